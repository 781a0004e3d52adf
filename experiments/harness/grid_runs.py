"""Run the units of a grid, each a run of `experiments.one_shot` in its own folder.

A unit of a grid is a cell and a seed: one run on one split. The units of one data set and one
number of clients are a block, which shares compiled programs. Time is predicted before a grid
starts, and an interrupted grid continues.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rich.console import Console

from experiments.harness import (
    accuracies,
    config,
    folders,
    forecast,
    grids,
    kept_clients,
    memory,
    one_round,
    records,
    steps,
    tasks,
)
from experiments.harness.grids import Unit
from experiments.harness.progress import Watch, bar
from experiments.harness.tables import Table, terminal

WALL = "wall_seconds"
"""The metric of the row that holds the seconds of a whole run."""
Done = dict[Unit, list[records.Row]]
"""The rows of every unit; an empty list where the unit is missing."""
_Written = TypeVar("_Written")


def run(
    grid: grids.Cells,
    program: str,
    write: Callable[[Any, Done], _Written],
    console: Console,
) -> tuple[Any, _Written]:
    """Compute the missing units; call `write` after each and at the end.

    Return the grid of both what its folder has and what is asked for, and what `write` returned of
    it. The configurations of runs differ only in data sets, splits, seeds and folders. Errors are
    raised and the time is predicted before the first unit starts.
    """
    with contextlib.ExitStack() as held:
        held.enter_context(records.folder(grid.out))
        begun = all((grid.out / name).exists() for name in (records.CONFIG, "table.csv"))
        if begun:
            grid = folders.grown(grid, type(grid)(), "table")
        # Hold the folders of the runs too, where `experiments.one_shot` could be running.
        done, left, blocks = {}, {}, {}
        for unit, asked in grids.units(grid).items():
            held.enter_context(records.folder(asked.out))
            asked, done[unit] = folders.resume(asked, config.one_shot(asked.data.dataset))
            if names := one_round.missing(asked, done[unit]):
                (left[unit],) = names.values()
                # Runs of a block share programs.
                block = asked.data.dataset, asked.data.num_clients, left[unit]
                blocks.setdefault(block, {})[unit] = asked
        ready = {
            block: [one_round.only(task, block[2]) for task in tasks.one_rounds([*own.values()])]
            for block, own in blocks.items()
        }
        _predict(grid, ready, done, console)
        if blocks:
            folders.begin(grid, program, console, "what is missing is computed" * begun)
        for block, own in blocks.items():
            # A finished block frees the memory of its data.
            _compute([*own], ready.pop(block), done, partial(write, grid), console)
        return grid, write(grid, done)


def show(shown: Sequence[Table], notes: str, console: Console) -> None:
    """Print tables and notes; tables may be wider than the terminal, where their lines break."""
    wide = Console(highlight=False, width=max(console.width, 200))
    for table in shown:
        wide.print(terminal(table))
    console.print(notes, style="dim")


def _predict(
    grid: grids.Cells,
    ready: Mapping[Any, Sequence[tasks.OneRound]],
    done: Done,
    console: Console,
) -> None:
    """Print the memory and the time that are needed, or refuse what does not fit."""
    found = []
    for (dataset, number, _), runs in ready.items():
        name = f"{dataset}, {number} clients"
        need = memory.predict(runs[0])
        console.print(f"{name}: {memory.check(need, memory.available())}")
        before = [cell for cell in done if done[cell] and _block(grid, cell) == (dataset, number)]
        walls = [row.value for unit in before for row in done[unit] if row.metric == WALL]
        expected = statistics.median(walls) if walls else forecast.probe(runs)
        found.append((name, len(runs), expected))
    each = [(task, [_named(task)]) for runs in ready.values() for task in runs]
    if kept := kept_clients.announce(grid.out, each):
        console.print(kept)
    if found:
        text = forecast.describe(found)
        if any(task.config.calibrate or task.config.exchanges for task, _ in each):
            text += " Exchanges without training, of runs that are not done, are not in it."
        console.print(text, soft_wrap=True)


def _block(grid: grids.Cells, unit: Unit) -> tuple[str, int]:
    data = grid.configuration(*unit).data
    return data.dataset, data.num_clients


def _named(task: tasks.OneRound) -> steps.Unit:
    """Return the seed of the split and the seed of training of a run."""
    (split,), (seed,) = task.config.partition_seeds, task.config.seeds
    return split, seed


def _compute(
    units: Sequence[Unit],
    ready: Sequence[tasks.OneRound],
    done: Done,
    write: Callable[[Done], Any],
    console: Console,
) -> None:
    """Compute the units of a block."""
    with bar(console) as shown:
        watch = Watch(console, shown, [(task, [_named(task)]) for task in ready])
        for unit, task in zip(units, ready, strict=True):
            cell, out, name = unit[0], task.config.out, _named(task)
            where = f"{cell.dataset}, {cell.label}, "
            how = {"goes_on": bool(done[unit])}
            folders.write_config(out, task.config, "experiments.one_shot", **how)
            accuracies.write_labels(out, task.label_counts)
            start = time.perf_counter()
            new = one_round.run(task, name, watch.begin(name, where))
            wall = round(time.perf_counter() - start, 4)
            if not any(row.metric == WALL for row in done[unit]):
                all_ = {"partition_seed": name[0], "value": wall}
                new.append(records.Row("all", name[1], 1, "train", WALL, **all_))
            done[unit] = rows = one_round.replaced(done[unit], new)
            records.write_rows(out / records.RESULTS, rows, records.ONE_SHOT)
            one_round.clear(task)
            watch.finish(name, rows, wall, where)
            write(done)
