"""Compute the server's problem: one quadratic that is small where each client's model is good.

    L(W) = sum_i p_i 1/2 (W - W_i)^T F_i (W - W_i) + sum_l lambda_l / 2 ||W_l - C_l||^2,

where the centre C is the clients' mean sum_i p_i W_i, or another point, such as the model that
clients started from. Damping is relative to the scale of each block l (a layer, a leaf, or the
whole vector, as the operator splits params),

    lambda_l = damping * sum_i p_i tr(F_il) / (size of the block),

so that one number fits every layer, network and data set.

Each block is solved *at scale one*: each client's operator is divided by a power of two near its
scale, and its *vote*, p_i times that power, by the largest power. That changes no bits. So Fishers
of 1e-30 or 1e+30, whose products leave the range of float32, are solved like Fishers near 1. Sums
of diagonals without damping keep their units, because a quotient of them stays in range.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fisherjax import _preconditioning, _wide_layers, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._stacked import plain_sum
from fisherjax.fisher import Diagonal, Operator
from fisherjax.fisher.operators import Blockwise
from fisherjax.typing import AnyArray, Array, Params, Scalar


class Quadratic(NamedTuple):
    """A symmetric positive semi-definite system matvec(x) = rhs over blocks.

    Each leaf of a pytree of blocks is a separate system, because `matvec` does not couple leaves.
    Blocks have the dtype of the operators, at least float32, and `restore` keeps it.

    Attributes:
        matvec: Function from blocks to blocks, x -> sum_i p_i F_i x + lambda x.
        rhs: Right-hand side, sum_i p_i F_i W_i + lambda C.
        init: The centre C. Solvers start from it, and keep it where F is zero.
        restore: Function from blocks to params; None if the blocks are the params.
        precondition: Function from blocks to blocks, an approximate inverse of `matvec`, or None.
        is_diagonal: Whether `matvec` is elementwise, so that its entries are matvec(ones).
        means: Mean eigenvalue of each block before damping, in the units of the system; zero if no
            client has curvature. None if it is unknown.
        exponents: For each block, the exponent e of its units: the system is divided by 2^e. None
            if the system is in the units of the Fishers.
        slack: Relative residual to which `precondition` solves, if it is an iterative solve and so
            not quite linear; None if it is linear.
        origin: Blocks that are added to the unknowns; None if they are whole weights.
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
    origin: Any = None


def restored(problem: Quadratic, blocks: Any) -> Params:
    """Return params from their blocks."""
    if problem.origin is not None:
        blocks = jax.tree.map(jnp.add, problem.origin, blocks)
    return blocks if problem.restore is None else problem.restore(blocks)


class Sums(NamedTuple):
    """Sums over clients that determine the quadratic, for operators that add up leaf by leaf.

    Attributes:
        fisher: Operator sum_i w_i F_i.
        product: Blocks sum_i w_i F_i W_i.
        mean: Blocks sum_i w_i W_i, or the plain sum of W_i over the clients with a weight.
        weight: Number sum_i w_i, by which the quadratic divides.
        count: Number of clients with a weight, if `mean` is a plain sum; None otherwise.
    """

    fisher: Blockwise
    product: Any
    mean: Any
    weight: Array
    count: Array | None = None


def quadratic(
    fishers: Operator, params: Params, weights: Array, damping: Scalar, centre: Params = None
) -> Quadratic:
    """Make the server's quadratic of stacked clients, without adding their operators.

    Args:
        fishers: Stacked Fisher operators, leaves [M, ...].
        params: Stacked client models W_i, leaves [M, ...].
        weights: p_i [M], non-negative with sum one.
        damping: Damping delta >= 0, in units of each block's mean eigenvalue.
        centre: Point that damping pulls to, shaped as one client's params; None is the weighted
            mean.

    Returns:
        The quadratic, with a preconditioner if it is damped or diagonal.

    Raises:
        ValueError: If damping is negative, or if weights are not M numbers with sum one.

    Example:
        >>> from fisherjax import fisher
        >>> fishers = fisher.Diagonal({"w": jnp.array([[1.0], [3.0]])})
        >>> params = {"w": jnp.array([[0.0], [4.0]])}
        >>> problem = in_fisher_units(
        ...     quadratic(fishers, params, jnp.array([0.5, 0.5]), damping=0.0)
        ... )
        >>> print(problem.rhs["w"], problem.matvec(problem.init)["w"])
        [6.] [4.]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, equation 7, which weights clients
        equally and has no damping; its code weights them by p_i, as here.
    """
    checks.number("damping", damping)
    shares = _check_weights(weights, jax.tree.leaves(params)[0].shape[0])
    scaled, votes, system = _scale_clients(fishers, params, shares, damping, centre)
    # The clients' products are added, not their operators: Kronecker factors do not add up.
    problem = _problem(scaled, Partial(_wide_layers.weighted_mv, scaled, votes), system)
    if not (_is_damped(damping) or problem.is_diagonal):
        return problem
    precondition, slack = _preconditioning.of_clients(scaled, votes, system["lambdas"])
    return problem._replace(precondition=precondition, slack=slack)


