"""The cells of the FedLPA paper's table: every split of NIID-Bench, and how they are trained."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiments.harness import commands, config, limits

DATASETS: dict[str, dict[str, Any]] = {
    "mnist": {"model": "simple_cnn_mnist"},
    "fashion_mnist": {"model": "simple_cnn_mnist"},
    "cifar10": {"model": "simple_cnn", "augment": True, "augment_border": "reflect"},
    "svhn_cropped": {"model": "simple_cnn"},
    "digits": {"model": "mlp"},
}
"""The networks of the paper, by data set; digits are for trying."""


class Cell(NamedTuple):
    """One row of one data set's table: a way to split the data."""

    dataset: str
    partition: str
    number: str

    @property
    def label(self) -> str:
        """What the paper calls it."""
        return f"{'β' if self.partition == 'niid_bench' else '#C'} = {self.number}"


Unit = tuple[Cell, int]
"""A cell and a seed: one run."""
_METHODS = ("fedlpa", "fedlpa_ea", "fednova", "scaffold", "fedavg", "fedprox", "fedfisher_kfac")


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which cells, and how they are trained."""

    merging: config.Group[config.Merging] = dataclasses.field(default=config.Merging(_METHODS))
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    """One table each: mnist, fashion_mnist, cifar10, svhn_cropped; digits to try."""
    betas: tuple[float, ...] = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
    """Dirichlet splits of the classes over the clients."""
    classes: tuple[int, ...] = (1, 2, 3)
    """Splits with so many classes at each client."""
    epochs: int = 10
    """Passes of every client over its own data; the paper has 10, 20, 50, 100 and 200."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the split and of training."""
    num_clients: int = 10
    """Over how many clients the data are split."""
    calibrate: tuple[Literal["analytic_head", "ccvr"], ...] = ()
    """After each merge, an exchange without training: ALGORITHM+analytic_head, or +ccvr."""
    exchanges: int = 0
    """So many after each merge, the head and natural gradients: ALGORITHM+natural_gradient."""
    clients_per_chunk: int | None = None
    """Clients computed side by side; otherwise one on a CPU and all elsewhere."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/niid_table")
    """Folder for the results."""


def cells(grid: Grid, dataset: str) -> list[Cell]:
    """List the rows of a data set's table, in the paper's order."""
    betas = [Cell(dataset, "niid_bench", f"{beta:g}") for beta in grid.betas]
    return betas + [Cell(dataset, "classes_per_client", str(k)) for k in grid.classes]


def configuration(grid: Grid, cell: Cell, seed: int) -> config.OneShot:
    """Say how one cell is computed with one seed."""
    is_beta = cell.partition == "niid_bench"
    number = {"beta": float(cell.number)} if is_beta else {"classes_per_client": int(cell.number)}
    split = {"num_clients": grid.num_clients, "partition": cell.partition, **number}
    raw = {"normalize": False, "data_dir": grid.data_dir}
    return config.OneShot(
        data=config.Data(cell.dataset, **DATASETS[cell.dataset], **split, **raw),
        training=config.Training(
            learning_rate=0.01,
            weight_decay=1e-5,
            batch_size=64,
            clients_per_chunk=grid.clients_per_chunk,
        ),
        merging=grid.merging,
        epochs=grid.epochs,
        partition_seeds=(seed,),
        seeds=(seed,),
        calibrate=grid.calibrate,
        exchanges=grid.exchanges,
        central=False,
        out=grid.out / cell.dataset / f"{cell.partition}{cell.number}-seed{seed}",
    )


def units(grid: Grid) -> dict[Unit, config.OneShot]:
    """Say what is computed and how, seed by seed: an interrupted grid has whole tables."""
    return {
        (cell, seed): configuration(grid, cell, seed)
        for dataset in grid.datasets
        for seed in grid.seeds
        for cell in cells(grid, dataset)
    }


def check(grid: Grid) -> None:
    """Refuse cells that cannot be computed, with a ValueError that names the option."""
    for dataset in grid.datasets:
        commands.check_name("datasets", dataset, DATASETS)
    if not units(grid):
        raise ValueError("no cells: expected one of --datasets, --seeds, --betas or --classes")
    for field in ("datasets", "betas", "classes", "seeds"):
        if getattr(grid, field):
            commands.check_list(grid, field)
    for asked in units(grid).values():
        limits.check_one_shot(asked)
