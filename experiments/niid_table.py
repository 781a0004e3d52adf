"""Run the one-shot table of the FedLPA paper: ten clients, every split of NIID-Bench.

    python -m experiments.niid_table --datasets mnist --epochs 10 --seeds 0 1 2 --out runs/niid

Each cell and seed is one run of `experiments.one_shot`, in a folder of its own with its label
table: clients are trained once for all algorithms but those that change how, which train their own.
The seed sets the split, the initial model and the minibatches. Training is NIID-Bench's: SGD with
momentum and weight decay, images scaled to [0, 1] only, those of CIFAR-10 cropped and mirrored.
table.md and table.csv are written anew after every run; the same command continues.
"""

import contextlib
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from experiments.harness import accuracies, commands, grids, memory, niid, one_round, records, tasks
from experiments.harness.config import one_shot
from experiments.harness.progress import Watch, bar
from experiments.harness.tables import Table, markdown, terminal

PROGRAM = "experiments.niid_table"

_Done = dict[grids.Unit, list[records.Row]]


@commands.command(PROGRAM)
def main(arguments: Sequence[str], console: Console) -> None:
    grid = commands.read(arguments, PROGRAM, __doc__, grids.Grid)
    grids.check(grid)
    units = grids.units(grid)
    with contextlib.ExitStack() as held:
        # The folders of the runs too: `experiments.one_shot` could be at work there.
        for out in (grid.out, *(asked.out for asked in units.values())):
            held.enter_context(records.folder(out))
        done = {
            unit: records.resume(own.out, own, one_shot(own.data.dataset), records.ONE_SHOT)
            for unit, own in units.items()
        }
        for dataset in grid.datasets:
            missing = [unit for unit in units if unit[0].dataset == dataset and not done[unit]]
            if missing:
                _run(grid, missing, done, console)
        found, notes = _write(grid, done)
    # Wider than most terminals: better a line broken there than every cell.
    wide = Console(highlight=False, width=max(console.width, 180))
    for table in found:
        wide.print(terminal(table))
    console.print(notes, style="dim")
    left = "table.md, table.csv, and a folder for each run"
    console.print(f"\nIn {grid.out}/: {left}", soft_wrap=True)


def _run(grid: grids.Grid, missing: Sequence[grids.Unit], done: _Done, console: Console) -> None:
    """Compute the missing units of a data set, and write the tables after each."""
    ready = tasks.one_rounds([grids.configuration(grid, *unit) for unit in missing])
    console.print(memory.check(memory.predict(ready[0]), memory.available()))
    with bar(console) as shown:
        watch = Watch(console, shown, ready[0], [(seed, seed) for _, seed in missing])
        for (cell, seed), task in zip(missing, ready, strict=True):
            unit, out, where = (seed, seed), task.config.out, f"{cell.dataset}, {cell.label}, "
            records.write_config(out, task.config, "experiments.one_shot")
            accuracies.write_labels(out, task.label_counts)
            start = time.perf_counter()
            rows = one_round.run(task, unit, watch.begin(unit, where))
            wall = round(time.perf_counter() - start, 4)
            rows.append(records.Row("all", seed, 1, "train", niid.WALL, wall, partition_seed=seed))
            records.write_rows(out / records.RESULTS, rows, records.ONE_SHOT)
            done[cell, seed] = rows
            watch.finish(unit, rows, wall, where)
            _write(grid, done)


def _write(grid: grids.Grid, done: _Done) -> tuple[list[Table], str]:
    """Write what is done until now; return the tables, one for each data set, and notes."""
    names, results, found = grid.merging.algorithms, {}, []
    for dataset in grid.datasets:
        own = {
            cell: niid.measured([row for seed in grid.seeds for row in done[cell, seed]])
            for cell in grids.cells(grid, dataset)
        }
        title = f"{dataset}, {grid.num_clients} clients, {grid.epochs} epochs"
        found.append(niid.table(title, own, names, grid.epochs))
        results |= own
    how_long = grid.epochs, len(grid.seeds)
    notes = f"{niid.footnote(*how_long)}\n\n{niid.extrapolation(results, *how_long)}"
    parts = [markdown(table, 2) for table in found]
    records.write_text(grid.out / "table.md", "\n".join([*parts, notes, ""]))
    records.write_text(grid.out / "table.csv", niid.as_csv(results, names, grid.epochs))
    return found, notes


if __name__ == "__main__":
    sys.exit(main())
