"""Conjugate gradients, the default."""

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
from fisherjax.solvers.base import Solution, Solver, Status, as_data, dot, identity, ratio, solution
from fisherjax.typing import Array, Scalar

_map = jax.tree.map


@cached
def conjugate_gradients(tolerance: float = 1e-4, max_iterations: int = 200) -> Solver:
    """Make the default solver: conjugate gradients, with no step size and no validation data.

    Minimises 1/2 x^T A x - b^T x over init + the Krylov space of the first residual, or of the
    preconditioned one, where the problem comes with a preconditioner. A leaf stops when
    ||A x - b|| <= tolerance ||b||, or when it meets a direction without curvature. That bounds how
    far the quadratic is above its minimum, `fisherjax.solvers` says by how much; of a system
    without damping that is singular or nearly so, the unknowns may still be far.

    Args:
        tolerance: Relative residual at which a leaf stops.
        max_iterations: The most products with the operator.

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

    def solve(problem: Quadratic) -> Solution:
        x, count, unsolved = _conjugate_gradients(as_data(problem), tolerance, max_iterations)
        return solution(problem, x, count, tolerance, unsolved)

    return solve


@jit
def _conjugate_gradients(problem: Quadratic, tolerance: Scalar, max_iterations: Scalar) -> tuple:
    matvec, precondition = problem.matvec, problem.precondition or identity

    def multiply(system: tuple) -> tuple:
        x, size = system
        return matvec(x), size

    limits = tolerance, max_iterations, problem.exponents is not None, problem.slack is not None

    def solve(_: Any, system: tuple) -> tuple:
        residual, size = system
        x, count, broken = _descended(matvec, precondition, residual, size, limits)
        return (x, size), (count, broken)

    # What is solved for is the way from the start, which in a singular system keeps what the start
    # has in the null space. The size of the right-hand side, which the tolerance is relative to,
    # goes along as an unknown of its own, whose derivative is zero: that is written as a multiple
    # of the residual, because JAX transposes a solve only by all of its right-hand side.
    residual = _map(jnp.subtract, problem.rhs, matvec(problem.init))
    size = jax.lax.stop_gradient(_map(_norm, problem.rhs))
    size = _map(lambda size, r: size + 0 * r.sum(), size, residual)
    # Derivatives are solves of the same system, not of the loop, which has none.
    linear_solve = partial(jax.lax.custom_linear_solve, symmetric=True, has_aux=True)
    (way, _), (count, broken) = linear_solve(multiply, (residual, size), solve)
    unsolved = _map(lambda b: jnp.where(b, Status.BROKE_DOWN, Status.OUT_OF_ITERATIONS), broken)
    return _map(jnp.add, problem.init, way), count, unsolved


def _norm(x: Array) -> Array:
    unit = tree.unit(x)
    return unit * jnp.sqrt(dot(x / unit, x / unit))


def _descended(
    matvec: Callable,
    precondition: Callable,
    rhs: Any,
    size: Any,
    limits: tuple[Scalar, Scalar, bool, bool],
) -> tuple[Any, Any, Any]:
    """Solve from zero, to residuals of `tolerance` times size, or rhs if that is zero."""
    tolerance, max_iterations, at_scale_one, is_flexible = limits
    structure = jax.tree.structure(rhs)

    # What there is of each leaf is one vector: a compiler spends its time on every small operation.
    def stacked(scalars: Any) -> Array:
        return jnp.stack(jax.tree.leaves(scalars))

    def dots(left: Any, right: Any) -> Array:
        return stacked(_map(dot, left, right))

    def of_leaves(update: Callable, scalars: Array, *trees: Any) -> Any:
        return _map(update, jax.tree.unflatten(structure, list(scalars)), *trees)

    def scaled(scalars: Array, x: Any) -> Any:
        return of_leaves(lambda s, x: s.astype(x.dtype) * x, scalars, x)

    def kept(flags: Array, x: Any) -> Any:
        return of_leaves(lambda flag, x: jnp.where(flag, x, 0), flags, x)

    # In units of which squares stay in range, and which change no bit.
    units = _map(tree.unit, rhs)
    rhs = _map(jnp.divide, rhs, units)
    sizes, squares = stacked(_map(jnp.divide, size, units)), dots(rhs, rhs)
    judged = jnp.where(sizes > 0, sizes, jnp.sqrt(squares))
    goals = tolerance * judged
    # The residual that is carried along drifts by rounding from that of the answer: by more, the
    # longer the first one is beside what it is judged by.
    drifts = 64 * jnp.finfo(goals.dtype).eps * jnp.maximum(judged, jnp.sqrt(squares))
    bounds = jnp.square(jnp.maximum(goals - drifts, goals / 2))

    def turn(r: Any) -> Any:
        return _map(jnp.divide, precondition(r), steps)

    def unfinished(state: tuple) -> Array:
        *_, active, step = state
        # One loop for all leaves, until the last one is done.
        return (step < max_iterations) & active.any()

    def body(state: tuple) -> tuple:
        x, residual, direction, height, count, broken, active, step = state
        product = _map(jnp.divide, matvec(direction), lengths)
        curvature = dots(direction, product)
        # A leaf that is done, or whose direction has no curvature left, stands still from now on.
        going = active & (curvature > 0)
        broken = broken | (active & ~going)
        alpha = ratio(going, height, curvature)
        x = _map(jnp.add, x, scaled(alpha, _map(jnp.divide, direction, lengths)))
        old, residual = residual, _map(jnp.subtract, residual, scaled(alpha, product))
        active = going & (dots(residual, residual) > bounds)
        # A leaf that is done is not looked at: residuals and directions of zeros cost wide layers
        # nothing.
        steepest = turn(kept(active, residual))
        new = dots(residual, steepest)
        beta = ratio(active, new, height)
        if is_flexible:
            # What a linear preconditioner makes of a residual is orthogonal to the one before; the
            # answer of a solve is not, and has it taken out (Notay, Flexible conjugate gradients,
            # SIAM Journal on Scientific Computing 2000).
            beta = beta - ratio(active, dots(old, steepest), height)
        direction = kept(active, _map(jnp.add, steepest, scaled(beta, direction)))
        return x, residual, direction, new, count + going, broken, active, step + 1

    # The scale of the operator, by one product: it leaves the range of float32 no more than that of
    # the right-hand side. Systems at scale one need none.
    lengths = _map(jnp.ones_like, units) if at_scale_one else _map(tree.unit, matvec(rhs))
    # The scale of a preconditioner drops out of the iterates, but not out of the range of float32:
    # it is set to that of the first residual.
    first = precondition(rhs)
    steps = _map(tree.unit, first)
    direction = _map(jnp.divide, first, steps)
    count, broken = jnp.zeros(len(bounds), jnp.int32), jnp.zeros(len(bounds), bool)
    start = (_map(jnp.zeros_like, rhs), rhs, direction, dots(rhs, direction), count, broken)
    x, *_, count, broken, _, _ = jax.lax.while_loop(unfinished, body, (*start, squares > bounds, 0))
    count, broken = (jax.tree.unflatten(structure, list(each)) for each in (count, broken))
    return _map(jnp.multiply, x, units), count, broken
