"""Compare merged models with the best one of other papers, by differences within cells of a table.

A cell is what all rows share, such as a seed and a domain. Accuracies of a cell rise and fall
together, so that differences within cells are far more precise than means of rows.
"""

import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from experiments.harness import tables

Row = TypeVar("Row", bound=Hashable)
HEADING = "− best of others"
_BY_KFAC = ("fedfisher_kfac", "fedfisher_sequential", "fedfisher_sketched")


def words(cells: str) -> str:
    """Return what the column shows; `cells` says what differences are paired over."""
    return (
        f"The column “{HEADING}” has the mean difference to the reference in points, with its 95 % "
        f"t interval over {cells}. The reference is the best row without training of other papers, "
        "at any scale; rows by K-FAC, with another centre or with exchanges are not among them. A "
        "row is highest if the interval lies above zero, below if it lies under zero, else tied."
    )


def is_of_others(name: str) -> bool:
    """Return whether a row is a method as other papers have it.

    Example:
        >>> [
        ...     is_of_others(x)
        ...     for x in ("ties@density=0.1", "regmean@centre='prior_once'", "ties+ccvr")
        ... ]
        [True, False, False]
    """
    return name.partition("@")[0] not in _BY_KFAC and "centre=" not in name and "+" not in name


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a mean by Student's t; all numbers if there is one difference.

    Example:
        >>> [round(x, 2) for x in interval([1.0, 2.0, 3.0])]
        [-0.48, 4.48]
    """
    from scipy.stats import t

    number, mean = len(differences), statistics.fmean(differences)
    if number < 2:
        return -math.inf, math.inf
    half = float(t.ppf(0.975, number - 1)) * tables.deviation(differences) / math.sqrt(number)
    return mean - half, mean + half


def compared(
    found: Iterable[Any], row: Callable[[Any], Row], cell: Callable[[Any], Hashable]
) -> dict[Row, str]:
    """Return what the column has for each row of measurements.

    Args:
        found: Measurements with an `algorithm` and an `accuracy`, of merged models only.
        row: Function from a measurement to its row.
        cell: Function from a measurement to its cell.

    Example:
        >>> from collections import namedtuple
        >>> One = namedtuple("One", "algorithm, seed, accuracy")
        >>> found = [One("ties", 0, 0.6), One("ties", 1, 0.8)]
        >>> found += [One("fedfisher_kfac", 0, 0.61), One("fedfisher_kfac", 1, 0.812)]
        >>> compared(found, lambda one: one.algorithm, lambda one: one.seed)
        {'ties': 'reference', 'fedfisher_kfac': '+1.1 [-0.2, +2.4] tied'}
    """
    ones = tables.gathered((row(one), one) for one in found)
    cells = {row: {cell(one): 100 * one.accuracy for one in own} for row, own in ones.items()}
    others = [row for row, own in ones.items() if is_of_others(own[0].algorithm)]
    if not others:
        return dict.fromkeys(ones, "-")
    best = max(others, key=lambda row: tables.rank(statistics.fmean(cells[row].values())))
    differences = {row: _difference(own, cells[best]) for row, own in cells.items()}
    return differences | {best: "reference"}


def _difference(own: Mapping[Hashable, float], best: Mapping[Hashable, float]) -> str:
    differences = [own[cell] - best[cell] for cell in own if cell in best]
    if not differences:
        return "-"
    mean, (low, high) = statistics.fmean(differences), interval(differences)
    word = "highest" if low > 0 else "below" if high < 0 else "tied"
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}] {word}" if low > -math.inf else f"{mean:+.1f}"
