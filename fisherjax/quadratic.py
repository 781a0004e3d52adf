"""The server's problem: one quadratic that is small where every client's model is good.

    L(W) = sum_i p_i 1/2 (W - W_i)^T F_i (W - W_i) + sum_l lambda_l / 2 ||W_l - Wbar_l||^2,

with Wbar = sum_i p_i W_i. Damping is relative to each block's own scale (a layer, a leaf, or the
whole vector, as the operator splits params),

    lambda_l = damping * sum_i p_i tr(F_il) / (size of the block),

so that one number serves every layer, network and data set.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax import checks, tree
from fisherjax.fisher import Diagonal, Kronecker, Operator
from fisherjax.typing import Array, Params


class Quadratic(NamedTuple):
    """A symmetric positive semi-definite system matvec(x) = rhs over blocks.

    Every leaf of a block pytree is a system of its own: `matvec` does not couple leaves. Blocks
    have the dtype of the operators, at least float32, and `restore` keeps that.

    Attributes:
        matvec: Blocks -> blocks, x -> sum_i p_i F_i x + lambda x.
        rhs: sum_i p_i F_i W_i + lambda Wbar.
        init: Wbar, the weighted mean: where solvers start, and what is kept where F is zero.
        restore: Blocks -> params; None where blocks are params already.
        precondition: Blocks -> blocks, roughly the inverse of `matvec`; None where there is none.
        is_diagonal: Whether `matvec` is elementwise, so that its entries are matvec(ones).
    """

    matvec: Callable[[Any], Any]
    rhs: Any
    init: Any
    restore: Callable[[Any], Params] | None = None
    precondition: Callable[[Any], Any] | None = None
    is_diagonal: bool = False


class Sums(NamedTuple):
    """What the quadratic needs of the clients, for operators that add up leaf by leaf.

    Attributes:
        fisher: sum_i w_i F_i, an operator.
        product: sum_i w_i F_i W_i, blocks.
        mean: sum_i w_i W_i, blocks.
        weight: sum_i w_i, which the quadratic divides by.
    """

    fisher: Operator
    product: Any
    mean: Any
    weight: Array


def quadratic(fishers: Operator, params: Params, weights: Array, damping: float) -> Quadratic:
    """Set up the server's quadratic for stacked clients; the operators are never summed.

    Args:
        fishers: Stacked Fisher operators, leaves [M, ...].
        params: Stacked client models W_i, leaves [M, ...].
        weights: p_i [M], non-negative with sum one.
        damping: delta >= 0, in units of each block's mean eigenvalue.

    Raises:
        ValueError: If damping is negative, or the weights are not M that sum to one.

    Example:
        >>> from fisherjax import fisher
        >>> fishers = fisher.Diagonal({"w": jnp.array([[1.0], [3.0]])})
        >>> params = {"w": jnp.array([[0.0], [4.0]])}
        >>> problem = quadratic(fishers, params, jnp.array([0.5, 0.5]), damping=0.0)
        >>> print(problem.rhs["w"], problem.matvec(problem.init)["w"])
        [6.] [4.]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, equation 7, which weights clients
        equally and has no damping; its code weights by p_i, as here. The preconditioner is the
        damped inverse of (sum_i p_i A_i) (x) (sum_i p_i G_i). There is none without damping: in a
        singular system it would move what has no curvature.
    """
    checks.number("damping", damping)
    weights = _checked(weights, jax.tree.leaves(params)[0].shape[0])
    strengths, rhs, init = _damped_clients(fishers, params, weights, damping)
    # Products of clients are added, not operators: Kronecker factors do not add up.
    matvec = Partial(_damped_mv, Partial(_weighted_mv, fishers, weights), strengths)
    precondition = None
    # Whether a traced damping is zero is not known, so there is no preconditioner then.
    if isinstance(fishers, Kronecker) and not checks.is_traced(damping) and damping > 0:
        inverse = _approximate_inverse(fishers, weights, strengths)
        precondition = Partial(Kronecker.block_mv, inverse)
    # Stacked operators serve too: `restore` reads names and shapes, none of their arrays.
    restore = Partial(type(fishers).restore, fishers)
    return Quadratic(matvec, rhs, init, restore, precondition, isinstance(fishers, Diagonal))


def sums(fishers: Operator, params: Params, weights: Array) -> Sums:
    """Add up diagonal or dense clients, so that the server never holds them all.

    The arguments are those of `quadratic`, but weights may have any sum. The sums are at least
    float32; those of several groups of clients add up leaf by leaf.

    Raises:
        TypeError: If the operators do not add up.
    """
    if not fishers.adds_up:
        raise TypeError(
            f"{type(fishers).__name__} operators do not add up leaf by leaf: set up `quadratic` "
            "with those of all clients."
        )
    blocks = jax.vmap(_blocks)(fishers, params)
    # Client by client: sum_i w_i F_i W_i does not follow from the sums of F_i and of W_i.
    product = _weighted_sum(jax.vmap(type(fishers).block_mv)(fishers, blocks), weights)
    fisher, mean = (tree.weighted_sum(x, weights) for x in (fishers, blocks))
    return Sums(fisher, product, mean, jnp.sum(weights))


def from_sums(totals: Sums, damping: float) -> Quadratic:
    """Set up the same quadratic from what `sums` gives; damping is that of `quadratic`."""
    checks.number("damping", damping)
    fisher, mean, strengths, rhs = _damped_sums(totals, damping)
    matvec = Partial(_damped_mv, Partial(type(fisher).block_mv, fisher), strengths)
    restore = Partial(type(fisher).restore, fisher)
    return Quadratic(matvec, rhs, mean, restore, None, isinstance(fisher, Diagonal))


@jax.jit
def _damped_clients(fishers: Operator, params: Params, weights: Array, damping: Array) -> tuple:
    operator, blocks = type(fishers), jax.vmap(_blocks)(fishers, params)
    product = _weighted_sum(jax.vmap(operator.block_mv)(fishers, blocks), weights)
    scales = _weighted_sum(jax.vmap(operator.block_means)(fishers), weights)
    mean = tree.weighted_sum(blocks, weights)
    strengths = jax.tree.map(lambda scale: damping * scale, scales)
    return strengths, _pull(product, strengths, mean), mean


@jax.jit
def _damped_sums(totals: Sums, damping: Array) -> tuple[Operator, Any, Any, Any]:
    def divide(x: Array) -> Array:
        # Sums without any weight are zero, and stay zero in place of 0 / 0.
        return x / jnp.where(totals.weight > 0, totals.weight, 1).astype(x.dtype)

    fisher, product, mean = jax.tree.map(divide, totals[:3])
    strengths = jax.tree.map(lambda scale: damping * scale, fisher.block_means())
    return fisher, mean, strengths, _pull(product, strengths, mean)


@jax.jit
def _approximate_inverse(fishers: Kronecker, weights: Array, strengths: Any) -> Kronecker:
    return tree.weighted_sum(fishers, weights).inverse(strengths)


def _blocks(fisher: Operator, params: Params) -> Any:
    # Wide before anything is multiplied: sums in bfloat16 lose their small terms.
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves((fisher, params)))
    return jax.tree.map(lambda x: x.astype(dtype), fisher.blocks(params))


# `Partial`s of functions of a module or a class compare equal, those of closures and bound methods
# do not: jit reuses the program of an earlier merge of equal shapes.
def _weighted_mv(fishers: Operator, weights: Array, blocks: Any) -> Any:
    return _weighted_sum(jax.vmap(type(fishers).block_mv, (0, None))(fishers, blocks), weights)


def _damped_mv(matvec: Partial, strengths: Any, blocks: Any) -> Any:
    return _pull(matvec(blocks), strengths, blocks)


def _weighted_sum(computed: Any, weights: Array) -> Any:
    # What was computed of finite updates may overflow, and zero times infinity is NaN: a client of
    # weight zero is left out before it is weighted.
    return tree.weighted_sum(tree.keep(weights != 0, computed), weights)


def _pull(values: Any, strengths: Any, blocks: Any) -> Any:
    # A product gets lambda x, the right-hand side lambda Wbar: the pull is towards Wbar.
    return jax.tree.map(lambda v, s, b: v + s.astype(v.dtype) * b, values, strengths, blocks)


def _checked(weights: Array, num_clients: int) -> Array:
    # The values of traced weights are not known: under `jit` the caller answers for them.
    if checks.is_traced(weights):
        return weights
    weights = jnp.asarray(weights, float)
    if weights.shape != (num_clients,) or not abs(float(weights.sum()) - 1) < 1e-3:
        raise ValueError(
            f"weights have shape {weights.shape} and sum {float(weights.sum()):g}; expected one "
            f"for each of {num_clients} clients and sum one. Divide them by their sum."
        )
    return weights
