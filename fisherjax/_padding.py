"""Mask positions of sequences, so that padding does not influence losses, metrics and Fishers.

`Model.positions` maps inputs to a mask m [B, T]. If outputs are sequences [B, T, ..., C], the
log-likelihood of an example is the sum over the positions with m = 1. The random draws at a
position depend on its number, but not on the length of the sequence. A position whose class label
is -100 has no loss either, but its inputs count: Fishers that read no targets include it. Examples
of which no position counts have weight zero.

Models without `positions` are not changed. K-FAC's inputs and output gradients are masked in
`_layers.locations`, which `fisher._factors` calls.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import batches, output_checks
from fisherjax.typing import AnyArray, Array, Examples, Inputs, Key, Likelihood, Model, Positions

_AT_ONCE = 256  # examples whose positions are evaluated in one batch


def counted_positions(model: Model, inputs: Inputs) -> Array | None:
    """Return which positions count, booleans [B, T], or None if the model has no `positions`.

    Raises:
        ValueError: If `positions` returns another shape, or numbers that are not 0 or 1.
        TypeError: If it returns neither numbers nor booleans.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: w * x, fj.likelihoods.gaussian, positions=lambda x: x > 0)
        >>> print(counted_positions(model, jnp.array([[3, 1, 0], [2, 0, 0]])))
        [[ True  True False]
         [ True False False]]
    """
    return None if model.positions is None else _evaluate(model.positions, inputs)


def _evaluate(positions: Positions, inputs: Inputs) -> Array:
    output_checks.positions(positions, inputs)
    return jnp.asarray(positions(inputs)) != 0


def drop_uncounted(model: Model, examples: Examples) -> Examples:
    """Return examples with weight zero for those of which no position counts.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: w * x, fj.likelihoods.gaussian, positions=lambda x: x > 0)
        >>> print(drop_uncounted(model, Examples(jnp.array([[3, 1, 0], [0, 0, 0]]))).weights)
        [1. 0.]
    """
    positions = model.positions
    if positions is None:
        return examples
    inputs, _, indices, weights = examples

    rows = jnp.arange(batches.num_rows(inputs)) if indices is None else indices
    inputs = jax.tree.map(jnp.asarray, inputs)

    def counts(row: Array) -> Array:
        return _evaluate(positions, batches.take(inputs, row[None])).any()

    # Rows are mapped in batches: the inputs of a client are never copied as a whole.
    is_counted = jax.lax.map(counts, rows, batch_size=_AT_ONCE)
    weights = jnp.ones(is_counted.shape) if weights is None else weights
    return examples._replace(weights=jnp.where(is_counted, weights, 0))


def counted_targets(
    model: Model, inputs: Inputs, shape: tuple[int, ...], targets: AnyArray
) -> Array | None:
    """Return which output vectors of shape [B, T, ..., C] have a target, or None if all have."""
    if model.positions is None or not output_checks.are_positions(model, inputs, shape):
        return None
    return _with_label(shape, targets, _mask(_evaluate(model.positions, inputs), shape))


def likelihood(model: Model, inputs: Inputs, shape: tuple[int, ...]) -> Likelihood:
    """Return a likelihood of outputs of this shape that masks positions that do not count."""
    if model.positions is None or not output_checks.are_positions(model, inputs, shape):
        return model.likelihood
    unmasked, mask = model.likelihood, _evaluate(model.positions, inputs)

    def selected(z: Array) -> Array:
        # Outputs are masked first: masking a result that is not finite has a NaN gradient.
        return jnp.where(_mask(mask, z.shape)[..., None], z, 0)

    def loss(z: Array, y: Array) -> Array:
        has_target = _with_label(z.shape, y, _mask(mask, z.shape))
        # Positions are treated as examples, because their log-likelihoods add up.
        flat = selected(z).reshape(-1, z.shape[-1])
        known = jnp.asarray(output_checks.replace_ignored(model, z.shape, y))
        known = known.reshape(-1, *y.shape[z.ndim - 1 :])
        each = unmasked.negative_log_likelihood(flat, known).reshape(has_target.shape)
        return jnp.where(has_target, each, 0).sum(tuple(range(1, each.ndim)))

    def only(columns: Array) -> Array:
        return jnp.where(_mask(mask, columns.shape[1:])[..., None], columns, 0)

    def combined(combine: Callable[[Array, Array], Array], z: Array, r: Array) -> Array:
        return only(combine(selected(z), r)[None])[0]

    return unmasked._replace(
        negative_log_likelihood=loss,
        sample=lambda key, z: _by_position(unmasked.sample, key, z, 1),
        factor=lambda z: jax.tree.map(only, unmasked.factor(selected(z))),
        combine=None if unmasked.combine is None else functools.partial(combined, unmasked.combine),
        signs=_signs,
    )


def _mask(mask: Array, shape: tuple[int, ...]) -> Array:
    """Repeat a mask [B, T] for outputs of shape [B, T, ..., C]; return it as [B, T, ...]."""
    return jnp.broadcast_to(mask.reshape(*mask.shape, *(1,) * (len(shape) - 3)), shape[:-1])


def _with_label(shape: tuple[int, ...], targets: AnyArray, mask: Array) -> Array:
    is_label = output_checks.are_labels(shape, targets)
    return mask & (targets != output_checks.IGNORED) if is_label else mask


def _by_position(draw: Any, key: Key, z: Array, axis: int) -> Array:
    """Draw at each position with its own key, so that padding does not change other draws."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(z.shape[axis]))
    return jax.vmap(draw, (0, axis), axis)(keys, z)


def _signs(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw signs [draws, K, B, T, ...]."""

    def draw(key: Key, like: Array) -> Array:
        return jax.random.rademacher(key, like.shape, dtype)

    return _by_position(draw, key, jnp.zeros(shape, dtype), 3)
