"""Run the one-shot table of the FedLPA paper: ten clients, every split of NIID-Bench.

    python -m experiments.niid_table --datasets mnist --epochs 10 --seeds 0 1 2 --out runs/niid

Each cell and seed is one run of `experiments.one_shot`, in a folder of its own with its label
table: clients are trained once for all algorithms but those that change how, which train their own.
The seed sets the split, the initial model and the minibatches. Training is NIID-Bench's: SGD with
momentum and weight decay, images scaled to [0, 1] only, those of CIFAR-10 cropped and mirrored.
table.md and table.csv are written anew after every run; the same command continues.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from experiments import commands, config, memory, niid_report, records, runs
from experiments.choices import check_name
from experiments.config import Config
from experiments.experiment import prepare_splits
from experiments.niid_report import WALL, Cell
from experiments.progress import Watch
from experiments.records import Row

DATASETS = {
    "mnist": {"model": "simple_cnn_mnist"},
    "fashion_mnist": {"model": "simple_cnn_mnist"},
    "cifar10": {"model": "simple_cnn", "augment": True, "augment_border": "reflect"},
    "svhn_cropped": {"model": "simple_cnn"},
    "digits": {"model": "mlp"},
}
"""The networks of the paper, by data set; digits are for trying."""
_WIDTH = 180


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which cells, and how they are trained."""

    datasets: tuple[str, ...] = ("mnist", "cifar10")
    """One table each: mnist, fashion_mnist, cifar10, svhn_cropped; digits to try."""
    betas: tuple[float, ...] = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
    """Dirichlet splits of the classes over the clients."""
    classes: tuple[int, ...] = (1, 2, 3)
    """Splits with so many classes at each client."""
    epochs: int = 10
    """Passes of every client over its own data."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the split and of training."""
    algorithms: tuple[str, ...] = (
        *("fedlpa", "fedlpa_ea", "fednova", "scaffold", "fedavg", "fedprox"),
        "fedfisher_kfac",
    )
    """fedlpa_gd, the authors' 10,000 steps, is possible and slow."""
    num_clients: int = 10
    """Over how many clients the data are split."""
    mu: float = 1e-3
    """Of fedprox."""
    clients_per_chunk: int | None = None
    """Clients computed side by side; otherwise one on a CPU and all elsewhere."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/niid_table")
    """Folder for the results."""


def cells(grid: Grid, dataset: str) -> list[Cell]:
    """List the rows of a data set's table, in the paper's order."""
    betas = [Cell(dataset, "niid_bench", f"{beta:g}") for beta in grid.betas]
    return betas + [Cell(dataset, "classes_per_client", str(k)) for k in grid.classes]


def configuration(grid: Grid, cell: Cell, seed: int) -> Config:
    """Say how one cell is computed with one seed.

    Args:
        grid: what was asked.
        cell: the split.
        seed: of the split and of training.

    Returns:
        The configuration of a run.

    Example:
        >>> asked = configuration(Grid(), Cell("mnist", "niid_bench", "0.1"), seed=2)
        >>> asked.model, asked.beta, asked.partition_seeds, str(asked.out)
        ('simple_cnn_mnist', 0.1, (2,), 'runs/niid_table/mnist/niid_bench0.1-seed2')
    """
    number = {
        "niid_bench": lambda: {"beta": float(cell.number)},
        "classes_per_client": lambda: {"classes_per_client": int(cell.number)},
    }[cell.partition]()
    return Config(
        dataset=cell.dataset,
        **DATASETS[cell.dataset],
        num_clients=grid.num_clients,
        partition=cell.partition,
        **number,
        partition_seeds=(seed,),
        epochs=grid.epochs,
        learning_rate=0.01,
        momentum=0.9,
        weight_decay=1e-5,
        batch_size=64,
        normalize=False,
        seeds=(seed,),
        algorithms=grid.algorithms,
        mu=grid.mu,
        central=False,
        clients_per_chunk=grid.clients_per_chunk or "auto",
        data_dir=grid.data_dir,
        out=grid.out / cell.dataset / f"{cell.partition}{cell.number}-seed{seed}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of this process if None.

    Returns:
        The exit status: 0 when all is done, 1 when something was refused or a client diverged, 130
        when interrupted.
    """
    console = Console(highlight=False)
    grid = tyro.cli(
        Grid, prog="python -m experiments.niid_table", args=arguments, description=__doc__
    )
    try:
        _check(grid)
        done = {
            (cell, seed): records.resume(asked.out, asked) for cell, seed, asked in _units(grid)
        }
        for dataset in grid.datasets:
            _run(grid, dataset, done, console)
    except (ValueError, OSError) as error:
        return commands.refuse(error)
    except KeyboardInterrupt:
        console.print(
            f"Interrupted. What was finished is in {grid.out}; the same command continues."
        )
        return 130
    _write(grid, done)
    # Wider than most terminals: better a line broken there than every cell.
    wide = Console(highlight=False, width=max(console.width, _WIDTH))
    for title, headings, body in _tables(grid, done):
        wide.print(niid_report.table(title, headings, body))
    console.print(_notes(grid, done), style="dim")
    console.print(
        f"\nIn {grid.out}/: table.md, table.csv, and a folder for each run", soft_wrap=True
    )
    return 0


