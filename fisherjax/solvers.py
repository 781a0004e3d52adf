"""Solvers of symmetric positive semi-definite systems, which see a matrix-vector product only.

A solver is a function

    solve(matvec, rhs, init, restore=identity, precondition=identity) -> Solution(params, info)

made by a factory; only conjugate gradients make use of `precondition`, roughly the inverse of
`matvec`. Unknowns are pytrees, and *every leaf is a system of its own*, because `matvec`
does not couple leaves: step sizes, residuals and convergence belong to a leaf. An operator that
couples several arrays must see them as one leaf (`jax.flatten_util.ravel_pytree`).

Without a preconditioner all start from `init` and move only in the range of the operator, so in a
singular system the component of `init` in the null space stays (Jhunjhunwala, Wang, Joshi,
FedFisher, AISTATS 2024, Lemma 1).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax.typing import Array, Params


class Info(NamedTuple):
    """How a solve went, leaf by leaf.

    Attributes:
        iterations: Products with the operator that the leaf used.
        residual: ||matvec(x) - rhs|| / ||rhs|| at the end.
        converged: Whether the residual is at or below the tolerance that was asked for.
    """

    iterations: Any
    residual: Any
    converged: Any


class Solution(NamedTuple):
    """The answer of a solver.

    Attributes:
        params: The unknowns, put back together by `restore`.
        info: How the solve went.
    """

    params: Params
    info: Info


Solver = Callable[..., Solution]


def conjugate_gradients(tolerance: float = 1e-4, max_iterations: int = 200) -> Solver:
    """Make the default solver: conjugate gradients, with no step size and no validation data.

    Minimises 1/2 x^T A x - b^T x over init + the Krylov space of the first residual, or of the
    preconditioned one, where the problem comes with a preconditioner. A leaf stops when
    ||A x - b|| <= tolerance ||b||, or when it meets a direction without curvature.

    Args:
        tolerance: Relative residual at which a leaf stops.
        max_iterations: The most products with the operator.

    Returns:
        The solver.

    Raises:
        ValueError: If the tolerance is negative or max_iterations is not positive.

    Example:
        >>> solve = conjugate_gradients(tolerance=1e-6)
        >>> matrix = jnp.array([[2.0, 1.0], [1.0, 2.0]])
        >>> print(solve(lambda x: matrix @ x, jnp.array([3.0, 3.0]), jnp.zeros(2)).params)
        [1. 1.]

    Source: Hestenes and Stiefel, Methods of conjugate gradients for solving linear systems, 1952.
    """
    _check_positive("max_iterations", max_iterations)
    _check_not_negative("tolerance", tolerance)

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = _identity,
        precondition: Callable = _identity,
    ) -> Solution:
        system = (_partial(matvec), _partial(precondition), rhs, init)
        x, count = _conjugate_gradients(*system, tolerance, max_iterations)
        return Solution(restore(x), _info(matvec, rhs, x, count, tolerance))

    return solve


@jax.jit
def _conjugate_gradients(
    matvec: Callable,
    precondition: Callable,
    rhs: Any,
    init: Any,
    tolerance: Array,
    max_iterations: Array,
) -> tuple[Any, Any]:
    bound = _map(lambda b: jnp.square(tolerance).astype(b.dtype) * _dot(b, b), rhs)

    def unfinished(state: tuple) -> Array:
        _, residual, direction, _, _, step = state
        active = _map(lambda p, s, b: (s > b) & jnp.any(p != 0), direction, norms(residual), bound)
        return (step < max_iterations) & _any(active)

    def norms(residual: Any) -> Any:
        return _map(lambda r: _dot(r, r), residual)

    def body(state: tuple) -> tuple:
        x, residual, direction, height, count, step = state
        product = matvec(direction)
        curvature = _map(_dot, direction, product)
        # A leaf that is done, or whose direction has no curvature left, stands still from now on.
        going = _map(lambda c, s, b: (c > 0) & (s > b), curvature, norms(residual), bound)
        alpha = _map(_ratio, going, height, curvature)
        x = _map(lambda x, a, p: x + a * p, x, alpha, direction)
        residual = _map(lambda r, a, q: r - a * q, residual, alpha, product)
        steepest = precondition(residual)
        new = _map(
            lambda g, r, z, h: jnp.where(g, _dot(r, z), h), going, residual, steepest, height
        )
        beta = _map(_ratio, going, new, height)
        direction = _map(lambda g, z, b, p: g * (z + b * p), going, steepest, beta, direction)
        return x, residual, direction, new, _map(jnp.add, count, going), step + 1

    residual = _map(jnp.subtract, rhs, matvec(init))
    direction = precondition(residual)
    height = _map(_dot, residual, direction)
    count = _map(lambda _: jnp.zeros((), jnp.int32), height)
    state = (init, residual, direction, height, count, 0)
    state = jax.lax.while_loop(unfinished, body, state)
    return state[0], state[4]


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
    _check_positive("steps", steps)
    _check_positive("power_iterations", power_iterations)

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = _identity,
        precondition: Callable = _identity,
    ) -> Solution:
        del precondition
        x = _gradient_descent(_partial(matvec), rhs, init, steps, power_iterations)
        count = _map(lambda _: jnp.asarray(steps + power_iterations), rhs)
        return Solution(restore(x), _info(matvec, rhs, x, count, 1e-4))

    return solve


@jax.jit
def _gradient_descent(
    matvec: Callable, rhs: Any, init: Any, steps: Array, power_iterations: Array
) -> Any:
    def normalised(v: Any) -> Any:
        return _map(lambda x: x * _ratio(jnp.any(x != 0), 1, jnp.sqrt(_dot(x, x))), v)

    start = normalised(_map(jnp.subtract, rhs, matvec(init)))
    top = jax.lax.fori_loop(0, power_iterations, lambda _, v: normalised(matvec(v)), start)
    largest = _map(_dot, top, matvec(top))
    step = _map(lambda s: _ratio(s > 0, 1, s), largest)

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
        _check_positive(name, value)
    for name, value in (("learning_rate", learning_rate), ("epsilon", epsilon)):
        _check_positive(name, value)

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = _identity,
        precondition: Callable = _identity,
    ) -> Solution:
        del precondition
        evaluate = None if score is None else _partial(score)
        static = (epsilon_inside_root, steps, score_every)
        numbers = (learning_rate, epsilon)
        x = _paper_adam(*static, _partial(matvec), _partial(restore), evaluate, rhs, init, *numbers)
        count = _map(lambda _: jnp.asarray(steps), rhs)
        return Solution(restore(x), _info(matvec, rhs, x, count, 1e-4))

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
        return _map(lambda x, m, s: x - jnp.asarray(rate, x.dtype) * direction(m, s), x, m, s), m, s

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


def closed_form(floor: float = 1e-6) -> Solver:
    """Solve a diagonal system directly, x_j = b_j / a_j where a_j >= floor, else the start's x_j.

    The diagonal is read off as matvec(ones), so it is exact for elementwise operators and
    meaningless for others.

    Args:
        floor: Below this a coordinate counts as without curvature and keeps its start.

    Returns:
        The solver. `info.residual` is large where the operator was not diagonal.

    Raises:
        ValueError: If the floor is negative.

    Example:
        >>> solve = closed_form()
        >>> diagonal = jnp.array([2.0, 0.0])
        >>> print(
        ...     solve(lambda x: diagonal * x, jnp.array([4.0, 0.0]), jnp.array([1.0, 5.0])).params
        ... )
        [2. 5.]

    Source: Matena and Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022, equation
        5. The floor as in the FedFisher authors' code.
    """
    _check_not_negative("floor", floor)

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = _identity,
        precondition: Callable = _identity,
    ) -> Solution:
        del precondition
        x = _closed_form(_partial(matvec), rhs, init, floor)
        count = _map(lambda _: jnp.asarray(1), rhs)
        return Solution(restore(x), _info(matvec, rhs, x, count, 1e-4))

    return solve


@jax.jit
def _closed_form(matvec: Callable, rhs: Any, init: Any, floor: Array) -> Any:
    entries = matvec(_map(jnp.ones_like, init))
    counts = _map(lambda a: (a >= floor) & (a > 0), entries)
    return _map(lambda c, b, a, x: jnp.where(c, _ratio(c, b, a), x), counts, rhs, entries, init)


def _partial(function: Callable) -> Partial:
    """Make a function an argument of a compiled solver, which may carry its arrays as data."""
    return function if isinstance(function, Partial) else Partial(function)


def _info(matvec: Callable, rhs: Any, x: Any, count: Any, tolerance: float) -> Info:
    return _compiled_info(_partial(matvec), rhs, x, count, tolerance)


@jax.jit
def _compiled_info(matvec: Callable, rhs: Any, x: Any, count: Any, tolerance: Array) -> Info:
    residual = _map(_relative_residual, matvec(x), rhs)
    return Info(count, residual, _map(lambda r: r <= tolerance, residual))


def _relative_residual(product: Array, rhs: Array) -> Array:
    size = jnp.sqrt(_dot(rhs, rhs))
    error = product - rhs
    return _ratio(size != 0, jnp.sqrt(_dot(error, error)), size)


def _dot(left: Array, right: Array) -> Array:
    return jnp.vdot(left, right, precision=jax.lax.Precision.HIGHEST)


def _ratio(defined: Array, numerator: Any, denominator: Array) -> Array:
    """Divide where it is defined, and give zero elsewhere without ever dividing by zero."""
    return jnp.where(defined, numerator / jnp.where(defined, denominator, 1), 0)


def _any(flags: Any) -> Array:
    return jnp.any(jnp.stack(jax.tree.leaves(flags)))


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} is {value}; expected a positive number.")


def _check_not_negative(name: str, value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{name} is {value}; expected zero or a positive number.")


def _identity(blocks: Any) -> Any:
    return blocks


_map = jax.tree.map
