"""Average running statistics, such as those of BatchNorm, over clients.

Statistics are the untrained leaves that `Model.apply_train` changes. Whatever the method is, the
server replaces them by their weighted mean over clients. They are moments, E[x] and E[x^2]
(`networks.statistics` explains why), so that this mean is that of the clients' mixture.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax._core.compiler import jit
from fisherjax.algorithms.base import WeightedSum, weighted_sum
from fisherjax.typing import Array


class SumsAndStatistics(NamedTuple):
    """Sums over clients for a network with running statistics.

    Attributes:
        sums: Result of the algorithm's `reduce`.
        statistics: Weighted sum of the running statistics, by name.
    """

    sums: Any
    statistics: WeightedSum


def average_statistics(statistics: dict[str, Array], weights: Array) -> dict[str, Array]:
    """Return the weighted mean over clients of stacked statistics [K, ...], by name."""
    return _sum_statistics(statistics, weights).mean() if statistics else {}


def add_up(
    reduce: Callable[[Any, Array], Any], values: Any, statistics: dict, weights: Array
) -> Any:
    """Sum stacked updates by `reduce`; return `SumsAndStatistics` if there are statistics."""
    sums = compiled(reduce, values, weights)
    return SumsAndStatistics(sums, _sum_statistics(statistics, weights)) if statistics else sums


# The old totals are donated, so that memory holds the sums once.
@partial(jit, donate_argnums=0)
def add_to(totals: Any, sums: Any) -> Any:
    """Return totals with further results of `add_up`; the old totals cannot be used any more."""
    return jax.tree.map(jnp.add, totals, sums)


def _sum_statistics(statistics: dict[str, Array], weights: Array) -> WeightedSum:
    return compiled(weighted_sum, statistics, weights)


# Compiled once for a function; factories return the same one for equal arguments.
@partial(jit, static_argnums=0)
def compiled(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)
