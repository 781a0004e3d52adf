"""Cut a client's examples into minibatches, shuffle them, and draw or hold out some of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core import batches, checks
from fisherjax.typing import AnyArray, Array, Examples, Inputs, Key

Minibatch = tuple[Any, Any, Array]  # inputs [B, ...], targets or None, weights [B]


def minibatches(
    examples: Examples, batch_size: int
) -> tuple[Array, Callable[[Array | int], Minibatch]]:
    """Cut examples, in their order, into minibatches of B, or of all rows if there are fewer.

    Returns:
        The number of minibatches up to the last row with a weight, and `batch(number) ->
        (inputs [B, ...], targets, weights [B])`. Rows of weight zero are never read: their places,
        and those left over in the last minibatch, hold other examples with weight zero.

    Example:
        >>> number, batch = minibatches(Examples(jnp.arange(5.0)), batch_size=3)
        >>> print(number, *batch(1)[::2])
        2 [3. 4. 3.] [1. 1. 0.]
    """
    rows, weights = rows_of(examples)
    length = min(checks.count("batch_size", batch_size), rows.shape[0])
    # Minibatches after the last example with a weight are not run.
    used = jnp.asarray(rows.shape[0], jnp.int32)
    if examples.weights is not None:
        used = jnp.where(weights != 0, jnp.arange(1, rows.shape[0] + 1, dtype=jnp.int32), 0).max()

    def batch(number: Array | int) -> Minibatch:
        place = jnp.arange(length, dtype=jnp.int32)
        # At least 1, as a remainder by 0 is undefined: under vmap an empty client also runs the
        # minibatches of the largest client of its chunk.
        start = jnp.asarray(number, jnp.int32) * length
        full = jax.lax.clamp(np.int32(1), used - start, np.int32(length))
        # The minibatch's own rows, from its first on, fill the places that are left over.
        chosen = start + jax.lax.rem(place, full)
        w = (place < full).astype(weights.dtype)
        if examples.weights is not None:
            given = _select(weights, chosen)
            # The last row with a weight replaces those without: NaN times weight zero is NaN.
            chosen, w = jnp.where(given != 0, chosen, jnp.maximum(used - 1, 0)), given * w
        row = chosen if examples.indices is None else _select(rows, chosen)
        targets = None if examples.targets is None else _select(examples.targets, row)
        return _select(examples.inputs, row), targets, w

    return jax.lax.div(used + length - 1, np.int32(length)), batch


def _select(values: Inputs, rows: Array) -> Any:
    """Select rows by numbers that are in bounds, and so need no checks in the program."""
    how = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
    return jax.tree.map(lambda x: jnp.asarray(x).at[rows].get(**how), values)


def shuffled(key: Key, examples: Examples) -> Examples:
    """Permute a client's examples at random; the padding stays behind them.

    The permutation depends on the key, but not on the amount of padding.
    """
    rows, weights = rows_of(examples)
    # Draws have 32 bits, so that the order is the same with and without float64.
    draws = jax.random.bits(key, rows.shape, jnp.uint32)
    # Padding gets the largest number. The sort is stable: an example that draws it stays before.
    order = jnp.argsort(jnp.where(weights == 0, ~jnp.uint32(0), draws), stable=True)
    return examples._replace(indices=_select(rows, order), weights=_select(weights, order))


def draw(key: Key, examples: Examples, most: int | None) -> Examples:
    """Draw at most so many of a client's examples without replacement; None draws all.

    Example:
        >>> drawn = draw(jax.random.key(0), Examples(jnp.arange(9.0)), most=4)
        >>> len(set(drawn.indices.tolist()))
        4
    """
    if most is None or rows_of(examples)[0].shape[0] <= most:
        return examples
    # Examples come before padding.
    rows, weights = rows_of(shuffled(key, examples))
    return examples._replace(indices=rows[:most], weights=weights[:most])


def hold_out(examples: Examples, every: int) -> tuple[Examples, Examples]:
    """Split off every `every`-th example; return the others and those that are held out.

    Example:
        >>> others, held = hold_out(Examples(jnp.arange(5.0)), every=2)
        >>> print(others.indices, held.indices)
        [0 2 4] [1 3]
    """
    rows, weights = rows_of(examples)
    is_held = np.arange(rows.shape[0]) % checks.count("every", every) == every - 1

    def chosen(which: np.ndarray) -> Examples:
        if not which.any():  # an empty set is one row of weight zero
            return examples._replace(indices=rows[:1], weights=0 * weights[:1])
        return examples._replace(indices=rows[which], weights=weights[which])

    return chosen(~is_held), chosen(is_held)


def num_batches(sizes: Array, batch_size: int) -> Array:
    """Return the number of minibatches of an epoch, ceil(n_i / B)."""
    return -(-sizes // batch_size)


def num_rows(examples: Examples) -> int:
    """Return the number of rows in use, padding included."""
    return batches.num_rows(examples.inputs if examples.indices is None else examples.indices)


def rows_of(examples: Examples) -> tuple[AnyArray, Array]:
    """Return the rows in use and their weights, by default all rows and weights of one."""
    rows = examples.indices
    rows = jnp.arange(num_rows(examples), dtype=jnp.int32) if rows is None else rows
    return rows, jnp.asarray(weights_of(examples), float)


def weights_of(examples: Examples) -> AnyArray:
    """Return the weights of the rows in use, by default ones."""
    if examples.weights is not None:
        return examples.weights
    return jnp.ones(num_rows(examples))
