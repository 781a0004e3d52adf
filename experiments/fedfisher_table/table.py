"""Table 2 of the FedFisher paper, ours beside theirs, and its Figure 3: over numbers of clients.

Their numbers, from Jhunjhunwala, Wang, Joshi, "FedFisher: Leveraging Fisher Information for
One-Shot Federated Learning", AISTATS 2024, are in fedfisher_paper.csv: means and deviations of 5
seeds in percent, 5 clients, 30 epochs, uploads compressed to the size of FedAvg's.
"""

import csv
import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from experiments.harness import commands, config, figures, grid_runs, limits, steps
from experiments.harness.records import Row
from experiments.harness.tables import Table, csv_text, spread

_PAPER, _CLIENTS = Path(__file__).with_name("fedfisher_paper.csv"), 5
_ORDER = (
    *("fedavg", "otfusion", "pfnm", "regmean", "dense", "fisher_merge", "fedfisher_diag"),
    *("fedfisher_kfac", "fedfisher_sequential"),
)
"""In the paper's order, then ours. Others come after them."""


class Cell(NamedTuple):
    """One row of one data set's table: over how many clients the data are split, and how."""

    dataset: str
    num_clients: int
    alpha: float

    @property
    def label(self) -> str:
        """What it is called."""
        return f"{self.num_clients} clients, α = {self.alpha:g}"


@dataclasses.dataclass(frozen=True)
class Grid:
    """Which cells, and how they are trained."""

    merging: config.Group[config.Merging] = dataclasses.field(default=config.Merging(_ORDER))
    datasets: tuple[str, ...] = ("mnist", "cifar10")
    """One table each: fashion_mnist, svhn_cropped, cifar10, cinic10; mnist, cifar100, digits."""
    num_clients: tuple[int, ...] = (5,)
    """Over how many clients the data are split; several draw clients.png, the paper's Figure 3."""
    alphas: tuple[float, ...] = (0.2, 0.1, 0.05)
    """Dirichlet splits: each client's shares of the classes; the smaller the fewer classes."""
    epochs: int = 10
    """Passes of every client over its own data; the paper has 30."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the initial model and of training."""
    partition_seed: int = 3
    """Of the split, the same for all seeds, as in the authors' code."""
    calibrate: tuple[Literal["analytic_head", "ccvr"], ...] = ()
    """After each merge, an exchange without training: tables of analytic_head, or ccvr."""
    clients_per_chunk: int | None = None
    """Clients computed side by side; otherwise one on a CPU and all elsewhere."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/fedfisher_table")
    """Folder for the results."""


class Published(NamedTuple):
    """What the paper reports, in percent."""

    accuracy: float
    deviation: float


class Measured(NamedTuple):
    """What one algorithm gave in some runs; seconds as medians, of all clients together."""

    accuracies: tuple[float, ...]  # percent of each run
    upload_bytes: int | None  # of one client
    seconds: float | None  # of the clients' summaries and the server's merge
    server: float | None  # of that the server's; early runs did not time it apart

    @property
    def clients(self) -> float | None:
        """Seconds of the summaries, if the halves were timed apart."""
        if self.seconds is None or self.server is None:
            return None
        return max(self.seconds - self.server, 0.0)


_NOTHING = Measured((), None, None, None)


def cells(grid: Grid, dataset: str) -> list[Cell]:
    """List the rows of a data set's table."""
    return [Cell(dataset, number, alpha) for number in grid.num_clients for alpha in grid.alphas]


def configuration(grid: Grid, cell: Cell, seed: int) -> config.OneShot:
    """Say how one cell is computed with one seed: as FedFisher's paper, but for the epochs."""
    usual = config.one_shot(cell.dataset)
    split = {
        "num_clients": cell.num_clients,
        "partition": "dirichlet_of_client",
        "alpha": cell.alpha,
    }
    chunk = {"clients_per_chunk": grid.clients_per_chunk}
    return dataclasses.replace(
        usual,
        data=dataclasses.replace(usual.data, **split, data_dir=grid.data_dir),
        training=dataclasses.replace(usual.training, **chunk),
        merging=grid.merging,
        epochs=grid.epochs,
        partition_seeds=(grid.partition_seed,),
        seeds=(seed,),
        calibrate=grid.calibrate,
        central=False,
        out=grid.out / cell.dataset / f"m{cell.num_clients}-alpha{cell.alpha}-seed{seed}",
    )


