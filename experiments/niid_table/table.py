"""Tabulate our results beside the one-shot table of the FedLPA paper.

The paper's numbers, from Liu, Liu, Ye, Shen, Li, Jiang, Li, "FedLPA: One-shot Federated Learning
with Layer-Wise Posterior Aggregation", NeurIPS 2024, are those of `papers`: six methods after 200
epochs (Table 1) and after 10, 20, 50 and 100 (Tables 5 to 8), with 5, 20 and 50 clients (Tables 2
and 9) and the most skewed split (Table 10), and FedOV with two classes of MNIST a client
(Table 11). Each is a mean of 3 seeds in percent with a spread after its ±, which the paper
does not define. For FedLPA and DENSE the paper takes the best of several candidates on the test
data.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.harness import figures, grid_runs, grids, methods, papers, records
from experiments.harness.names import is_exchanged
from experiments.harness.papers import Published
from experiments.harness.tables import Table, csv_text, moments

_TABLES = [f"Table {number}" for number in (1, 2, *range(5, 12))]
_ORDER = (
    *("fedlpa", "fedlpa_ea", "fedlpa_gd", "fednova", "scaffold", "fedavg", "fedprox", "dense"),
    *("fedov", "fedfisher_kfac"),
)
"""Methods in the paper's order; other methods come after them."""
_THEIRS = {"dense": "DENSE", "fedov": "FedOV"}
"""Methods whose published numbers are shown also where ours were not computed."""
_MOST_EPOCHS = 200


class Measured(NamedTuple):
    """The results of a cell over all seeds."""

    accuracies: dict[str, tuple[float, ...]]  # by algorithm, in percent of each seed
    seconds: float | None  # median time of a whole run
    training: float | None  # median time of its training, which grows with the epochs


Results = dict[grids.Cell, Measured]


def published(epochs: int, clients: int = 10) -> dict[tuple[grids.Cell, str], Published]:
    """Read the paper's numbers of so many epochs and clients."""
    return {
        where: found
        for (how, where), found in papers.published("fedlpa", _TABLES, _place).items()
        if how == (str(epochs), str(clients))
    }


def _place(one: papers.Number) -> tuple[tuple[str, str], tuple[grids.Cell, str]]:
    how = one.setting
    number = how.get("beta") or how["classes"]
    cell = grids.Cell(one.dataset, how["partition"], number)
    return (how["epochs"], how["clients"]), (cell, one.algorithm)


def measured(rows: Sequence[records.Row], last: Mapping[str, int] | None = None) -> Measured:
    """Gather the rows of one cell over all seeds.

    The accuracy of an algorithm is that of the first round, or of its round in `last`.
    """
    accuracies: dict[str, tuple[float, ...]] = {}
    training = {row.seed: 0.0 for row in rows}
    for row in rows:
        counts = row.client is None and row.metric == "accuracy"
        if counts and row.round == (last or {}).get(row.algorithm, 1):
            accuracies[row.algorithm] = (*accuracies.get(row.algorithm, ()), 100 * row.value)
        if (row.algorithm == "local" and row.client == 0) or methods.trains_its_own(row.algorithm):
            training[row.seed] += row.seconds or 0.0
    walls = [row.value for row in rows if row.metric == grid_runs.WALL]
    medians = (statistics.median(own) if own else None for own in (walls, training.values()))
    return Measured(accuracies, *medians)


def _columns(algorithms: Sequence[str], paper: Iterable[str]) -> list[str]:
    """Order algorithms as the paper does, with those of its methods that are always shown."""
    theirs = [name for name in dict.fromkeys(paper) if name in _THEIRS]
    return papers.in_order([*algorithms, *(n for n in theirs if n not in algorithms)], _ORDER)


def table(
    title: str, results: Results, algorithms: Sequence[str], epochs: int, clients: int = 10
) -> Table:
    """Return the table of one data set, with cells "ours ± deviation (theirs)"."""
    paper = published(epochs, clients)
    names = _columns(algorithms, [name for cell, name in paper if cell in results])
    headings = ("", *(_THEIRS.get(name) or figures.label(name) for name in names), "seconds")
    body = []
    for cell, own in results.items():
        seconds = "-" if own.seconds is None else f"{own.seconds:.0f}"
        cells = [papers.beside(own.accuracies.get(n, ()), paper.get((cell, n))) for n in names]
        body.append([cell.label, *cells, seconds])
    return Table(title, headings, body)


def footnote(
    tables: Sequence[Table],
    algorithms: Sequence[str],
    epochs: int,
    num_seeds: int,
    choose: str,
    clients: int = 10,
) -> str:
    """Return the note that explains the tables; `choose` is the option of `config.Merging`."""
    shown = {heading for table in tables for heading in table.headings}
    theirs = [own for name, own in _THEIRS.items() if name not in algorithms and own in shown]
    verb = "is" if len(theirs) == 1 else "are"
    only = f"{' and '.join(theirs)} {verb} the paper's only. " if theirs else ""
    if any(is_exchanged(name) for name in algorithms):
        only += "What follows a + came after the merge, by exchanges without training. "
    ours = {
        "last": "ours are not chosen",
        "validation": "ours of DENSE and OTFusion on 500 training images",
        "test": "so are ours of DENSE and OTFusion",
    }[choose]
    several = f"mean ± standard deviation over up to {num_seeds} seeds, each with its own split"
    brackets = (
        f"in brackets the paper's mean of 3 seeds after {epochs} epochs, where it has one (its "
        "spreads are in table.csv)"
        if published(epochs, clients)
        else f"the paper has no numbers of {clients} clients after {epochs} epochs"
    )
    return (
        f"Test accuracy in %, {'one seed' if num_seeds == 1 else several}; {brackets}. {only}The "
        f"paper's FedLPA and DENSE are the best on the test data of several candidates, {ours}. "
        "Seconds are of all algorithms of one seed together, the median over seeds; the first cell "
        "of a process includes compilation."
    )


def extrapolation(results: Results, epochs: int, num_seeds: int) -> str:
    """Return a sentence that extrapolates the time of the same cells to the paper's epochs."""
    timed = [own for own in results.values() if own.seconds is not None]
    if not timed:
        return ""
    seconds, training = (sum(own[i] for own in timed) for i in (1, 2))
    longer = seconds + (_MOST_EPOCHS / epochs - 1) * training
    what = "1 cell" if len(timed) == 1 else f"{len(timed)} cells"
    return (
        f"{what} took {seconds:.0f} s a seed, {training:.0f} s of it training: by extrapolation "
        f"at {_MOST_EPOCHS} epochs {longer / 3600:.1f} h a seed, "
        f"{num_seeds * longer / 3600:.1f} h for {num_seeds}."
    )


def as_csv(results: Results, algorithms: Sequence[str], epochs: int, clients: int = 10) -> str:
    """Return the table as CSV, with a line for each cell and algorithm."""
    paper, lines = published(epochs, clients), []
    for cell, found in results.items():
        for name in _columns(algorithms, [name for other, name in paper if other == cell]):
            values = moments(found.accuracies.get(name, ()))
            theirs = paper.get((cell, name), (None, None))
            lines.append((*cell, name, epochs, *values, *theirs))
    more = ("algorithm", "epochs", "mean", "std", "runs", "paper", "paper_spread")
    return csv_text((*grids.Cell._fields, *more), lines)
