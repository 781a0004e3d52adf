"""Make noisy curvature positive semi-definite on the server; post-processing costs no privacy."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import quadratic
from fisherjax._core import linalg
from fisherjax.algorithms.base import WeightedSum
from fisherjax.algorithms.exchanges._head_sums import HeadSums
from fisherjax.fisher import Dense
from fisherjax.typing import Array


def repaired(sums: Any, deviations: Any, damping: float) -> Any:
    """Return sums whose noisy curvature is positive semi-definite and damped by its noise.

    Args:
        sums: The noisy sums over clients.
        deviations: Standard deviation of the noise on each leaf of `sums`.
        damping: In units of the spectral norm of the noise.
    """
    if isinstance(sums, quadratic.Sums):
        is_matrix = isinstance(sums.fisher, Dense)
        leaves, structure = jax.tree.flatten(sums.fisher)
        levels = jax.tree.leaves(deviations.fisher)
        # The largest of as many normal numbers as a diagonal has; `_definite` computes a matrix's.
        largest = damping * math.sqrt(2 * math.log(max(sum(x.size for x in leaves), 2)))
        strength = damping if is_matrix else largest
        found = [_definite(*x, strength, is_matrix) for x in zip(leaves, levels, strict=True)]
        # Damp towards the clients' mean: each vector of `product` and of `mean` belongs to one
        # leaf of the Fisher.
        centre = WeightedSum(jax.tree.leaves(sums.mean), sums.weight).mean()
        products, blocks = jax.tree.flatten(sums.product)
        pulled = [p + s * c for p, (_, s), c in zip(products, found, centre, strict=True)]
        fisher = jax.tree.unflatten(structure, [matrix for matrix, _ in found])
        return sums._replace(fisher=fisher, product=jax.tree.unflatten(blocks, pulled))
    if isinstance(sums, WeightedSum) and isinstance(sums.total, HeadSums):
        total, levels = sums.total, deviations.total
        inputs, _ = _definite(total.inputs, levels.inputs, damping, True)
        # Counts and sums of squares are never negative, but noisy ones may be.
        sizes = {n: jnp.maximum(getattr(total, n), 0) for n in ("squares", "negative", "count")}
        return sums._replace(total=dataclasses.replace(total, inputs=inputs, **sizes))
    return sums


def _definite(
    noisy: Array, deviation: float, damping: float, is_matrix: bool
) -> tuple[Array, float]:
    """Return the nearest positive semi-definite matrix (or entries) plus a strength, and that."""
    if deviation == 0:
        return noisy, 0.0
    if not is_matrix:
        strength = damping * deviation
        return jnp.maximum(noisy, 0) + strength, strength
    # The spectral norm of the symmetric part of a square matrix of noise.
    strength = damping * deviation * math.sqrt(2 * len(noisy))
    values, vectors = linalg.eigh((noisy + noisy.T) / 2)
    values = jnp.maximum(values, 0) + strength
    return jnp.matmul(vectors * values, vectors.T, precision="highest"), strength
