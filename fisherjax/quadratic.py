"""The server's problem: one quadratic that is small where every client's model is good.

    L(W) = sum_i p_i 1/2 (W - W_i)^T F_i (W - W_i) + sum_l lambda_l / 2 ||W_l - Wbar_l||^2,

with Wbar = sum_i p_i W_i. Damping is relative to each block's own scale (a layer, a leaf, or the
whole vector, as the operator splits params),

    lambda_l = damping * sum_i p_i tr(F_il) / (size of the block),

so that one number serves every layer, network and data set. Every block is solved at scale one:
each client's part is divided by a power of two near its own scale, and its vote, p_i times that
power, by the largest one of all clients. That changes no bit, and Fishers of 1e-30 and of 1e+30,
whose products and squares leave the range of float32, are solved like those of 1. Sums of
diagonals that are not damped keep their units: a quotient stays in range by itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax import _preconditioning, _wide_layers, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.fisher import Diagonal, Kronecker, Operator
from fisherjax.fisher.operators import Blockwise
from fisherjax.typing import Array, Params, Scalar


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
        means: Each block's mean eigenvalue before damping, in the units of the system; zero where
            no client has curvature. None where that is not known.
        exponents: Each block's system is written in units of 2^exponent; None where it is not.
        slack: Relative residual to which `precondition` solves, where it is a solve of its own and
            so not quite linear; None where it is linear.
    """

    matvec: Callable[[Any], Any]
    rhs: Any
    init: Any
    restore: Callable[[Any], Params] | None = None
    precondition: Callable[[Any], Any] | None = None
    is_diagonal: bool = False
    means: Any = None
    exponents: Any = None
    slack: Array | None = None


def restored(problem: Quadratic, blocks: Any) -> Params:
    """Put blocks together to params; without `restore` they are params already."""
    return blocks if problem.restore is None else problem.restore(blocks)


class Sums(NamedTuple):
    """What the quadratic needs of the clients, for operators that add up leaf by leaf.

    Attributes:
        fisher: sum_i w_i F_i, an operator.
        product: sum_i w_i F_i W_i, blocks.
        mean: sum_i w_i W_i, blocks.
        weight: sum_i w_i, which the quadratic divides by.
    """

    fisher: Blockwise
    product: Any
    mean: Any
    weight: Array