def sums(fishers: Operator, params: Params, weights: Array, plain: bool = False) -> Sums:
    """Return the sums over clients with diagonal or dense Fishers that determine the quadratic.

    The sums of groups of clients add up leaf by leaf, so the server need not have all clients in
    memory. Arguments are as in `quadratic`, but weights have any sum. Sums are float32 or wider. If
    `plain`, every client with a weight counts once in `mean`, and `count` is their number.

    Raises:
        TypeError: If the operators do not add up.
    """
    if not fishers.adds_up:
        raise TypeError(
            f"{type(fishers).__name__} operators do not add up leaf by leaf; expected diagonal or "
            "dense ones. Pass the stacked operators of all clients to `quadratic`."
        )
    blocks = jax.vmap(_wide_blocks)(fishers, params)
    # The sum of F_i W_i does not follow from the sums of F_i and of W_i.
    products = tree.where(weights != 0, _wide_layers.products(fishers, blocks))
    product = tree.weighted_sum(products, weights)
    fisher, weight = tree.weighted_sum(fishers, weights), jnp.sum(weights)
    if not plain:
        return Sums(fisher, product, tree.weighted_sum(blocks, weights), weight)
    present = (weights > 0).astype(weights.dtype)
    return Sums(fisher, product, plain_sum(blocks, present), weight, jnp.sum(present))


def from_sums(totals: Sums, damping: Scalar, centre: Params = None) -> Quadratic:
    """Make the same quadratic as `quadratic` from a result of `sums`, with the same damping.

    The operator in the sums may also be a `KroneckerSum`, with weight one. The centre is as in
    `quadratic`.
    """
    checks.number("damping", damping)
    fisher, system = _scale_sums(totals, damping, centre)
    problem = _problem(fisher, Partial(type(fisher).block_mv, fisher), system)
    if not (_is_damped(damping) or problem.is_diagonal):
        return problem
    return problem._replace(precondition=_preconditioning.of_sums(fisher, system["lambdas"]))


def in_fisher_units(problem: Quadratic) -> Quadratic:
    """Return the system in the units of the Fishers, for solvers whose steps depend on its scale.

    Example:
        >>> problem = Quadratic(lambda x: x, jnp.ones(2), jnp.zeros(2), exponents=jnp.array(3))
        >>> print(in_fisher_units(problem).rhs)
        [8. 8.]
    """
    exponents = problem.exponents
    if exponents is None:
        return problem
    matvec = Partial(_mv_in_fisher_units, problem.matvec, exponents)
    rhs, precondition = _times_powers(problem.rhs, exponents), problem.precondition
    if precondition is not None:
        precondition = Partial(_precondition_in_fisher_units, precondition, exponents)
    # `means` keep their units: solvers only check whether they are zero.
    return problem._replace(matvec=matvec, rhs=rhs, precondition=precondition, exponents=None)


def _problem(operator: Blockwise, matvec: Partial, system: dict[str, Any]) -> Quadratic:
    system = dict(system)
    matvec = Partial(_damped_mv, matvec, system.pop("lambdas"))
    # The operator may be stacked: `restore` reads its names and shapes only.
    restore = Partial(type(operator).restore, operator)
    return Quadratic(matvec, restore=restore, is_diagonal=isinstance(operator, Diagonal), **system)


def _is_damped(damping: Scalar) -> bool:
    # A traced damping may be zero; preconditioners check that block by block.
    # NumPy compares: under `jit`, JAX would trace the comparison with an array that is known.
    return checks.is_traced(damping) or bool(np.asarray(damping) > 0)


