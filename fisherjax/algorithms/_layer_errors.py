"""Relative errors of merged layers at each client, in the metric of Kronecker factors."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.fisher.kfac_operator import diagonal_of
from fisherjax.fisher.operators import PRECISION
from fisherjax.solvers.base import ratio
from fisherjax.typing import Array

_SMALLEST = 0.1  # smallest e: otherwise iota would outweigh the factors


class Squares(NamedTuple):
    """Squared errors of a merged layer at each client, in the metric of its factor A.

    Attributes:
        error: tr (V - V_i)^T A (V - V_i), [M], in units of the scale of A.
        size: tr V_i^T A V_i, [M], in the same units.
        scale: Mean eigenvalue of A, [M].
    """

    error: Array
    size: Array
    scale: Array


def squared_errors(merged: Array, models: Array, factors: Array, multiply: Callable) -> Squares:
    """Compute how far each client's layer [M, a, o] is from the merged one, and its size."""

    def one(factor: Array, model: Array) -> Squares:
        # Only ratios matter, but squares must stay in range.
        mean = jnp.mean(diagonal_of(factor))
        factor = ratio(mean > 0, factor, mean)

        def square(x: Array) -> Array:
            diagonal = factor.ndim == 1
            product = factor[:, None] * x if diagonal else multiply(factor, x, precision=PRECISION)
            return jnp.vdot(x, product, precision=PRECISION)

        return Squares(square(merged - model), square(model), mean)

    return jax.vmap(one)(factors, models)


def relative_error(parts: list[Squares], shape: tuple[int, ...]) -> Array:
    """Compute the relative error [M] of several layers together, at most 1; zero for no layers."""
    if not parts:
        return jnp.zeros(shape)
    error, size, _ = parts[0]
    if len(parts) > 1:
        scales = jnp.stack([part.scale for part in parts])
        largest = scales.max(0)
        votes = jnp.where(largest > 0, ratio(largest > 0, scales, largest), 1)
        error, size = (
            jnp.sum(votes * jnp.stack([getattr(part, name) for part in parts]), 0)
            for name in ("error", "size")
        )
    # If the layers of a client are zero, any error counts as 1.
    return jnp.clip(jnp.where(size > 0, ratio(size > 0, error, size), error > 0), 0, 1)


def agreement(models: Array, factors: Array, weights: Array) -> Array:
    """Compute max(0, 1 / e - 2), with e the relative error of the mean of models [M, a, o]."""
    found = squared_errors(tree.weighted_sum(models, weights), models, factors, jnp.matmul)
    wrong = jnp.dot(weights, jnp.where(weights > 0, relative_error([found], weights.shape), 0))
    return jnp.maximum(1 / jnp.maximum(wrong, _SMALLEST) - 2, 0)
