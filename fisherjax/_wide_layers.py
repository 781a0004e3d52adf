"""Layers with many inputs or outputs: their products, and a small system in place of theirs.

Most of a wide layer's curvature lies in few directions of its inputs. With Q [a, r] an orthonormal
basis of them, P of those of the outputs, and lambda the damping,

    S(X) = sum_i v_i A_i X G_i + lambda X   is nearly   S_c(E) = sum_i v_i (Q^T A_i Q) E (P^T G_i P)
    + lambda E   on X = Q E P^T,

and what is left of a client's factor is nearly its mean eigenvalue there, alpha_i beside Q and
beta_i beside P. So a residual R is answered by

    Q S_c^-1(Q^T R P) P^T + (I - Q Q^T) R P (sum_i v_i alpha_i P^T G_i P + lambda)^-1 P^T
    + Q (sum_i v_i beta_i Q^T A_i Q + lambda)^-1 Q^T R (I - P P^T)
    + (I - Q Q^T) R (I - P P^T) / (sum_i v_i alpha_i beta_i + lambda),

with S_c^-1 by a few conjugate gradients, each a hundredth of a product of the whole layer. The mean
of the factors, which precondition narrow layers well, is no good for wide ones: clients differ.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import linalg
from fisherjax.fisher import kronecker
from fisherjax.fisher.kronecker import Kronecker
from fisherjax.typing import Array

WIDE = 768
"""Inputs or outputs from which on a product with a layer takes longer than anything beside it."""
RANK = 512
"""Directions of a wide layer's inputs, or outputs, that are solved for."""
SLACK = 0.3
"""Relative residual of the small solve, so that conjugate gradients around it must be flexible."""
_MOST = 100
_PRECISION = "highest"


class WideLayer(NamedTuple):
    """What the preconditioner of one layer holds.

    Attributes:
        inputs: Q [a, r], or None where the inputs are few.
        outputs: P [o, s], or None likewise.
        factors: Of the clients, stacked, {"input": Q^T A_i Q, "output": P^T G_i P}.
        votes: v_i [M].
        shift: lambda.
        inverse: Of the mean factors, {"input", "output"}: preconditions the small system.
        beside: Inverses on what is left: "input" [s, s] beside Q, "output" [r, r] beside P, each
            where there is such a basis, and "both".
    """

    inputs: Array | None
    outputs: Array | None
    factors: dict[str, Array]
    votes: Array
    shift: Array
    inverse: dict[str, Array]
    beside: dict[str, Array]


def is_wide(factor: dict[str, Array]) -> bool:
    """Say whether a layer's factors, of one client or stacked, are worth it: matrices, and wide.

    Example:
        >>> is_wide({"input": jnp.eye(800), "output": jnp.eye(10)})
        True
    """
    sizes = [side.shape[-1] for side in factor.values()]
    # Stacked or not, a table's input factor is a vector where the output factor is a matrix.
    same = len({side.ndim for side in factor.values()}) == 1
    return same and max(sizes) >= WIDE


def apart(fishers: Kronecker) -> tuple[Kronecker, dict[str, dict[str, Array]]]:
    """Split the factors of wide layers off, by the names of their kernels."""
    wide = {name: factor for name, factor in fishers.factors.items() if is_wide(factor)}
    narrow = {name: factor for name, factor in fishers.factors.items() if name not in wide}
    return dataclasses.replace(fishers, factors=narrow), wide


def weighted_product(factors: dict[str, Array], votes: Array, value: Array) -> Array:
    """Compute sum_i v_i A_i X G_i for one X [a, o]; zeros cost nothing.

    Solvers hand over zeros for a layer that is done, while they go on with others.
    """
    added = partial(_added, factors, votes)
    return jax.lax.cond(tree.any_nonzero(value), added, jnp.zeros_like, value)


def _added(factors: dict[str, Array], votes: Array, value: Array) -> Array:
    # Two products without a batch: A_i X of all clients at once, and their sum over clients with
    # the other side's. Within a loop XLA would take four times as long on a CPU for a batch, and
    # copy every factor out of its stack for one client after another.
    turned = jnp.einsum("mab,bo->mao", factors["input"], value, precision=_PRECISION)
    votes = votes.astype(value.dtype)[:, None, None]
    # Selected, as in all weighted sums: who has no vote may overflow.
    turned = jnp.where(votes != 0, votes * turned, 0)
    return jnp.einsum("mao,mop->ap", turned, factors["output"], precision=_PRECISION)


def preconditioner(factors: dict[str, Array], votes: Array, shift: Array) -> WideLayer:
    """Set up the preconditioner of sum_i v_i A_i (x) G_i + shift.

    Args:
        factors: Of the clients, stacked, {"input": [M, a, a], "output": [M, o, o]}.
        votes: [M], non-negative.
        shift: lambda; where it is zero the preconditioner is the identity.
    """
    # How fast the server solves has no derivative.
    factors, votes, shift = jax.lax.stop_gradient((factors, votes, shift))
    total = jnp.where(votes.any(), votes.sum(), 1)

    def mean(stacked: Array) -> Array:
        return tree.weighted_sum(stacked, votes / total)

    # A direction of one side counts as much as all that the client has on the other.
    sizes = {"input": _traces(factors["output"]), "output": _traces(factors["input"])}
    bases = {
        side: _basis(tree.weighted_sum(x, _shares(votes, sizes[side])))
        for side, x in factors.items()
    }

    def turned(side: str, x: Array) -> Array:
        basis = bases[side]
        return x if basis is None else jax.lax.map(lambda f: _turned(basis, f), x)

    small = {side: turned(side, x) for side, x in factors.items()}
    means = {"input": mean(small["input"]) * total, "output": mean(small["output"])}
    left = {side: _left(x, small[side]) for side, x in factors.items()}

    def beside(side: str, other: str) -> Array:
        return kronecker.inverse(tree.weighted_sum(small[other], _shares(votes, left[side])), shift)

    both = _shares(votes, left["input"], left["output"]).sum() + shift
    others = {"input": "output", "output": "input"}
    rest = {side: beside(side, others[side]) for side in others if bases[side] is not None}
    rest["both"] = 1 / jnp.where(both > 0, both, 1)
    inverse = kronecker.inverse_factors(means, shift)
    return WideLayer(bases["input"], bases["output"], small, votes, shift, inverse, rest)


