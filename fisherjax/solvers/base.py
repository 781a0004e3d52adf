"""What every solver returns and uses."""

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax import tree
from fisherjax._core.compiler import jit
from fisherjax.quadratic import Quadratic, restored
from fisherjax.typing import Array, Params, Scalar


class Status(enum.IntEnum):
    """How the solve of one block ended."""

    CONVERGED = 0
    """The residual is at or below the tolerance; what that promises `fisherjax.solvers` says."""
    OUT_OF_ITERATIONS = 1
    """It is not, after as many iterations as were allowed."""
    NO_CURVATURE = 2
    """No client has any, so that the block keeps its start, the weighted mean."""
    BROKE_DOWN = 3
    """A direction without or with negative curvature, or numbers beyond the range of the dtype."""
    STEPS_TAKEN = 4
    """It is not, and the method takes a fixed number of steps whatever the residual."""


class Info(NamedTuple):
    """How a solve went, leaf by leaf.

    Attributes:
        iterations: Products with the operator that the leaf used.
        residual: ||matvec(x) - rhs|| / ||rhs|| at the end.
        status: A `Status`, as an integer.
        covered: Share of the parameters that are not left to K-FAC's `fallback`; one number.
    """

    iterations: Any
    residual: Any
    status: Any
    covered: Any = 1.0

    @property
    def converged(self) -> Any:
        """Whether the residual is at or below the tolerance that was asked for, leaf by leaf."""
        return jax.tree.map(lambda status: status == Status.CONVERGED, self.status)


class Solution(NamedTuple):
    """The answer of a solver: the unknowns, put back together by `restore`, and how it went."""

    params: Params
    info: Info

    def report(self, covered: float) -> Any:
        """Give the info with the share that is covered; what is no `Info` as it is."""
        return self.info._replace(covered=covered) if isinstance(self.info, Info) else self.info


Solver = Callable[[Quadratic], Solution]
"""`solve(problem) -> Solution`, made by a factory."""


def as_partial(function: Callable) -> Partial:
    """Make a function an argument of a compiled solver, which may carry its arrays as data."""
    return function if isinstance(function, Partial) else Partial(function)


def as_data(problem: Quadratic) -> Quadratic:
    """Make a problem an argument of a compiled solver, with the identity for what it leaves out."""
    given = (problem.matvec, problem.restore or identity, problem.precondition or identity)
    matvec, restore, precondition = map(as_partial, given)
    return problem._replace(matvec=matvec, restore=restore, precondition=precondition)


def identity(blocks: Any) -> Any:
    """Return blocks as they are."""
    return blocks


def solution(
    problem: Quadratic,
    x: Any,
    products: Any,
    tolerance: float = 1e-4,
    unsolved: Any = Status.STEPS_TAKEN,
    checked: bool = False,
) -> Solution:
    """Put the answer x together, and say how far from solved the system is.

    The number of products, and the status of what is unsolved, are one for all leaves, or for each.
    An answer that is `checked` is not finite already where the system is not; it does not wait for
    the residual, which the compiler then leaves out where nobody reads it.
    """
    problem = as_data(problem)
    each = jax.tree.structure(problem.rhs)
    products, unsolved = (
        x
        if jax.tree.structure(x) == each
        else jax.tree.map(lambda _, x=x: jnp.asarray(x), problem.rhs)
        for x in (products, unsolved)
    )
    return _judged(problem, x, tolerance, Info(products, None, unsolved), checked)


@partial(jit, static_argnums=4)
def _judged(problem: Quadratic, x: Any, tolerance: Scalar, info: Info, checked: bool) -> Solution:
    # How it went has no derivative.
    found, rhs = jax.lax.stop_gradient((x, problem.rhs))
    residual = jax.tree.map(_relative_residual, jax.lax.stop_gradient(problem.matvec(found)), rhs)
    if not checked:
        # A system that float32 cannot hold has no answer, least of all the start.
        x = jax.tree.map(lambda x, r: jnp.where(jnp.isnan(r), jnp.nan, x), x, residual)

    def status(residual: Array, unsolved: Array, mean: Array) -> Array:
        ended = jnp.where(jnp.isfinite(residual), unsolved, Status.BROKE_DOWN)
        ended = jnp.where(residual <= tolerance, Status.CONVERGED, ended)
        return jnp.where(mean == 0, Status.NO_CURVATURE, ended).astype(jnp.int32)

    means = jax.tree.map(lambda _: 1, residual) if problem.means is None else problem.means
    ended = jax.tree.map(status, residual, info.status, means)
    return Solution(restored(problem, x), Info(info.iterations, residual, ended))


def _relative_residual(product: Array, rhs: Array) -> Array:
    # In units of rhs: squares of 1e-25 are zero in float32, and would look solved.
    size = tree.unit(rhs)
    wanted, error = rhs / size, (product - rhs) / size
    norm = jnp.sqrt(dot(wanted, wanted))
    return ratio(norm != 0, jnp.sqrt(dot(error, error)), norm)


def dot(left: Array, right: Array) -> Array:
    """Multiply two vectors in the highest precision."""
    return jnp.vdot(left, right, precision=jax.lax.Precision.HIGHEST)


def ratio(defined: Array, numerator: Any, denominator: Array) -> Array:
    """Divide where it is defined, and give zero elsewhere without ever dividing by zero."""
    # Both branches of a `where` are computed, and their derivatives too.
    return jnp.where(defined, numerator / jnp.where(defined, denominator, 1), 0)


def power_iteration(matvec: Callable, start: Any, iterations: Scalar) -> Any:
    """Turn each leaf towards its top eigenvector, of norm one; one that is zero stays zero."""

    def normalised(x: Array) -> Array:
        # First by a power of two, so that the square of a tiny vector is not zero.
        x = x / tree.unit(x)
        return x * ratio(tree.any_nonzero(x), 1, jnp.sqrt(dot(x, x)))

    def turn(_: Array, v: Any) -> Any:
        return jax.tree.map(normalised, matvec(v))

    return jax.lax.fori_loop(0, iterations, turn, jax.tree.map(normalised, start))
