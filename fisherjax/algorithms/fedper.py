"""FedPer: the clients share the body of the network, and each has a head of its own.

Arivazhagan, Aggarwal, Singh, Choudhary, Federated learning with personalization layers, 2019.
"""

from collections.abc import Callable
from typing import Any

from fisherjax import leaves
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Report, averaging
from fisherjax.algorithms.wrappers.local_leaves import keep_chosen
from fisherjax.typing import Params


@cached
def fedper(head: str, algorithm: Algorithm[Report] | None = None) -> Algorithm[Report]:
    """Make FedPer: clients keep the layer that makes the outputs; other leaves are averaged.

    Args:
        head: Name of the layer, a part of the names of its leaves: "dense3" selects
            "dense3/kernel" and "params/dense3/bias".
        algorithm: Algorithm that merges the other leaves (default federated averaging).

    Returns:
        The algorithm, a `keep_local` of `algorithm`.

    Raises:
        TypeError: If the head is not a string, or `algorithm` is not an Algorithm.
        ValueError: When params are first seen, if no leaf or every leaf belongs to the head.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = {"dense1": {"kernel": jnp.zeros(2)}, "dense2": {"kernel": jnp.zeros(3)}}
        >>> list(fedper("dense2").link.init_client(params).leaves)
        ['dense2/kernel']

    Source: the paper above, algorithms 1 and 2. There the body is averaged with equal weights or by
        numbers of examples; here by numbers of examples.
    """
    if not isinstance(head, str):
        raise TypeError(f"head is {head!r}; expected the name of a layer, such as 'dense3'.")
    base: Algorithm[Any] = averaging() if algorithm is None else algorithm
    return keep_chosen(base, _leaves_of(head))


@cached
def _leaves_of(layer: str) -> Callable[[Params], set[str]]:
    # Cached, because equal arguments must give the same algorithm.
    def choose(params: Params) -> set[str]:
        parts = {name: name.split("/") for name in leaves.by_name(params)}
        found = {name for name, path in parts.items() if layer in path}
        if not found:
            every = sorted({part for path in parts.values() for part in path[:-1] or path})
            raise ValueError(
                f"No layer is called {layer!r}: did you mean {checks.nearest(layer, every)}? "
                f"The leaves are {list(parts)}."
            )
        return found

    return choose
