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

from fisherjax import checks, quadratic, solvers, tree
from fisherjax.algorithms.base import ENOUGH, Algorithm, fisher_summary
from fisherjax.configuration import cached
from fisherjax.fisher import Diagonal, Kronecker, automatic, kfac
from fisherjax.fisher.kinds import Kind
from fisherjax.fisher.kronecker import diagonal_of, identity_like
from fisherjax.fisher.operators import PRECISION
from fisherjax.solvers import Info
from fisherjax.solvers.base import Solver, ratio
from fisherjax.typing import Array, Model, Params

_SHRUNK = 3  # inputs that shrank to less than a third, or grew to more than thrice, count as that
_WRONG = 100  # times that gradients are wrong at most: nothing is left of them by then


class _Settings(NamedTuple):
    solve: Solver
    outputs: bool
    errors: bool
    passes: int


@cached
def fedfisher_sequential(
    model: Model,
    *,
    kind: Kind = automatic,
    damping: float = 0.01,
    outputs: bool = True,
    errors: bool = True,
    passes: int = 2,
    fallback: Callable[..., Diagonal] | None = None,
    solver: solvers.Solver | None = None,
    batch_size: int = 64,
    max_examples: int | None = ENOUGH,
) -> Algorithm:
    """Make FedFisher with K-FAC that merges one layer after the other, in the forward order.

        sum_i p_i (t_i A_i (t_i V - V_i) + N_i (V - V_i)) G_i + damping s (V - Vbar) = 0,
        N_i = max(r_i - (1 - t_i)^2, 0) (diag(A_i) + k_i D) / 2,
        G_i = (G'_i + sigma_i m_i I) / sqrt(m_i),
        t_i = <V_i, t_i V>_A / |V_i|^2_A                       of the layers before, in [1/3, 3],
        r_i = (|t_i V - V_i|^2_A + |V|^2_N) / |V_i|^2_A        of the layers before, at most 1,
        sigma_i = (|V - V_i|^2_G' + sigma_i m_i |V|^2) / |V_i|^2_G'   of the layers after,

    with A and G' the Kronecker factors of the Fisher information, k_i and m_i their mean
    eigenvalues, s that of the sum, <X, Y>_A = tr X^T A Y and |X|^2_G = tr X G X^T. In the merged
    network client i's inputs a come as t_i a + e: all layers before have shrunk them to the share
    t_i, and r_i of their square is wrong, so that e has what shrinking leaves of it. It is spread
    half as the inputs are active at the client, half as they are at all together, D, which is
    sum_j p_j diag(A_j) / k_j at a mean of one. Gradients are wrong by the share sigma_i likewise,
    spread evenly. Inputs of the first layer are everybody's: t is one, r zero, and G is the
    identity, since whatever comes after can make use of every output. Outputs of the last layer are
    everybody's too: sigma is zero. The first pass takes sigma for zero, later ones that of the pass
    before. A client that is sure of its examples has a small G', which says little about its
    model's worth elsewhere: it votes by the root of its scale, halfway to equal votes. Where nobody
    has any curvature G' is the identity.

    Where a network branches, the layers before are those whose outputs make the inputs, skips
    included (`Kronecker.feeders`), and numerators and denominators are sums over them, so that a
    branch counts by the size of its outputs: t is one and r zero for whoever takes only the
    network's inputs. The layers after likewise. An operator that does not say who feeds whom, as of
    uploads written before that was known, is merged as a chain.

    Args:
        model: The network and what its outputs mean.
        kind: `fisher.true`, `fisher.curvature_propagation`, as good in one backward pass,
            `fisher.sampled` or `fisher.empirical`; `fisher.automatic` is true, but curvature
            propagation where outputs are sequences.
        damping: In units of each layer's mean eigenvalue.
        outputs: Whether the factors of the outputs are used; otherwise G is the identity
            everywhere, which is RegMean of every layer, convolutions too, with errors=False.
        errors: Whether t, r and sigma are; otherwise one, zero and zero.
        passes: Through all layers, at least one.
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
    checks.count("passes", passes)
    # Damping is a hundredth of what K-FAC takes: a layer may need more steps.
    solve = solvers.conjugate_gradients(max_iterations=500) if solver is None else solver
    checks.function("solver", solve, "solvers.conjugate_gradients()")
    settings = _Settings(solve, outputs, errors, passes)

    def aggregate(key: Any, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, params, cohort
        updates, weights = received
        merged, info = _merged(settings, updates["fisher"], updates["params"], weights, damping)
        return merged, state, info

    return Algorithm(summarize, aggregate, kind=sent, model=model)


@partial(jax.jit, static_argnums=0)
def _merged(
    settings: _Settings, fishers: Kronecker, params: Params, weights: Array, damping: Array
) -> tuple[Params, Any]:
    def solve(
        part: Kronecker, damping: Array, more: Kronecker | None = None
    ) -> tuple[dict[str, Array], Any]:
        problem = quadratic.quadratic(part, params, weights, damping)
        if more is not None:
            own = jax.vmap(Kronecker.block_mv)(more, {name: models[name] for name in more.factors})
            pull = tree.weighted_sum(tree.keep(weights > 0, own), weights)

            def add(rhs: Array, pull: Array, exponent: Array) -> Array:
                return rhs + tree.times_power(pull.astype(rhs.dtype), -exponent)

            problem = problem._replace(rhs=jax.tree.map(add, problem.rhs, pull, problem.exponents))
        # A part of the layers makes no params.
        return settings.solve(problem._replace(restore=None))

    layers = [layer for layer in fishers.layers if layer.kernel in fishers.factors]
    models = jax.vmap(Kronecker.blocks)(fishers, params)
    inputs = {name: factor["input"] for name, factor in fishers.factors.items()}
    profiles = {name: _profiles(own, weights) for name, own in inputs.items()}
    outputs, votes, scales = {}, {}, {}
    for number, layer in enumerate(layers):
        own = fishers.factors[layer.kernel]["output"]
        known = own if settings.outputs and number else jnp.zeros_like(own)
        outputs[layer.kernel], votes[layer.kernel] = _units(known, weights > 0)
        scales[layer.kernel] = jnp.trace(known, axis1=1, axis2=2) / known.shape[-1]
    before = _before(fishers, list(outputs))

    def merge_all(sigma: dict[str, Array], _: None) -> tuple[Any, Any]:
        merged, infos, known = {}, [], {}
        for layer in layers:
            name = layer.kernel
            share = _share([known[x] for x in before[name] if x in known], weights.shape)
            kept = jnp.clip(share.kept, 1 / _SHRUNK, _SHRUNK)
            rest = jnp.clip(jnp.clip(share.wrong, 0, 1) - (1 - kept) ** 2, 0, 1)
            noise = _times(profiles[name], rest)
            output = votes[name] * _plus(outputs[name], _even(outputs[name], sigma[name]))
            factor = {"input": _plus(_times(inputs[name], kept**2), noise), "output": output}
            part = partial(Kronecker, entries={}, layers=(layer,), template=fishers.template)
            more = None
            if before[name] and settings.errors:
                more = part(
                    {name: {"input": _times(inputs[name], kept - kept**2), "output": output}}
                )
            found, info = solve(part({name: factor}), damping, more)
            merged |= found
            infos.append(info)
            if settings.errors:
                own = _squares(found[name], models[name], inputs[name], jnp.matmul, kept)
                known[name] = _passed_on(own, noise, found[name])
        if settings.errors:
            sigma = _backward(merged, models, outputs, scales, before)
        return sigma, (merged, infos)

    nothing = {layer.kernel: jnp.zeros(weights.shape) for layer in layers}
    # Without errors every pass is the first again.
    number = settings.passes if settings.errors else 1
    _, passes = jax.lax.scan(merge_all, nothing, length=number)
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


def _profiles(stacked: Array, weights: Array) -> Array:
    """Say how active each input is, half at the client, half at all, at its own scale [M, a]."""
    diagonals = jax.vmap(diagonal_of)(stacked)
    means = jnp.mean(diagonals, axis=1, keepdims=True)
    # Of a client without inputs, or without weight, nothing is known, however large it is.
    known = (means > 0) & (weights > 0)[:, None]
    units = jnp.where(known, ratio(known, diagonals, means), 0)
    common = jnp.tensordot(weights.astype(units.dtype), units, 1)
    common = ratio(common.any(), common, jnp.mean(common))
    return jnp.where(known, diagonals + means * common, 0) / 2


def _even(stacked: Array, sizes: Array) -> Array:
    """Give each client [M, ...] so many times the identity, as a diagonal."""
    return jnp.broadcast_to(sizes.astype(stacked.dtype)[:, None], stacked.shape[:2])


def _times(stacked: Array, shares: Array) -> Array:
    """Multiply what each client has [M, ...] by its share [M]."""
    return shares.astype(stacked.dtype).reshape(-1, *(1,) * (stacked.ndim - 1)) * stacked


def _plus(stacked: Array, diagonals: Array) -> Array:
    """Add a diagonal to each client's factor, which may be diagonal itself."""
    more = diagonals if stacked.ndim == diagonals.ndim else jax.vmap(jnp.diag)(diagonals)
    return stacked + more


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
    known: dict[str, _Squares] = {}
    # From the last on, but not of the first, whose output factor is the identity.
    for name in list(outputs)[:0:-1]:
        after = [known[x] for x in known if name in before[x]]
        sigma[name] = jnp.clip(_share(after, sigma[name].shape).wrong, 0, _WRONG)
        own = _squares(merged[name], models[name], outputs[name], _from_the_right)
        own = _passed_on(own, _even(outputs[name], sigma[name]), merged[name].T)
        # Output factors are in units, but gradients that meet are not.
        known[name] = own._replace(scale=own.scale * scales[name])
    return sigma


