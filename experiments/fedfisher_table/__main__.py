"""Run the one-shot table of the FedFisher paper, and its figure over the number of clients.

    python -m experiments.fedfisher_table --datasets mnist cifar10 --alphas 0.2 0.1 0.05
    python -m experiments.fedfisher_table --datasets cifar10 --alphas 0.3 --num-clients 10 20 30

Each cell and seed is one run of `experiments.one_shot` in its own folder. Clients are trained once
for all algorithms, except for algorithms that change the training, which train their own clients.
All seeds have the same split, as in the authors' code; networks and training are theirs too, with
fewer epochs. The time is predicted first. After every run table.md and table.csv are written: our
accuracies, the paper's, and the bytes and seconds of a round. clients.png is drawn at the end if
there are several numbers of clients. The same command continues an interrupted grid.
"""

from rich.console import Console

from experiments.fedfisher_table import table as fedfisher
from experiments.fedfisher_table.table import Grid
from experiments.harness import commands, grid_runs, grids, records, tables

PROGRAM = "experiments.fedfisher_table"


@commands.command(PROGRAM, __doc__, Grid, grids.check)
def main(grid: Grid, console: Console) -> None:
    grid, done = grid_runs.run(grid, PROGRAM, _write, console)
    grid_runs.show(_tables(grid, done), fedfisher.footnote(grid), console)
    left = ["table.md", "table.csv"]
    if len(grid.num_clients) > 1:
        left.append("clients.png")
        fedfisher.figure(grid, done, grid.out / left[-1])
    more = "and a folder for each run"
    console.print(f"\nIn {grid.out}/: {', '.join(left)}, {more}", soft_wrap=True)


def _tables(grid: Grid, done: grid_runs.Done) -> list[tables.Table]:
    accuracies = [one for dataset in grid.datasets for one in fedfisher.tables(grid, dataset, done)]
    blocks = [(dataset, number) for dataset in grid.datasets for number in grid.num_clients]
    return accuracies + [fedfisher.costs(grid, *block, done) for block in blocks]


def _write(grid: Grid, done: grid_runs.Done) -> grid_runs.Done:
    """Write the tables of what is done until now."""
    parts = [tables.markdown(table, 2) for table in _tables(grid, done)]
    if len(grid.num_clients) > 1:
        parts.append("![accuracy over clients](clients.png)\n")
    command = ["", "```", commands.write(grid, PROGRAM), "```", ""]
    text = "\n".join([*parts, fedfisher.footnote(grid), *command])
    records.write_text(grid.out / "table.md", text)
    records.write_text(grid.out / "table.csv", fedfisher.as_csv(grid, done))
    return done


if __name__ == "__main__":
    raise SystemExit(main())
