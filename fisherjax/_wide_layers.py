"""Multiply by the curvature of wide layers, and precondition them by a small system.

A layer with many inputs or outputs has most of its curvature in few directions. Let Q [a, r] be an
orthonormal basis of these directions for the inputs, P [o, s] one for the outputs, v_i the clients'
weights and lambda the damping. In these directions the system of the layer,

    S(X) = sum_i v_i A_i X G_i + lambda X,

is nearly a small system,

    S_c(E) = sum_i v_i (Q^T A_i Q) E (P^T G_i P) + lambda E,   X = Q E P^T.

In the other directions the factors A_i and G_i are nearly their mean eigenvalues there, alpha_i and
beta_i. So the preconditioner maps a residual R to

    Q S_c^-1(Q^T R P) P^T + (I - Q Q^T) R P (sum_i v_i alpha_i P^T G_i P + lambda)^-1 P^T
    + Q (sum_i v_i beta_i Q^T A_i Q + lambda)^-1 Q^T R (I - P P^T)
    + (I - Q Q^T) R (I - P P^T) / (sum_i v_i alpha_i beta_i + lambda).

S_c^-1 is computed by a few conjugate gradients, each of which costs a hundredth of a product with
the whole layer. The mean of the clients' factors, which preconditions narrow layers well, does not
work for wide layers, because the clients' factors differ too much.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import linalg
from fisherjax.fisher import kfac_operator
from fisherjax.fisher.kfac_operator import Kronecker, sandwich
from fisherjax.fisher.operators import PRECISION, Blockwise
from fisherjax.typing import Array

WIDE = 768
"""Least number of inputs or outputs of a wide layer, whose products dominate the solver's time."""
RANK = 512
"""Number of directions, of a wide layer's inputs or outputs, in the small system."""
SLACK = 0.3
"""Relative residual of the small solve; so rough that the outer solver must be flexible."""
_MAX_ITERATIONS = 100


class WideLayer(NamedTuple):
    """The preconditioner of one layer.

    Attributes:
        inputs: Q [a, r], or None if the layer has few inputs.
        outputs: P [o, s], or None if the layer has few outputs.
        factors: Stacked factors of the small system, {"input": Q^T A_i Q, "output": P^T G_i P}.
        votes: v_i [M].
        shift: lambda.
        inverse: Inverses of the mean factors, {"input", "output"}, which precondition the small
            system.
        rest: Inverses in the other directions: "input" [s, s] orthogonal to Q, "output" [r, r]
            orthogonal to P, each if there is such a basis, and "both", a number.
    """

    inputs: Array | None
    outputs: Array | None
    factors: dict[str, Array]
    votes: Array
    shift: Array
    inverse: dict[str, Array]
    rest: dict[str, Array]


def is_wide(factor: dict[str, Array]) -> bool:
    """Return whether a layer's factors, of one client or stacked, are matrices and one is wide.

    Example:
        >>> is_wide({"input": jnp.eye(800), "output": jnp.eye(10)})
        True
    """
    sizes = [side.shape[-1] for side in factor.values()]
    # The input factor of a table has one axis less than its output factor.
    are_matrices = len({side.ndim for side in factor.values()}) == 1
    return are_matrices and max(sizes) >= WIDE


def split_wide(fishers: Kronecker) -> tuple[Kronecker, dict[str, dict[str, Array]]]:
    """Return the operator without wide layers, and the factors of these by kernel name.

    A layer with groups has smaller factors, and is never among them.
    """
    grouped = {layer.kernel for layer in fishers.layers if layer.groups}
    factors = fishers.factors.items()
    wide = {name: factor for name, factor in factors if name not in grouped and is_wide(factor)}
    narrow = {name: factor for name, factor in fishers.factors.items() if name not in wide}
    return dataclasses.replace(fishers, factors=narrow), wide


def products(fishers: Blockwise, blocks: Any, axis: int | None = 0) -> Any:
    """Return each client's F_i X_i, or F_i X if axis is None, of stacked operators."""
    return jax.vmap(type(fishers).block_mv, (0, axis))(fishers, blocks)


def weighted_sums(values: Any, votes: Any) -> Any:
    """Return sum_i v_i X_i of stacked blocks, with votes [M] for each block."""
    # The product of a client of weight zero may overflow, and zero times infinity is NaN.
    return jax.tree.map(lambda x, v: tree.weighted_sum(tree.where(v != 0, x), v), values, votes)


