"""Which positions of sequences count: padding leaves no trace in losses, metrics and Fishers.

`Model.positions` turns inputs into a mask m [B, T]. Where outputs are sequences [B, T, ..., C] the
log-likelihood of an example is the sum over the positions with m = 1, and what is drawn at a
position depends on its number, not on how many there are. A position whose class label is -100 has
no loss either, but its inputs stay: Fishers that read no targets do not see such labels. Examples
of which no position counts have weight zero.

Nothing here changes a model without `positions`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax.typing import AnyArray, Array, Examples, Key, Likelihood, Model, Positions

_AT_ONCE = 256  # examples whose positions are looked at together


def counted(model: Model, inputs: AnyArray) -> Array | None:
    """Evaluate which positions count, booleans [B, T]; None where all do.

    Raises:
        ValueError: If `positions` returns another shape, or numbers that are not 0 or 1.
        TypeError: If it returns what are no numbers.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: w * x, fj.likelihoods.gaussian, positions=lambda x: x > 0)
        >>> print(counted(model, jnp.array([[3, 1, 0], [2, 0, 0]])))
        [[ True  True False]
         [ True False False]]
    """
    return None if model.positions is None else _counted(model.positions, inputs)


def _counted(positions: Positions, inputs: AnyArray) -> Array:
    checks.positions(positions, inputs)
    return jnp.asarray(positions(inputs)) != 0


def weighed(model: Model, examples: Examples) -> Examples:
    """Set the weight of examples of which no position counts to zero.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: w * x, fj.likelihoods.gaussian, positions=lambda x: x > 0)
        >>> print(weighed(model, Examples(jnp.array([[3, 1, 0], [0, 0, 0]]))).weights)
        [1. 0.]
    """
    positions = model.positions
    if positions is None:
        return examples
    inputs, _, indices, weights = examples

    def counts(one: AnyArray) -> Array:
        return _counted(positions, one[None]).any()

    # Some at a time: the inputs of a client are not copied.
    if indices is None:
        found = jax.lax.map(counts, jnp.asarray(inputs), batch_size=_AT_ONCE)
    else:
        found = jax.lax.map(lambda row: counts(inputs[row]), indices, batch_size=_AT_ONCE)
    weights = jnp.ones(found.shape) if weights is None else weights
    return examples._replace(weights=jnp.where(found, weights, 0))


def targets_counted(
    model: Model, inputs: AnyArray, shape: tuple[int, ...], targets: AnyArray
) -> Array | None:
    """Evaluate which output vectors of shape [B, T, ..., C] have a target; None if all do."""
    if model.positions is None or not checks.are_positions(model, inputs, shape):
        return None
    return _with_label(shape, targets, _mask(_counted(model.positions, inputs), shape))


def likelihood(model: Model, inputs: AnyArray, shape: tuple[int, ...]) -> Likelihood:
    """Make the likelihood of the positions of a minibatch that count, of outputs of this shape."""
    if model.positions is None or not checks.are_positions(model, inputs, shape):
        return model.likelihood
    own, mask = model.likelihood, _counted(model.positions, inputs)

    def selected(z: Array) -> Array:
        # Before anything is computed of it: what is selected later may have no gradient.
        return jnp.where(_mask(mask, z.shape)[..., None], z, 0)

    def loss(z: Array, y: Array) -> Array:
        has_target = _with_label(z.shape, y, _mask(mask, z.shape))
        # Positions like examples: their log-likelihoods add up.
        flat = selected(z).reshape(-1, z.shape[-1])
        known = jnp.asarray(checks.labels(model, z.shape, y))
        known = known.reshape(-1, *y.shape[z.ndim - 1 :])
        each = own.negative_log_likelihood(flat, known).reshape(has_target.shape)
        return jnp.where(has_target, each, 0).sum(tuple(range(1, each.ndim)))

    def only(columns: Array) -> Array:
        return jnp.where(_mask(mask, columns.shape[1:])[..., None], columns, 0)

    def combined(combine: Callable[[Array, Array], Array], z: Array, r: Array) -> Array:
        return only(combine(selected(z), r)[None])[0]

    return own._replace(
        negative_log_likelihood=loss,
        sample=lambda key, z: _by_position(own.sample, key, z, 1),
        factor=lambda z: jax.tree.map(only, own.factor(selected(z))),
        combine=None if own.combine is None else functools.partial(combined, own.combine),
        signs=_signs,
    )


def _mask(mask: Array, shape: tuple[int, ...]) -> Array:
    """Repeat [B, T] for output vectors of shape [B, T, ..., C]: [B, T, ...]."""
    return jnp.broadcast_to(mask.reshape(*mask.shape, *(1,) * (len(shape) - 3)), shape[:-1])


def _with_label(shape: tuple[int, ...], targets: AnyArray, mask: Array) -> Array:
    return mask & (targets != checks.IGNORED) if checks.are_labels(shape, targets) else mask


def _by_position(draw: Any, key: Key, z: Array, axis: int) -> Array:
    """Draw at each position by a key of its own: padding does not change what others draw."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(z.shape[axis]))
    return jax.vmap(draw, (0, axis), axis)(keys, z)


def _signs(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw signs [draws, K, B, T, ...]."""

    def draw(key: Key, like: Array) -> Array:
        return jax.random.rademacher(key, like.shape, dtype)

    return _by_position(draw, key, jnp.zeros(shape, dtype), 3)
