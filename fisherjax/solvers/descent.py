"""Solve by gradient descent, the solver of FedFisher's theory."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.quadratic import Quadratic
from fisherjax.solvers.base import (
    Solution,
    Solver,
    as_data,
    by_leaf,
    dot,
    power_iteration,
    ratio,
    solution,
)
from fisherjax.typing import Array, Scalar


@cached
def gradient_descent(steps: int = 2000, power_iterations: int = 50) -> Solver:
    """Make gradient descent with a constant step, x <- x - (A x - b) / lambda_max.

    lambda_max of each leaf is estimated by power iteration from the first residual. The iterates
    stay in the Krylov space of this residual, so the largest eigenvalue there is the one that
    limits the step size. Descent takes all of its steps, whatever the residual is. Along
    eigenvalues that are small compared with lambda_max / steps the unknowns hardly move.
    Derivatives are those of forward mode; for `jax.grad` take `conjugate_gradients`.

    Args:
        steps: Number of descent steps (default 2000).
        power_iterations: Number of products for the estimate of lambda_max (default 50).

    Returns:
        The solver. FedFisher's theory assumes it; `conjugate_gradients` is faster.

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

    @by_leaf
    def solve(problem: Quadratic) -> Solution:
        # The numbers are traced, so that solvers with other numbers share the compiled program.
        x = _gradient_descent(as_data(problem), steps, power_iterations)
        return solution(problem, x, steps + power_iterations)

    return solve


@partial(jit, autotune=True)
def _gradient_descent(problem: Quadratic, steps: Scalar, power_iterations: Scalar) -> Any:
    matvec, rhs, init, *_ = problem
    top = power_iteration(matvec, jax.tree.map(jnp.subtract, rhs, matvec(init)), power_iterations)
    # The Rayleigh quotient of a vector of norm one.
    largest = jax.tree.map(dot, top, matvec(top))
    # A leaf without curvature keeps its start.
    step = jax.tree.map(lambda s: ratio(s > 0, 1, s), largest)

    def descend(_: Array, x: Any) -> Any:
        return jax.tree.map(lambda x, s, q, b: x - s * (q - b), x, step, matvec(x), rhs)

    return jax.lax.fori_loop(0, steps, descend, init)