def units(grid: Grid) -> dict[grid_runs.Unit, config.OneShot]:
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
        commands.check_name("datasets", dataset, config.IMAGES)
    commands.check_list(grid, "datasets", "num_clients", "alphas", "seeds")
    commands.check(grid, "num_clients", "whole numbers from 1 up", lambda number: number >= 1)
    commands.check(grid, "alphas", "numbers above 0", lambda alpha: 0 < alpha < float("inf"))
    commands.check(grid, "partition_seed", "0 to 2**32 - 1", lambda seed: 0 <= seed < 2**32)
    for asked in units(grid).values():
        limits.check_one_shot(asked)


def columns(grid: Grid) -> dict[str, list[str]]:
    """Order algorithms as the paper does, and what follows each merge likewise, by its name."""
    asked = grid.merging.algorithms
    order = [name for name in _ORDER if name in asked]
    order += [name for name in asked if name not in _ORDER]
    after = {other: [f"{name}+{other}" for name in order] for other in grid.calibrate}
    return {"": order} | after


def published() -> dict[tuple[Cell, str], Published]:
    """Read the paper's numbers, by cell and algorithm."""
    with open(_PAPER, newline="") as file:
        _, *lines = csv.reader(file)
    return {
        (Cell(dataset, _CLIENTS, float(alpha)), name): Published(*map(float, numbers))
        for dataset, alpha, name, *numbers in lines
    }


def measured(rows: Iterable[Row]) -> dict[str, Measured]:
    """Gather rows of merged models by algorithm, those of the clients' training among them."""
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        # Of the clients one, as each has the seconds of all.
        if row.client in (None, 0):
            found.setdefault(row.algorithm, {}).setdefault(row.metric, []).append(row)
    gathered = {}
    for name, own in found.items():
        models = own.get("accuracy", [])
        uploads = [row.upload_bytes for row in models if row.upload_bytes is not None]
        gathered[name] = Measured(
            tuple(100 * row.value for row in models),
            uploads[0] if uploads else None,
            _median(row.seconds for row in models),
            _median(row.value for row in own.get(steps.SERVER, [])),
        )
    return gathered


def tables(grid: Grid, dataset: str, done: grid_runs.Done) -> list[Table]:
    """Lay out the accuracies of one data set, "ours ± deviation (theirs)", a table for each step.

    The first is of the merged models, the others of those that an exchange followed.
    """
    paper, found = published(), []
    own = {cell: _of(grid, [cell], done) for cell in cells(grid, dataset)}
    for exchange, names in columns(grid).items():
        lines = []
        for cell, measured_ in own.items():
            ours = [spread(measured_.get(name, _NOTHING).accuracies) for name in names]
            theirs = [paper.get((cell, name)) for name in names]
            both = zip(ours, theirs, strict=True)
            lines.append((cell.label, *(f"{o} ({t.accuracy:.1f})" if t else o for o, t in both)))
        then = f", then {exchange.replace('_', ' ')}" if exchange else ""
        title = f"{dataset}: test accuracy in % after {grid.epochs} epochs{then}"
        headings = ("", *(figures.label(name) for name in columns(grid)[""]))
        found.append(Table(title, headings, lines))
    return found


def costs(grid: Grid, dataset: str, num_clients: int, done: grid_runs.Done) -> Table:
    """Lay out what one round takes from so many clients of a data set, by algorithm."""
    some = [cell for cell in cells(grid, dataset) if cell.num_clients == num_clients]
    own = _of(grid, some, done)
    model = own["ensemble"].upload_bytes if "ensemble" in own else None
    training = _number(own["local"].seconds if "local" in own else None)
    lines = [("training", "-", "-", training, training, "-")]
    for name in _names(grid):
        found = own.get(name, _NOTHING)
        sent = found.upload_bytes
        size = (
            ("-", "-") if not sent or not model else (f"{sent / 1000:.1f}", f"{sent / model:.2f}")
        )
        seconds = map(_number, (found.seconds, found.clients, found.server))
        lines.append((figures.label(name), *size, *seconds))
    headings = ("upload, kB", "times FedAvg's", "seconds", "of clients", "of the server")
    title = f"{dataset}, {num_clients} clients: what a round takes"
    return Table(title, ("", *headings), lines, sections=[0])


