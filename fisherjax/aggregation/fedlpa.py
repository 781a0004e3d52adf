"""FedLPA: layer-wise posterior aggregation, in one round.

Liu, Liu, Ye, Shen, Li, Jiang, Li, FedLPA: one-shot federated learning with layer-wise posterior
aggregation, NeurIPS 2024. Every layer of every client is a Gaussian whose precision is the
Kronecker product of two small matrices; the merged layer is the mode of the product of Gaussians.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax import quadratic, solvers, tree
from fisherjax.aggregation.base import Aggregator, fisher_summary, no_state
from fisherjax.clients import Examples
from fisherjax.fisher import Kronecker, empirical, kfac, zero
from fisherjax.fisher.layers import trace
from fisherjax.likelihoods import Likelihood
from fisherjax.typing import Apply, Array, Key, Params


def fedlpa(
    apply: Apply,
    likelihood: Likelihood,
    *,
    kind: Callable[..., Array] = empirical,
    damping: float = 1e-3,
    balanced: bool = False,
    authors_split: bool = True,
    solver: solvers.Solver | None = None,
    otherwise: Callable[..., Any] | None = None,
    batch_size: int = 64,
) -> Aggregator:
    r"""Make FedLPA, which solves one linear system for each layer V [inputs + 1, outputs].

        sum_i p_i A_i V G_i = sum_i p_i A_i V_i G_i,
        A_i = A'_i + pi_i sqrt(damping) I,   G_i = G'_i + sqrt(damping) / pi_i I,

    with A' and G' the Kronecker factors of the empirical Fisher information, biases included.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        likelihood: What the outputs mean.
        kind: `fisher.empirical`, as in the paper, `fisher.true` or `fisher.sampled`.
        damping: lambda, absolute. It reaches each factor as its square root, so that it depends on
            how the scale of the Fisher is split between them.
        balanced: Whether pi_i^2 is the ratio of the mean eigenvalues of A'_i and G'_i, as in the
            paper's text, which makes the damping independent of that split. Otherwise pi_i is 1, as
            in the authors' code.
        authors_split: At T output locations A' is a mean over examples and locations, divided by T
            once more, and G' the mean over examples of T sums over locations. Otherwise A' sums
            over locations and G' averages, as in `fisher.kfac`. The product is the same.
        solver: None is `solvers.conjugate_gradients()`, preconditioned by the expectation
            approximation; `expectation_approximation()` and `residual_descent()` are the authors'.
        otherwise: For leaves that belong to no dense or convolution layer, as in `fisher.kfac`:
            `fisher.zero` merges them to their weighted mean, as the authors do.
        batch_size: Examples of a minibatch in the Fisher pass.

    Returns:
        The aggregator. Updates are {"params": W_i, "fisher": Kronecker}. The server needs each of
        them, so `reduce` is None.

    Raises:
        ValueError: If damping is negative or not finite.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> method = fedlpa(lambda params, x: x @ params["w"], fj.likelihoods.gaussian, damping=0.0)
        >>> w = [{"w": jnp.zeros((1, 1))}, {"w": jnp.ones((1, 1))}]
        >>> data = [fj.clients.examples(jnp.full((1, 1), x), jnp.full((1, 1), 3.0)) for x in (1, 2)]
        >>> updates = [method.summarize(None, w[i], data[i], None) for i in range(2)]
        >>> [fisher["fisher"].dense().item() for fisher in updates]
        [9.0, 4.0]
        >>> print(fj.aggregation.merge(method, w[0], updates)[0]["w"])
        [[0.30769232]]

    Source: the paper above and the authors' code. Deviations: the code solves twice, by
        `expectation_approximation` and by `residual_descent`, and reports the better of the two on
        the test data; here one solver is chosen beforehand. Its Fisher pass sees augmented images;
        here the examples are taken as they are.
    """
    if not isinstance(damping, jax.core.Tracer) and not 0 <= damping < float("inf"):
        raise ValueError(f"damping is {damping}; expected a finite number, zero or more.")
    solve = solvers.conjugate_gradients() if solver is None else solver
    factors = partial(kfac, otherwise=otherwise)
    summary = fisher_summary(apply, likelihood, factors, kind, batch_size)

    def summarize(key: Key, params: Params, examples: Examples, global_params: Params) -> Any:
        update = summary(key, params, examples, global_params)
        if authors_split:
            locations = _locations(apply, params, examples.inputs)
            update["fisher"] = _split_as_the_authors(update["fisher"], locations)
        return update

    def finish(received: Any, global_params: Params, state: Any) -> tuple[Params, Any, Any]:
        del global_params
        updates, weights = received
        fishers = _damped(balanced, otherwise is zero, updates["fisher"], damping)
        problem = quadratic.quadratic(fishers, updates["params"], weights, damping=0.0)
        approximation = Partial(_multiply, _expectation(fishers, weights))
        solution = solve(*problem._replace(precondition=approximation))
        return solution.params, state, solution.info

    return Aggregator(no_state, summarize, None, finish)


def expectation_approximation() -> solvers.Solver:
    """Make FedLPA's approximate solution, exact where all clients agree on one of the factors.

        V = (sum_i p_i A_i)^-1 (sum_i p_i A_i V_i G_i) (sum_i p_i G_i)^-1.

    Returns:
        The solver, for `fedlpa`. `info.residual` says how far from exact it was.

    Example:
        >>> half = Partial(lambda blocks: jax.tree.map(lambda x: x / 2, blocks))
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
        restore: Callable = _identity,
        precondition: Callable = _identity,
    ) -> solvers.Solution:
        del init
        blocks = precondition(rhs)
        return solvers.Solution(restore(blocks), _info(_partial(matvec), rhs, blocks, 1))

    return solve


