"""FedPer: everybody's body, a head for each client.

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
    """Make FedPer: clients keep the layer that makes the outputs, and the rest is averaged.

    Args:
        head: The layer's name, a part of the names of its leaves: "dense3" is that of
            "dense3/kernel" and of "params/dense3/bias".
        algorithm: How the rest is merged; None is federated averaging.

    Returns:
        The algorithm, `keep_local` of the other.

    Raises:
        TypeError: If the head is not a string, or the algorithm none.
        ValueError: Once params are known, if no leaf or every leaf belongs to the head.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = {"dense1": {"kernel": jnp.zeros(2)}, "dense2": {"kernel": jnp.zeros(3)}}
        >>> list(fedper("dense2").link.init_client(params).leaves)
        ['dense2/kernel']

    Source: the paper above, algorithms 1 and 2. There the body is averaged with equal weights or by
        examples; here by examples.
    """
    if not isinstance(head, str):
        raise TypeError(f"head is {head!r}; expected the name of a layer, such as 'dense3'.")
    base: Algorithm[Any] = averaging() if algorithm is None else algorithm
    return keep_chosen(base, _leaves_of(head))


@cached
def _leaves_of(layer: str) -> Callable[[Params], set[str]]:
    # One object for one name: the algorithm is known by it.
    def choose(params: Params) -> set[str]:
        parts = {name: name.split("/") for name in leaves.by_name(params)}
        found = {name for name, own in parts.items() if layer in own}
        if not found:
            every = sorted({part for own in parts.values() for part in own[:-1] or own})
            raise ValueError(
                f"No layer is called {layer!r}: did you mean {checks.nearest(layer, every)}? "
                f"The leaves are {list(parts)}."
            )
        return found

    return choose