def precondition(layer: WideLayer, residual: Array) -> Array:
    """Answer a residual [a, o] as the module says; one of zeros costs nothing."""
    answer = partial(_answer, layer)
    return jax.lax.cond(tree.any_nonzero(residual), answer, jnp.zeros_like, residual)


def _answer(layer: WideLayer, residual: Array) -> Array:
    turned = _times(residual, layer.outputs)  # R P, all of R where the outputs are few
    seen = _into(layer.inputs, turned)
    answer = _out_of(layer.inputs, _solved(layer, seen))
    if layer.inputs is not None:
        answer += _times(turned - _out_of(layer.inputs, seen), layer.beside["input"])
    if layer.outputs is not None:
        answer = _times(answer, layer.outputs.T)
        rest = residual - _times(turned, layer.outputs.T)
        seen = _into(layer.inputs, rest)
        answer += _out_of(layer.inputs, _times(layer.beside["output"], seen))
        if layer.inputs is not None:
            answer += (rest - _out_of(layer.inputs, seen)) * layer.beside["both"]
    return jnp.where((layer.shift > 0) & tree.is_finite(answer), answer, residual)


def _solved(layer: WideLayer, rhs: Array) -> Array:
    """Solve the small system from zero, to a relative residual of SLACK."""

    def multiply(x: Array) -> Array:
        return _added(layer.factors, layer.votes, x) + layer.shift.astype(x.dtype) * x

    def turn(x: Array) -> Array:
        return _product(layer.inverse["input"], x, layer.inverse["output"])

    def unfinished(state: tuple) -> Array:
        *_, going, step = state
        return going & (step < _MOST)

    def body(state: tuple) -> tuple:
        x, residual, direction, height, _, step = state
        product = multiply(direction)
        curvature = jnp.vdot(direction, product)
        # A direction without curvature ends it: what has been found is the answer.
        sound = curvature > 0
        length = jnp.where(sound, height / jnp.where(sound, curvature, 1), 0)
        x, residual = x + length * direction, residual - length * product
        steepest = turn(residual)
        new = jnp.vdot(residual, steepest)
        share = new / jnp.where(height > 0, height, 1)
        going = sound & (jnp.vdot(residual, residual) > bound)
        return x, residual, steepest + share * direction, new, going, step + 1

    squares, direction = jnp.vdot(rhs, rhs), turn(rhs)
    bound = SLACK**2 * squares
    state = jnp.zeros_like(rhs), rhs, direction, jnp.vdot(rhs, direction), squares > bound, 0
    return jax.lax.while_loop(unfinished, body, state)[0]


def _basis(matrix: Array) -> Array | None:
    """Find the directions [n, r] in which a semi-definite matrix [n, n] is largest; None if few.

    Source: Halko, Martinsson, Tropp, Finding structure with randomness, SIAM Review 2011,
        algorithm 4.4, with one power iteration.
    """
    if len(matrix) < WIDE:
        return None
    # Of no consequence for the answer: any start does.
    basis = jax.random.normal(jax.random.key(0), (len(matrix), RANK), matrix.dtype)
    for _ in range(2):
        basis = linalg.orthonormal(jnp.matmul(matrix, basis, precision=_PRECISION))
    return basis


def _turned(basis: Array, matrix: Array) -> Array:
    return _product(basis.T, matrix, basis)


def _left(stacked: Array, small: Array) -> Array:
    """Give every client's mean eigenvalue beside the directions, [M]; 0 where they are all."""
    count = stacked.shape[-1] - small.shape[-1]
    return jnp.maximum(_traces(stacked) - _traces(small), 0) / max(count, 1) * (count > 0)


def _traces(stacked: Array) -> Array:
    return jnp.trace(stacked, axis1=-2, axis2=-1)


def _shares(votes: Array, *left: Array) -> Array:
    # Selected, as in all weighted sums: who has no vote may overflow.
    return jnp.where(votes != 0, math.prod(left) * votes, 0)


def _times(x: Array, matrix: Array | None) -> Array:
    return x if matrix is None else jnp.matmul(x, matrix, precision=_PRECISION)


def _into(basis: Array | None, x: Array) -> Array:
    return x if basis is None else _times(basis.T, x)


def _out_of(basis: Array | None, x: Array) -> Array:
    return x if basis is None else _times(basis, x)


def _product(left: Array, value: Array, right: Array) -> Array:
    # As in `kronecker`: not as one product of three.
    return jnp.matmul(jnp.matmul(left, value, precision=_PRECISION), right, precision=_PRECISION)
