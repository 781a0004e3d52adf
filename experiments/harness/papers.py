"""Set our accuracies beside those of a paper, which stand in a CSV file of its study."""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.tables import spread


class Published(NamedTuple):
    """A mean in percent as a paper reports it, and the number after its ±."""

    accuracy: float
    spread: float


def published(path: Path, key: Callable[..., Any]) -> dict[Any, Published]:
    """Read a paper's numbers, the last two columns, by a function of the other columns."""
    with open(path, newline="") as file:
        _, *lines = csv.reader(file)
    return {key(*cells): Published(float(mean), float(std)) for *cells, mean, std in lines}


def in_order(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Return names in a paper's order; names that the paper does not have come after them.

    Example:
        >>> in_order(["ours", "fedavg", "fedlpa"], order=["fedlpa", "fedavg", "dense"])
        ['fedlpa', 'fedavg', 'ours']
    """
    given = list(names)
    return [x for x in order if x in given] + [x for x in given if x not in order]


def beside(values: Sequence[float], theirs: Published | None) -> str:
    """Return "ours ± deviation (theirs)", without brackets if the paper has no number.

    Example:
        >>> beside([70.0, 72.0], Published(68.4, 0.5)), beside([], None)
        ('71.0 ± 1.4 (68.4)', '-')
    """
    return spread(values) + (f" ({theirs.accuracy:.1f})" if theirs else "")