def _from_the_right(factor: Array, x: Array, **how: Any) -> Array:
    return jnp.matmul(x, factor, **how)


class _Squares(NamedTuple):
    """How wrong a merged layer is for each client, what it keeps, and how large the client's is."""

    wrong: Array
    kept: Array
    size: Array
    scale: Array


def _squares(
    merged: Array, models: Array, factors: Array, multiply: Callable, kept: Array | None = None
) -> _Squares:
    """Measure |t V - V_i|^2_A, <V_i, t V>_A and |V_i|^2_A of clients' V_i [M, a, o]."""
    kept = jnp.ones(len(models), merged.dtype) if kept is None else kept

    def one(factor: Array, model: Array, kept: Array) -> _Squares:
        # Neither its scale nor the layer's matters, but squares must stay in range.
        mean = jnp.mean(diagonal_of(factor))
        factor, given = ratio(mean > 0, factor, mean), kept.astype(merged.dtype) * merged

        def product(x: Array, y: Array) -> Array:
            diagonal = factor.ndim == 1
            image = factor[:, None] * y if diagonal else multiply(factor, y, precision=PRECISION)
            return jnp.vdot(x, image, precision=PRECISION)

        wrong = given - model
        return _Squares(product(wrong, wrong), product(model, given), product(model, model), mean)

    return jax.vmap(one)(factors, models, kept)


