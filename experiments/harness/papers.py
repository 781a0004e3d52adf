"""Read the numbers that papers print, and set our accuracies beside them.

The folder paper_cells has a CSV file for each paper, a row for each number: the table, the data
set, settings `name=value` joined by semicolons, the algorithm, the metric, the value, what stands
behind its ±, and the unit. Values are as printed, digit for digit:

* fedfisher: Jhunjhunwala, Wang, Joshi, AISTATS 2024. Means and deviations of 5 seeds.
* fedlpa: Liu et al., the anonymous submission of their NeurIPS 2024 paper. Means of 3 seeds; the
  paper does not define its spreads.
* fedfish: Dhawan et al., "Leveraging Function Space Aggregation", TMLR 2024.
* weighted: Huang et al., "through Feature Learning Theory", ICLR 2024. Means of 5 trials.
"""

import csv
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.harness.tables import spread

_CELLS = Path(__file__).with_name("paper_cells")
NAMES = ("fedfisher", "fedlpa", "fedfish", "weighted")
"""The papers, by the names of their files."""


class Number(NamedTuple):
    """One number of a paper, as printed."""

    table: str
    dataset: str
    setting: Mapping[str, str]
    algorithm: str
    metric: str
    value: str
    spread: str  # empty if the paper gives none
    unit: str


class Published(NamedTuple):
    """A mean in percent as a paper reports it, and the number after its ±."""

    accuracy: float
    spread: float


def numbers(paper: str) -> list[Number]:
    """Read every number of a paper, in the order of its tables.

    Example:
        >>> first, *_ = numbers("fedfisher")
        >>> first.table, first.setting["epochs"], first.value, first.unit
        ('Table 1', '30', '14.5', 'seconds')
    """
    with open(_CELLS / f"{paper}.csv", newline="") as file:
        _, *lines = csv.reader(file)
    return [
        Number(table, dataset, dict(x.split("=") for x in setting.split(";") if x), *others)
        for table, dataset, setting, *others in lines
    ]


def published(
    paper: str, tables: Collection[str], key: Callable[[Number], Any]
) -> dict[Any, Published]:
    """Return the accuracies of some tables of a paper, by a function of their cells."""
    return {
        key(one): Published(float(one.value), float(one.spread))
        for one in numbers(paper)
        if one.table in tables
    }


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
