"""The solvers of FedLPA's authors: the expectation approximation, and descent from there."""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.quadratic import Quadratic
from fisherjax.solvers.base import Solution, Solver, as_data, power_iteration, solution
from fisherjax.typing import Array, Scalar


@cached
def expectation_approximation() -> Solver:
    """Make FedLPA's approximate solver, exact if one of the factors is equal at all clients.

        V = (sum_i p_i A_i)^-1 (sum_i p_i A_i V_i G_i) (sum_i p_i G_i)^-1.

    Raises:
        ValueError: On solving, if the problem has no preconditioner; FedLPA's is the approximation.

    Example:
        >>> half = jax.tree_util.Partial(lambda x: x / 2)
        >>> problem = Quadratic(lambda x: 2 * x, jnp.ones(2), jnp.zeros(2), precondition=half)
        >>> solved = expectation_approximation()(problem)
        >>> print(solved.params, solved.info.residual)
        [0.5 0.5] 0.0

    Source: FedLPA, section 3.3.
    """

    def solve(problem: Quadratic) -> Solution:
        return solution(problem, _approximation(problem), 1)

    return solve


@cached
def residual_descent(
    steps: int = 10_000, learning_rate: float = 1.0, power_iterations: int = 50
) -> Solver:
    r"""Make the authors' refinement: gradient descent on the mean squared residual of each layer.

        V <- V - min(2 eta / N, 1 / lambda_max^2) L(L(V) - Z),   L(V) = sum_i p_i A_i V G_i,

    from the expectation approximation, where N is the number of entries of V. An error along an
    eigenvector of L with a small eigenvalue lambda shrinks by a factor of 1 - 2 eta lambda^2 / N
    per step only, so that large layers hardly move.

    Args:
        steps: Number of gradient steps.
        learning_rate: eta.
        power_iterations: Number of power iterations for lambda_max, from the first residual.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> poor = jax.tree_util.Partial(lambda x: 0 * x)
        >>> problem = Quadratic(lambda x: 2 * x, jnp.ones(2), jnp.zeros(2), precondition=poor)
        >>> print(residual_descent(steps=100)(problem).params)
        [0.5 0.5]

    Source: the authors' code of FedLPA, which has no cap: steps beyond 2 / lambda_max^2 diverge.
    """
    checks.count("steps", steps)
    checks.positive("learning_rate", learning_rate)
    checks.count("power_iterations", power_iterations)

    def solve(problem: Quadratic) -> Solution:
        started = as_data(problem._replace(init=_approximation(problem)))
        # The numbers are traced, so that solvers with other steps or rates share one program.
        blocks = _descend(started, steps, learning_rate, power_iterations)
        # Each step needs two products with L.
        return solution(problem, blocks, 2 * steps + power_iterations + 1)

    return solve


@jit
def _descend(problem: Quadratic, steps: Scalar, rate: Scalar, power_iterations: Scalar) -> Any:
    matvec, rhs, start, *_ = problem

    def residual(blocks: Any) -> Any:
        return jax.tree.map(jnp.subtract, matvec(blocks), rhs)

    top = power_iteration(matvec, residual(start), power_iterations)
    # The top eigenvector has norm one, so that its product with L has norm lambda_max.
    largest = jax.tree.map(jnp.linalg.norm, matvec(top))

    def step(x: Array, largest: Array, slope: Array) -> Array:
        # If a layer has no curvature, lambda_max is zero; its cap is then huge instead of 1 / 0.
        cap = 1 / jnp.maximum(jnp.square(largest), jnp.finfo(largest.dtype).tiny)
        return x - jnp.minimum(2 * rate / x.size, cap).astype(x.dtype) * slope

    def descend(_: Array, blocks: Any) -> Any:
        return jax.tree.map(step, blocks, largest, matvec(residual(blocks)))

    return jax.lax.fori_loop(0, steps, descend, start)


def _approximation(problem: Quadratic) -> Any:
    # The flag of a traced problem has no value.
    if problem.precondition is None or problem.is_diagonal is True:
        raise ValueError(
            "This solver starts from the expectation approximation, which is the preconditioner of "
            "FedLPA's problem; this problem has none. Use solvers.conjugate_gradients()."
        )
    return problem.precondition(problem.rhs)
