"""Tabulate our results beside Table 2 of the FedFisher paper, and draw its Figure 3.

The paper's numbers, from Jhunjhunwala, Wang, Joshi, "FedFisher: Leveraging Fisher Information for
One-Shot Federated Learning", AISTATS 2024, are those of `papers`: means and deviations of 5 seeds
in percent, 5 clients, 30 epochs, uploads compressed to the size of FedAvg's.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness import commands, config, figures, grid_runs, grids, papers, records, steps
from experiments.harness.papers import Published
from experiments.harness.tables import Table, csv_text, gathered, moments

_ORDER = (
    *("fedavg", "otfusion", "pfnm", "regmean", "dense", "fisher_merge", "fedfisher_diag"),
    *("fedfisher_kfac", "fedfisher_sequential"),
)
"""Methods in the paper's order, then ours; other methods come after them."""


class Cell(NamedTuple):
    """One row of one data set's table: the number of clients and the Dirichlet parameter."""

    dataset: str
    num_clients: int
    alpha: float

    @property
    def label(self) -> str:
        """The name of the row."""
        return f"{self.num_clients} clients, α = {self.alpha:g}"


@dataclasses.dataclass(frozen=True)
class Grid(grids.Cells):
    """The cells of the FedFisher paper's table, and how clients are trained."""

    merging: config.Group[config.Merging] = dataclasses.field(default=config.Merging(_ORDER))
    num_clients: tuple[int, ...] = (5,)
    """Numbers of clients; several of them draw clients.png, the paper's Figure 3."""
    alphas: tuple[float, ...] = (0.2, 0.1, 0.05)
    """Dirichlet parameters of each client's shares of the classes; smaller means fewer classes."""
    partition_seed: int = 3
    """Seed of the split, the same for all seeds of training, as in the authors' code."""
    out: commands.Folder = Path("runs/fedfisher_table")
    """Folder for the results."""

    def cells(self, dataset: str) -> list[Cell]:
        """List the rows of a data set's table."""
        return [Cell(dataset, n, alpha) for n in self.num_clients for alpha in self.alphas]

    def configuration(self, cell: Cell, seed: int) -> config.OneShot:
        """Return the run of one cell with one seed: as in FedFisher's paper, but for the epochs."""
        usual = config.one_shot(cell.dataset)
        split = {"partition": "dirichlet_of_client", "alpha": cell.alpha}
        split |= {"num_clients": cell.num_clients, "data_dir": self.data_dir}
        chunk = {"clients_per_chunk": self.clients_per_chunk}
        return dataclasses.replace(
            usual,
            data=dataclasses.replace(usual.data, **split),
            training=dataclasses.replace(usual.training, **chunk),
            partition_seeds=(self.partition_seed,),
            seeds=(seed,),
            out=self.out / cell.dataset / f"m{cell.num_clients}-alpha{cell.alpha}-seed{seed}",
            **self.of_all,
        )


class Measured(NamedTuple):
    """The results of one algorithm in some runs; seconds are medians, of all clients together."""

    accuracies: tuple[float, ...]  # in percent, of each run
    upload_bytes: int | None  # size of one client's upload
    seconds: float | None  # time of the clients' summaries and the server's merge
    server: float | None  # the server's part of it; early runs did not time it separately

    @property
    def clients(self) -> float | None:
        """Seconds of the summaries; None if the two parts were not timed separately."""
        if self.seconds is None or self.server is None:
            return None
        return max(self.seconds - self.server, 0.0)


_NOTHING = Measured((), None, None, None)


def columns(grid: Grid) -> dict[str, list[str]]:
    """Order algorithms as the paper does, and likewise the exchanges after merges, by name."""
    asked = grid.merging.algorithms
    order = papers.in_order(asked, _ORDER)
    after = {other: [f"{name}+{other}" for name in order] for other in grid.calibrate}
    return {"": order} | after


def published() -> dict[tuple[Cell, str], Published]:
    """Read the paper's numbers by cell and algorithm."""
    return papers.published("fedfisher", ("Table 2",), _cell)


def _cell(one: papers.Number) -> tuple[Cell, str]:
    how = one.setting
    return Cell(one.dataset, int(how["clients"]), float(how["alpha"])), one.algorithm


def measured(rows: Iterable[records.Row]) -> dict[str, Measured]:
    """Gather the rows by algorithm; the references, such as local, are included."""
    # One client is enough, because the row of each has the seconds of all clients.
    own = [row for row in rows if row.client in (None, 0)]
    found = {}
    for name, ones in gathered((row.algorithm, row) for row in own).items():
        models = [row for row in ones if row.metric == "accuracy"]
        found[name] = Measured(
            tuple(100 * row.value for row in models),
            next((row.upload_bytes for row in models if row.upload_bytes is not None), None),
            _median(row.seconds for row in models),
            _median(row.value for row in ones if row.metric == steps.SERVER),
        )
    return found


