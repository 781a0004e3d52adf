"""Running statistics of a merged network, computed again by the clients.

A mean of weights damps what a network's layers put out, so that the running statistics of the
clients, or their mean, are not those of the merged network, and its tests normalise wrongly.
Izmailov, Podoprikhin, Garipov, Vetrov, Wilson, Averaging weights leads to wider optima and better
generalization, UAI 2018, compute them again after averaging; Jordan, Sedghi, Saukh, Entezari,
Neyshabur, REPAIR: renormalizing permuted activations for interpolation repair, ICLR 2023, show
what is lost without it.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import _padding, leaves, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, WeightedSum, check_pass, weighted_sum
from fisherjax.clients import draw, weights_of
from fisherjax.fisher import _passes
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


@cached
def running_statistics(
    model: Model, *, batch_size: int = 64, max_examples: int | None = None
) -> Algorithm[tuple[()]]:
    r"""Make the exchange that computes the running statistics of the received model again.

        m_i = sum_b n_b E_b[x - c] / n_i,   s_i = sum_b n_b E_b[(x - c)^2] / n_i,
        m = sum_i p_i m_i,   s = sum_i p_i s_i,

    for each channel of each normalisation, over the minibatches b of client i, which has n_i
    examples. As in training, a minibatch is normalised by its own statistics: `Model.apply_train`
    runs the network. All other leaves stay the same, so that the exchange can follow any merge of a
    network with BatchNorm: see `merging.exchange`. A client sends its statistics, which are as
    large as those of an update.

    Args:
        model: The network, whose `apply_train` returns moments, as `networks.apply_fn` and
            `networks.to_moments` make them.
        batch_size: Minibatch size. Larger ones have less noise.
        max_examples: Largest number of a client's examples, drawn by the key of `summarize`; None
            (default) uses all.

    Returns:
        The algorithm. Updates are {"examples": n_i} and the statistics.

    Raises:
        ValueError: If a number is out of range, or on summarize if the network has no running
            moments.

    Example:
        >>> import fisherjax as fj
        >>> def train(params, x, key, weights):
        ...     batch = {"mean": x.mean(0), "second_moment": (x**2).mean(0)}
        ...     new = jax.tree.map(lambda old, now: 0.9 * old + 0.1 * now, params["norm"], batch)
        ...     return x @ params["w"], params | {"norm": new}
        >>> params = {"w": jnp.ones((1, 2)), "norm": {"mean": jnp.zeros(1), "second_moment": 1.0}}
        >>> mask = {"w": True, "norm": {"mean": False, "second_moment": False}}
        >>> apply = lambda params, x: (x - params["norm"]["mean"]) @ params["w"]
        >>> model = fj.Model(apply, fj.likelihoods.categorical, train, mask)
        >>> data = jnp.arange(4.0)[:, None], jnp.zeros(4, int)
        >>> federation = fj.clients.federation(data, [[0, 1], [2, 3]])
        >>> method, key = running_statistics(model), jax.random.key(0)
        >>> again, _, _ = fj.merging.exchange(method, params, federation, key=key)
        >>> f"{again['norm']['mean'][0]:.2f}"
        '1.50'

    Source: the papers above. Deviations: they run over all data in one place, and a minibatch of
        theirs mixes what is several clients' here; moments are a mean over examples, not over
        minibatches.
    """
    checks.model(model)
    check_pass(batch_size, max_examples)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        drawn, dropout = jax.random.split(key)
        examples = _padding.drop_uncounted(model, draw(drawn, examples, max_examples))
        statistics = _client_statistics(model, batch_size, trained.whole, examples, dropout)
        return {"examples": weights_of(examples).sum(), "statistics": statistics}, local

    def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
        return weighted_sum(updates["examples"], weights)

    def aggregate(key: Key, sums: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, sums, cohort
        return params, state, ()

    return Algorithm(summarize, aggregate, reduce, kind="running statistics", model=model)


def _client_statistics(
    model: Model, batch_size: int, params: Params, examples: Examples, key: Key
) -> dict[str, Array]:
    """Return a client's moments by name, as means over its examples."""
    held, kinds = tree.by_name(params), leaves.kinds(model, params, examples.inputs)
    # Trained and frozen leaves may have such names too.
    running = {name for name, kind in zip(held, kinds, strict=True) if kind == leaves.STATISTICS}
    named = [name.removesuffix("mean") for name in held if name.endswith("mean")]
    layers = [layer for layer in named if {f"{layer}mean", f"{layer}second_moment"} <= running]
    train = model.apply_train
    if train is None or not layers:
        missing = "apply_train" if named and train is None else "running moments"
        raise ValueError(
            f"This network has no {missing}; expected a "
            "model with BatchNorm, such as networks.model makes, or an apply_train of your own "
            "that returns moments (networks.to_moments)."
        )

    def batch_sums(inputs: Any, targets: Any, weights: Array, key: Key) -> dict[str, Array]:
        del targets

        def update(means: dict[str, Array]) -> dict[str, Array]:
            """Return what the minibatch makes of moments with these means and no variance."""
            given = {}
            for layer, mean in means.items():
                given |= _moments(layer, mean, jnp.zeros_like(mean), held)
            whole = leaves.replace(params, held | given)
            return tree.by_name(train(whole, inputs, key, weights)[1])

        # A statistic becomes (1 - a) times the old one and a times the minibatch's: of means, two
        # give both. At the minibatch's mean, the same holds for variances and second moments alike.
        # In the compiled program the network runs once, since only these sums differ.
        zeros = {layer: jnp.zeros_like(held[f"{layer}mean"]) for layer in layers}
        low, high = update(zeros), update(jax.tree.map(jnp.ones_like, zeros))
        shares = {layer: 1 - (high[f"{layer}mean"] - low[f"{layer}mean"]) for layer in layers}
        # A network may return what it received: then there is nothing to compute. What is not a
        # number counts as moved, so that the server sees it.
        stays = {layer: share <= 0 for layer, share in shares.items()}
        shares = {layer: jnp.where(stays[layer], 1, share) for layer, share in shares.items()}
        near = {layer: low[f"{layer}mean"] / share for layer, share in shares.items()}
        centred, found = update(near), {}
        for layer, point in near.items():
            share, second = shares[layer], centred[f"{layer}second_moment"]
            # A share is not exact, and a mean far from zero is a large multiple of its error.
            mean = point + (centred[f"{layer}mean"] - point) / share
            variance = (second - point**2) / share - (mean - point) * (mean + point)
            if f"{layer}within" in centred:
                variance = centred[f"{layer}within"] / share
            for name, moment in _moments(layer, mean, variance, held).items():
                found[name] = jnp.where(stays[layer], held[name], moment)
        return jax.tree.map(lambda x: weights.sum().astype(x.dtype) * x, found)

    found = _passes.weighted_mean(batch_sums, examples, key=key, batch_size=batch_size)
    has_examples = weights_of(examples).sum() > 0
    return {name: jnp.where(has_examples, x, held[name]) for name, x in found.items()}


def _moments(layer: str, mean: Array, variance: Array, held: dict[str, Array]) -> dict[str, Array]:
    """Return those moments of a layer that a network holds, by name."""
    moments = {"mean": mean, "second_moment": variance + mean**2, "within": variance}
    return {layer + name: x for name, x in moments.items() if layer + name in held}