def weighted_mv(fishers: Blockwise, votes: Any, blocks: Any) -> Any:
    """Return sum_i v_i F_i X of blocks X, whose wide layers are products of their own."""
    wide = {}
    if isinstance(fishers, Kronecker):
        fishers, factors = split_wide(fishers)
        wide = {n: weighted_product(f, votes[n], blocks[n]) for n, f in factors.items()}
        votes = {name: vote for name, vote in votes.items() if name not in wide}
        if not votes:  # every layer is wide
            return wide
    sums = weighted_sums(products(fishers, blocks, None), votes)
    return sums | wide if wide else sums


def weighted_product(factors: dict[str, Array], votes: Array, value: Array) -> Array:
    """Return sum_i v_i A_i X G_i for one X [a, o], without computing it if X is zero.

    Solvers pass zeros for a layer that has converged, while other layers have not.
    """
    multiply = partial(_weighted_product, factors, votes)
    return jax.lax.cond(tree.any_nonzero(value), multiply, jnp.zeros_like, value)


def _weighted_product(factors: dict[str, Array], votes: Array, value: Array) -> Array:
    # These are two products without a batch axis: A_i X for all clients, and the sum over clients
    # with G_i. For batched products within a loop XLA takes four times as long on a CPU, and for
    # one client after another it copies each factor out of its stack.
    products = jnp.einsum("mab,bo->mao", factors["input"], value, precision=PRECISION)
    votes = votes.astype(value.dtype)[:, None, None]
    # Selected, as in all weighted sums: the product of a client of weight zero may overflow.
    products = jnp.where(votes != 0, votes * products, 0)
    return jnp.einsum("mao,mop->ap", products, factors["output"], precision=PRECISION)


def preconditioner(factors: dict[str, Array], votes: Array, shift: Array) -> WideLayer:
    """Compute the preconditioner of sum_i v_i A_i (x) G_i + shift.

    Args:
        factors: Stacked factors of the clients, {"input": [M, a, a], "output": [M, o, o]}.
        votes: v_i [M], non-negative.
        shift: lambda; if it is zero, then the preconditioner is the identity.
    """
    # A preconditioner changes only how fast a system is solved, so it has no derivative.
    factors, votes, shift = jax.lax.stop_gradient((factors, votes, shift))
    total = jnp.where(votes.any(), votes.sum(), 1)

    def mean(stacked: Array) -> Array:
        return tree.weighted_sum(stacked, votes / total)

    # The basis of one side weighs each client by its trace of the other side's factor.
    sizes = {"input": _traces(factors["output"]), "output": _traces(factors["input"])}
    bases = {
        side: _basis(tree.weighted_sum(x, _scale_votes(votes, sizes[side])))
        for side, x in factors.items()
    }

    def reduce(side: str, x: Array) -> Array:
        q = bases[side]
        return x if q is None else jax.lax.map(lambda f: sandwich(q.T, f, q), x)

    small = {side: reduce(side, x) for side, x in factors.items()}
    means = {"input": mean(small["input"]) * total, "output": mean(small["output"])}
    # {"input": alpha_i [M], "output": beta_i [M]}
    eigenvalues = {side: _mean_eigenvalues(x, small[side]) for side, x in factors.items()}

    def inverse_of_rest(side: str, other: str) -> Array:
        scaled = _scale_votes(votes, eigenvalues[side])
        return kfac_operator.inverse(tree.weighted_sum(small[other], scaled), shift)

    both = _scale_votes(votes, eigenvalues["input"], eigenvalues["output"]).sum() + shift
    others = {"input": "output", "output": "input"}
    rest = {side: inverse_of_rest(side, others[side]) for side in others if bases[side] is not None}
    rest["both"] = 1 / jnp.where(both > 0, both, 1)
    inverse = kfac_operator.inverse_factors(means, shift)
    return WideLayer(bases["input"], bases["output"], small, votes, shift, inverse, rest)


def precondition(layer: WideLayer, residual: Array) -> Array:
    """Return the preconditioned residual [a, o], without computing it if the residual is zero."""
    apply = partial(_precondition, layer)
    return jax.lax.cond(tree.any_nonzero(residual), apply, jnp.zeros_like, residual)


