"""Compute preconditioners of the server's damped systems, for conjugate gradients.

The preconditioner depends on the operators:

* for clients with Kronecker factors, the damped inverse of (sum_i v_i A_i) (x) (sum_i v_i G_i);
* for their wide layers, a solve in few directions (`_wide_layers`);
* for a sum of Kronecker products, the damped inverse of its first term;
* for a diagonal, its inverse, and zero for entries that are zero.

For any other block that is not damped, or in which no client has curvature, it is the identity: in
a singular system any other one would change coordinates that have no curvature. A preconditioner
has no derivative, because it changes only how fast the system is solved.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax import _wide_layers, tree
from fisherjax._core.compiler import jit
from fisherjax.fisher import Diagonal, Kronecker, KroneckerSum
from fisherjax.fisher.operators import Blockwise
from fisherjax.typing import Array


def of_clients(fishers: Blockwise, votes: Any, lambdas: Any) -> tuple[Partial | None, Any]:
    """Return the preconditioner of sum_i v_i F_i + lambda for stacked clients, leaves [M, ...].

    Args:
        fishers: F_i, at scale one.
        votes: v_i [M] for each block.
        lambdas: lambda for each block.

    Returns:
        A function from blocks to blocks, or None, and the `slack` of `quadratic.Quadratic`.
    """
    if isinstance(fishers, Diagonal):
        return of_sums(_sum(fishers, votes), lambdas), None
    if not isinstance(fishers, Kronecker):
        return None, None
    inverse, wide = _approximate_inverse(fishers, votes, lambdas)
    if not wide:
        return Partial(Kronecker.block_mv, inverse), None
    return Partial(_apply, inverse, wide), jnp.asarray(_wide_layers.SLACK)


def of_sums(fisher: Blockwise, lambdas: Any) -> Partial | None:
    """Return the preconditioner of F + lambda for the operator of all clients, or None."""
    if isinstance(fisher, Diagonal):
        return Partial(_divide, *jax.lax.stop_gradient((fisher.entries, lambdas)))
    if isinstance(fisher, KroneckerSum):
        return Partial(Kronecker.block_mv, _leading_inverse(fisher, lambdas))
    return None


@jit
def _sum(fishers: Diagonal, votes: Any) -> Diagonal:
    return Diagonal(jax.tree.map(tree.weighted_sum, fishers.entries, votes))


@jit
def _approximate_inverse(
    fishers: Kronecker, votes: Any, lambdas: Any
) -> tuple[Kronecker, dict[str, _wide_layers.WideLayer]]:
    """Return the inverse of the clients' mean factors, and the preconditioners of wide layers."""

    def average(factor: dict[str, Array], vote: Array) -> dict[str, Array]:
        # Each side is divided by the root of the sum of votes, so that the product of the means has
        # the scale of the clients' products.
        return tree.weighted_sum(factor, vote / jnp.sqrt(jnp.where(vote.any(), vote.sum(), 1)))

    fishers, factors = _wide_layers.split_wide(fishers)
    wide = {n: _wide_layers.preconditioner(f, votes[n], lambdas[n]) for n, f in factors.items()}
    factors = {name: average(factor, votes[name]) for name, factor in fishers.factors.items()}
    entries = {name: tree.weighted_sum(f, votes[name]) for name, f in fishers.entries.items()}
    mean = dataclasses.replace(fishers, factors=factors, entries=entries)
    mean, lambdas = jax.lax.stop_gradient((mean, lambdas))
    return mean.inverse(lambdas), wide


@jit
def _leading_inverse(fisher: KroneckerSum, lambdas: Any) -> Kronecker:
    first, lambdas = jax.lax.stop_gradient((fisher.leading(), lambdas))
    return first.inverse(lambdas)


# `Partial`s of module functions compare equal, so that `jit` reuses a program.
def _apply(inverse: Kronecker, wide: dict[str, _wide_layers.WideLayer], blocks: Any) -> Any:
    found = {name: _wide_layers.precondition(layer, blocks[name]) for name, layer in wide.items()}
    return inverse.block_mv(blocks) | found


def _divide(entries: Any, lambdas: Any, blocks: Any) -> Any:
    def leaf(entries: Array, damping: Array, x: Array) -> Array:
        entries = entries + damping.astype(entries.dtype)
        # A subnormal number may be zero to a division, and above zero to a comparison.
        has_curvature = entries >= jnp.finfo(entries.dtype).tiny
        return jnp.where(has_curvature, x / jnp.where(has_curvature, entries, 1), 0)

    return jax.tree.map(leaf, entries, lambdas, blocks)
