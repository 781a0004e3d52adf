"""FedOV: clients learn which inputs are unknown to them, and vote by what they know.

Diao, Li, He, Towards addressing label skews in one-shot federated learning, ICLR 2023. The network
has one output more than there are classes, the last, for "unknown".
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import leaves, likelihoods
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._stacked import copies
from fisherjax.algorithms.base import Algorithm, Link, present_on_host
from fisherjax.algorithms.distillation._open_set import open_outputs
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


class FedOVReport(NamedTuple):
    """Report of FedOV.

    Attributes:
        clients: Indices [V], among all clients, of the clients that the stacked models belong to.
    """

    clients: Array


@cached
def voting(model: Model, quorum: int | None = None) -> Model:
    """Make a model whose outputs are the vote of several models, of those that know an input best.

        log v(c | x) = log mean_{i in Q(x)} p_i(c | x),   c = 1 .. C

    where p_i is the softmax of all C + 1 outputs of model i, and Q(x) are the models with the
    lowest p_i(unknown | x). A model with a high probability of "unknown" hardly affects the vote.

    Args:
        model: The network of one client, with C + 1 outputs: the argument of `open_set`, or its
            result.
        quorum: Number of models that vote on an input (default all).

    Returns:
        A model with stacked params, leaves [V, ...], such as those that `fedov` merges to:
        `metrics.accuracy(voting(model), stacked, test)`. Its outputs are [B, C].

    Raises:
        ValueError: If the likelihood is not categorical or the quorum is out of range; on use, if
            there are fewer models than the quorum, or fewer than 3 outputs.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: jnp.log(x @ w), fj.likelihoods.categorical)
        >>> stacked, x = jnp.array([[[0.8, 0.1, 0.1]], [[0.1, 0.2, 0.7]]]), jnp.ones((1, 1))
        >>> print(*(f"{v:.2f}" for v in jnp.exp(voting(model).apply(stacked, x))[0]))
        0.45 0.15
        >>> print(*(f"{v:.2f}" for v in jnp.exp(voting(model, quorum=1).apply(stacked, x))[0]))
        0.80 0.10

    Source: the paper above, section 3, where the vote is a sum instead of a mean.
    """
    _check_classes(model)
    if quorum is not None:
        checks.count("quorum", quorum)

    def apply(stacked: Params, inputs: Array) -> Array:
        number = jax.tree.leaves(stacked)[0].shape[0]
        checks.stacked(stacked, number)
        if quorum is not None and quorum > number:
            raise ValueError(f"quorum is {quorum}; expected at most the {number} models.")
        # One after another, so that only the activations of one model are in memory.
        z = jax.lax.map(lambda params: open_outputs(model.apply, params, inputs), stacked)
        votes = jax.nn.log_softmax(z)
        chosen = number if quorum is None else quorum
        if chosen < number:
            _, best = jax.lax.top_k(-votes[..., -1].T, chosen)  # [B, quorum]
            votes = jnp.take_along_axis(votes, best.T[..., None], axis=0)
        return jax.nn.logsumexp(votes[..., :-1], axis=0) - np.log(chosen)

    return Model(apply, likelihoods.categorical)


def _check_classes(model: Model) -> None:
    checks.model(model)
    if not likelihoods.is_categorical(model.likelihood):
        raise ValueError(
            "Clients vote on classes: the model's likelihood must be a categorical one, as that of "
            "open_set(model) is."
        )


@cached
def fedov(model: Model) -> Algorithm[FedOVReport]:
    """Make FedOV, whose merged model is the stack of the clients' models, for a vote.

        W = (W_i) over clients of p_i > 0,   predictions by `voting(model)` at W.

    Weights only say which clients are left out. Clients train `open_set(model)`, preferably each
    from an initial model of its own. `distilled` trains one model on the vote.

    Args:
        model: The network of one client, with C + 1 outputs: the argument of `open_set`, or its
            result.

    Returns:
        The algorithm. Updates are {"params": W_i}. Merged leaves are [V, ...], so that rounds
        cannot continue from them. It reports `FedOVReport`.

    Raises:
        ValueError: If the likelihood is not categorical; on a merge, if the clients' leaves have
            other shapes than params.
        TypeError: On a merge under `jit`, because clients without weight are found on the host.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.arange(2)), [[0], [1], [0]])
        >>> models, key = [n * jnp.ones((2, 3)) for n in range(3)], jax.random.key(0)
        >>> sent = fj.merging.summarize(fedov(model), models, federation, key=key)
        >>> stacked, _, voters = fj.merging.merge(fedov(model), models[0], sent, [1, 0, 1])
        >>> stacked.shape, voters.clients.tolist()
        ((2, 2, 3), [0, 2])

    Source: the paper above, algorithm 1.
    """
    _check_classes(model)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        del key, examples
        return {"params": trained.params}, local

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key
        # The number of merged models depends on values.
        trained = leaves.trained(model, params)
        present = present_on_host("FedOV finds clients without weight", received, trained)
        updates, _ = received
        stacked = jax.tree.map(lambda leaf: leaf[present], updates["params"])
        # The vote runs all models: each has a copy of the leaves that are not trained.
        stacked = leaves.join(stacked, copies(params, len(present)))
        return stacked, state, FedOVReport(jnp.asarray(cohort)[present])

    kind = "params of an open set"
    link = Link(whole=True)
    return Algorithm(summarize, aggregate, kind=kind, model=model, gives="votes", link=link)
