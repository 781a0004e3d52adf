"""FedLPA: layer-wise posterior aggregation, in one round.

Liu, Liu, Ye, Shen, Li, Jiang, Li, FedLPA: one-shot federated learning with layer-wise posterior
aggregation, NeurIPS 2024. Every layer of every client is a Gaussian whose precision is the
Kronecker product of two small matrices; the merged layer is the mode of the product of Gaussians.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax import checks, quadratic, solvers, tree
from fisherjax.algorithms.base import Algorithm, fisher_kind, fisher_summary
from fisherjax.configuration import cached
from fisherjax.fisher import Kronecker, empirical, kfac, zero
from fisherjax.fisher.layers import trace
from fisherjax.quadratic import Quadratic
from fisherjax.solvers.base import Solution, Solver, as_partial, power_iteration, solution
from fisherjax.training import Trained
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params


@cached
def fedlpa(
    model: Model,
    *,
    kind: Callable[..., Array] = empirical,
    damping: float = 1e-3,
    balanced: bool = False,
    authors_split: bool = True,
    solver: Solver | None = None,
    fallback: Callable[..., Any] | None = None,
    batch_size: int = 64,
) -> Algorithm:
    r"""Make FedLPA, which solves one linear system for each layer V [inputs + 1, outputs].

        sum_i p_i A_i V G_i = sum_i p_i A_i V_i G_i,
        A_i = A'_i + pi_i sqrt(damping) I,   G_i = G'_i + sqrt(damping) / pi_i I,

    with A' and G' the Kronecker factors of the empirical Fisher information, biases included.

    Args:
        model: The network and what its outputs mean.
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
            approximation; the authors' are `expectation_approximation()` and
            `residual_descent()`.
        fallback: For leaves that belong to no dense or convolution layer, as in `fisher.kfac`:
            `fisher.zero` merges them to their weighted mean, as the authors do.
        batch_size: Examples of a minibatch in the Fisher pass.

    Returns:
        The algorithm. Updates are {"params": W_i, "fisher": Kronecker}. The server needs each of
        them, so `reduce` is None.

    Raises:
        ValueError: If damping is negative or not finite.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w["w"], fj.likelihoods.gaussian)
        >>> method, start = fedlpa(model, damping=0.0), {"w": jnp.zeros((1, 1))}
        >>> data = jnp.array([[1.0], [2.0]]), jnp.full((2, 1), 3.0)
        >>> trained = fj.training.Trained({"w": jnp.array([[[0.0]], [[1.0]]])})
        >>> federation = fj.clients.federation(data, [[0], [1]])
        >>> updates = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
        >>> jax.vmap(lambda fisher: fisher.dense())(updates.values["fisher"]).ravel().tolist()
        [9.0, 4.0]
        >>> print(f"{fj.merging.merge(method, start, updates)[0]['w'].item():.4f}")
        0.3077

    Source: the paper above and the authors' code. Deviations: the code solves twice, by
        `expectation_approximation` and `residual_descent`, and reports the better of the
        two on the test data; here one solver is chosen beforehand. Its Fisher pass sees augmented
        images; here the examples are taken as they are.
    """
    checks.number("damping", damping)
    solve = solvers.conjugate_gradients() if solver is None else solver
    checks.function("solver", solve, "solvers.conjugate_gradients()")
    factors = partial(kfac, fallback=fallback)
    summary = fisher_summary(model, factors, kind, batch_size)

    def summarize(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        update, private = summary(key, trained, examples, private)
        # Damping is added to each factor, so that the split changes what is solved, although the
        # product of the factors is the same.
        if authors_split:
            locations = _locations(model.apply, trained.params, examples.inputs)
            update["fisher"] = _split_as_the_authors(update["fisher"], locations)
        return update, private

    def aggregate(
        key: Key, received: Any, params: Params, state: Any, cohort: Array
    ) -> tuple[Params, Any, Any]:
        del key, params, cohort
        updates, weights = received
        fishers = _damped(balanced, fallback is zero, updates["fisher"], damping)
        # The factors hold the damping already. Without its own the quadratic has no preconditioner:
        # the expectation approximation serves as one.
        problem = quadratic.quadratic(fishers, updates["params"], weights, damping=0.0)
        approximation = Partial(_multiply, _expectation(fishers, weights))
        solved = solve(problem._replace(precondition=approximation))
        return solved.params, state, solved.info

    split = ", scales as FedLPA's authors" if authors_split else ""
    return Algorithm(summarize, aggregate, kind=fisher_kind(factors, kind) + split, model=model)


def _locations(apply: Apply, params: Params, inputs: Array) -> dict[str, int]:
    """Count each layer's output locations T by tracing; nothing is computed."""
    # Filled while tracing: the counts are shapes, so that no array has to come out.
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
            # K-FAC's sum over locations becomes a mean, divided by T once more; G makes up for it.
            "input": factor["input"] / locations[name] ** 2,
            "output": factor["output"] * locations[name] ** 2,
        }
        for name, factor in fisher.factors.items()
    }
    return dataclasses.replace(fisher, factors=factors)


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
        return dataclasses.replace(fisher, factors=factors, entries=rest)

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
        # Eigenvalues of the size of rounding count as zero: their inverses would be noise.
        rtol = 10 * jnp.finfo(matrix.dtype).eps
        return jnp.linalg.pinv(matrix, rtol=rtol, hermitian=True)

    entries = {n: jnp.where(f > 0, 1 / jnp.where(f > 0, f, 1), 0) for n, f in mean.entries.items()}
    return dataclasses.replace(mean, factors=jax.tree.map(inverse, mean.factors), entries=entries)