def _passed_on(own: _Squares, noise: Array, merged: Array) -> _Squares:
    """Add what a layer makes of the noise of its inputs, diagonal [M, a]."""
    scale = own.scale[:, None]
    more = jnp.matmul(ratio(scale > 0, noise, scale), merged**2, precision=PRECISION).sum(1)
    return own._replace(wrong=own.wrong + more)


class _Share(NamedTuple):
    """Of what several layers give together: which share is wrong, and which is there, [M]."""

    wrong: Array
    kept: Array


def _share(parts: list[_Squares], shape: tuple[int, ...]) -> _Share:
    """Add up the layers that feed another; of none nothing is wrong and all is there."""
    if not parts:
        return _Share(jnp.zeros(shape), jnp.ones(shape))
    total, *others = parts
    if others:
        scales = jnp.stack([part.scale for part in parts])
        largest = scales.max(0)
        votes = jnp.where(largest > 0, ratio(largest > 0, scales, largest), 1)
        total = jax.tree.map(lambda *own: jnp.sum(votes * jnp.stack(own), 0), *parts)
    known = total.size > 0
    # Whatever is wrong with layers of zeros is all of it.
    wrong = jnp.where(known, ratio(known, total.wrong, total.size), total.wrong > 0)
    return _Share(wrong, jnp.where(known, ratio(known, total.kept, total.size), 1))


def _joined(infos: list[Any], covered: float) -> Any:
    """Make one info of those of the layers."""
    if not all(isinstance(info, Info) for info in infos):
        return infos
    fields = [[info[number] for info in infos] for number in range(3)]
    return Info(*({k: v for one in own for k, v in one.items()} for own in fields), covered)