def _precondition(layer: WideLayer, residual: Array) -> Array:
    rp = _times(residual, layer.outputs)  # R P, or R if the layer has few outputs
    coordinates = _project(layer.inputs, rp)
    result = _expand(layer.inputs, _solve_small(layer, coordinates))
    if layer.inputs is not None:
        result += _times(rp - _expand(layer.inputs, coordinates), layer.rest["input"])
    if layer.outputs is not None:
        result = _times(result, layer.outputs.T)
        orthogonal = residual - _times(rp, layer.outputs.T)  # R (I - P P^T)
        coordinates = _project(layer.inputs, orthogonal)
        result += _expand(layer.inputs, _times(layer.rest["output"], coordinates))
        if layer.inputs is not None:
            result += (orthogonal - _expand(layer.inputs, coordinates)) * layer.rest["both"]
    return jnp.where((layer.shift > 0) & tree.is_finite(result), result, residual)


def _solve_small(layer: WideLayer, rhs: Array) -> Array:
    """Solve the small system by conjugate gradients to a relative residual of SLACK."""

    def multiply(x: Array) -> Array:
        return _weighted_product(layer.factors, layer.votes, x) + layer.shift.astype(x.dtype) * x

    def apply_inverse(x: Array) -> Array:
        return sandwich(layer.inverse["input"], x, layer.inverse["output"])

    def is_unfinished(state: tuple) -> Array:
        *_, active, step = state
        return active & (step < _MAX_ITERATIONS)

    def body(state: tuple) -> tuple:
        x, residual, direction, height, _, step = state
        product = multiply(direction)
        curvature = jnp.vdot(direction, product)
        # The iteration ends at a direction without curvature, with the x that it has.
        has_curvature = curvature > 0
        alpha = jnp.where(has_curvature, height / jnp.where(has_curvature, curvature, 1), 0)
        x, residual = x + alpha * direction, residual - alpha * product
        steepest = apply_inverse(residual)
        new = jnp.vdot(residual, steepest)
        beta = new / jnp.where(height > 0, height, 1)
        active = has_curvature & (jnp.vdot(residual, residual) > bound)
        return x, residual, steepest + beta * direction, new, active, step + 1

    squares, direction = jnp.vdot(rhs, rhs), apply_inverse(rhs)
    bound = SLACK**2 * squares
    state = jnp.zeros_like(rhs), rhs, direction, jnp.vdot(rhs, direction), squares > bound, 0
    return jax.lax.while_loop(is_unfinished, body, state)[0]


def _basis(matrix: Array) -> Array | None:
    """Return the directions [n, RANK] in which a semi-definite matrix [n, n] is largest.

    Return None if the matrix is not wide.

    Source: Halko, Martinsson, Tropp, Finding structure with randomness, SIAM Review 2011,
        algorithm 4.4, with one power iteration.
    """
    if len(matrix) < WIDE:
        return None
    # The start changes the speed of the solver only, so that a fixed key is used.
    basis = jax.random.normal(jax.random.key(0), (len(matrix), RANK), matrix.dtype)
    for _ in range(2):
        basis = linalg.orthonormal_basis(jnp.matmul(matrix, basis, precision=PRECISION))
    return basis


def _mean_eigenvalues(stacked: Array, small: Array) -> Array:
    """Return each client's mean eigenvalue in the directions that the small factors leave out."""
    count = stacked.shape[-1] - small.shape[-1]
    return jnp.maximum(_traces(stacked) - _traces(small), 0) / max(count, 1) * (count > 0)


def _traces(stacked: Array) -> Array:
    return jnp.trace(stacked, axis1=-2, axis2=-1)


def _scale_votes(votes: Array, *scales: Array) -> Array:
    # Selected, as in all weighted sums: the scale of a client of weight zero may overflow.
    return jnp.where(votes != 0, math.prod(scales) * votes, 0)


def _times(x: Array, matrix: Array | None) -> Array:
    return x if matrix is None else jnp.matmul(x, matrix, precision=PRECISION)


def _project(basis: Array | None, x: Array) -> Array:
    return x if basis is None else _times(basis.T, x)


def _expand(basis: Array | None, x: Array) -> Array:
    return x if basis is None else _times(basis, x)
