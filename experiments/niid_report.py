"""The one-shot table of the FedLPA paper, ours beside theirs, and what it takes to compute it.

Their numbers, from Liu, Liu, Ye, Shen, Li, Jiang, Li, "FedLPA: One-shot Federated Learning with
Layer-Wise Posterior Aggregation", NeurIPS 2024, are in fedlpa_paper.csv: all methods at 200 epochs
(Table 1), FedLPA, FedAvg and DENSE at 10 to 100 (Tables 5 to 8). Each is a mean of 3 seeds in
percent; FedLPA's and DENSE's are the best on the test data of several candidates.
"""

import csv
import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.table import Table

from experiments.choices import label
from experiments.methods import trains_its_own
from experiments.records import Row

PAPER = Path(__file__).with_name("fedlpa_paper.csv")
COLUMNS = (
    *("fedlpa", "fedlpa_ea", "fedlpa_gd", "fednova", "scaffold", "fedavg", "fedprox", "dense"),
    "fedfisher_kfac",
)
"""In the paper's order; dense is the paper's only. Others come after them."""
WALL, MOST_EPOCHS = "wall_seconds", 200


class Cell(NamedTuple):
    """One row of one data set's table: a way to split the data."""

    dataset: str
    partition: str
    number: str

    @property
    def label(self) -> str:
        """What the paper calls it."""
        return f"{'β' if self.partition == 'niid_bench' else '#C'} = {self.number}"


class Published(NamedTuple):
    """What the paper reports: accuracy in percent, after how many epochs."""

    accuracy: float
    epochs: int


class Measured(NamedTuple):
    """What the runs of a cell gave.

    Attributes:
        accuracies: by algorithm, in percent, one for each seed.
        seconds: of one seed, all that was computed; the median over seeds, None if unknown.
        training: the part of them that grows with the epochs.
    """

    accuracies: dict[str, tuple[float, ...]]
    seconds: float | None
    training: float | None


def published(epochs: int) -> dict[tuple[Cell, str], Published]:
    """Read the paper's numbers.

    Args:
        epochs: of local training; where the paper has none for so many, that of 200 is given.

    Returns:
        By cell and algorithm.

    Example:
        >>> published(10)[Cell("mnist", "niid_bench", "0.1"), "fedlpa"]
        Published(accuracy=78.07, epochs=10)
        >>> published(10)[Cell("mnist", "niid_bench", "0.1"), "fednova"]
        Published(accuracy=48.07, epochs=200)
    """
    with open(PAPER, newline="") as file:
        lines = list(csv.DictReader(file))
    found = {}
    for wanted in (MOST_EPOCHS, epochs):  # the second replaces the first
        for line in lines:
            if int(line["epochs"]) == wanted:
                cell = Cell(line["dataset"], line["partition"], line["number"])
                found[cell, line["algorithm"]] = Published(float(line["accuracy"]), wanted)
    return found


def measured(rows: Sequence[Row]) -> Measured:
    """Gather the rows of one cell, of all its seeds.

    Args:
        rows: with one wall time for each seed.

    Returns:
        What they hold; of later rounds nothing.
    """
    merged = [row for row in rows if row.client is None and row.round == 1]
    accuracies = {}
    for row in merged:
        if row.metric == "accuracy":
            accuracies.setdefault(row.algorithm, []).append(100 * row.value)
    walls = [row.value for row in rows if row.metric == WALL]
    training = {row.seed: 0.0 for row in rows}
    for row in rows:
        if (row.algorithm == "local" and row.client == 0) or trains_its_own(row.algorithm):
            training[row.seed] += row.seconds
    return Measured(
        {name: tuple(values) for name, values in accuracies.items()},
        statistics.median(walls) if walls else None,
        statistics.median(training.values()) if training else None,
    )


def columns(algorithms: Sequence[str]) -> list[str]:
    """Order algorithms as the paper does, with its DENSE before those that it does not have."""
    order = [name for name in COLUMNS if name in algorithms or name == "dense"]
    return order + [name for name in algorithms if name not in COLUMNS]


