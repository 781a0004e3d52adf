"""FedFisher layer by layer: each layer is merged given the errors of the layers around it.

The Kronecker factors of a client belong to its own network. In the merged network, the inputs of a
layer and the gradients that reach it differ from the client's, because the layers before and after
it were merged too. The same upload shows by how much: by the error of the merged layers, measured
in the metric of the client's factors.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import solvers
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.algorithms._fisher_updates import centre_point, fisher_summary, link_of, plain_sum
from fisherjax.algorithms._layer_errors import Squares, agreement, relative_error, squared_errors
from fisherjax.algorithms._layer_solves import about_mean, combined
from fisherjax.algorithms.base import FISHER_EXAMPLES, Algorithm
from fisherjax.fisher import Diagonal, Kronecker, automatic, kfac
from fisherjax.fisher.kfac_operator import diagonal_of, identity_like
from fisherjax.fisher.kinds import Kind
from fisherjax.solvers import Info
from fisherjax.solvers.base import Solver, ratio
from fisherjax.typing import Array, Centre, Model, Params, Scalar


class _Settings(NamedTuple):
    solve: Solver
    outputs: bool
    passes: int


class _Sizes(NamedTuple):
    damping: Scalar
    isotropy: Scalar
    centre: Params


@cached
def fedfisher_sequential(
    model: Model,
    *,
    kind: Kind = automatic,
    damping: Scalar = 0.01,
    centre: Centre = "mean",
    outputs: bool = True,
    isotropy: Scalar = 0.3,
    passes: int = 2,
    fallback: Callable[..., Diagonal] | None = None,
    solver: solvers.Solver | None = None,
    batch_size: int = 64,
    max_examples: int | None = FISHER_EXAMPLES,
) -> Algorithm[Info]:
    """Make FedFisher with K-FAC that merges one layer after another, in the forward order.

        sum_i p_i A_i (V - V_i) G_i + damping s (V - C) = 0,   s the mean eigenvalue of the sum,
        A_i = A"_i + rho_i diag(A"_i),        G_i = (G'_i + sigma_i m_i I) / sqrt(m_i),
        A"_i = A'_i + iota k_i I,             iota = isotropy max(0, 1 / e - 2),
        rho_i = |V - V_i|^2_A / |V_i|^2_A     of the layers before, at most 1,
        sigma_i = |V - V_i|^2_G / |V_i|^2_G   of the layers after, at most 1,
        e = sum_i p_i min(1, |Vbar - V_i|^2_A' / |V_i|^2_A')   of the last layer, at least 1/10,

    with A' and G' the Kronecker factors of the Fisher information, k_i and m_i their mean
    eigenvalues, |X|^2_A = tr X^T A X and |X|^2_G = tr X G X^T. All clients share the inputs of the
    first layer: rho and iota are zero there, and G is the identity, since later layers can use
    every output. They share the outputs of the last layer too: sigma is zero there. The first pass
    uses sigma = 0, later ones sigma of the pass before. A client that predicts its examples with
    high confidence has a small G', which says little about how good its model is on other
    examples: its weight is the root of its scale, halfway to equal weights. If G' is zero at all
    clients, the identity replaces it.

    If e, the relative error of the clients' mean, is below one half, the clients have learned much
    the same. Each is then also accurate on inputs that it has seldom seen, and iota gives it weight
    in all directions.

    In a network with branches, the layers before a layer are those whose outputs make its inputs,
    through skips too (`Kronecker.feeders`); the layers after it are defined likewise. Numerators
    and denominators are sums over these layers, so that a branch counts by the size of its outputs;
    rho is zero for a layer that only takes the network's inputs. If the operators have no feeders,
    as in uploads of earlier versions, the layers are merged as a chain.

    Args:
        model: The network and the likelihood of its outputs.
        kind: `fisher.true`; `fisher.curvature_propagation`, as accurate in one backward pass;
            `fisher.sampled`; or `fisher.empirical`. The default, `fisher.automatic`, is
            `fisher.true`, or curvature propagation if outputs are sequences.
        damping: Damping in units of each layer's mean eigenvalue.
        centre: The point C that damping pulls to: "mean", "start" or "sum", as in `fedfisher`.
        outputs: Whether the factors of the outputs are used. Otherwise G is the identity in all
            layers; with passes=0 and isotropy=0, that is RegMean of all layers, with convolutions.
        isotropy: Factor of iota, the multiple of the mean eigenvalue that is added to input factors
            if clients agree (default 0.3).
        passes: Number of passes through all layers; 1 leaves sigma zero, and 0 is one pass with
            rho zero as well.
        fallback: Structure for leaves that belong to no layer, as in `fisher.kfac`. These leaves,
            scales and shifts are merged as by `fedfisher`.
        solver: Solver of each layer's system (default
            `solvers.conjugate_gradients(max_iterations=500)`).
        batch_size: Minibatch size of the Fisher pass.
        max_examples: Largest number of a client's examples in its Fisher pass; None uses all.

    Returns:
        The algorithm. Updates are those of `fedfisher(model)`, {"params": W_i, "fisher": F_i}.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> method = fedfisher_sequential(model, damping=0.0)
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.zeros((2, 1))), [[0], [1]])
        >>> models = [{"w": jnp.zeros((2, 1))}, {"w": jnp.ones((2, 1))}]
        >>> updates = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
        >>> print(fj.merging.merge(method, models[0], updates)[0]["w"].T)
        [[0. 1.]]

    Source: this library. The quadratic is that of Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS
        2024; matching outputs on inputs is RegMean (Jin, Ren, Preotiuc-Pietro, Cheng, ICLR 2023).
        Layers are merged in the order in which the network uses them.
    """
    structure = kfac if fallback is None else partial(kfac, fallback=fallback)
    summarize, sent = fisher_summary(model, structure, kind, batch_size, max_examples)
    checks.number("damping", damping)
    checks.number("isotropy", isotropy)
    if passes != 0:
        checks.count("passes", passes)
    link = link_of(centre)
    # Damping is a hundredth of K-FAC's default, so that a layer may need more iterations.
    solve = solvers.conjugate_gradients(max_iterations=500) if solver is None else solver
    checks.function("solver", solve, "solvers.conjugate_gradients()")
    settings = _Settings(solve, outputs, passes)

    def aggregate(key: Any, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        updates, weights = received
        sent = updates["fisher"], updates["params"], weights
        point = centre_point(centre, params, partial(plain_sum, *sent[1:]))
        merged, info = _merged(settings, *sent, _Sizes(damping, isotropy, point))
        return merged, state, info

    return Algorithm(summarize, aggregate, kind=sent, model=model, link=link)


@partial(jit, static_argnums=0)
def _merged(
    settings: _Settings, fishers: Kronecker, params: Params, weights: Array, sizes: _Sizes
) -> tuple[Params, Any]:
    def solve(part: Kronecker, damping: Scalar) -> tuple[dict[str, Array], Any]:
        problem = about_mean(part, params, weights, damping, sizes.centre)
        # One layer does not make complete params.
        return settings.solve(problem._replace(restore=None))

    layers = [layer for layer in fishers.layers if layer.kernel in fishers.factors]
    models = jax.vmap(Kronecker.blocks)(fishers, params)
    inputs = {name: factor["input"] for name, factor in fishers.factors.items()}
    outputs, votes, scales = {}, {}, {}
    for number, layer in enumerate(layers):
        factor = fishers.factors[layer.kernel]["output"]
        factor = factor if settings.outputs and number else jnp.zeros_like(factor)
        outputs[layer.kernel], votes[layer.kernel] = _normalized(factor, weights > 0)
        scales[layer.kernel] = _means(factor)
    before = _layers_before(fishers, list(outputs))
    last = layers[-1].kernel
    iota = sizes.isotropy * agreement(models[last], inputs[last], weights)
    for name in [name for name in outputs if before[name]]:
        inputs[name] = _add_diagonal(inputs[name], jnp.full(weights.shape, iota), _mean)

    def merge_all(sigma: dict[str, Array], _: None) -> tuple[Any, Any]:
        merged, infos, errors = {}, [], {}
        for layer in layers:
            name = layer.kernel
            rho = relative_error([errors[x] for x in before[name] if x in errors], weights.shape)
            output = _add_diagonal(outputs[name], sigma[name], _ones)
            factor = {
                "input": _add_diagonal(inputs[name], rho, diagonal_of),
                "output": votes[name] * output,
            }
            part = Kronecker({name: factor}, {}, (layer,), fishers.template)
            found, info = solve(part, sizes.damping)
            merged |= found
            infos.append(info)
            if settings.passes:
                errors[name] = squared_errors(
                    found[name], models[name], factor["input"], jnp.matmul
                )
        if settings.passes:
            sigma = _errors_after(merged, models, outputs, scales, before)
        return sigma, (merged, infos)

    nothing = {layer.kernel: jnp.zeros(weights.shape) for layer in layers}
    _, passes = jax.lax.scan(merge_all, nothing, length=max(settings.passes, 1))
    merged, infos = jax.tree.map(lambda x: x[-1], passes)
    if fishers.entries:
        others = tuple(layer for layer in fishers.layers if layer.kernel in fishers.scales)
        rest = Kronecker({}, fishers.entries, others, fishers.template)
        found, info = solve(rest, Kronecker.default_damping)
        merged, infos = merged | found, [*infos, info]
    return fishers.restore(merged), _reports(infos, fishers.coverage)


def _normalized(stacked: Array, present: Array) -> tuple[Array, Array]:
    """Scale output factors to mean eigenvalue one; return them and the votes [M, 1, 1] of clients.

    If the factors of all clients with a weight are zero, the votes are equal, and the scaled
    factors identities.
    """
    identities = jax.vmap(identity_like)(stacked)
    each = (-1, *(1,) * (stacked.ndim - 1))
    means = _means(stacked).reshape(each)
    # The scale of a client without weight must not matter, however large it is.
    is_known = (means > 0) & present.reshape(each)
    largest = jnp.where(is_known, means, 0).max()
    units = jnp.where(is_known, ratio(is_known, stacked, means), identities)
    # In units of the largest before the root, so that votes stay in range. The inner `where` avoids
    # the derivative of a root at zero.
    votes = ratio(is_known, means, jnp.where(largest > 0, largest, 1))
    votes = jnp.where(is_known, jnp.sqrt(jnp.where(is_known, votes, 1)), largest == 0)
    return units, votes.astype(stacked.dtype)


def _means(stacked: Array) -> Array:
    """Return each client's mean eigenvalue [M] of a factor, over all groups of a layer."""
    return jax.vmap(lambda matrix: jnp.mean(diagonal_of(matrix)))(stacked)


