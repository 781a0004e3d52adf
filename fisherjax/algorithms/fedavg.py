"""Federated averaging: W = sum_i p_i W_i.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, Communication-efficient learning of deep networks
from decentralized data, AISTATS 2017, algorithm 1.
"""

from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, averaging


@cached
def fedavg() -> Algorithm[tuple[()]]:
    """Make federated averaging, W = sum_i p_i W_i, of every leaf.

    Returns:
        The algorithm. Updates are {"params": W_i}, of which the server needs only sums.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> updates = fj.algorithms.Update({"params": jnp.array([[0.0], [4.0]])}, "params")
        >>> print(fj.merging.merge(fedavg(), jnp.zeros(1), updates)[0])
        [2.]
    """
    return averaging()
