"""Conjugate gradients, the default."""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import checks
from fisherjax.configuration import cached
from fisherjax.quadratic import Quadratic
from fisherjax.solvers.base import Solution, Solver, as_data, dot, ratio, solution, unit
from fisherjax.typing import Array

_map = jax.tree.map


@cached
def conjugate_gradients(tolerance: float = 1e-4, max_iterations: int = 200) -> Solver:
    """Make the default solver: conjugate gradients, with no step size and no validation data.

    Minimises 1/2 x^T A x - b^T x over init + the Krylov space of the first residual, or of the
    preconditioned one, where the problem comes with a preconditioner. A leaf stops when
    ||A x - b|| <= tolerance ||b||, or when it meets a direction without curvature.

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
        x, count = _conjugate_gradients(as_data(problem), tolerance, max_iterations)
        return solution(problem, x, count, tolerance)

    return solve


@jax.jit
def _conjugate_gradients(problem: Quadratic, tolerance: Array, max_iterations: Array) -> tuple:
    # In units of which squares stay in range, and which change no bit.
    lengths, sizes = _map(unit, problem.init), _map(unit, problem.rhs)
    init, rhs = _map(jnp.divide, problem.init, lengths), _map(jnp.divide, problem.rhs, sizes)
    bound = _map(lambda b: jnp.square(tolerance).astype(b.dtype) * dot(b, b), rhs)

    def multiply(x: Any) -> Any:
        # A leaf has one length and one size, so that its scaled system stays symmetric.
        return _map(jnp.divide, problem.matvec(_map(jnp.multiply, x, lengths)), sizes)

    def turn(r: Any) -> Any:
        return _map(jnp.divide, problem.precondition(r), steps)

    def unfinished(state: tuple) -> Array:
        _, residual, direction, _, _, step = state
        active = _map(lambda p, s, b: (s > b) & jnp.any(p != 0), direction, norms(residual), bound)
        # One loop for all leaves, until the last one is done.
        return (step < max_iterations) & jnp.stack(jax.tree.leaves(active)).any()

    def norms(residual: Any) -> Any:
        return _map(lambda r: dot(r, r), residual)

    def body(state: tuple) -> tuple:
        x, residual, direction, height, count, step = state
        product = multiply(direction)
        curvature = _map(dot, direction, product)
        # A leaf that is done, or whose direction has no curvature left, stands still from now on.
        going = _map(lambda c, s, b: (c > 0) & (s > b), curvature, norms(residual), bound)
        alpha = _map(ratio, going, height, curvature)
        x = _map(lambda x, a, p: x + a * p, x, alpha, direction)
        residual = _map(lambda r, a, q: r - a * q, residual, alpha, product)
        steepest = turn(residual)
        new = _map(lambda g, r, z, h: jnp.where(g, dot(r, z), h), going, residual, steepest, height)
        beta = _map(ratio, going, new, height)
        # Zero for a leaf that is done, by which `unfinished` knows it.
        direction = _map(lambda g, z, b, p: g * (z + b * p), going, steepest, beta, direction)
        return x, residual, direction, new, _map(jnp.add, count, going), step + 1

    residual = _map(jnp.subtract, rhs, multiply(init))
    # The scale of a preconditioner drops out of the iterates, but not out of the range of float32:
    # it is set to that of the first residual.
    steps = _map(unit, problem.precondition(residual))
    direction = turn(residual)
    height = _map(dot, residual, direction)
    count = _map(lambda _: jnp.zeros((), jnp.int32), height)
    state = (init, residual, direction, height, count, 0)
    x, _, _, _, count, _ = jax.lax.while_loop(unfinished, body, state)
    return _map(jnp.multiply, x, lengths), count
