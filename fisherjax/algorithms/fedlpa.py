"""FedLPA: layer-wise posterior aggregation, in one round.

Liu, Liu, Ye, Shen, Li, Jiang, Li, FedLPA: one-shot federated learning with layer-wise posterior
aggregation, NeurIPS 2024. The posterior of each layer of each client is a Gaussian whose precision
is the Kronecker product of two small matrices; the merged layer is the mode of their product.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import Partial

from fisherjax import _padding, leaves, quadratic, solvers, tree
from fisherjax._core import checks, linalg
from fisherjax._core.caching import by_value, cached
from fisherjax._core.compiler import jit
from fisherjax._layers import locations
from fisherjax._layers.pairs import trace
from fisherjax.algorithms._fisher_updates import fisher_summary
from fisherjax.algorithms.base import FISHER_EXAMPLES, Algorithm
from fisherjax.fisher import Kronecker, _passes, empirical, kfac, zero
from fisherjax.fisher.kfac_operator import diagonal_of, identity_like
from fisherjax.fisher.kinds import Kind
from fisherjax.solvers.base import Info, Solver, ratio
from fisherjax.training import Trained
from fisherjax.typing import AnyArray, Apply, Array, Examples, Key, Model, Params, Scalar


@cached
def fedlpa(
    model: Model,
    *,
    kind: Kind = empirical,
    damping: Scalar = 1e-3,
    balanced: bool = False,
    authors_split: bool = True,
    solver: Solver | None = None,
    fallback: Callable[..., Any] | None = None,
    batch_size: int = 64,
    max_examples: int | None = FISHER_EXAMPLES,
) -> Algorithm[Info]:
    r"""Make FedLPA, which solves one linear system for each layer V [inputs + 1, outputs].

        sum_i p_i A_i V G_i = sum_i p_i A_i V_i G_i,
        A_i = A'_i + pi_i sqrt(damping) I,   G_i = G'_i + sqrt(damping) / pi_i I,

    where A' and G' are the Kronecker factors of the empirical Fisher information, with biases.

    Args:
        model: The network and the likelihood of its outputs.
        kind: `fisher.empirical` (default, as in the paper), `fisher.true` or `fisher.sampled`.
        damping: Absolute damping; its effect depends on how A'_i and G'_i share the scale of the
            Fisher.
        balanced: Whether pi_i^2 is the ratio of the mean eigenvalues of A'_i and G'_i, as in the
            paper's text, which removes that dependence; otherwise it is 1, as in the authors' code.
        authors_split: Whether, in a layer with T output locations, A' is a mean over examples and
            locations, divided by T once more, and G' the mean over examples of T sums over
            locations. Otherwise A' sums over locations and G' averages, as in `fisher.kfac`. The
            product is the same. If the model has `positions`, T is the mean number of valid
            locations in an example of the client.
        solver: Solver of the server's system. The default is `solvers.conjugate_gradients()`,
            preconditioned by the expectation approximation; the authors use
            `expectation_approximation()` and `residual_descent()`.
        fallback: Structure for leaves that belong to no dense or convolution layer, as in
            `fisher.kfac`; `fisher.zero` merges them to their weighted mean, as the authors do.
        batch_size: Minibatch size of the Fisher pass.
        max_examples: Largest number of a client's examples in its Fisher pass, drawn anew by the
            key of `summarize`; None uses all.

    Returns:
        The algorithm. Updates are {"params": W_i, "fisher": Kronecker}; the server needs each.

    Raises:
        ValueError: If damping is negative or not finite.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w["w"], fj.likelihoods.gaussian)
        >>> method, start = fedlpa(model, damping=0.0), {"w": jnp.zeros((1, 1))}
        >>> data = jnp.array([[1.0], [2.0]]), jnp.full((2, 1), 3.0)
        >>> federation = fj.clients.federation(data, [[0], [1]])
        >>> models = [{"w": jnp.full((1, 1), w)} for w in (0.0, 1.0)]  # their Fishers are 9 and 4
        >>> updates = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
        >>> print(f"{fj.merging.merge(method, start, updates)[0]['w'].item():.4f}")
        0.3077

    Source: the paper above and the authors' code. Deviations: the code runs both
        `expectation_approximation` and `residual_descent` and reports the better one on the test
        data; here one is selected beforehand. Its Fisher pass uses augmented images.
    """
    checks.number("damping", damping)
    solve = solvers.conjugate_gradients() if solver is None else solver
    checks.function("solver", solve, "solvers.conjugate_gradients()")
    fisher = partial(kfac, fallback=fallback)
    summarize, sent = fisher_summary(model, fisher, kind, batch_size, max_examples)
    # Damping is added to each factor, so that the solution depends on the split although the
    # product of the factors does not.
    if authors_split:
        summarize = by_value(partial(_summarize, model, summarize, batch_size))

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, params, cohort
        updates, weights = received
        fishers = _damped(balanced, fallback is zero, updates["fisher"], damping)
        # The factors include the damping already. Without damping of its own, the quadratic has no
        # preconditioner: the expectation approximation is used as one.
        problem = quadratic.quadratic(fishers, updates["params"], weights, damping=0.0)
        problem = quadratic.in_fisher_units(problem)
        # A function of the class, since `Partial`s of one function are equal: solvers compile once.
        approximation = Partial(Kronecker.block_mv, _expectation(fishers, weights))
        solved = solve(problem._replace(precondition=approximation))
        return solved.params, state, solved.report(fishers.coverage)

    sent += ", scales as FedLPA's authors" if authors_split else ""
    return Algorithm(summarize, aggregate, kind=sent, model=model)


def _summarize(
    model: Model,
    summary: Callable[..., tuple[dict[str, Any], Any]],
    batch_size: int,
    key: Key,
    trained: Trained,
    examples: Examples,
    local: Any,
) -> tuple[dict[str, Any], Any]:
    update, local = summary(key, trained, examples, local)
    apply, opened = leaves.bind_untrained(model, trained.whole)
    if model.positions is None:
        counts = _location_counts(apply, opened, examples.inputs)
    else:
        plain = model._replace(apply_train=None)
        counts = _mean_location_counts(plain, batch_size, trained.whole, examples)
    update["fisher"] = _authors_split(update["fisher"], counts)
    return update, local


def _location_counts(apply: Apply, params: Params, inputs: AnyArray) -> dict[str, int]:
    """Return the number of locations T of each layer, by kernel name."""

    def activations(params: Params, inputs: Array) -> dict[str, Array]:
        seen = trace(apply, params, inputs)
        return dict(zip((layer.kernel for layer in seen.layers), seen.activations, strict=True))

    # Only shapes of the activations [B, T, a] are needed: nothing is computed.
    shapes = jax.eval_shape(activations, params, tree.shape_of(inputs, 1))
    return {name: shape.shape[1] for name, shape in shapes.items()}


@partial(jit, static_argnums=(0, 1))
def _mean_location_counts(
    model: Model, batch_size: int, params: Params, examples: Examples
) -> dict[str, Array]:
    """Compute the mean number of valid locations per example, of each layer with a matrix."""

    def batch_sums(x: Array, y: Array | None, w: Array, key: Key | None) -> dict[str, Array]:
        del y, key
        seen = trace(model.apply, params, x)
        counts = locations.counted(seen, _padding.counted_positions(model, x))
        pairs = zip(seen.layers, counts, strict=True)
        return {x.kernel: jnp.vdot(w, c.sum(1)) for x, c in pairs if c is not None}

    unlabelled = _padding.drop_uncounted(model, examples)._replace(targets=None)
    means = _passes.weighted_mean(batch_sums, unlabelled, key=None, batch_size=batch_size)
    # The factors of a client without examples are zero.
    return {name: jnp.where(mean > 0, mean, 1) for name, mean in means.items()}


def _authors_split(fisher: Kronecker, counts: dict[str, Any]) -> Kronecker:
    factors = {}
    for name, factor in fisher.factors.items():
        squared = counts[name] ** 2
        # K-FAC's sum over locations becomes a mean divided by T once more; G is multiplied instead.
        sides = {"input": factor["input"] / squared, "output": factor["output"] * squared}
        factors[name] = sides
    return dataclasses.replace(fisher, factors=factors)


@partial(jit, static_argnums=(0, 1))
def _damped(balanced: bool, mean_of_rest: bool, fishers: Kronecker, damping: Scalar) -> Kronecker:
    """Add the damping to each client's factors."""

    def shifted(matrix: Array, shift: Array) -> Array:
        return matrix + shift.astype(matrix.dtype) * identity_like(matrix)

    def factor_pair(factor: dict[str, Array]) -> dict[str, Array]:
        if factor["output"].ndim == 3:  # a layer with groups
            return jax.vmap(factor_pair)(factor)
        means = {side: jnp.mean(diagonal_of(matrix)) for side, matrix in factor.items()}
        pi = jnp.sqrt(means["input"] / means["output"])
        # The factors of a client without data, or with a perfect fit, have no scale.
        pi = jnp.where(balanced & jnp.isfinite(pi) & (pi > 0), pi, 1)
        shifts = {"input": pi * jnp.sqrt(damping), "output": jnp.sqrt(damping) / pi}
        return jax.tree.map(shifted, factor, shifts)

    def one(fisher: Kronecker) -> Kronecker:
        factors = {name: factor_pair(factor) for name, factor in fisher.factors.items()}
        ones = fisher.identity().entries
        # If all clients have equal curvatures, the merge is the weighted mean.
        entries = {n: damping * one + fisher.entries[n] for n, one in ones.items()}
        entries = ones if mean_of_rest else entries
        return dataclasses.replace(fisher, factors=factors, entries=entries)

    return jax.vmap(one)(fishers)


@jit
def _expectation(fishers: Kronecker, weights: Array) -> Kronecker:
    """Compute the pseudo-inverse of (sum_i p_i A_i) (x) (sum_i p_i G_i)."""
    mean = tree.weighted_sum(fishers, weights)

    def inverse(matrix: Array) -> Array:
        if matrix.ndim == 1:
            return ratio(matrix > 0, 1, matrix)
        invert = linalg.pseudo_inverse
        return invert(matrix) if matrix.ndim == 2 else jax.vmap(invert)(matrix)

    def inverse_entries(name: str) -> Array:
        entries = mean.entries[name]
        if name not in mean.scales:
            return ratio(entries > 0, 1, entries)
        return jax.vmap(inverse, -1, -1)(entries)

    entries = {name: inverse_entries(name) for name in mean.entries}
    return dataclasses.replace(mean, factors=jax.tree.map(inverse, mean.factors), entries=entries)
