"""Choose learning rates of clients and server on validation clients.

All cells of a grid run for a quarter of the rounds with the first seed. If the best of them has the
least or the greatest rate that was tried, the grid is widened beyond it. The best three run all
rounds with all seeds, and the best of these is the choice.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.harness import records, tables
from experiments.harness.config import Federated

_WIDENINGS = 5
"""Number of times that a grid is widened at most."""
_KEPT = 3
"""Number of cells that run all rounds."""
Score = tuple[float, float]
"""Mean accuracy over the validation clients, and their loss with a minus to part equal ones."""


class Cell(NamedTuple):
    """Learning rates of a run; `local` is None if there is no grid, for the rate of all runs."""

    server: float
    local: float | None = None


def asked(config: Federated) -> bool:
    """Return whether a configuration has a grid."""
    return bool(config.local_learning_rate)


def columns(config: Federated) -> tuple[str, ...]:
    """Return the columns of results.csv."""
    return records.GRID if asked(config) else records.FEDERATED


def quarter(rounds: int) -> int:
    """Return the number of rounds after which the cells of a grid are compared."""
    return max(1, rounds // 4)


def score(rows: Iterable[records.Row], seed: int | None, round_: int) -> dict[Cell, Score]:
    """Return the score of each cell after a round, of one seed or the mean over all."""
    found: dict[str, dict[Cell, list[float]]] = {}
    for name in ("accuracy", "loss"):
        found[name] = tables.gathered(
            (Cell(row.server_learning_rate, row.learning_rate), row.value)
            for row in rows
            if (row.split, row.metric, row.round) == ("validation", name, round_)
            if seed in (None, row.seed)
        )
    losses = found["loss"]

    def of(cell: Cell, values: list[float]) -> Score:
        loss = -statistics.fmean(losses[cell]) if cell in losses else 0.0
        return tables.rank(statistics.fmean(values)), tables.rank(loss)

    return {cell: of(cell, values) for cell, values in found["accuracy"].items()}


def cells(
    local: Sequence[float], server: Sequence[float], scores: Mapping[Cell, Score]
) -> list[Cell]:
    """Return the cells to try: those of these rates, and those beyond a choice at an edge.

    Example:
        >>> found = {Cell(1.0, 0.1): (0.5, -1.0), Cell(1.0, 0.2): (0.6, -1.0)}
        >>> [cell.local for cell in cells([0.1, 0.2], [1.0], found)]
        [0.1, 0.2, 0.4]
    """
    for _ in range(_WIDENINGS + 1):
        tried = [Cell(s, rate) for rate in local for s in server]
        if not all(cell in scores for cell in tried):
            break
        best = max(tried, key=lambda cell: scores[cell])
        wider = _beyond(local, best.local), _beyond(server, best.server)
        if wider == (local, server):
            break
        local, server = wider
    return tried


def best(tried: Iterable[Cell], scores: Mapping[Cell, Score]) -> list[Cell]:
    """Return the cells that run all rounds, the best first and the first of equals."""
    return sorted(tried, key=lambda cell: scores[cell], reverse=True)[:_KEPT]


def table(
    config: Federated, rows: Sequence[records.Row], rounds: int, chosen: Cell
) -> tables.Table:
    """Return the validation accuracies of an algorithm's cells after a quarter of the rounds.

    A star is at those that ran all rounds, two at the choice.
    """
    scores = score(rows, config.seeds[0], quarter(rounds))
    whole = score(rows, None, rounds)
    server = sorted({cell.server for cell in scores})

    def text(cell: Cell) -> str:
        mark = "\\*\\*" if cell == chosen else "\\*" if cell in whole else ""
        return f"{100 * scores[cell][0]:.1f}{mark}" if cell in scores else "-"

    local = sorted({cell.local for cell in scores if cell.local is not None})
    lines = [(f"{rate:g}", *(text(Cell(s, rate)) for s in server)) for rate in local]
    return tables.Table("", ("local rate", *(f"server {s:g}" for s in server)), lines)


def _beyond(rates: Sequence[float], chosen: float | None) -> Sequence[float]:
    """Return the rates and, if the chosen one is at an edge, the next of the same ratio."""
    ordered = sorted(rates)
    for end, inner in ((ordered[0], ordered[1:2]), (ordered[-1], ordered[-2:-1])):
        if chosen == end and inner:
            return [*rates, float(f"{end * end / inner[0]:.6g}")]
    return rates