def quadratic(fishers: Operator, params: Params, weights: Array, damping: Scalar) -> Quadratic:
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
        >>> problem = in_fisher_units(problem)
        >>> print(problem.rhs["w"], problem.matvec(problem.init)["w"])
        [6.] [4.]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, equation 7, which weights clients
        equally and has no damping; its code weights by p_i, as here. What is damped comes with a
        preconditioner (`preconditioning`).
    """
    checks.number("damping", damping)
    weights = _checked(weights, jax.tree.leaves(params)[0].shape[0])
    scaled, votes, system = _scaled_clients(fishers, params, weights, damping)
    # Products of clients are added, not operators: Kronecker factors do not add up.
    problem = _problem(scaled, Partial(_weighted_mv, scaled, votes), system)
    if not _damped(damping):
        return problem
    precondition, slack = _preconditioning.of_clients(scaled, votes, system["strengths"])
    return problem._replace(precondition=precondition, slack=slack)


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
    products = tree.keep(weights != 0, _products(fishers, blocks))
    product = tree.weighted_sum(products, weights)
    fisher, mean = (tree.weighted_sum(x, weights) for x in (fishers, blocks))
    return Sums(fisher, product, mean, jnp.sum(weights))


def from_sums(totals: Sums, damping: Scalar) -> Quadratic:
    """Set up the same quadratic from what `sums` gives; damping is that of `quadratic`.

    A `KroneckerSum` of weight one serves too.
    """
    checks.number("damping", damping)
    damped = _damped(damping)
    fisher, system = _scaled_sums(totals, damping, damped)
    problem = _problem(fisher, Partial(type(fisher).block_mv, fisher), system)
    if not damped:
        return problem
    return problem._replace(precondition=_preconditioning.of_sums(fisher, system["strengths"]))


def in_fisher_units(problem: Quadratic) -> Quadratic:
    """Write a system in the units of the Fishers, for solvers whose steps depend on its scale.

    Example:
        >>> problem = Quadratic(lambda x: x, jnp.ones(2), jnp.zeros(2), exponents=jnp.array(3))
        >>> print(in_fisher_units(problem).rhs)
        [8. 8.]
    """
    exponents = problem.exponents
    if exponents is None:
        return problem
    matvec = Partial(_raised_mv, problem.matvec, exponents)
    precondition = problem.precondition
    if precondition is not None:
        precondition = Partial(_lowered, precondition, exponents)
    # The means say no more than where there is curvature: they stay in range.
    changes = {
        "matvec": matvec,
        "rhs": _raised(problem.rhs, exponents),
        "precondition": precondition,
    }
    return problem._replace(**changes, exponents=None)


def _products(fishers: Blockwise, blocks: Any, axis: int | None = 0) -> Any:
    return jax.vmap(type(fishers).block_mv, (0, axis))(fishers, blocks)


def _problem(operator: Blockwise, matvec: Partial, system: dict[str, Any]) -> Quadratic:
    system = dict(system)
    matvec = Partial(_damped_mv, matvec, system.pop("strengths"))
    # Stacked operators serve too: `restore` reads names and shapes, none of their arrays.
    restore = Partial(type(operator).restore, operator)
    return Quadratic(matvec, restore=restore, is_diagonal=isinstance(operator, Diagonal), **system)


def _damped(damping: Scalar) -> bool:
    # Whether a traced damping is zero is decided leaf by leaf.
    return checks.is_traced(damping) or bool(damping > 0)


def _system(operator: Blockwise, damping: Scalar, product: Any, **system: Any) -> dict[str, Any]:
    strengths = operator.strengths(system["means"], damping)
    return system | {"rhs": _pull(product, strengths, system["init"]), "strengths": strengths}


@jit
def _scaled_clients(
    fishers: Blockwise, params: Params, weights: Array, damping: Scalar
) -> tuple[Blockwise, Any, dict[str, Any]]:
    operator, blocks = type(fishers), jax.vmap(_blocks)(fishers, params)
    fishers, own = jax.vmap(operator.at_scale_one)(fishers)

    def vote(own: Array, largest: Array) -> Array:
        # Those without weight may be larger.
        return tree.times_power(weights, jnp.minimum(own - largest, 0))

    exponents = jax.tree.map(lambda own: jnp.where(weights > 0, own, tree.NOTHING).max(), own)
    votes = jax.tree.map(vote, own, exponents)
    product = _weighted_sums(_products(fishers, blocks), votes)
    system = {
        "init": tree.weighted_sum(blocks, weights),
        "means": _weighted_sums(jax.vmap(operator.block_means)(fishers), votes),
        "exponents": _known(exponents),
    }
    return fishers, votes, _system(fishers, damping, product, **system)


@partial(jit, static_argnums=2)
def _scaled_sums(totals: Sums, damping: Scalar, damped: bool) -> tuple[Blockwise, dict[str, Any]]:
    def divide(x: Array) -> Array:
        # Sums without any weight are zero, and stay zero in place of 0 / 0.
        return x / jnp.where(totals.weight > 0, totals.weight, 1).astype(x.dtype)

    fisher, product, mean = jax.tree.map(divide, totals[:3])
    exponents = None
    # A quotient stays in range by itself.
    if damped or not isinstance(fisher, Diagonal):
        fisher, exponents = fisher.at_scale_one()
        exponents = _known(exponents)
        product = _raised(product, jax.tree.map(jnp.negative, exponents))
    system = {"init": mean, "means": fisher.block_means(), "exponents": exponents}
    return fisher, _system(fisher, damping, product, **system)


def _blocks(fisher: Blockwise, params: Params) -> Any:
    # Wide before anything is multiplied: sums in bfloat16 lose their small terms.
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves((fisher, params)))
    return jax.tree.map(lambda x: x.astype(dtype), fisher.blocks(params))


# `Partial`s of functions of a module or a class compare equal, those of closures and bound methods
# do not: jit reuses the program of an earlier merge of equal shapes.
def _weighted_mv(fishers: Blockwise, votes: Any, blocks: Any) -> Any:
    wide = {}
    if isinstance(fishers, Kronecker):
        fishers, factors = _wide_layers.apart(fishers)
        wide = {
            n: _wide_layers.weighted_product(f, votes[n], blocks[n]) for n, f in factors.items()
        }
        votes = {name: vote for name, vote in votes.items() if name not in wide}
        if not votes:  # every layer is wide
            return wide
    computed = _products(fishers, blocks, None)
    sums = _weighted_sums(computed, votes)
    return sums | wide if wide else sums


def _damped_mv(matvec: Partial, strengths: Any, blocks: Any) -> Any:
    return _pull(matvec(blocks), strengths, blocks)


def _known(exponents: Any) -> Any:
    # Where nobody has curvature everything is zero, in whatever units.
    return jax.tree.map(lambda e: jnp.where(e > tree.NOTHING // 2, e, 0), exponents)


def _raised_mv(matvec: Partial, exponents: Any, blocks: Any) -> Any:
    return _raised(matvec(blocks), exponents)


def _lowered(function: Partial, exponents: Any, blocks: Any) -> Any:
    return function(_raised(blocks, jax.tree.map(jnp.negative, exponents)))


def _raised(values: Any, exponents: Any) -> Any:
    return jax.tree.map(tree.times_power, values, exponents)


def _weighted_sums(computed: Any, votes: Any) -> Any:
    # What was computed of finite updates may overflow, and zero times infinity is NaN: a client of
    # weight zero is left out before it is weighted.
    return jax.tree.map(lambda x, v: tree.weighted_sum(tree.keep(v != 0, x), v), computed, votes)


@jit
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