def _system(operator: Blockwise, damping: Scalar, product: Any, **system: Any) -> dict[str, Any]:
    lambdas = operator.block_damping(system["means"], damping)
    return system | {"rhs": _add_damping(product, lambdas, system["init"]), "lambdas": lambdas}


@jit
def _scale_clients(
    fishers: Blockwise, params: Params, weights: Array, damping: Scalar, centre: Params
) -> tuple[Blockwise, Any, dict[str, Any]]:
    operator, blocks = type(fishers), jax.vmap(_wide_blocks)(fishers, params)
    mean = tree.weighted_sum(blocks, weights)
    fishers, scales = jax.vmap(operator.at_scale_one)(fishers)
    exponents = jax.tree.map(lambda e: jnp.where(weights > 0, e, tree.ZERO_EXPONENT).max(), scales)
    # The scale of a client without weight may be larger than the largest one, hence the minimum.
    powers = jax.tree.map(lambda e, largest: jnp.minimum(e - largest, 0), scales, exponents)
    votes = jax.tree.map(partial(tree.times_power, weights), powers)
    product = _wide_layers.weighted_sums(_wide_layers.products(fishers, blocks), votes)
    system = {
        # The operator may be stacked: `blocks` reads its names only.
        "init": mean if centre is None else _wide_blocks(fishers, centre),
        "means": _wide_layers.weighted_sums(jax.vmap(operator.block_means)(fishers), votes),
        "exponents": _replace_nothing(exponents),
    }
    return fishers, votes, _system(fishers, damping, product, **system)


@jit
def _scale_sums(totals: Sums, damping: Scalar, centre: Params) -> tuple[Blockwise, dict[str, Any]]:
    # If the weight is zero, then so are the sums, and they stay zero instead of 0 / 0.
    total = jnp.where(totals.weight > 0, totals.weight, 1)
    fisher, product, mean = jax.tree.map(lambda x: x / total.astype(x.dtype), totals[:3])
    init = mean if centre is None else _wide_blocks(totals.fisher, centre)
    fisher, exponents = fisher.at_scale_one()
    exponents = _replace_nothing(exponents)
    product = _times_powers(product, jax.tree.map(jnp.negative, exponents))
    system = {"init": init, "means": fisher.block_means(), "exponents": exponents}
    return fisher, _system(fisher, damping, product, **system)


def _wide_blocks(fisher: Blockwise, params: Params) -> Any:
    # In at least float32, because sums in bfloat16 lose small terms.
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves((fisher, params)))
    return jax.tree.map(lambda x: x.astype(dtype), fisher.blocks(params))


# The functions below are in `Partial`s. Those of module functions compare equal, unlike those of
# closures and bound methods, so that `jit` reuses the program of an earlier merge.
def _damped_mv(matvec: Partial, lambdas: Any, blocks: Any) -> Any:
    return _add_damping(matvec(blocks), lambdas, blocks)


def _mv_in_fisher_units(matvec: Partial, exponents: Any, blocks: Any) -> Any:
    return _times_powers(matvec(blocks), exponents)


def _precondition_in_fisher_units(function: Partial, exponents: Any, blocks: Any) -> Any:
    return function(_times_powers(blocks, jax.tree.map(jnp.negative, exponents)))


@jit
def _times_powers(values: Any, exponents: Any) -> Any:
    return jax.tree.map(tree.times_power, values, exponents)


def _replace_nothing(exponents: Any) -> Any:
    # A block in which no client has curvature is zero in any units, so its exponent is set to 0.
    return jax.tree.map(lambda e: jnp.where(e > tree.ZERO_EXPONENT // 2, e, 0), exponents)


@jit
def _add_damping(values: Any, lambdas: Any, blocks: Any) -> Any:
    return jax.tree.map(lambda v, s, b: v + s.astype(v.dtype) * b, values, lambdas, blocks)


def _check_weights(weights: AnyArray, num_clients: int) -> Any:
    if checks.is_traced(weights):
        return weights  # They have no values, so under `jit` the caller must check them.
    weights = np.asarray(weights, jnp.result_type(float))
    if weights.shape != (num_clients,) or not abs(weights.sum() - 1) < 1e-3:
        raise ValueError(
            f"weights have shape {weights.shape} and sum {weights.sum():g}; expected one for each "
            f"of {num_clients} clients and sum one. Divide them by their sum."
        )
    return weights
