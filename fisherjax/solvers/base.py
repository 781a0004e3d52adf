"""What every solver returns and uses."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax.quadratic import Quadratic
from fisherjax.typing import Array, Params


class Info(NamedTuple):
    """How a solve went, leaf by leaf.

    Attributes:
        iterations: Products with the operator that the leaf used.
        residual: ||matvec(x) - rhs|| / ||rhs|| at the end.
        converged: Whether the residual is at or below the tolerance that was asked for.
    """

    iterations: Any
    residual: Any
    converged: Any


class Solution(NamedTuple):
    """The answer of a solver: the unknowns, put back together by `restore`, and how it went."""

    params: Params
    info: Info


Solver = Callable[[Quadratic], Solution]
"""`solve(problem) -> Solution`, made by a factory."""


def as_partial(function: Callable) -> Partial:
    """Make a function an argument of a compiled solver, which may carry its arrays as data."""
    return function if isinstance(function, Partial) else Partial(function)


def as_data(problem: Quadratic) -> Quadratic:
    """Make a problem an argument of a compiled solver, with the identity for what it leaves out."""
    given = (problem.matvec, problem.restore or _identity, problem.precondition or _identity)
    matvec, restore, precondition = map(as_partial, given)
    return problem._replace(matvec=matvec, restore=restore, precondition=precondition)


def _identity(blocks: Any) -> Any:
    return blocks


def solution(problem: Quadratic, x: Any, products: Any, tolerance: float = 1e-4) -> Solution:
    """Put the answer x together, and say how far from solved the system is."""
    problem = as_data(problem)
    # Products with the operator are one number, or one for each leaf.
    if jax.tree.structure(products) != jax.tree.structure(problem.rhs):
        products = jax.tree.map(lambda _: jnp.asarray(products), problem.rhs)
    x, info = _judged(problem, x, products, tolerance)
    return Solution(problem.restore(x), info)


@jax.jit
def _judged(problem: Quadratic, x: Any, count: Any, tolerance: Array) -> tuple[Any, Info]:
    residual = jax.tree.map(_relative_residual, problem.matvec(x), problem.rhs)
    # A system that float32 cannot hold has no answer, least of all the start.
    x = jax.tree.map(lambda x, r: jnp.where(jnp.isnan(r), jnp.nan, x), x, residual)
    return x, Info(count, residual, jax.tree.map(lambda r: r <= tolerance, residual))


def _relative_residual(product: Array, rhs: Array) -> Array:
    # In units of rhs: squares of 1e-25 are zero in float32, and would look solved.
    wanted, error = rhs / unit(rhs), (product - rhs) / unit(rhs)
    size = jnp.sqrt(dot(wanted, wanted))
    return ratio(size != 0, jnp.sqrt(dot(error, error)), size)


def unit(x: Array) -> Array:
    """Give a power of two near the largest entry: in its units squares stay in range.

    Dividing by it changes no bit of what is computed.
    """
    top = jnp.abs(x).max(initial=0)
    # With top = m 2^e and 1/2 <= m < 1 this is 2^(e - 1).
    return ratio(top > 0, top, 2 * jnp.frexp(top)[0]) + (top == 0)


def dot(left: Array, right: Array) -> Array:
    """Multiply two vectors in the highest precision."""
    return jnp.vdot(left, right, precision=jax.lax.Precision.HIGHEST)


def ratio(defined: Array, numerator: Any, denominator: Array) -> Array:
    """Divide where it is defined, and give zero elsewhere without ever dividing by zero."""
    # Both branches of a `where` are computed, and their derivatives too.
    return jnp.where(defined, numerator / jnp.where(defined, denominator, 1), 0)


def power_iteration(matvec: Callable, start: Any, iterations: Array) -> Any:
    """Turn each leaf towards its top eigenvector, of norm one; one that is zero stays zero."""

    def normalised(x: Array) -> Array:
        # First by a power of two, so that the square of a tiny vector is not zero.
        x = x / unit(x)
        return x * ratio(jnp.any(x != 0), 1, jnp.sqrt(dot(x, x)))

    def turn(_: Array, v: Any) -> Any:
        return jax.tree.map(normalised, matvec(v))

    return jax.lax.fori_loop(0, iterations, turn, jax.tree.map(normalised, start))