def tables(grid: Grid, dataset: str, done: grid_runs.Done) -> list[Table]:
    """Tabulate accuracies of one data set as "ours ± deviation (theirs)".

    The first table is of the merged models, the others are of models after an exchange.
    """
    paper, found = published(), []
    own = {cell: _of(grid, [cell], done) for cell in grid.cells(dataset)}
    for exchange, names in columns(grid).items():
        lines = []
        for cell, ours in own.items():
            values = [ours.get(name, _NOTHING).accuracies for name in names]
            theirs = [paper.get((cell, name)) for name in names]
            lines.append((cell.label, *map(papers.beside, values, theirs)))
        then = f", then {exchange.replace('_', ' ')}" if exchange else ""
        title = f"{dataset}: test accuracy in % after {grid.epochs} epochs{then}"
        headings = ("", *(figures.label(name) for name in columns(grid)[""]))
        found.append(Table(title, headings, lines))
    return found


def costs(grid: Grid, dataset: str, num_clients: int, done: grid_runs.Done) -> Table:
    """Tabulate the bytes and seconds of one round of a number of clients, by algorithm."""
    some = [cell for cell in grid.cells(dataset) if cell.num_clients == num_clients]
    own = _of(grid, some, done)
    model = own["ensemble"].upload_bytes if "ensemble" in own else None
    training = _number(own["local"].seconds if "local" in own else None)
    lines = [("training", "-", "-", training, training, "-")]
    for name in _names(grid):
        found = own.get(name, _NOTHING)
        sent = found.upload_bytes
        size = [f"{sent / 1000:.1f}", f"{sent / model:.2f}"] if sent and model else ["-", "-"]
        seconds = map(_number, (found.seconds, found.clients, found.server))
        lines.append((figures.label(name), *size, *seconds))
    headings = ("upload, kB", "times FedAvg's", "seconds", "of clients", "of the server")
    title = f"{dataset}, {num_clients} clients: what a round takes"
    return Table(title, ("", *headings), lines, sections=[0])


def footnote(grid: Grid) -> str:
    """Return the note that explains the tables."""
    number = len(grid.seeds)
    several = f"Mean ± standard deviation over up to {number} seeds of training, on one split"
    ours = {"none": "Our uploads are not compressed. "}.get(
        grid.merging.compress,
        f"Our uploads are compressed too ({grid.merging.compress.replace('_', ' ')}). ",
    )
    return (
        f"{'One seed' if number == 1 else several}; in brackets the paper's mean of 5 seeds, after "
        "30 epochs and with uploads compressed to the size of FedAvg's. "
        f"{ours}An upload is one client's. "
        "Seconds are of all clients together and of the server, medians over rows and seeds; those "
        "of algorithms leave the clients' training out, unless they train their own. The "
        "first run of a process includes compilation. A dash is what was not measured."
    )


def as_csv(grid: Grid, done: grid_runs.Done) -> str:
    """Return the tables as CSV, with a line for each cell and algorithm."""
    paper, lines = published(), []
    for cell in (cell for dataset in grid.datasets for cell in grid.cells(dataset)):
        own = _of(grid, [cell], done)
        for name in _names(grid):
            found = own.get(name, _NOTHING)
            numbers = *moments(found.accuracies), *paper.get((cell, name), (None, None))
            took = (found.upload_bytes, found.seconds, found.server)
            lines.append((*cell, name, grid.epochs, *numbers, *took))
    more = ("algorithm", "epochs", "mean", "std", "runs", "paper", "paper_std")
    return csv_text((*Cell._fields, *more, "upload_bytes", "seconds", "server_seconds"), lines)


def figure(grid: Grid, done: grid_runs.Done, path: Path) -> None:
    """Draw accuracy over the number of clients: a line for the mean and a dot for each seed."""
    rows, wide = len(grid.alphas), len(grid.datasets)
    beside = 2 * wide  # labels of the legend
    size = 1.2 + 4.4 * wide, 1.2 + 2.6 * rows + 0.22 * -(-len(_names(grid)) // beside)
    shared = {"grid": "both", "sharex": True, "sharey": True, "squeeze": False}
    drawn, panels = figures.canvas(*size, wide, rows, **shared)
    for across, alpha in zip(panels, grid.alphas, strict=True):
        for panel, dataset in zip(across, grid.datasets, strict=True):
            own = [_of(grid, [Cell(dataset, n, alpha)], done) for n in grid.num_clients]
            for name in _names(grid):
                _line(panel, grid.num_clients, name, [o[name].accuracies for o in own])
            panel.set_title(f"{dataset}, α = {alpha:g}", fontsize="medium", loc="left")
            panel.set_xticks(sorted(grid.num_clients))
    for panel in panels[-1]:
        panel.set_xlabel("clients")
    for across in panels:
        across[0].set_ylabel("test accuracy, %")
    figures.save_with_legend(drawn, path, columns=beside)


def _line(
    panel: Any, numbers: Sequence[int], name: str, values: Sequence[tuple[float, ...]]
) -> None:
    curve = dict(sorted(zip(numbers, values, strict=True)))
    style, line = figures.style(name), figures.line_style(name)
    means = map(statistics.fmean, curve.values())
    panel.plot([*curve], [*means], markersize=5, linestyle=line, **style)
    dots = {"linestyle": "", "marker": style["marker"], "color": style["color"]}
    for number, accuracies in curve.items():
        panel.plot([number] * len(accuracies), accuracies, markersize=2.5, alpha=0.5, **dots)


def _names(grid: Grid) -> list[str]:
    return [name for names in columns(grid).values() for name in names]


def _of(grid: Grid, some: Sequence[Cell], done: grid_runs.Done) -> dict[str, Measured]:
    return measured(row for cell in some for seed in grid.seeds for row in done[cell, seed])


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def _number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f}"
