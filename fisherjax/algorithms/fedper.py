"""FedPer: everybody's body, a head for each client.

Arivazhagan, Aggarwal, Singh, Choudhary, Federated learning with personalization layers, 2019.
"""

from fisherjax.algorithms.base import Algorithm, averaging
from fisherjax.algorithms.private import keep_private
from fisherjax.configuration import cached


@cached
def fedper(head: str, algorithm: Algorithm | None = None) -> Algorithm:
    """Make FedPer: clients keep the layer that makes the outputs, and the rest is averaged.

    Args:
        head: The layer's name, a part of the names of its leaves: "dense3" is that of
            "dense3/kernel" and of "params/dense3/bias".
        algorithm: How the rest is merged; None is federated averaging.

    Returns:
        The algorithm, `keep_private` of the other.

    Raises:
        TypeError: If the head is not a string, or the algorithm none.
        ValueError: Once params are known, if no leaf or every leaf belongs to the head.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> params = {"dense1": {"kernel": jnp.zeros(2)}, "dense2": {"kernel": jnp.zeros(3)}}
        >>> list(fedper("dense2").init_client(params).leaves)
        ['dense2/kernel']

    Source: the paper above, algorithms 1 and 2. There the body is averaged with equal weights or by
        examples; here by examples.
    """
    if not isinstance(head, str):
        raise TypeError(f"head is {head!r}; expected the name of a layer, such as 'dense3'.")
    return keep_private(averaging() if algorithm is None else algorithm, _part(head))


@cached
def _part(name: str):
    # One object for one name: the algorithm is known by it.
    def where(leaf: str) -> bool:
        return name in leaf.split("/")

    where.part = name  # for the refusal of a name that no leaf has
    return where
