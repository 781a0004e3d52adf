"""SingleSet: each client trains alone, the baseline that federated methods should improve on."""

from typing import Any

from fisherjax import tree
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Link, nothing
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params


@cached
def single_set() -> Algorithm[tuple[()]]:
    """Make the baseline without communication: in rounds, each client trains its own model further.

        W_i <- training of W_i on client i's examples

    Nothing is sent; `params` stay the same, and `Federated.models` returns the clients' models.

    Returns:
        The algorithm, for `rounds`; it has no merged model.

    Example:
        >>> import jax, jax.numpy as jnp, fisherjax as fj
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.zeros(2, int)), [[0], [1]])
        >>> import optax
        >>> how = {"cohort": 2, "optimizer": optax.sgd(0.1), "epochs": 1, "batch_size": 1}
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> alone = fj.rounds.federated(model, single_set(), **how)
        >>> alone.traffic(jnp.zeros((2, 2)), federation)
        Traffic(down=0, up=0)

    Source: Huang, Shi, Cai, Suzuki, Understanding convergence and generalization in federated
        learning through feature learning theory, ICLR 2024, tables 1 and 2 (the name); Li, Jiang,
        Zhang, Kamp, Dou, FedBN, ICLR 2021.
    """

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        del key, examples, local
        return {}, trained.params

    def aggregate(key: Key, received: Any, params: Params, state: Any, cohort: Array) -> tuple:
        del key, received, cohort
        return params, state, ()

    return Algorithm(
        summarize,
        aggregate,
        kind="nothing",
        gives="model per client",
        link=Link(
            init_client=lambda params: params,
            broadcast=nothing,
            receive=lambda _, local: (local, ()),
            keeps=tree.names,
        ),
    )
