"""Relative errors of merged layers at each client, in the metric of Kronecker factors."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.fisher.kronecker import diagonal_of
from fisherjax.fisher.operators import PRECISION
from fisherjax.solvers.base import ratio
from fisherjax.typing import Array

_LEAST = 0.1  # what is wrong with the mean of clients that agree: factors still count more


class Squares(NamedTuple):
    """tr (V - V_i)^T A (V - V_i) and tr V_i^T A V_i of each client, in units of A's scale."""

    error: Array
    size: Array
    scale: Array


def squares(merged: Array, models: Array, factors: Array, multiply: Callable) -> Squares:
    """Say how far each client's layer [M, a, o] is from the merged one, and how large it is."""

    def one(factor: Array, model: Array) -> Squares:
        # Neither its scale nor the layer's matters, but squares must stay in range.
        mean = jnp.mean(diagonal_of(factor))
        factor = ratio(mean > 0, factor, mean)

        def square(x: Array) -> Array:
            diagonal = factor.ndim == 1
            product = factor[:, None] * x if diagonal else multiply(factor, x, precision=PRECISION)
            return jnp.vdot(x, product, precision=PRECISION)

        return Squares(square(merged - model), square(model), mean)

    return jax.vmap(one)(factors, models)


def share(parts: list[Squares], shape: tuple[int, ...]) -> Array:
    """Say which share of what several layers give together is wrong, at most 1; zero of none."""
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
    # Whatever is wrong with layers of zeros is all of it.
    share = jnp.where(size > 0, ratio(size > 0, error, size), error > 0)
    return jnp.clip(share, 0, 1)


def agreement(models: Array, factors: Array, weights: Array) -> Array:
    """Say by how much what is right in the clients' mean [a, o] outweighs what is wrong."""
    found = squares(tree.weighted_sum(models, weights), models, factors, jnp.matmul)
    wrong = jnp.dot(weights, jnp.where(weights > 0, share([found], weights.shape), 0))
    return jnp.maximum(1 / jnp.maximum(wrong, _LEAST) - 2, 0)