def footnote(grid: Grid) -> str:
    """Say what the tables hold."""
    number = len(grid.seeds)
    several = f"Mean ± standard deviation over up to {number} seeds of training, on one split"
    return (
        f"{'One seed' if number == 1 else several}; in brackets the paper's mean of 5 seeds, after "
        "30 epochs and with uploads compressed to the size of FedAvg's. An upload is one client's. "
        "Seconds are of all clients together and of the server, medians over rows and seeds; those "
        "of algorithms leave the clients' training out, unless they train their own. The "
        "first run of a process includes compilation. A dash is what was not measured."
    )


def as_csv(grid: Grid, done: grid_runs.Done) -> str:
    """Write the tables as CSV, a line for each cell and algorithm."""
    paper, lines = published(), []
    for cell in (cell for dataset in grid.datasets for cell in cells(grid, dataset)):
        own = _of(grid, [cell], done)
        for name in _names(grid):
            found = own.get(name, _NOTHING)
            values = found.accuracies
            mean = round(statistics.fmean(values), 2) if values else None
            deviation = round(statistics.stdev(values), 2) if len(values) > 1 else None
            numbers = mean, deviation, len(values), *paper.get((cell, name), (None, None))
            took = (found.upload_bytes, found.seconds, found.server)
            lines.append((*cell, name, grid.epochs, *numbers, *took))
    more = ("algorithm", "epochs", "mean", "std", "runs", "paper", "paper_std")
    return csv_text((*Cell._fields, *more, "upload_bytes", "seconds", "server_seconds"), lines)


def figure(grid: Grid, done: grid_runs.Done, path: Path) -> None:
    """Draw accuracy over the number of clients: a line is a mean, a dot one seed."""
    rows, wide = len(grid.alphas), len(grid.datasets)
    beside = 2 * wide  # labels of the legend
    size = 1.2 + 4.4 * wide, 1.2 + 2.6 * rows + 0.22 * -(-len(_names(grid)) // beside)
    shared = {"sharex": True, "sharey": True, "squeeze": False}
    drawn, panels = figures.canvas(*size, wide, rows, **shared)
    for across, alpha in zip(panels, grid.alphas, strict=True):
        for panel, dataset in zip(across, grid.datasets, strict=True):
            own = [_of(grid, [Cell(dataset, n, alpha)], done) for n in grid.num_clients]
            for name in _names(grid):
                _line(panel, grid.num_clients, name, [o[name].accuracies for o in own])
            panel.set_title(f"{dataset}, α = {alpha:g}", fontsize="medium", loc="left")
            panel.set_xticks(sorted(grid.num_clients))
            panel.grid(color=figures.GRID, linewidth=0.8)
    for panel in panels[-1]:
        panel.set_xlabel("clients")
    for across in panels:
        across[0].set_ylabel("test accuracy, %")
    figures.legend(drawn, panels.ravel(), columns=beside)
    figures.save(drawn, path)


def _line(panel, numbers: Sequence[int], name: str, values: Sequence[tuple[float, ...]]) -> None:
    points = sorted(zip(numbers, values, strict=True))
    style = figures.style(name)
    means = [statistics.fmean(own) for _, own in points]
    line = figures.line_style(name)
    panel.plot([n for n, _ in points], means, markersize=5, linestyle=line, **style)
    for number, own in points:
        dots = {"linestyle": "", "marker": style["marker"], "color": style["color"]}
        panel.plot([number] * len(own), own, markersize=2.5, alpha=0.5, **dots)


def _names(grid: Grid) -> list[str]:
    return [name for names in columns(grid).values() for name in names]


def _of(grid: Grid, some: Sequence[Cell], done: grid_runs.Done) -> dict[str, Measured]:
    return measured(row for cell in some for seed in grid.seeds for row in done[cell, seed])


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"
