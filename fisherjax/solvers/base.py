"""Define what solvers return, and functions that they share."""

import enum
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from fisherjax import tree
from fisherjax._core.compiler import jit
from fisherjax.quadratic import Quadratic, restored
from fisherjax.typing import Array, Params, Scalar


class Status(enum.IntEnum):
    """How the solve of one block ended."""

    CONVERGED = 0
    """The residual is at most the tolerance; see `fisherjax.solvers` for what that bounds."""
    OUT_OF_ITERATIONS = 1
    """The residual is larger than the tolerance after the allowed number of iterations."""
    NO_CURVATURE = 2
    """No client has curvature in this block, which keeps its start, the centre of damping."""
    BROKE_DOWN = 3
    """A direction had no or negative curvature, or a number was not finite."""
    STEPS_TAKEN = 4
    """The residual is larger than the tolerance, but the method takes a fixed number of steps."""


class Info(NamedTuple):
    """Result of a solve, leaf by leaf.

    Attributes:
        iterations: Number of products with the operator that the leaf needed.
        residual: Relative residual ||matvec(x) - rhs|| / ||rhs|| at the end.
        status: A `Status`, as an integer.
        covered: Share of the parameters that K-FAC covers without its `fallback`; one number.
    """

    iterations: Any
    residual: Any
    status: Any
    covered: Any = 1.0

    @property
    def converged(self) -> Any:
        """Return whether the residual is at most the tolerance, leaf by leaf."""
        return jax.tree.map(lambda status: status == Status.CONVERGED, self.status)


class Solution(NamedTuple):
    """The result of a solver.

    Attributes:
        params: The unknowns as params, put together by `Quadratic.restore`.
        info: Iterations, residual and status of each leaf.
    """

    params: Params
    info: Info

    def report(self, covered: float) -> Any:
        """Return the info with the share of covered parameters; another type of info unchanged."""
        return self.info._replace(covered=covered) if isinstance(self.info, Info) else self.info


Solver = Callable[[Quadratic], Solution]
"""A function `solve(problem) -> Solution`, made by a factory."""


def by_leaf(solver: Solver) -> Solver:
    """Mark a solver that treats each leaf of a problem for itself, and return it.

    Merges solve layers of one shape one after another by such a solver, which compiles one program
    for all of them. A solver without the mark gets all leaves in one problem.

    Example:
        >>> solve = by_leaf(lambda problem: Solution(problem.restore(problem.rhs), None))
        >>> solve.is_by_leaf
        True
    """
    solver.is_by_leaf = True  # type: ignore[attr-defined]
    return solver


def as_partial(function: Callable) -> Partial:
    """Return a function as a `Partial`, which can be an argument of a compiled function."""
    return function if isinstance(function, Partial) else Partial(function)


def as_data(problem: Quadratic) -> Quadratic:
    """Return a problem that can be an argument of a compiled solver.

    Its functions are `Partial`s, and those that it lacks are the identity.
    """
    functions = (problem.matvec, problem.restore or identity, problem.precondition or identity)
    matvec, restore, precondition = map(as_partial, functions)
    return problem._replace(matvec=matvec, restore=restore, precondition=precondition)


def identity(blocks: Any) -> Any:
    """Return blocks unchanged."""
    return blocks


def solution(
    problem: Quadratic,
    x: Any,
    products: Any,
    tolerance: Scalar = 1e-4,
    unsolved: Any = Status.STEPS_TAKEN,
    checked: bool = False,
) -> Solution:
    """Return the solution of blocks x, with the residual and the status of each leaf.

    Args:
        problem: The system.
        x: The solver's result, blocks.
        products: Number of products with the operator, one for all leaves or one for each.
        tolerance: Relative residual at which a leaf has converged.
        unsolved: `Status` of a leaf that has not converged, one for all leaves or one for each.
        checked: Whether x is already NaN where the system is not finite. Then x does not depend on
            the residual, and the compiler omits the residual if it is not used.
    """
    problem = as_data(problem)
    structure = jax.tree.structure(problem.rhs)
    products, unsolved = (
        x if jax.tree.structure(x) == structure else _for_each(x, problem.rhs)
        for x in (products, unsolved)
    )
    return _solution(problem, x, tolerance, Info(products, None, unsolved), checked)


def _for_each(number: Any, blocks: Any) -> Any:
    # NumPy compiles no program for a Python number.
    number = number if isinstance(number, jax.Array) else np.asarray(number)
    return jax.tree.map(lambda _: number, blocks)


@partial(jit, static_argnums=4)
def _solution(problem: Quadratic, x: Any, tolerance: Scalar, info: Info, checked: bool) -> Solution:
    # The info has no derivative.
    found, rhs = jax.lax.stop_gradient((x, problem.rhs))
    residual = jax.tree.map(_relative_residual, jax.lax.stop_gradient(problem.matvec(found)), rhs)
    if not checked:
        # A system with numbers beyond the range of the dtype has no solution; the start, which the
        # solver may have kept, must not look like one.
        x = jax.tree.map(lambda x, r: jnp.where(jnp.isnan(r), jnp.nan, x), x, residual)

    def status(residual: Array, unsolved: Array, mean: Array) -> Array:
        ended = jnp.where(jnp.isfinite(residual), unsolved, Status.BROKE_DOWN)
        ended = jnp.where(residual <= tolerance, Status.CONVERGED, ended)
        return jnp.where(mean == 0, Status.NO_CURVATURE, ended).astype(jnp.int32)

    means = jax.tree.map(lambda _: 1, residual) if problem.means is None else problem.means
    ended = jax.tree.map(status, residual, info.status, means)
    return Solution(restored(problem, x), Info(info.iterations, residual, ended))


def _relative_residual(product: Array, rhs: Array) -> Array:
    # In units of rhs: the square of 1e-25 is zero in float32, which would look like a solution.
    size = tree.power_of_two(rhs)
    wanted, error = rhs / size, (product - rhs) / size
    norm = jnp.sqrt(dot(wanted, wanted))
    return ratio(norm != 0, jnp.sqrt(dot(error, error)), norm)


def dot(left: Array, right: Array) -> Array:
    """Return the inner product of two vectors, in the highest precision."""
    return jnp.vdot(left, right, precision=jax.lax.Precision.HIGHEST)


def ratio(defined: Array, numerator: Any, denominator: Array) -> Array:
    """Return the quotient where it is defined and zero elsewhere, without a division by zero."""
    # Both branches of a `where` are computed, and so are their derivatives.
    return jnp.where(defined, numerator / jnp.where(defined, denominator, 1), 0)


def power_iteration(matvec: Callable, start: Any, iterations: Scalar) -> Any:
    """Estimate the top eigenvector of each leaf, of norm one; a leaf that is zero stays zero."""

    def normalize(x: Array) -> Array:
        # After the division by a power of two, the square of a tiny vector is not zero.
        x = x / tree.power_of_two(x)
        return x * ratio(tree.any_nonzero(x), 1, jnp.sqrt(dot(x, x)))

    def step(_: Array, v: Any) -> Any:
        return jax.tree.map(normalize, matvec(v))

    return jax.lax.fori_loop(0, iterations, step, jax.tree.map(normalize, start))
