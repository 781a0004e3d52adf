"""Run the one-shot table of the FedLPA paper: ten clients, every split of NIID-Bench.

    python -m experiments.niid_table --datasets mnist --epochs 10 --seeds 0 1 2 --out runs/niid

Each cell and seed is one run of `experiments.one_shot` in its own folder. Clients are trained once
for all algorithms, except for algorithms that change the training, which train their own clients.
The seed sets the split, the initial model and the minibatches. Training is that of NIID-Bench: SGD
with momentum and weight decay, images scaled to [0, 1], and those of CIFAR-10 cropped and mirrored.
The options --calibrate and --exchanges add exchanges without training after each merge. The time
is predicted first, and table.md and table.csv are written after every run. The same command
continues an interrupted grid.
"""

from rich.console import Console

from experiments.harness import accuracies, commands, grid_runs, grids, records, tables
from experiments.niid_table import table as niid

PROGRAM = "experiments.niid_table"


@commands.command(PROGRAM, __doc__, grids.Grid, grids.check)
def main(grid: grids.Grid, console: Console) -> None:
    grid, (found, notes) = grid_runs.run(grid, PROGRAM, _write, console)
    grid_runs.show(found, notes, console)
    left = "table.md, table.csv, and a folder for each run"
    console.print(f"\nIn {grid.out}/: {left}", soft_wrap=True)


def _write(grid: grids.Grid, done: grid_runs.Done) -> tuple[list[tables.Table], str]:
    """Write the tables of the finished runs; return the table of each data set, and notes."""
    every = [row for rows in done.values() for row in rows]
    last = accuracies.exchanged(every, grid.merging.algorithms)
    names, results, found = (*grid.merging.algorithms, *last), {}, []
    for dataset in grid.datasets:
        own = {
            cell: niid.measured([row for seed in grid.seeds for row in done[cell, seed]], last)
            for cell in grid.cells(dataset)
        }
        title = f"{dataset}, {grid.num_clients} clients, {grid.epochs} epochs"
        found.append(niid.table(title, own, names, grid.epochs, grid.num_clients))
        results |= own
    how_long = grid.epochs, len(grid.seeds)
    what = niid.footnote(found, names, *how_long, grid.merging.choose, grid.num_clients)
    notes = f"{what}\n\n{niid.extrapolation(results, *how_long)}"
    parts = [tables.markdown(table, 2) for table in found]
    records.write_text(grid.out / "table.md", "\n".join([*parts, notes, ""]))
    lines = niid.as_csv(results, names, grid.epochs, grid.num_clients)
    records.write_text(grid.out / "table.csv", lines)
    return found, notes


if __name__ == "__main__":
    raise SystemExit(main())
