"""Define grids of experiments, and the grid of the FedLPA paper's table: splits of NIID-Bench."""

import abc
import dataclasses
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from experiments.harness import choices, commands, config, limits

DATASETS: dict[str, dict[str, Any]] = {
    "mnist": {"model": "simple_cnn_mnist"},
    "fashion_mnist": {"model": "simple_cnn_mnist"},
    "cifar10": {"model": "simple_cnn", "augment": True, "augment_border": "reflect"},
    "svhn_cropped": {"model": "simple_cnn"},
    "digits": {"model": "mlp"},
}
"""The networks of the FedLPA paper by data set; digits are for trials."""


class Cell(NamedTuple):
    """One row of one data set's table: a way to split the data."""

    dataset: str
    partition: str
    number: str

    @property
    def label(self) -> str:
        """The paper's name of the row."""
        return f"{'β' if self.partition == 'niid_bench' else '#C'} = {self.number}"


Unit = tuple[Any, int]
"""A cell, which has a data set and a label, and a seed: one run."""
_METHODS = ("fedlpa", "fedlpa_ea", "fednova", "scaffold", "fedavg", "fedprox", "fedfisher_kfac")


@dataclasses.dataclass(frozen=True)
class Cells(commands.Imports, abc.ABC):
    """The options that every grid has."""

    merging: config.Group[config.Merging] = dataclasses.field(default=config.Merging(_METHODS))
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    """Data sets, one table each; digits are for trials."""
    epochs: int = 10
    """Passes of every client over its own data; the papers have 30 (FedFisher) or 200 (FedLPA)."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the initial model and of training; in niid_table of the split too."""
    calibrate: tuple[config.Calibration, ...] = ()
    """Exchanges without training after each merge: rows such as ALGORITHM+analytic_head."""
    clients_per_chunk: int | None = None
    """Number of clients computed side by side; None is one on a CPU and all elsewhere."""
    keep_clients: bool = False
    """Keep trained clients in the folders of the runs, so that further methods need not train."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; None takes the environment's TFDS_DATA_DIR."""
    known: ClassVar = config.IMAGES

    @property
    def of_all(self) -> dict[str, Any]:
        """The options that all runs of the grid have."""
        names = ("merging", "epochs", "calibrate", "keep_clients", "imports")
        return {name: getattr(self, name) for name in names} | {"central": False}

    @abc.abstractmethod
    def cells(self, dataset: str) -> list[Any]:
        """List the rows of a data set's table, in the paper's order."""

    @abc.abstractmethod
    def configuration(self, cell: Any, seed: int) -> config.OneShot:
        """Return the run of one cell with one seed."""


@dataclasses.dataclass(frozen=True)
class Grid(Cells):
    """The cells of the FedLPA paper's table, and how clients are trained."""

    betas: tuple[float, ...] = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
    """Dirichlet parameters of splits of the classes over the clients."""
    classes: tuple[int, ...] = (1, 2, 3)
    """Numbers of classes of each client, for splits by classes."""
    num_clients: int = 10
    """Number of clients that the data are split over."""
    exchanges: int = 0
    """Exchanges after each merge, a head and then natural gradients: ALGORITHM+natural_gradient."""
    out: commands.Folder = Path("runs/niid_table")
    """Folder for the results."""
    known: ClassVar = DATASETS

    def cells(self, dataset: str) -> list[Cell]:
        """List the rows of a data set's table, in the paper's order."""
        betas = [Cell(dataset, "niid_bench", f"{beta:g}") for beta in self.betas]
        return betas + [Cell(dataset, "classes_per_client", str(k)) for k in self.classes]

    def configuration(self, cell: Cell, seed: int) -> config.OneShot:
        """Return the run of one cell with one seed."""
        split: dict[str, Any] = {"num_clients": self.num_clients, "partition": cell.partition}
        if cell.partition == "niid_bench":
            split["beta"] = float(cell.number)
        else:
            split["classes_per_client"] = int(cell.number)
        raw = {"normalize": False, "data_dir": self.data_dir}
        how = {"weight_decay": 1e-5, "batch_size": 64, "clients_per_chunk": self.clients_per_chunk}
        return config.OneShot(
            data=config.Data(cell.dataset, **DATASETS.get(cell.dataset, {}), **split, **raw),
            training=config.Training(learning_rate=0.01, **how),
            partition_seeds=(seed,),
            seeds=(seed,),
            exchanges=self.exchanges,
            out=self.out / cell.dataset / f"{cell.partition}{cell.number}-seed{seed}",
            **self.of_all,
        )


def units(grid: Cells) -> dict[Unit, config.OneShot]:
    """Return the run of each unit, seed by seed, so that an interrupted grid has whole tables."""
    return {
        (cell, seed): grid.configuration(cell, seed)
        for dataset in grid.datasets
        for seed in grid.seeds
        for cell in grid.cells(dataset)
    }


def check(grid: Cells) -> None:
    """Refuse grids without cells, and cells that cannot be computed; name the option."""
    limits.check_options(grid)
    commands.check_names(grid, "datasets", [*grid.known, *choices.own_datasets()])
    runs = units(grid)
    if not runs:
        raise ValueError("no cells: expected at least one of --betas or --classes")
    for asked in runs.values():
        limits.check_one_shot(asked)