# No closure: `Partial`s of it compare equal, so that solvers do not compile again.
def _multiply(fisher: Kronecker, blocks: Any) -> Any:
    return fisher.block_mv(blocks)


@cached
def expectation_approximation() -> Solver:
    """Make FedLPA's approximate solution, exact where all clients agree on one of the factors.

        V = (sum_i p_i A_i)^-1 (sum_i p_i A_i V_i G_i) (sum_i p_i G_i)^-1.

    Returns:
        The solver, for `fedlpa`. `info.residual` says how far from exact it was.

    Raises:
        ValueError: On solving, if the problem has no preconditioner, which is the approximation.

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
        >>> precondition = jax.tree_util.Partial(lambda x: 0 * x)
        >>> problem = (lambda x: 2 * x, jnp.array([3.0]), jnp.zeros(1), None, precondition)
        >>> print(residual_descent(steps=100)(Quadratic(*problem)).params)
        [1.5]

    Source: the authors' code of FedLPA: eta is 1 and steps are 10,000. Deviation: the cap, without
        which steps beyond 2 / lambda_max^2 diverge.
    """
    checks.count("steps", steps)
    checks.positive("learning_rate", learning_rate)
    checks.count("power_iterations", power_iterations)

    def solve(problem: Quadratic) -> Solution:
        system = (as_partial(problem.matvec), problem.rhs, _approximation(problem))
        # Numbers are traced, so that solvers with other steps or rates share the program.
        blocks = _descend(*system, steps, learning_rate, power_iterations)
        # Each step takes two products, L(L(V) - Z).
        return solution(problem, blocks, 2 * steps + power_iterations + 1)

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
    # The top eigenvector has norm one, so that its product has norm lambda_max.
    largest = jax.tree.map(jnp.linalg.norm, matvec(top))

    def step(x: Array, largest: Array, slope: Array) -> Array:
        # A layer without curvature has lambda_max zero: its cap is huge, not 1 / 0.
        cap = 1 / _at_least_tiny(jnp.square(largest))
        return x - jnp.minimum(2 * learning_rate / x.size, cap).astype(x.dtype) * slope

    def descend(_: Array, blocks: Any) -> Any:
        return jax.tree.map(step, blocks, largest, matvec(residual(blocks)))

    return jax.lax.fori_loop(0, steps, descend, start)


def _at_least_tiny(x: Array) -> Array:
    return jnp.maximum(x, jnp.finfo(x.dtype).tiny)


def _approximation(problem: Quadratic) -> Any:
    if problem.precondition is None:
        raise ValueError(
            "This solver starts from the expectation approximation, which is the preconditioner of "
            "FedLPA's problem; this problem has none. Use solvers.conjugate_gradients()."
        )
    return problem.precondition(problem.rhs)
