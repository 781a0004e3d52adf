"""Rough inverses of the server's damped systems, for conjugate gradients.

Of clients whose Kronecker factors do not add up it is the damped inverse of (sum_i v_i A_i) (x)
(sum_i v_i G_i), of wide layers a solve in few directions (`_wide_layers`), of a sum of Kronecker
products that of its first term, of a diagonal its inverse. Where a block is not damped, or nobody
has curvature, the identity stands in: in a singular system anything else would move what has none.
How fast the server solves has no derivative.
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


def of_clients(fishers: Blockwise, votes: Any, strengths: Any) -> tuple[Partial | None, Any]:
    """Precondition sum_i v_i F_i + lambda of stacked clients, leaves [M, ...].

    Args:
        fishers: F_i, at scale one.
        votes: v_i of each block [M].
        strengths: lambda of each block.

    Returns:
        Blocks -> blocks, or None where there is none, and the `slack` of `quadratic.Quadratic`.
    """
    if isinstance(fishers, Diagonal):
        return of_sums(_summed(fishers, votes), strengths), None
    if not isinstance(fishers, Kronecker):
        return None, None
    inverse, wide = _approximate_inverse(fishers, votes, strengths)
    if not wide:
        return Partial(Kronecker.block_mv, inverse), None
    return Partial(_turned, inverse, wide), jnp.asarray(_wide_layers.SLACK)


def of_sums(fisher: Blockwise, strengths: Any) -> Partial | None:
    """Precondition F + lambda of an operator that holds all clients; None where there is none."""
    if isinstance(fisher, Diagonal):
        return Partial(_divided, *jax.lax.stop_gradient((fisher.entries, strengths)))
    if isinstance(fisher, KroneckerSum):
        return Partial(Kronecker.block_mv, _leading_inverse(fisher, strengths))
    return None


@jit
def _summed(fishers: Diagonal, votes: Any) -> Diagonal:
    return Diagonal(jax.tree.map(tree.weighted_sum, fishers.entries, votes))


@jit
def _approximate_inverse(
    fishers: Kronecker, votes: Any, strengths: Any
) -> tuple[Kronecker, dict[str, _wide_layers.WideLayer]]:
    """Invert the mean of the clients, but for wide layers, which are answered otherwise."""

    def average(factor: dict[str, Array], vote: Array) -> dict[str, Array]:
        # The votes' sum goes to one side: the product has the scale of the clients' products.
        return tree.weighted_sum(factor, vote / jnp.sqrt(jnp.where(vote.any(), vote.sum(), 1)))

    fishers, factors = _wide_layers.apart(fishers)
    wide = {n: _wide_layers.preconditioner(f, votes[n], strengths[n]) for n, f in factors.items()}
    factors = {name: average(factor, votes[name]) for name, factor in fishers.factors.items()}
    entries = {name: tree.weighted_sum(f, votes[name]) for name, f in fishers.entries.items()}
    mean = dataclasses.replace(fishers, factors=factors, entries=entries)
    mean, strengths = jax.lax.stop_gradient((mean, strengths))
    return mean.inverse(strengths), wide


@jit
def _leading_inverse(fisher: KroneckerSum, strengths: Any) -> Kronecker:
    first, strengths = jax.lax.stop_gradient((fisher.leading(), strengths))
    return first.inverse(strengths)


# Functions of a module, so that `Partial`s of them compare equal, and `jit` reuses its program.
def _turned(inverse: Kronecker, wide: dict[str, _wide_layers.WideLayer], blocks: Any) -> Any:
    answers = {name: _wide_layers.precondition(own, blocks[name]) for name, own in wide.items()}
    return inverse.block_mv(blocks) | answers


def _divided(entries: Any, strengths: Any, blocks: Any) -> Any:
    def leaf(entries: Array, strength: Array, x: Array) -> Array:
        return x / jnp.where(strength > 0, entries + strength.astype(entries.dtype), 1)

    return jax.tree.map(leaf, entries, strengths, blocks)