def residual_descent(
    steps: int = 10_000, learning_rate: float = 1.0, power_iterations: int = 50
) -> solvers.Solver:
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
        if not value > 0:
            raise ValueError(f"{name} is {value}; expected a positive number.")

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = _identity,
        precondition: Callable = _identity,
    ) -> solvers.Solution:
        del init
        matvec, start = _partial(matvec), precondition(rhs)
        blocks = _descend(matvec, rhs, start, steps, learning_rate, power_iterations)
        products = 2 * steps + power_iterations + 1
        return solvers.Solution(restore(blocks), _info(matvec, rhs, blocks, products))

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

    def normalised(blocks: Any) -> Any:
        return jax.tree.map(lambda x: x / _at_least_tiny(jnp.linalg.norm(x)), blocks)

    top = normalised(residual(start))
    top = jax.lax.fori_loop(0, power_iterations, lambda _, v: normalised(matvec(v)), top)
    largest = jax.tree.map(jnp.linalg.norm, matvec(top))

    def step(x: Array, largest: Array, slope: Array) -> Array:
        cap = 1 / _at_least_tiny(jnp.square(largest))
        return x - jnp.minimum(2 * learning_rate / x.size, cap).astype(x.dtype) * slope

    def descend(_: Array, blocks: Any) -> Any:
        return jax.tree.map(step, blocks, largest, matvec(residual(blocks)))

    return jax.lax.fori_loop(0, steps, descend, start)


def _at_least_tiny(x: Array) -> Array:
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)


def _locations(apply: Apply, params: Params, inputs: Array) -> dict[str, int]:
    """Count each layer's output locations T by tracing; nothing is computed."""
    found = {}

    def look(params: Params, inputs: Array) -> None:
        seen = trace(apply, params, inputs)
        pairs = zip(seen.layers, seen.activations, strict=True)
        found.update({layer.kernel: a.shape[1] for layer, a in pairs})

    jax.eval_shape(look, params, jax.ShapeDtypeStruct((1, *inputs.shape[1:]), inputs.dtype))
    return found


def _split_as_the_authors(fisher: Kronecker, locations: dict[str, int]) -> Kronecker:
    factors = {
        name: {
            "input": factor["input"] / locations[name] ** 2,
            "output": factor["output"] * locations[name] ** 2,
        }
        for name, factor in fisher.factors.items()
    }
    return fisher.replace(factors=factors)


@partial(jax.jit, static_argnums=(0, 1))
def _damped(balanced: bool, mean_of_rest: bool, fishers: Kronecker, damping: Array) -> Kronecker:
    """Add the damping to every client's factors."""

    def factor_pair(factor: dict[str, Array]) -> dict[str, Array]:
        root = jnp.sqrt(damping)
        ratio = jnp.sqrt(_mean_eigenvalue(factor["input"]) / _mean_eigenvalue(factor["output"]))
        # A client without data, or with a perfect fit, has no scale to balance.
        usable = balanced & jnp.isfinite(ratio) & (ratio > 0)
        ratio = jnp.where(usable, ratio, 1)
        return {
            "input": _shifted(factor["input"], ratio * root),
            "output": _shifted(factor["output"], root / ratio),
        }

    def one(fisher: Kronecker) -> Kronecker:
        factors = {name: factor_pair(factor) for name, factor in fisher.factors.items()}
        # Equal curvatures at all clients make the weighted mean.
        rest = {
            n: jnp.ones_like(f) if mean_of_rest else f + damping for n, f in fisher.entries.items()
        }
        return fisher.replace(factors=factors, entries=rest)

    return jax.vmap(one)(fishers)


def _mean_eigenvalue(matrix: Array) -> Array:
    return jnp.mean(jnp.diagonal(matrix))


def _shifted(matrix: Array, shift: Array) -> Array:
    return matrix + shift.astype(matrix.dtype) * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)


@jax.jit
def _expectation(fishers: Kronecker, weights: Array) -> Kronecker:
    """Invert (sum_i p_i A_i) (x) (sum_i p_i G_i), or what of it is not singular."""
    mean = tree.weighted_sum(fishers, weights)

    def inverse(matrix: Array) -> Array:
        rtol = 10 * jnp.finfo(matrix.dtype).eps
        return jnp.linalg.pinv(matrix, rtol=rtol, hermitian=True)

    entries = {n: jnp.where(f > 0, 1 / jnp.where(f > 0, f, 1), 0) for n, f in mean.entries.items()}
    return mean.replace(factors=jax.tree.map(inverse, mean.factors), entries=entries)


def _multiply(fisher: Kronecker, blocks: Any) -> Any:
    return fisher.block_mv(blocks)


def _partial(function: Callable) -> Partial:
    """Make a function an argument of a compiled one, which may carry its arrays as data."""
    return function if isinstance(function, Partial) else Partial(function)


@jax.jit
def _info(matvec: Callable, rhs: Any, blocks: Any, products: Array) -> solvers.Info:
    def relative(product: Array, b: Array) -> Array:
        return jnp.linalg.norm(product - b) / _at_least_tiny(jnp.linalg.norm(b))

    residual = jax.tree.map(relative, matvec(blocks), rhs)
    counts = jax.tree.map(lambda _: products, rhs)
    return solvers.Info(counts, residual, jax.tree.map(lambda r: r <= 1e-4, residual))


def _identity(blocks: Any) -> Any:
    return blocks
