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
            approximation; the authors' are `solvers.expectation_approximation()` and
            `solvers.residual_descent()`.
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
        >>> print(f"{fj.aggregation.merge(method, w[0], updates)[0]['w'].item():.4f}")
        0.3077

    Source: the paper above and the authors' code. Deviations: the code solves twice, by
        `solvers.expectation_approximation` and `residual_descent`, and reports the better of the
        two on the test data; here one solver is chosen beforehand. Its Fisher pass sees augmented
        images; here the examples are taken as they are.
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