def lines(
    results: dict[Cell, Measured], algorithms: Sequence[str], epochs: int
) -> tuple[list[str], list[list[str]]]:
    """Lay out the table of one data set, "ours ± deviation (theirs)".

    Args:
        results: by cell, in the order of the table.
        algorithms: ours.
        epochs: of local training.

    Returns:
        The headings, and the cells of each line as text; * marks theirs at 200 epochs.
    """
    paper = published(epochs)
    names = columns(algorithms)
    headings = ["", *("DENSE" if name == "dense" else label(name) for name in names), "seconds"]
    body = []
    for cell, own in results.items():
        seconds = "-" if own.seconds is None else f"{own.seconds:.0f}"
        cells = [_cell(own.accuracies.get(n, ()), paper.get((cell, n)), epochs) for n in names]
        body.append([cell.label, *cells, seconds])
    return headings, body


def table(title: str, headings: Sequence[str], body: Sequence[Sequence[str]]) -> Table:
    """Lay the lines out for a terminal."""
    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for number, heading in enumerate(headings):
        shown.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for line in body:
        shown.add_row(*line)
    return shown


def markdown(title: str, headings: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Write the lines as a table in Markdown, with its heading."""
    lines = [f"| {' | '.join(line)} |" for line in (headings, *body)]
    rule = "| --- |" + " ---: |" * (len(headings) - 1)
    return "\n".join([f"## {title}", "", lines[0], rule, *lines[1:], ""])


def footnote(epochs: int, num_seeds: int) -> str:
    """Say what the table holds."""
    return (
        f"Test accuracy in %, mean ± standard deviation over up to {num_seeds} seeds, each with "
        "its own split; in brackets the paper's mean of 3 seeds, marked * where it has none after "
        f"{epochs} epochs and this is the one after {MOST_EPOCHS}. DENSE is the paper's only. The "
        "paper's FedLPA and DENSE are the best on the test data of several candidates, ours are "
        "not chosen. Seconds are of all algorithms of one seed together, the median over seeds; "
        "the first cell of a session includes compilation."
    )


def extrapolation(results: dict[Cell, Measured], epochs: int, num_seeds: int) -> str:
    """Say how long the same cells would take with as many epochs as the paper's.

    Only training grows with the epochs.

    Args:
        results: by cell.
        epochs: of local training in these results.
        num_seeds: that the whole grid has.

    Returns:
        A sentence, empty if nothing was timed.

    Example:
        >>> cell = Measured({}, seconds=100.0, training=90.0)
        >>> extrapolation({Cell("mnist", "niid_bench", "0.1"): cell}, epochs=10, num_seeds=2)
        '1 cells took 100 s a seed, ... at 200 epochs 0.5 h a seed, 1.0 h for 2.'
    """
    timed = [own for own in results.values() if own.seconds is not None]
    if not timed:
        return ""
    seconds, training = (sum(own[i] for own in timed) for i in (1, 2))
    longer = seconds + (MOST_EPOCHS / epochs - 1) * training
    return (
        f"{len(timed)} cells took {seconds:.0f} s a seed, {training:.0f} s of it training: by "
        f"extrapolation at {MOST_EPOCHS} epochs {longer / 3600:.1f} h a seed, "
        f"{num_seeds * longer / 3600:.1f} h for {num_seeds}."
    )


def csv_text(results: dict[Cell, Measured], algorithms: Sequence[str], epochs: int) -> str:
    """Write the table as CSV, a line for each cell and algorithm."""
    paper = published(epochs)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (*Cell._fields, "algorithm", "epochs", "mean", "std", "runs", "paper", "paper_epochs")
    )
    for cell, own in results.items():
        for name in columns(algorithms):
            values = own.accuracies.get(name, ())
            mean = round(statistics.fmean(values), 2) if values else None
            deviation = round(statistics.stdev(values), 2) if len(values) > 1 else None
            theirs = paper.get((cell, name), (None, None))
            writer.writerow((*cell, name, epochs, mean, deviation, len(values), *theirs))
    return text.getvalue()


def _cell(values: Sequence[float], theirs: Published | None, epochs: int) -> str:
    ours = f"{statistics.fmean(values):.1f}" if values else "-"
    if len(values) > 1:
        ours += f" ± {statistics.stdev(values):.1f}"
    if theirs is None:
        return ours
    return f"{ours} ({theirs.accuracy:.1f}{'' if theirs.epochs == epochs else '*'})"
