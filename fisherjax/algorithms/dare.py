"""DARE: drop most entries of the clients' changes at random, and rescale the others.

Yu, Yu, Yu, Huang, Li, Language models are super Mario: absorbing abilities from homologous models
as a free lunch, ICML 2024, section 3.2.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import by_value, cached
from fisherjax.algorithms._changes import adding_changes, change_of
from fisherjax.algorithms.base import Algorithm
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Scalar


@cached
def dare(*, drop: float = 0.9, scaling: Scalar | None = None) -> Algorithm[tuple[()]]:
    """Make DARE, which drops entries of the changes of the start W_0 before it adds them.

        t_i = m_i (W_i - W_0) / (1 - drop),   m_i = 0 with probability `drop`, else 1,
        W_0 + sum_i p_i t_i   or   W_0 + scaling M sum_i p_i t_i,

    entry by entry, with M the number of clients with a weight. The mean of t_i over all draws is
    the change, and that of the merged model the one of `fedavg` or `task_arithmetic`.

    Args:
        drop: Probability that an entry is dropped, below 1 (default 0.9, one of the paper's).
        scaling: Factor of the sum, as in `task_arithmetic`; None for the weighted mean.

    Returns:
        The algorithm. Updates are {"change": t_i}, of which a share `drop` is zero; each client
        draws by the key of `summarize`. The server needs only sums and the start.

    Raises:
        ValueError: If a number is out of range; on summarize, if the initial model of a client is
            unknown.

    Example:
        >>> import fisherjax as fj
        >>> method, start = dare(drop=0.5), jnp.zeros(4)
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.zeros(2)), [[0, 1]])
        >>> trained = fj.training.Trained(jnp.ones((1, 4)), start)
        >>> sent = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
        >>> print(jnp.unique(sent.values["change"]))
        [0. 2.]

    Source: the paper above. Deviation: clients count by their weights, as in `task_arithmetic`.
    """
    checks.number("drop", drop, below=1.0)
    if scaling is not None:
        checks.number("scaling", scaling)

    def merged(mean: Array, count: Array) -> Array:
        return mean if scaling is None else scaling * count * mean

    summarize = by_value(partial(_summarize, drop))
    return adding_changes(merged, "change", summarize=summarize, kind="changes, most dropped")


def _summarize(
    drop: float, key: Key, trained: Trained, examples: Examples, local: Any
) -> tuple[dict[str, Any], Any]:
    del examples
    change = change_of(trained, "DARE drops entries of the changes of clients")
    leaves, structure = jax.tree.flatten(change)
    keys = jax.random.split(key, len(leaves))
    sent = [_dropped(drop, *pair) for pair in zip(keys, leaves, strict=True)]
    return {"change": jax.tree.unflatten(structure, sent)}, local


def _dropped(drop: float, key: Key, change: Array) -> Array:
    # An entry that is not finite is kept, so that the server sees it.
    kept = jax.random.bernoulli(key, 1 - drop, change.shape) | ~jnp.isfinite(change)
    return jnp.where(kept, change / (1 - drop), 0)