Done = dict[tuple[Cell, int], list[Row]]


def _units(grid: Grid, dataset: str | None = None) -> list[tuple[Cell, int, Config]]:
    """List what is computed, seed by seed: an interrupted grid has whole tables."""
    datasets = grid.datasets if dataset is None else (dataset,)
    return [
        (cell, seed, configuration(grid, cell, seed))
        for name in datasets
        for seed in grid.seeds
        for cell in cells(grid, name)
    ]


def _check(grid: Grid) -> None:
    for dataset in grid.datasets:
        if dataset not in DATASETS:
            raise ValueError(f"--datasets has {dataset!r}, expected some of {', '.join(DATASETS)}")
    for name in grid.algorithms:
        check_name("algorithms", name)
    if not _units(grid):
        raise ValueError(
            "no cells: expected one of --datasets, of --seeds, of --betas or --classes"
        )
    for field in ("datasets", "betas", "classes", "seeds"):
        values = getattr(grid, field)
        if len(set(values)) < len(values):
            given = " ".join(map(str, values))
            raise ValueError(f"--{field} is {given}, expected each only once")
    for _, _, asked in _units(grid):
        config.check(asked)


def _run(grid: Grid, dataset: str, done: Done, console: Console) -> None:
    """Compute the missing units of a data set, and write the tables after each."""
    missing = [unit for unit in _units(grid, dataset) if not done[unit[:2]]]
    if not missing:
        return
    experiments = prepare_splits([asked for _, _, asked in missing])
    console.print(memory.check(memory.predict(experiments[0]), memory.available()))
    with Watch(console, experiments[0].config, [(seed, seed) for _, seed, _ in missing]) as watch:
        for (cell, seed, asked), experiment in zip(missing, experiments, strict=True):
            unit, where = (seed, seed), f"{dataset}, {cell.label}, "
            records.write_config(asked.out, asked)
            records.write_labels(asked.out / records.LABELS, experiment.label_counts)
            start = time.perf_counter()
            rows = runs.run(experiment, unit, watch.begin(unit, where))
            wall = round(time.perf_counter() - start, 4)
            rows.append(Row("all", *unit, 1, None, "train", WALL, wall, None, None))
            records.write(asked.out / records.RESULTS, rows)
            done[cell, seed] = rows
            watch.finish(unit, rows, wall, where)
            _write(grid, done)


def _results(grid: Grid, dataset: str, done: Done) -> dict[Cell, niid_report.Measured]:
    return {
        cell: niid_report.measured([row for seed in grid.seeds for row in done[cell, seed]])
        for cell in cells(grid, dataset)
    }


def _tables(grid: Grid, done: Done) -> list[tuple[str, list[str], list[list[str]]]]:
    return [
        (
            f"{dataset}, {grid.num_clients} clients, {grid.epochs} epochs",
            *niid_report.lines(_results(grid, dataset, done), grid.algorithms, grid.epochs),
        )
        for dataset in grid.datasets
    ]


def _notes(grid: Grid, done: Done) -> str:
    all_results = {c: m for name in grid.datasets for c, m in _results(grid, name, done).items()}
    time_needed = niid_report.extrapolation(all_results, grid.epochs, len(grid.seeds))
    return f"{niid_report.footnote(grid.epochs, len(grid.seeds))}\n\n{time_needed}"


def _write(grid: Grid, done: Done) -> None:
    parts = [niid_report.markdown(*table) for table in _tables(grid, done)]
    records.write_text(grid.out / "table.md", "\n".join([*parts, _notes(grid, done), ""]))
    results = {c: m for name in grid.datasets for c, m in _results(grid, name, done).items()}
    text = niid_report.csv_text(results, grid.algorithms, grid.epochs)
    records.write_text(grid.out / "table.csv", text)


if __name__ == "__main__":
    sys.exit(main())
