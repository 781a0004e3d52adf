"""Gradient descent, and the adaptive one of the FedFisher paper."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax.solvers.base import (
    Solution,
    Solver,
    as_partial,
    check_positive,
    dot,
    identity,
    power_iteration,
    ratio,
    report,
)
from fisherjax.typing import Array, Params

_map = jax.tree.map


def gradient_descent(steps: int = 2000, power_iterations: int = 50) -> Solver:
    """Make plain gradient descent, x <- x - (A x - b) / lambda_max, the method of the theory.

    lambda_max of each leaf comes from power iteration started at the first residual: the iterates
    never leave the Krylov space of that residual, so its largest eigenvalue there is the one that
    counts.

    Args:
        steps: Descent steps.
        power_iterations: Products spent on lambda_max.

    Returns:
        The solver. `info.converged` says whether the residual fell below 1e-4.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> solve = gradient_descent(steps=100)
        >>> matrix = jnp.array([[2.0, 1.0], [1.0, 2.0]])
        >>> print(solve(lambda x: matrix @ x, jnp.array([3.0, 3.0]), jnp.zeros(2)).params)
        [1. 1.]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, equation 8 and Lemma 1.
    """
    check_positive("steps", steps)
    check_positive("power_iterations", power_iterations)

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = identity,
        precondition: Callable = identity,
    ) -> Solution:
        del precondition
        x = _gradient_descent(as_partial(matvec), rhs, init, steps, power_iterations)
        return Solution(restore(x), report(matvec, rhs, x, steps + power_iterations))

    return solve


@jax.jit
def _gradient_descent(
    matvec: Callable, rhs: Any, init: Any, steps: Array, power_iterations: Array
) -> Any:
    top = power_iteration(matvec, _map(jnp.subtract, rhs, matvec(init)), power_iterations)
    largest = _map(dot, top, matvec(top))
    step = _map(lambda s: ratio(s > 0, 1, s), largest)

    def descend(_: Array, x: Any) -> Any:
        return _map(lambda x, s, q, b: x - s * (q - b), x, step, matvec(x), rhs)

    return jax.lax.fori_loop(0, steps, descend, init)


def paper_adam(
    *,
    epsilon_inside_root: bool,
    steps: int = 2000,
    learning_rate: float = 0.01,
    epsilon: float = 0.01,
    score: Callable[[Params], Array] | None = None,
    score_every: int = 100,
) -> Solver:
    """Make the optimiser of the FedFisher paper's experiments: Adam with sums in place of averages.

        v = A x - b,  m <- 0.9 m + v,  s <- 0.99 s + v^2,
        x <- x - eta m / (sqrt(s) + eps)   or   x <- x - eta m / sqrt(s + eps),

    without bias correction. Coordinates with |v| far below eps hardly move, which keeps the
    solution near the mean; the rest of its regularisation is stopping early, by validation
    accuracy.

    Args:
        epsilon_inside_root: True is the authors' K-FAC variant, False their diagonal variant.
        steps: Steps T.
        learning_rate: eta.
        epsilon: eps.
        score: Params -> scalar, higher is better, for instance accuracy on validation data. The
            best of the iterates after steps 1, 101, ..., strictly, is the answer; the last one
            without it.
        score_every: Steps between two scores.

    Returns:
        The solver. `info.converged` says whether the residual fell below 1e-4: early stopping means
        that it need not.

    Raises:
        ValueError: If a number is not positive.

    Example:
        >>> solve = paper_adam(epsilon_inside_root=True, steps=1000)
        >>> solution = solve(lambda x: 2 * x, jnp.array([3.0]), jnp.zeros(1))
        >>> print(solution.params.round(2))
        [1.5]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, appendix C and the authors' code. A
        run whose every candidate scores nothing returns the last candidate compared, never nothing.
    """
    for name, value in (("steps", steps), ("score_every", score_every)):
        check_positive(name, value)
    for name, value in (("learning_rate", learning_rate), ("epsilon", epsilon)):
        check_positive(name, value)

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = identity,
        precondition: Callable = identity,
    ) -> Solution:
        del precondition
        evaluate = None if score is None else as_partial(score)
        static = (epsilon_inside_root, steps, score_every)
        numbers = (learning_rate, epsilon)
        x = _paper_adam(
            *static, as_partial(matvec), as_partial(restore), evaluate, rhs, init, *numbers
        )
        return Solution(restore(x), report(matvec, rhs, x, steps))

    return solve


@partial(jax.jit, static_argnums=(0, 1, 2))
def _paper_adam(
    epsilon_inside_root: bool,
    steps: int,
    score_every: int,
    matvec: Callable,
    restore: Callable,
    score: Callable | None,
    rhs: Any,
    init: Any,
    learning_rate: Array,
    epsilon: Array,
) -> Any:
    def direction(m: Array, s: Array) -> Array:
        eps = jnp.asarray(epsilon, s.dtype)
        return m / (jnp.sqrt(s + eps) if epsilon_inside_root else jnp.sqrt(s) + eps)

    def step(_: Array, state: tuple) -> tuple:
        x, m, s = state
        v = _map(jnp.subtract, matvec(x), rhs)
        m = _map(lambda m, v: 0.9 * m + v, m, v)
        s = _map(lambda s, v: 0.99 * s + v * v, s, v)
        rate = learning_rate
        return (
            _map(lambda x, m, s: x - jnp.asarray(rate, x.dtype) * direction(m, s), x, m, s),
            m,
            s,
        )

    zeros = _map(jnp.zeros_like, init)
    start = (init, zeros, zeros)
    if score is None:
        return jax.lax.fori_loop(0, steps, step, start)[0]

    def scored(round_: Array, carry: tuple) -> tuple:
        state, best, best_score = carry
        first = round_ * score_every
        state = step(first, state)
        value = jnp.asarray(score(restore(state[0])), jnp.float32)
        better = value > best_score
        best = _map(lambda new, old: jnp.where(better, new, old), state[0], best)
        left = jnp.minimum(score_every, steps - first) - 1
        state = jax.lax.fori_loop(0, left, step, state)
        return state, best, jnp.maximum(value, best_score)

    rounds = -(-steps // score_every)
    carry = (start, init, jnp.float32(-jnp.inf))
    return jax.lax.fori_loop(0, rounds, scored, carry)[1]