def _ones(matrix: Array) -> Array:
    return jnp.ones_like(diagonal_of(matrix))


def _mean(matrix: Array) -> Array:
    return _ones(matrix) * jnp.mean(diagonal_of(matrix))


def _add_diagonal(stacked: Array, sizes: Array, diagonal: Callable[[Array], Array]) -> Array:
    """Add a multiple of a diagonal to each client's factor: its own, their mean, or ones."""

    def one(factor: Array, size: Array) -> Array:
        more = size.astype(factor.dtype) * diagonal(factor)
        return factor + (more if factor.ndim == 1 else more[..., None] * jnp.eye(more.shape[-1]))

    return jax.vmap(one)(stacked, sizes)


def _layers_before(fishers: Kronecker, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the layers, of those named, that make the inputs of each layer."""
    if fishers.feeders is None:
        return {names[0]: ()} | {name: (last,) for last, name in itertools.pairwise(names)}
    pairs = zip(fishers.layers, fishers.feeders, strict=True)
    return {layer.kernel: feeders for layer, feeders in pairs if layer.kernel in names}


def _errors_after(
    merged: dict, models: dict, outputs: dict, scales: dict, before: dict
) -> dict[str, Array]:
    """Compute sigma of each layer: the relative error of the layers after it, zero at the ends."""
    sigma = {name: jnp.zeros(len(models[name])) for name in outputs}
    errors: dict[str, Squares] = {}
    # From the last layer to the second; the output factor of the first is the identity.
    for name in list(outputs)[:0:-1]:
        after = [errors[x] for x in errors if name in before[x]]
        sigma[name] = relative_error(after, sigma[name].shape)
        factor = _add_diagonal(outputs[name], sigma[name], _ones)
        found = squared_errors(merged[name], models[name], factor, _multiply_right)
        # Output factors are normalised, but gradients of several layers add up with their scales.
        errors[name] = found._replace(scale=found.scale * scales[name])
    return sigma


def _multiply_right(factor: Array, x: Array, **how: Any) -> Array:
    return jnp.matmul(x, factor, **how)


def _reports(infos: list[Any], coverage: float) -> Any:
    """Combine the solver's reports on layers into one, if they are the library's own."""
    return combined(infos, coverage) if all(isinstance(x, Info) for x in infos) else infos
