"""FedLPA's own solvers, which begin at the preconditioner's answer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax.solvers.base import (
    Solution,
    Solver,
    as_partial,
    check_positive,
    identity,
    power_iteration,
    report,
)
from fisherjax.typing import Array


def expectation_approximation() -> Solver:
    """Make FedLPA's approximate solution, exact where all clients agree on one of the factors.

        V = (sum_i p_i A_i)^-1 (sum_i p_i A_i V_i G_i) (sum_i p_i G_i)^-1.

    Returns:
        The solver, for `fedlpa`. `info.residual` says how far from exact it was.

    Example:
        >>> half = jax.tree_util.Partial(lambda x: x / 2)
        >>> solve = expectation_approximation()
        >>> solution = solve(lambda x: 2 * x, jnp.ones(2), jnp.zeros(2), precondition=half)
        >>> print(solution.params, solution.info.residual)
        [0.5 0.5] 0.0

    Source: FedLPA, section 3.3.
    """

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = identity,
        precondition: Callable = identity,
    ) -> Solution:
        del init
        blocks = precondition(rhs)
        return Solution(restore(blocks), report(matvec, rhs, blocks, 1))

    return solve


def residual_descent(
    steps: int = 10_000, learning_rate: float = 1.0, power_iterations: int = 50
) -> Solver:
    r"""Make the authors' refinement: gradient steps on the mean squared residual of each layer.

        V <- V - min(2 eta / N, 1 / lambda_max^2) L(L(V) - Z),   L(V) = sum_i p_i A_i V G_i,

    from the expectation approximation, with N the number of entries of V. Each step decreases
    ||L(V) - Z||^2 / N; what belongs to a small eigenvalue lambda of L shrinks by
    1 - 2 eta lambda^2 / N only, so that large layers hardly move.

    Args:
        steps: Gradient steps.
        learning_rate: eta.
        power_iterations: Products spent on lambda_max, started at the first residual.

    Returns:
        The solver, for `fedlpa`. `info.converged` says whether the residual fell below 1e-4.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> solve = residual_descent(steps=100)
        >>> print(solve(lambda x: 2 * x, jnp.array([3.0]), jnp.zeros(1)).params)
        [1.5]

    Source: the authors' code of FedLPA: eta is 1 and steps are 10,000. Deviation: the cap, without
        which steps beyond 2 / lambda_max^2 diverge.
    """
    numbers = {"steps": steps, "learning_rate": learning_rate}
    for name, value in (numbers | {"power_iterations": power_iterations}).items():
        check_positive(name, value)

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = identity,
        precondition: Callable = identity,
    ) -> Solution:
        del init
        matvec, start = as_partial(matvec), precondition(rhs)
        blocks = _descend(matvec, rhs, start, steps, learning_rate, power_iterations)
        products = 2 * steps + power_iterations + 1
        return Solution(restore(blocks), report(matvec, rhs, blocks, products))

    return solve


@jax.jit
def _descend(
    matvec: Callable,
    rhs: Any,
    start: Any,
    steps: Array,
    learning_rate: Array,
    power_iterations: Array,
) -> Any:
    def residual(blocks: Any) -> Any:
        return jax.tree.map(jnp.subtract, matvec(blocks), rhs)

    top = power_iteration(matvec, residual(start), power_iterations)
    largest = jax.tree.map(jnp.linalg.norm, matvec(top))

    def step(x: Array, largest: Array, slope: Array) -> Array:
        cap = 1 / _at_least_tiny(jnp.square(largest))
        return x - jnp.minimum(2 * learning_rate / x.size, cap).astype(x.dtype) * slope

    def descend(_: Array, blocks: Any) -> Any:
        return jax.tree.map(step, blocks, largest, matvec(residual(blocks)))

    return jax.lax.fori_loop(0, steps, descend, start)


def _at_least_tiny(x: Array) -> Array:
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)
