"""FedBN: every client's own normalisation, everybody's other layers.

Li, Jiang, Zhang, Kamp, Dou, FedBN: Federated learning on non-IID features via local batch
normalization, ICLR 2021.
"""

import re
from collections.abc import Callable

from fisherjax.algorithms.base import Algorithm, averaging
from fisherjax.algorithms.private import keep_private
from fisherjax.configuration import cached


def is_normalization(name: str) -> bool:
    """Say whether a leaf is of a normalisation, by its name.

    That is one with a part such as "norm1", "BatchNorm_0" or "bn2", or of the running statistics
    that `networks.init` keeps as "moments".

    Example:
        >>> [is_normalization(n) for n in ("params/norm1/scale", "moments/bn/mean", "dense/kernel")]
        [True, True, False]
    """
    parts = name.split("/")
    return parts[0] == "moments" or any(re.search(r"norm|^bn\d*$", p, re.I) for p in parts)


@cached
def fedbn(
    algorithm: Algorithm | None = None, where: Callable[[str], bool] = is_normalization
) -> Algorithm:
    """Make FedBN: clients keep scales, shifts and running statistics, and the rest is averaged.

    Args:
        algorithm: How the rest is merged; None is federated averaging.
        where: Name of a leaf -> whether it belongs to a normalisation.

    Returns:
        The algorithm, `keep_private` of the other.

    Raises:
        TypeError: If an argument has the wrong kind.
        ValueError: Once params are known, if the network has no normalisation, or nothing else.

    Example:
        >>> import jax, jax.numpy as jnp, fisherjax as fj
        >>> params = fj.networks.init(
        ...     fj.networks.NormedCNN(), jax.random.key(0), jnp.zeros((1, 28, 28, 1))
        ... )
        >>> len(fedbn().init_client(params).leaves)
        16

    Source: the paper above, algorithm 1, with weights by examples; its code for digits counts every
        client the same. Without normalisation it would be federated averaging, and is refused.
    """
    return keep_private(averaging() if algorithm is None else algorithm, where)
