"""Many runs of `experiments.one_shot`, each in a folder of its own: foretold, computed, continued.

A unit of a grid is a cell and a seed: one run, on one split. Those of one data set and one number
of clients, a block, share what is compiled.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console

from experiments.harness import accuracies, config, forecast, memory, one_round, records, tasks
from experiments.harness.progress import Watch, bar

WALL = "wall_seconds"
"""The metric of the row that says how long all of a run took."""


class Cell(Protocol):
    """A row of a data set's table: who learns it."""

    @property
    def dataset(self) -> str:
        """What is learned."""

    @property
    def label(self) -> str:
        """What the row is called."""


Unit = tuple[Any, int]
"""A `Cell` and a seed."""
Done = dict[Unit, list[records.Row]]
"""The rows of every unit; none where it is missing."""
_Written = TypeVar("_Written")


def run(
    out: Path,
    runs: Mapping[Unit, config.OneShot],
    write: Callable[[Done], _Written],
    console: Console,
) -> _Written:
    """Compute the units that are missing; write what there is after each, and in the end.

    The configurations differ in data sets, splits, seeds and folders only. All that can be refused
    is, and the time that is needed is said, before the first starts. Returned is what `write` gave.
    """
    with contextlib.ExitStack() as held:
        # The folders of the runs too: `experiments.one_shot` could be at work there.
        for folder in (out, *(own.out for own in runs.values())):
            held.enter_context(records.folder(folder))
        done = {
            unit: records.resume(own.out, own, config.one_shot(own.data.dataset), records.ONE_SHOT)
            for unit, own in runs.items()
        }
        missing: dict[tuple[str, int], list[Unit]] = {}
        for unit, rows in done.items():
            if not rows:
                missing.setdefault(_block(runs[unit]), []).append(unit)
        ready = {
            block: tasks.one_rounds([runs[unit] for unit in units])
            for block, units in missing.items()
        }
        _foretell(ready, runs, done, console)
        for block, units in missing.items():
            # The data of a block that is over make room.
            _compute(units, ready.pop(block), done, write, console)
        return write(done)


def _block(asked: config.OneShot) -> tuple[str, int]:
    return asked.data.dataset, asked.data.num_clients


def _foretell(
    ready: Mapping[tuple[str, int], Sequence[tasks.OneRound]],
    runs: Mapping[Unit, config.OneShot],
    done: Done,
    console: Console,
) -> None:
    """Say what memory and how much time is needed, or refuse what does not fit."""
    found = []
    for block, own in ready.items():
        name = f"{block[0]}, {block[1]} clients"
        console.print(f"{name}: {memory.check(memory.predict(own[0]), memory.available())}")
        before = [unit for unit, asked in runs.items() if _block(asked) == block]
        walls = [row.value for unit in before for row in done[unit] if row.metric == WALL]
        found.append((name, len(own), statistics.median(walls) if walls else forecast.probe(own)))
    if found:
        said = forecast.told(found)
        if any(asked.calibrate or asked.exchanges for asked in runs.values()):
            said += " Exchanges without training, of runs that are not done, are not in it."
        console.print(said, soft_wrap=True)


def _compute(
    units: Sequence[Unit],
    ready: Sequence[tasks.OneRound],
    done: Done,
    write: Callable[[Done], Any],
    console: Console,
) -> None:
    """Compute the units of a block."""
    # What `one_round` calls a unit: the seeds of the split and of training.
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
