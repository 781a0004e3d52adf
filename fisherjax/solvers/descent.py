"""Gradient descent, the method of the theory."""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.quadratic import Quadratic
from fisherjax.solvers.base import Solution, Solver, as_data, dot, power_iteration, ratio, solution
from fisherjax.typing import Array, Scalar


@cached
def gradient_descent(steps: int = 2000, power_iterations: int = 50) -> Solver:
    """Make plain gradient descent, x <- x - (A x - b) / lambda_max, the method of the theory.

    lambda_max of each leaf comes from power iteration started at the first residual: the iterates
    never leave the Krylov space of that residual, so its largest eigenvalue there is the one that
    counts. Descent takes its steps whatever the residual: along eigenvalues that are small beside
    lambda_max / steps the unknowns have hardly moved.

    Args:
        steps: Descent steps.
        power_iterations: Products spent on lambda_max.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> problem = Quadratic(lambda x: 2 * x, jnp.array([3.0]), jnp.zeros(1))
        >>> print(gradient_descent(steps=100)(problem).params)
        [1.5]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, equation 8 and Lemma 1.
    """
    checks.count("steps", steps)
    checks.count("power_iterations", power_iterations)

    def solve(problem: Quadratic) -> Solution:
        # Numbers are traced, so that solvers with other numbers of steps share the program.
        x = _gradient_descent(as_data(problem), steps, power_iterations)
        return solution(problem, x, steps + power_iterations)

    return solve


@jit
def _gradient_descent(problem: Quadratic, steps: Scalar, power_iterations: Scalar) -> Any:
    matvec, rhs, init, *_ = problem
    top = power_iteration(matvec, jax.tree.map(jnp.subtract, rhs, matvec(init)), power_iterations)
    # The Rayleigh quotient of a vector of norm one.
    largest = jax.tree.map(dot, top, matvec(top))
    # A leaf without curvature stays where it is.
    step = jax.tree.map(lambda s: ratio(s > 0, 1, s), largest)

    def descend(_: Array, x: Any) -> Any:
        return jax.tree.map(lambda x, s, q, b: x - s * (q - b), x, step, matvec(x), rhs)

    return jax.lax.fori_loop(0, steps, descend, init)
