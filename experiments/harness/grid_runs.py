"""Run the units of a grid, each a run of `experiments.one_shot` in its own folder.

A unit of a grid is a cell and a seed: one run on one split. The units of one data set and one
number of clients are a block, which shares compiled programs. Time is predicted before a grid
starts, and an interrupted grid continues.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from experiments.harness import accuracies, config, forecast, memory, one_round, records, tasks
from experiments.harness.progress import Watch, bar
from experiments.harness.tables import Table, gathered, terminal

WALL = "wall_seconds"
"""The metric of the row that holds the seconds of a whole run."""
Unit = tuple[Any, int]
"""A cell, which has a data set and a label, and a seed."""
Done = dict[Unit, list[records.Row]]
"""The rows of every unit; an empty list where the unit is missing."""
_Written = TypeVar("_Written")


def run(
    out: Path,
    runs: Mapping[Unit, config.OneShot],
    write: Callable[[Done], _Written],
    console: Console,
) -> _Written:
    """Compute the missing units; call `write` after each and at the end, and return its result.

    The configurations differ only in data sets, splits, seeds and folders. Errors are raised and
    the time is predicted before the first unit starts.
    """
    with contextlib.ExitStack() as held:
        # Hold the folders of the runs too, where `experiments.one_shot` could be running.
        for folder in (out, *(asked.out for asked in runs.values())):
            held.enter_context(records.folder(folder))
        done = {}
        for unit, asked in runs.items():
            default = config.one_shot(asked.data.dataset)
            done[unit] = records.resume(asked.out, asked, default, records.ONE_SHOT)
        missing = gathered((_block(runs[unit]), unit) for unit, rows in done.items() if not rows)
        ready = {
            block: tasks.one_rounds([runs[unit] for unit in units])
            for block, units in missing.items()
        }
        _predict(ready, runs, done, console)
        for block, units in missing.items():
            # A finished block frees the memory of its data.
            _compute(units, ready.pop(block), done, write, console)
        return write(done)


def show(shown: Sequence[Table], notes: str, console: Console) -> None:
    """Print tables and notes; tables may be wider than the terminal, where their lines break."""
    wide = Console(highlight=False, width=max(console.width, 200))
    for table in shown:
        wide.print(terminal(table))
    console.print(notes, style="dim")


def _block(asked: config.OneShot) -> tuple[str, int]:
    return asked.data.dataset, asked.data.num_clients


def _predict(
    ready: Mapping[tuple[str, int], Sequence[tasks.OneRound]],
    runs: Mapping[Unit, config.OneShot],
    done: Done,
    console: Console,
) -> None:
    """Print the memory and the time that are needed, or refuse what does not fit."""
    found = []
    for block, runs_of_block in ready.items():
        name = f"{block[0]}, {block[1]} clients"
        need = memory.predict(runs_of_block[0])
        console.print(f"{name}: {memory.check(need, memory.available())}")
        before = [unit for unit, asked in runs.items() if _block(asked) == block]
        walls = [row.value for unit in before for row in done[unit] if row.metric == WALL]
        expected = statistics.median(walls) if walls else forecast.probe(runs_of_block)
        found.append((name, len(runs_of_block), expected))
    if found:
        text = forecast.describe(found)
        if any(asked.calibrate or asked.exchanges for asked in runs.values()):
            text += " Exchanges without training, of runs that are not done, are not in it."
        console.print(text, soft_wrap=True)


def _compute(
    units: Sequence[Unit],
    ready: Sequence[tasks.OneRound],
    done: Done,
    write: Callable[[Done], Any],
    console: Console,
) -> None:
    """Compute the units of a block."""
    # A unit of `one_round` is the seed of the split and the seed of training.
    named = [(*task.config.partition_seeds, *task.config.seeds) for task in ready]
    with bar(console) as shown:
        watch = Watch(console, shown, ready[0], named)
        for unit, task, name in zip(units, ready, named, strict=True):
            cell, out = unit[0], task.config.out
            where = f"{cell.dataset}, {cell.label}, "
            records.write_config(out, task.config, "experiments.one_shot")
            accuracies.write_labels(out, task.label_counts)
            start = time.perf_counter()
            rows = one_round.run(task, name, watch.begin(name, where))
            wall = round(time.perf_counter() - start, 4)
            all_ = {"partition_seed": name[0], "value": wall}
            rows.append(records.Row("all", name[1], 1, "train", WALL, **all_))
            records.write_rows(out / records.RESULTS, rows, records.ONE_SHOT)
            one_round.clear(task)
            done[unit] = rows
            watch.finish([name], rows, wall, where)
            write(done)
