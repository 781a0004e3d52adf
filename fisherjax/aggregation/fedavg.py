"""Federated averaging: W = sum_i p_i W_i.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, Communication-efficient learning of deep networks
from decentralized data, AISTATS 2017, algorithm 1.
"""

from typing import Any

from fisherjax import tree
from fisherjax.aggregation.base import Aggregator, no_state
from fisherjax.clients import Examples
from fisherjax.typing import Array, Key, Params


def fedavg() -> Aggregator:
    """Make federated averaging, W = sum_i p_i W_i, of every leaf.

    Returns:
        The aggregator. Updates are {"params": W_i}.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> updates = {"params": {"w": jnp.array([[0.0], [4.0]])}}
        >>> merged, _ = fj.aggregation.merge(fedavg(), {"w": jnp.zeros(1)}, updates)
        >>> print(merged["w"])
        [2.]
    """

    def summarize(key: Key, params: Params, examples: Examples, global_params: Params) -> Any:
        del key, examples, global_params
        return {"params": params}

    def reduce(updates: Any, weights: Array) -> Params:
        return tree.weighted_sum(updates["params"], weights)

    def finish(sums: Params, global_params: Params, state: Any) -> tuple[Params, Any, Any]:
        del global_params
        return sums, state, ()

    return Aggregator(no_state, summarize, reduce, finish)
