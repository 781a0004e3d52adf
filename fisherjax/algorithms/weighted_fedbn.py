"""Weighted FedAvg with personal BatchNorm: two of the papers together."""

from collections.abc import Callable
from typing import Any

from fisherjax.algorithms.base import Algorithm
from fisherjax.algorithms.fedbn import fedbn
from fisherjax.algorithms.weighted_fedavg import weighted_fedavg
from fisherjax.typing import Array, Model


def weighted_fedbn(
    model: Model,
    *,
    where: Callable[[str], bool] | frozenset[str] | None = None,
    temperature: float = 1.0,
    **options: Any,
) -> Algorithm[Array]:
    """Make Weighted FedAvg with personal BatchNorm, `fedbn(weighted_fedavg(model, ...), where)`.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.categorical)
        >>> weighted_fedbn(model, where=frozenset({"scale"})).kind
        'params and prototypes, of shared leaves'
    """
    return fedbn(weighted_fedavg(model, temperature=temperature, **options), where)
