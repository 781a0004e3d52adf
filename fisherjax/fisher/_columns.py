"""Sum over the K columns of an output factor, [K, B, ..., C], a few columns at a time.

The columns of sequences come as `ByPosition`, each supported on one position, and are written out
only where they are used: 80 positions of 65 classes have 5,120 columns, which take 6.8 GB for a
minibatch of 64.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core.compiler import trace_once
from fisherjax.typing import Array, ByPosition

Columns = Array | ByPosition
"""The columns that a kind computes from the outputs of a minibatch."""


def sum_over_columns(function: Callable[[Array], Any], columns: Columns, at_once: int = 16) -> Any:
    """Sum a function of a few output cotangents, [few, B, ..., C], over all columns.

    Its results for `at_once` columns are in memory at the same time; for sequences, those for
    `at_once` positions, or for one column if there are more positions. The sum is a loop, not
    unrolled: on a CPU its working set then stays in the cache (LeNet was twice as fast), and
    compile time does not grow with the number of classes.
    """
    count, positions = len(values(columns)), math.prod(values(columns).shape[2:-1])
    count *= positions if isinstance(columns, ByPosition) else 1
    groups = -(-count // max(1, at_once // positions))
    # Groups have equal sizes: 17 columns make two groups of 9, of which one column is zero.
    few = -(-count // groups)
    is_stored = not isinstance(columns, ByPosition) and groups * few == count
    if is_stored and groups == 1:
        return function(values(columns))

    def of_group(group: Array) -> Any:
        return function(group if is_stored else select(columns, group))

    numbers = jnp.arange(groups * few).reshape(groups, few)
    # Columns that are stored are cut by the loop itself.
    stored = values(columns)
    each = stored.reshape(groups, few, *stored.shape[1:]) if is_stored else numbers
    traced, shapes = trace_once(of_group, each[0])
    zeros = jax.tree.map(jnp.zeros_like, shapes)
    return jax.lax.scan(
        lambda sums, group: (jax.tree.map(jnp.add, sums, traced(group)), None), zeros, each
    )[0]


def select(columns: Columns, numbers: Array) -> Array:
    """Return the columns with these numbers, [few, B, ..., C]; zeros for numbers after the last."""
    if not isinstance(columns, ByPosition):
        return jnp.take(columns, numbers, axis=0, mode="fill", fill_value=0)
    factors = columns.factors
    place, column = jnp.divmod(numbers, len(factors))
    # [L..., 1]; a number after the last column belongs to no position, so that it selects zeros.
    places = jnp.arange(math.prod(factors.shape[2:-1])).reshape(*factors.shape[2:-1], 1)
    here = places == place.reshape(-1, *(1,) * (1 + places.ndim))
    return jnp.where(here, factors[column], 0)


def weight(columns: Columns, w: Array) -> Columns:
    """Scale cotangents [K, B, ..., C] by sqrt(w_n), so that squares of gradients carry w_n."""

    def scaled(x: Array) -> Array:
        return x * jnp.sqrt(w).astype(x.dtype).reshape(1, -1, *(1,) * (x.ndim - 2))

    return jax.tree.map(scaled, columns)


def blocks(columns: Columns) -> Array:
    """Return the factor of each position, or of whole examples, [K, B, positions or 1, outputs]."""
    x = values(columns)
    outputs = x.shape[-1] if isinstance(columns, ByPosition) else math.prod(x.shape[2:])
    return x.reshape(*x.shape[:2], -1, outputs)


def values(columns: Columns) -> Array:
    """Return the array that the columns are stored in."""
    return columns.factors if isinstance(columns, ByPosition) else columns
