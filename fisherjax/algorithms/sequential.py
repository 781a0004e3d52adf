"""FedFisher layer by layer: each layer knows what the merge of its neighbours did to it.

Kronecker factors are of the clients' own networks. In the merged network a layer's inputs, and the
gradients that come back to it, are others, because the layers before and after it were merged too.
How far off they are is known from the same upload: it is the error that a merged layer makes, in
the metric of its own factors.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import quadratic, solvers
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.algorithms._fisher_updates import fisher_summary
from fisherjax.algorithms._layer_errors import Squares, agreement, share, squares
from fisherjax.algorithms.base import ENOUGH, Algorithm
from fisherjax.fisher import Diagonal, Kronecker, automatic, kfac
from fisherjax.fisher.kinds import Kind
from fisherjax.fisher.kronecker import diagonal_of, identity_like
from fisherjax.solvers import Info
from fisherjax.solvers.base import Solver, ratio
from fisherjax.typing import Array, Model, Params


class _Settings(NamedTuple):
    solve: Solver
    outputs: bool
    passes: int


class _Sizes(NamedTuple):
    damping: Array
    isotropy: Array


@cached
def fedfisher_sequential(
    model: Model,
    *,
    kind: Kind = automatic,
    damping: float = 0.01,
    outputs: bool = True,
    isotropy: float = 0.3,
    passes: int = 2,
    fallback: Callable[..., Diagonal] | None = None,
    solver: solvers.Solver | None = None,
    batch_size: int = 64,
    max_examples: int | None = ENOUGH,
) -> Algorithm:
    """Make FedFisher with K-FAC that merges one layer after the other, in the forward order.

        sum_i p_i A_i (V - V_i) G_i + damping s (V - Vbar) = 0,   s the mean eigenvalue of the sum,
        A_i = A"_i + rho_i diag(A"_i),        G_i = (G'_i + sigma_i m_i I) / sqrt(m_i),
        A"_i = A'_i + iota k_i I,             iota = isotropy max(0, 1 / e - 2),
        rho_i = |V - V_i|^2_A / |V_i|^2_A     of the layers before, at most 1,
        sigma_i = |V - V_i|^2_G / |V_i|^2_G   of the layers after, at most 1,
        e = sum_i p_i min(1, |Vbar - V_i|^2_A' / |V_i|^2_A')   of the last layer, at least 1/10,

    with A' and G' the Kronecker factors of the Fisher information, k_i and m_i their mean
    eigenvalues, |X|^2_A = tr X^T A X and |X|^2_G = tr X G X^T. Inputs of the first layer are
    everybody's: rho and iota are zero, and G is the identity, since whatever comes after can make
    use of every output. Outputs of the last layer are everybody's too: sigma is zero. The first
    pass takes sigma for zero, later ones that of the pass before. A client that is sure of its
    examples has a small G', which says little about its model's worth elsewhere: it votes by the
    root of its scale, halfway to equal votes. Where nobody has any curvature G' is the identity.

    Clients whose plain mean is wrong in less than half of what they would say, e, have learned much
    the same: each is right about inputs that it has seldom seen too, and counts in all directions
    by iota.

    Where a network branches, the layers before are those whose outputs make the inputs, skips
    included (`Kronecker.feeders`), and numerators and denominators are sums over them, so that a
    branch counts by the size of its outputs: rho is zero for whoever takes only the network's
    inputs. The layers after likewise. An operator that does not say who feeds whom, as of uploads
    written before that was known, is merged as a chain.

    Args:
        model: The network and what its outputs mean.
        kind: `fisher.true`, `fisher.curvature_propagation`, as good in one backward pass,
            `fisher.sampled` or `fisher.empirical`; `fisher.automatic` is true, but curvature
            propagation where outputs are sequences.
        damping: In units of each layer's mean eigenvalue.
        outputs: Whether the factors of the outputs are used; otherwise G is the identity
            everywhere, which is RegMean of every layer, convolutions too, with passes=0
            and isotropy=0.
        isotropy: How much of a mean eigenvalue is added to inputs for clients that agree.
        passes: Through all layers; 1 leaves sigma zero, and 0 is one pass with rho zero as well.
        fallback: For leaves that belong to no layer: that of `fisher.kfac`. They, and scales and
            shifts, are merged as by `fedfisher`.
        solver: Of each layer's system; None is `solvers.conjugate_gradients(max_iterations=500)`.
        batch_size: Examples of a minibatch in the Fisher pass.
        max_examples: Of how many of a client's examples its Fisher is at most; None is all.

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
        Layers are in the order in which the network uses them.
    """
    structure = kfac if fallback is None else partial(kfac, fallback=fallback)
    summarize, sent = fisher_summary(model, structure, kind, batch_size, max_examples)
    checks.number("damping", damping)
    checks.number("isotropy", isotropy)
    if passes != 0:
        checks.count("passes", passes)
    # Damping is a hundredth of what K-FAC takes: a layer may need more steps.
    solve = solvers.conjugate_gradients(max_iterations=500) if solver is None else solver
    checks.function("solver", solve, "solvers.conjugate_gradients()")
    settings = _Settings(solve, outputs, passes)

    def aggregate(key: Any, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, params, cohort
        updates, weights = received
        sent = updates["fisher"], updates["params"], weights
        merged, info = _merged(settings, *sent, _Sizes(damping, isotropy))
        return merged, state, info

    return Algorithm(summarize, aggregate, kind=sent, model=model)


@partial(jit, static_argnums=0)
def _merged(
    settings: _Settings, fishers: Kronecker, params: Params, weights: Array, sizes: _Sizes
) -> tuple[Params, Any]:
    def solve(part: Kronecker, damping: Array) -> tuple[dict[str, Array], Any]:
        problem = quadratic.quadratic(part, params, weights, damping)
        # A part of the layers makes no params.
        return settings.solve(problem._replace(restore=None))

    layers = [layer for layer in fishers.layers if layer.kernel in fishers.factors]
    models = jax.vmap(Kronecker.blocks)(fishers, params)
    inputs = {name: factor["input"] for name, factor in fishers.factors.items()}
    outputs, votes, scales = {}, {}, {}
    for number, layer in enumerate(layers):
        own = fishers.factors[layer.kernel]["output"]
        known = own if settings.outputs and number else jnp.zeros_like(own)
        outputs[layer.kernel], votes[layer.kernel] = _units(known, weights > 0)
        scales[layer.kernel] = jnp.trace(known, axis1=1, axis2=2) / known.shape[-1]
    before = _before(fishers, list(outputs))
    last = layers[-1].kernel
    iota = sizes.isotropy * agreement(models[last], inputs[last], weights)
    for name in [name for name in outputs if before[name]]:
        inputs[name] = _plus(inputs[name], jnp.full(weights.shape, iota), _mean)

    def merge_all(sigma: dict[str, Array], _: None) -> tuple[Any, Any]:
        merged, infos, known = {}, [], {}
        for layer in layers:
            name = layer.kernel
            rho = share([known[x] for x in before[name] if x in known], weights.shape)
            output = _plus(outputs[name], sigma[name], _ones)
            factor = {
                "input": _plus(inputs[name], rho, diagonal_of),
                "output": votes[name] * output,
            }
            part = Kronecker({name: factor}, {}, (layer,), fishers.template)
            found, info = solve(part, sizes.damping)
            merged |= found
            infos.append(info)
            if settings.passes:
                known[name] = squares(found[name], models[name], factor["input"], jnp.matmul)
        if settings.passes:
            sigma = _backward(merged, models, outputs, scales, before)
        return sigma, (merged, infos)

    nothing = {layer.kernel: jnp.zeros(weights.shape) for layer in layers}
    _, passes = jax.lax.scan(merge_all, nothing, length=max(settings.passes, 1))
    merged, infos = jax.tree.map(lambda x: x[-1], passes)
    if fishers.entries:
        scales = tuple(layer for layer in fishers.layers if layer.kernel in fishers.scales)
        rest = Kronecker({}, fishers.entries, scales, fishers.template)
        found, info = solve(rest, Kronecker.default_damping)
        merged, infos = merged | found, [*infos, info]
    return fishers.restore(merged), _joined(infos, fishers.coverage)


def _units(stacked: Array, present: Array) -> tuple[Array, Array]:
    """Scale output factors to mean eigenvalue one, and give their votes [M, 1, 1] apart.

    Where no client that counts has any, the votes are equal, and the units identities.
    """
    identities = jax.vmap(identity_like)(stacked)
    means = jnp.trace(stacked, axis1=1, axis2=2)[:, None, None] / stacked.shape[-1]
    # Who has no weight is not asked, however large it is.
    known = (means > 0) & present[:, None, None]
    largest = jnp.where(known, means, 0).max()
    units = jnp.where(known, ratio(known, stacked, means), identities)
    # In units of the largest before the root, so that votes stay in range; a root of zero has no
    # derivative.
    votes = ratio(known, means, jnp.where(largest > 0, largest, 1))
    votes = jnp.where(known, jnp.sqrt(jnp.where(known, votes, 1)), largest == 0)
    return units, votes.astype(stacked.dtype)


def _ones(matrix: Array) -> Array:
    return jnp.ones(len(matrix), matrix.dtype)


def _mean(matrix: Array) -> Array:
    return jnp.full(len(matrix), jnp.mean(diagonal_of(matrix)), matrix.dtype)


def _plus(stacked: Array, sizes: Array, diagonal: Callable[[Array], Array]) -> Array:
    """Add to each client's factor so many times a diagonal: its own, their mean, or ones."""

    def one(factor: Array, size: Array) -> Array:
        more = size.astype(factor.dtype) * diagonal(factor)
        return factor + (more if factor.ndim == 1 else jnp.diag(more))

    return jax.vmap(one)(stacked, sizes)


def _before(fishers: Kronecker, names: list[str]) -> dict[str, tuple[str, ...]]:
    """Say which layers, of these in their order, make the inputs of each."""
    if fishers.feeders is None:
        return {names[0]: ()} | {name: (last,) for last, name in itertools.pairwise(names)}
    pairs = zip(fishers.layers, fishers.feeders, strict=True)
    return {layer.kernel: feeders for layer, feeders in pairs if layer.kernel in names}


def _backward(
    merged: dict, models: dict, outputs: dict, scales: dict, before: dict
) -> dict[str, Array]:
    """Give sigma of every layer: zero at the ends, in between the error of those after."""
    sigma = {name: jnp.zeros(len(models[name])) for name in outputs}
    known: dict[str, Squares] = {}
    # From the last on, but not of the first, whose output factor is the identity.
    for name in list(outputs)[:0:-1]:
        after = [known[x] for x in known if name in before[x]]
        sigma[name] = share(after, sigma[name].shape)
        factor = _plus(outputs[name], sigma[name], _ones)
        own = squares(merged[name], models[name], factor, _from_the_right)
        # Output factors are in units, but gradients that meet are not.
        known[name] = own._replace(scale=own.scale * scales[name])
    return sigma


def _from_the_right(factor: Array, x: Array, **how: Any) -> Array:
    return jnp.matmul(x, factor, **how)


def _joined(infos: list[Any], covered: float) -> Any:
    """Make one info of those of the layers."""
    if not all(isinstance(info, Info) for info in infos):
        return infos
    fields = [[info[number] for info in infos] for number in range(3)]
    return Info(*({k: v for one in own for k, v in one.items()} for own in fields), covered)
