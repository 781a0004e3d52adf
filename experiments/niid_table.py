"""Run the one-shot table of the FedLPA paper: ten clients, every split of NIID-Bench.

    python -m experiments.niid_table --datasets mnist --epochs 10 --seeds 0 1 2 --out runs/niid

Each cell and seed is one run of `experiments.one_shot`, in a folder of its own with its label
table: clients are trained once for all algorithms but those that change how, which train their own.
The seed sets the split, the initial model and the minibatches. Training is NIID-Bench's: SGD with
momentum and weight decay, images scaled to [0, 1] only, those of CIFAR-10 cropped and mirrored.
table.md and table.csv are written anew after every run; the same command continues.
"""

import sys
import time
from collections.abc import Sequence

from rich.console import Console

from experiments.harness import (
    accuracies,
    commands,
    config,
    grids,
    memory,
    niid,
    one_round,
    progress,
    records,
    tables,
    tasks,
)
from experiments.harness.grids import Grid, Unit, cells, configuration
from experiments.harness.records import Row

PROGRAM = "experiments.niid_table"
_WIDTH = 180

Done = dict[Unit, list[Row]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if all is done, 1 if something was refused, 130 if interrupted."""
    return commands.attempt(_main, PROGRAM, arguments)


def _main(arguments: Sequence[str]) -> None:
    console = Console(highlight=False)
    grid = commands.read(arguments, PROGRAM, __doc__, Grid)
    grids.check(grid)
    with records.folder(grid.out):
        done = {unit: _resume(grid, unit) for unit in grids.units(grid)}
        for dataset in grid.datasets:
            _run(grid, dataset, done, console)
        _write(grid, done)
    # Wider than most terminals: better a line broken there than every cell.
    wide = Console(highlight=False, width=max(console.width, _WIDTH))
    for table in _tables(grid, done):
        wide.print(tables.terminal(table))
    console.print(_notes(grid, done), style="dim")
    left = "table.md, table.csv, and a folder for each run"
    console.print(f"\nIn {grid.out}/: {left}", soft_wrap=True)


def _run(grid: Grid, dataset: str, done: Done, console: Console) -> None:
    """Compute the missing units of a data set, and write the tables after each."""
    missing = [unit for unit in grids.units(grid) if unit[0].dataset == dataset and not done[unit]]
    if not missing:
        return
    ready = tasks.one_rounds([configuration(grid, *unit) for unit in missing])
    console.print(memory.check(memory.predict(ready[0]), memory.available()))
    with progress.bar(console) as bar:
        seeds = [(seed, seed) for _, seed in missing]
        watch = progress.Watch(console, bar, ready[0], seeds)
        for (cell, seed), task in zip(missing, ready, strict=True):
            unit, out, where = (seed, seed), task.config.out, f"{dataset}, {cell.label}, "
            out.mkdir(parents=True, exist_ok=True)
            records.write_config(out, task.config, "experiments.one_shot")
            labels = accuracies.label_csv(task.label_counts)
            records.write_text(out / accuracies.LABELS, labels)
            start = time.perf_counter()
            rows = one_round.run(task, unit, watch.begin(unit, where))
            wall = round(time.perf_counter() - start, 4)
            rows.append(Row("all", seed, 1, "train", niid.WALL, wall, partition_seed=seed))
            records.write_rows(out / records.RESULTS, rows, records.ONE_SHOT)
            done[cell, seed] = rows
            watch.finish(unit, rows, wall, where)
            _write(grid, done)


def _resume(grid: Grid, unit: Unit) -> list[Row]:
    asked = configuration(grid, *unit)
    default = config.one_shot(asked.data.dataset)
    return records.resume(asked.out, asked, default, records.ONE_SHOT)


def _results(grid: Grid, done: Done, *datasets: str) -> niid.Results:
    return {
        cell: niid.measured([row for seed in grid.seeds for row in done[cell, seed]])
        for dataset in datasets
        for cell in cells(grid, dataset)
    }


def _tables(grid: Grid, done: Done) -> list[tables.Table]:
    about = f"{grid.num_clients} clients, {grid.epochs} epochs"
    names = grid.merging.algorithms
    return [
        niid.table(f"{dataset}, {about}", _results(grid, done, dataset), names, grid.epochs)
        for dataset in grid.datasets
    ]


def _notes(grid: Grid, done: Done) -> str:
    results = _results(grid, done, *grid.datasets)
    time_needed = niid.extrapolation(results, grid.epochs, len(grid.seeds))
    return f"{niid.footnote(grid.epochs, len(grid.seeds))}\n\n{time_needed}"


def _write(grid: Grid, done: Done) -> None:
    parts = [tables.markdown(table, 2) for table in _tables(grid, done)]
    records.write_text(grid.out / "table.md", "\n".join([*parts, _notes(grid, done), ""]))
    results = _results(grid, done, *grid.datasets)
    text = niid.as_csv(results, grid.merging.algorithms, grid.epochs)
    records.write_text(grid.out / "table.csv", text)


if __name__ == "__main__":
    sys.exit(main())
