"""FedOV: clients learn what they do not know, and vote only as far as they know.

Diao, Li, He, Towards addressing label skews in one-shot federated learning, ICLR 2023. A network
has one output more than there are classes, the last: unknown.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import leaves, likelihoods, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Link
from fisherjax.algorithms.distillation._open_set import open_outputs
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


class Voters(NamedTuple):
    """What FedOV reports of the stacked models that it gives.

    Attributes:
        clients: [V] whose they are, places among all clients.
    """

    clients: Array


@cached
def voting(model: Model, quorum: int | None = None) -> Model:
    """Make the model of several: the vote of those that know an input best.

        log v(c | x) = log mean_{i in Q(x)} p_i(c | x),   c = 1 .. C

    with p_i the softmax of all C + 1 outputs of model i, and Q(x) the models with the lowest
    p_i(unknown | x). A model that does not know has little to say: it gives all to unknown.

    Args:
        model: The network of one client, with C + 1 outputs: the one given to `open_set`, or what
            that made.
        quorum: How many models vote on an input; None is all.

    Returns:
        A model whose params are stacked, leaves [V, ...], such as those that `fedov` merges to:
        `metrics.accuracy(voting(model), stacked, test)`. Its outputs are [B, C].

    Raises:
        ValueError: If the likelihood is no categorical one or the quorum is out of range; on use,
            if there are fewer models than it, or fewer than 3 outputs.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: jnp.log(x @ w), fj.likelihoods.categorical)
        >>> stacked, x = jnp.array([[[0.8, 0.1, 0.1]], [[0.1, 0.2, 0.7]]]), jnp.ones((1, 1))
        >>> print(*(f"{v:.2f}" for v in jnp.exp(voting(model).apply(stacked, x))[0]))
        0.45 0.15
        >>> print(*(f"{v:.2f}" for v in jnp.exp(voting(model, quorum=1).apply(stacked, x))[0]))
        0.80 0.10

    Source: the paper above, section 3, where a vote is the sum.
    """
    _check_classes(model)
    if quorum is not None:
        checks.count("quorum", quorum)

    def apply(stacked: Params, inputs: Array) -> Array:
        number = jax.tree.leaves(stacked)[0].shape[0]
        checks.stacked(stacked, number)
        if quorum is not None and quorum > number:
            raise ValueError(f"quorum is {quorum}; expected at most the {number} models.")
        # In turn: the activations of one model only are in memory.
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
def fedov(model: Model) -> Algorithm:
    """Make FedOV, whose merged model is the clients' models, stacked, for a vote.

        W = (W_i) over clients of p_i > 0,   predictions by `voting(model)` at W.

    Weights say only who is left out. Clients train `open_set(model)`, best from initial models of
    their own. `distilled` makes one model of it.

    Args:
        model: The network of one client, with C + 1 outputs: the one given to `open_set`, or what
            that made.

    Returns:
        The algorithm. Updates are {"params": W_i}. The merged leaves are [V, ...], so that rounds
        cannot go on from them. It reports `Voters`.

    Raises:
        ValueError: If the likelihood is no categorical one; on a merge, if the clients' leaves have
            other shapes than params.
        TypeError: On a merge under `jit`: who is left out is found on the host.

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
        if checks.is_traced(received):
            raise TypeError(
                "FedOV finds on the host which clients have weight: call merging.merge outside of "
                "jit and vmap, and not in rounds."
            )
        updates, weights = received
        one = jax.tree.map(lambda leaf: leaf[0], updates["params"])
        trained = leaves.trained(model, params)
        if tree.shapes(one) != tree.shapes(trained):
            raise ValueError(
                f"Clients have leaves of shapes {tree.shapes(one)}, but params has "
                f"{tree.shapes(trained)}. Pass the params of the network that the clients trained."
            )
        present = np.flatnonzero(np.asarray(weights) > 0)
        stacked = jax.tree.map(lambda leaf: leaf[present], updates["params"])
        # A vote runs all of them: what nobody trains is there for each.
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(present), *jnp.shape(x))), params)
        stacked = leaves.join(stacked, copies)
        return stacked, state, Voters(jnp.asarray(cohort)[present])

    kind = "params of an open set"
    link = Link(whole=True)
    return Algorithm(summarize, aggregate, kind=kind, model=model, gives="votes", link=link)
