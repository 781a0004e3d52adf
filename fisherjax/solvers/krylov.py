"""Solve by conjugate gradients, the default solver."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.quadratic import Quadratic
from fisherjax.solvers.base import (
    Solution,
    Solver,
    Status,
    as_data,
    by_leaf,
    dot,
    identity,
    ratio,
    solution,
)
from fisherjax.solvers.direct import closed_form
from fisherjax.typing import Array, Scalar

_map = jax.tree.map


@cached
def conjugate_gradients(tolerance: float = 1e-4, max_iterations: int = 200) -> Solver:
    """Make conjugate gradients, the default solver, which needs no step size or validation data.

    It minimises 1/2 x^T A x - b^T x over init + the Krylov space of the first residual, or of the
    preconditioned first residual if the problem has a preconditioner. A leaf stops when
    ||A x - b|| <= tolerance ||b||, or at a direction without curvature. That bounds how far the
    quadratic is above its minimum (`fisherjax.solvers` has the bound). In a system without damping
    that is singular, or nearly so, the unknowns may still be far from a solution. A diagonal system
    needs no iteration: its solution is the quotient of `closed_form`, for entries of any size.

    Args:
        tolerance: Relative residual at which a leaf stops (default 1e-4).
        max_iterations: Most products with the operator (default 200).

    Returns:
        The solver.

    Raises:
        ValueError: If the tolerance is negative or max_iterations is not positive.

    Example:
        >>> problem = Quadratic(lambda x: 2 * x, jnp.array([3.0, 5.0]), jnp.zeros(2))
        >>> print(conjugate_gradients()(problem).params)
        [1.5 2.5]

    Source: Hestenes and Stiefel, Methods of conjugate gradients for solving linear systems, 1952.
    """
    checks.count("max_iterations", max_iterations)
    checks.number("tolerance", tolerance)

    @by_leaf
    def solve(problem: Quadratic) -> Solution:
        # A traced problem has no value of this flag.
        if not checks.is_traced(problem.is_diagonal) and problem.is_diagonal:
            return closed_form(floor=0.0)(problem)
        return _conjugate_gradients(as_data(problem), tolerance, max_iterations)

    return solve


@jit
def _conjugate_gradients(problem: Quadratic, tolerance: Scalar, max_iterations: Scalar) -> Solution:
    matvec, precondition = problem.matvec, problem.precondition or identity

    def multiply(system: tuple) -> tuple:
        x, size = system
        return matvec(x), size

    limits = tolerance, max_iterations, problem.exponents is not None, problem.slack is not None

    def solve(_: Any, system: tuple) -> tuple:
        residual, size = system
        x, count, broken = _iterate(matvec, precondition, residual, size, limits)
        return (x, size), (count, broken)

    # The unknown is the difference to the start, so that in a singular system the component of the
    # start in the null space stays. The norm of the right-hand side, which the tolerance refers to,
    # is passed on as a second unknown with derivative zero. It is written as a multiple of the
    # residual, because JAX transposes a solve with respect to all of its right-hand side.
    residual = _map(jnp.subtract, problem.rhs, matvec(problem.init))
    size = jax.lax.stop_gradient(_map(_norm, problem.rhs))
    size = _map(lambda size, r: size + 0 * r.sum(), size, residual)
    # Derivatives come from solves of the same system. A while loop has no reverse derivative.
    linear_solve = partial(jax.lax.custom_linear_solve, symmetric=True, has_aux=True)
    (difference, _), (count, broken) = linear_solve(multiply, (residual, size), solve)
    unsolved = _map(lambda b: jnp.where(b, Status.BROKE_DOWN, Status.OUT_OF_ITERATIONS), broken)
    x = _map(jnp.add, problem.init, difference)
    return solution(problem, x, count, tolerance, unsolved)


def _norm(x: Array) -> Array:
    unit = tree.power_of_two(x)
    return unit * jnp.sqrt(dot(x / unit, x / unit))


def _iterate(
    matvec: Callable,
    precondition: Callable,
    rhs: Any,
    size: Any,
    limits: tuple[Scalar, Scalar, bool, bool],
) -> tuple[Any, Any, Any]:
    """Solve from zero, until residuals are at most `tolerance` times `size`.

    For a leaf with size zero, until they are at most `tolerance` times the norm of `rhs`.

    Returns:
        The unknowns, the number of iterations of each leaf, and whether each broke down.
    """
    tolerance, max_iterations, at_scale_one, is_flexible = limits
    structure = jax.tree.structure(rhs)

    # The scalars of all leaves are one vector, because each small operation costs compile time.
    def stack(scalars: Any) -> Array:
        return jnp.stack(jax.tree.leaves(scalars))

    def dots(left: Any, right: Any) -> Array:
        return stack(_map(dot, left, right))

    def map_leaves(update: Callable, scalars: Array, *trees: Any) -> Any:
        return _map(update, jax.tree.unflatten(structure, list(scalars)), *trees)

    def scale(scalars: Array, x: Any) -> Any:
        return map_leaves(lambda s, x: s.astype(x.dtype) * x, scalars, x)

    def mask(flags: Array, x: Any) -> Any:
        return map_leaves(lambda flag, x: jnp.where(flag, x, 0), flags, x)

    # In these units, which change no bit, squares stay in range.
    units = _map(tree.power_of_two, rhs)
    rhs = _map(jnp.divide, rhs, units)
    sizes, squares = stack(_map(jnp.divide, size, units)), dots(rhs, rhs)
    norms = jnp.where(sizes > 0, sizes, jnp.sqrt(squares))
    goals = tolerance * norms
    # By rounding, the residual of the recurrence drifts from the true residual of x. It drifts more
    # if the first residual is large compared with the norm that the tolerance refers to.
    drifts = 64 * jnp.finfo(goals.dtype).eps * jnp.maximum(norms, jnp.sqrt(squares))
    bounds = jnp.square(jnp.maximum(goals - drifts, goals / 2))

    def apply_precondition(r: Any) -> Any:
        return _map(jnp.divide, precondition(r), steps)

    def is_unfinished(state: tuple) -> Array:
        *_, active, step = state
        # One loop runs for all leaves, until the last one has converged.
        return (step < max_iterations) & active.any()

    def body(state: tuple) -> tuple:
        x, residual, direction, height, count, broken, active, step = state
        product = _map(jnp.divide, matvec(direction), lengths)
        curvature = dots(direction, product)
        # A leaf that has converged, or whose direction has no curvature, does not change any more.
        moves = active & (curvature > 0)
        broken = broken | (active & ~moves)
        alpha = ratio(moves, height, curvature)
        x = _map(jnp.add, x, scale(alpha, _map(jnp.divide, direction, lengths)))
        old, residual = residual, _map(jnp.subtract, residual, scale(alpha, product))
        active = moves & (dots(residual, residual) > bounds)
        # The residuals and directions of converged leaves are zero, so that products with wide
        # layers are skipped (`_wide_layers`).
        steepest = apply_precondition(mask(active, residual))
        new = dots(residual, steepest)
        beta = ratio(active, new, height)
        if is_flexible:
            # With a linear preconditioner, the preconditioned residual is orthogonal to the
            # previous residual. With an iterative one it is not, and that component is subtracted
            # (Notay, Flexible conjugate gradients, SIAM Journal on Scientific Computing 2000).
            beta = beta - ratio(active, dots(old, steepest), height)
        direction = mask(active, _map(jnp.add, steepest, scale(beta, direction)))
        return x, residual, direction, new, count + moves, broken, active, step + 1

    # The scale of the operator is estimated by one product. A system at scale one needs none.
    lengths = _map(jnp.ones_like, units) if at_scale_one else _map(tree.power_of_two, matvec(rhs))
    # The scale of the preconditioner does not change the iterates, but it could leave the range of
    # float32, so that it is divided by its scale at the first residual.
    first = precondition(rhs)
    steps = _map(tree.power_of_two, first)
    direction = _map(jnp.divide, first, steps)
    count, broken = jnp.zeros(len(bounds), jnp.int32), jnp.zeros(len(bounds), bool)
    start = (_map(jnp.zeros_like, rhs), rhs, direction, dots(rhs, direction), count, broken)
    state = *start, squares > bounds, 0
    x, *_, count, broken, _, _ = jax.lax.while_loop(is_unfinished, body, state)
    count, broken = (jax.tree.unflatten(structure, list(each)) for each in (count, broken))
    return _map(jnp.multiply, x, units), count, broken
