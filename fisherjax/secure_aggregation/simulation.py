"""All rounds in one process, of any pytree and of any algorithm whose updates add up."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import merging
from fisherjax._core import checks
from fisherjax._upload_checks import check_weights, stacked
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.clients import shares
from fisherjax.merging._server_half import add_up, decode_and_screen, split_params
from fisherjax.secure_aggregation import fixed_point, protocol
from fisherjax.secure_aggregation.protocol import Entropy
from fisherjax.typing import Params, Weights

STAGES = ("advertise", "share", "mask", "unmask")


class SecureSum(NamedTuple):
    """The sum over those whose vectors arrived, in float64 and int64, and who they are."""

    total: Any
    survivors: tuple[int, ...]


def secure_sum(
    contributions: Sequence[Any],
    bound: Any,
    *,
    threshold: int,
    entropy: Entropy,
    bits: int = 32,
    absent: Mapping[str, Collection[int]] | None = None,
) -> SecureSum:
    """Play all rounds of `protocol` with M clients, and give the exact sum of the rounded values.

    Args:
        contributions: One pytree a client, all alike.
        bound: The largest absolute value of an entry: one number, or one for each leaf.
        threshold: How many clients have to stay to the end, at least two.
        entropy: Number of bytes -> random bytes: `os.urandom`, or a generator's for tests.
        bits: Of the ring, 32 or 64.
        absent: Who drops out before which stage: of "advertise", "share", "mask", "unmask".

    Raises:
        ValueError: If fewer than the threshold stay, a contribution is not finite or beyond its
            bound, or a number is out of range.
        ModuleNotFoundError: If the extra `secure` is not installed.

    Example:
        >>> import os
        >>> import numpy as np
        >>> found = secure_sum(list(np.eye(3)), 1.0, threshold=2, entropy=os.urandom)
        >>> print(found.total)
        [1. 1. 1.]
        >>> lost = {"mask": [1]}
        >>> secure_sum(list(np.eye(3)), 1.0, threshold=2, entropy=os.urandom, absent=lost).total
        array([1., 0., 1.])
    """
    checks.function("entropy", entropy, "os.urandom")
    if not contributions:
        raise ValueError("There are no contributions; expected one of each client.")
    number = len(contributions)
    gone = _gone(absent or {}, number)
    ring = fixed_point.ring(contributions[0], bound, number, bits)
    # Public, and new for each sum.
    agreed = protocol.setting(number, threshold, ring.length, bits, entropy(16))
    clients, sent = {}, []
    for place in gone("advertise", range(number)):
        clients[place], message = protocol.advertise(agreed, place, entropy)
        sent.append(message)
    roster = protocol.roster(agreed, sent)
    sent = []
    for place in gone("share", clients):
        clients[place], message = protocol.share(agreed, clients[place], roster, entropy)
        sent.append(message)
    boxes = protocol.delivered(agreed, sent)
    masked = []
    for place in gone("mask", boxes):
        values = fixed_point.encode(ring, contributions[place], f"client {place}")
        own = (clients[place], boxes[place], values)
        clients[place], message = protocol.mask(agreed, *own)
        masked.append(message)
    stayed = protocol.survivors(agreed, masked)
    answers = []
    for place in gone("unmask", stayed):
        clients[place], message = protocol.unmask(agreed, clients[place], stayed)
        answers.append(message)
    total = protocol.finish(agreed, roster, masked, answers)
    return SecureSum(fixed_point.decode(ring, total), stayed)


def secure_merge(
    algorithm: Algorithm,
    params: Params,
    updates: Update | Sequence[Update],
    weights: Weights | None = None,
    *,
    bound: Any,
    threshold: int,
    entropy: Entropy,
    bits: int = 32,
    absent: Mapping[str, Collection[int]] | None = None,
    state: Any = None,
) -> tuple[Params, Any, Any]:
    """Merge client updates of which the server only sees the sum.

    Each client reduces its own update by its own weight; the sums are what `secure_sum` makes of
    these. The first four arguments and what is returned are those of `merging.merge`, the others
    those of `secure_sum`; `bound` is of what `contributions` gives.

    Raises:
        ValueError: Also if the algorithm needs each update.

    Example:
        >>> import os
        >>> import fisherjax as fj
        >>> updates = fj.algorithms.Update({"params": {"w": jnp.eye(3)}}, "params")
        >>> how = {"bound": 1.0, "threshold": 2, "entropy": os.urandom}
        >>> average = fj.algorithms.fedavg()
        >>> merged, _, _ = secure_merge(average, {"w": jnp.zeros(3)}, updates, **how)
        >>> print(merged["w"].round(4))
        [0.3333 0.3333 0.3333]
    """
    updates = stacked(algorithm, updates)
    own = contributions(algorithm, params, updates, weights)
    how = {"threshold": threshold, "entropy": entropy, "bits": bits, "absent": absent}
    total, stayed = secure_sum(own, bound, **how)
    sums = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), total, own[0])
    how = {"frozen": updates.frozen, "state": state}
    return merging.merge_sums(algorithm, params, sums, jnp.array(stayed), **how)


def contributions(
    algorithm: Algorithm,
    params: Params,
    updates: Update | Sequence[Update],
    weights: Weights | None = None,
) -> list[Any]:
    """Compute what each client adds to the sum: `algorithm.reduce` of its own update and weight.

    Weights are shares of all, so that sums do not grow with the number of examples. Of a network
    with running statistics it is `merging.SumsAndStatistics`: that, and the weighted statistics.
    What comes of the sum is for `merging.merge_sums`, with `frozen=updates.frozen`.

    Example:
        >>> import fisherjax as fj
        >>> updates = fj.algorithms.Update({"params": {"w": jnp.eye(2)}}, "params")
        >>> own = contributions(fj.algorithms.fedavg(), {"w": jnp.zeros(2)}, updates, [1, 3])
        >>> print(own[1].total["w"], own[1].weight)
        [0.   0.75] 0.75
    """
    update, reduce = stacked(algorithm, updates), algorithm.reduce
    if reduce is None:
        raise ValueError(
            "This method needs each client's update (its reduce is None), as FedFisher with K-FAC "
            "does: there is no sum to hide them in. Use one that adds up, such as "
            "algorithms.fedfisher_sketched(model) for K-FAC."
        )
    number = jax.tree.leaves(update)[0].shape[0]
    weights = jnp.asarray(shares(check_weights(weights, number)), float)
    own = split_params(params, update)
    given = decode_and_screen(algorithm, own, update, weights, "raise").values

    def one(client: int) -> Any:
        values, statistics = jax.tree.map(lambda x: x[client : client + 1], given)
        return add_up(reduce, values, statistics, weights[client][None])

    return [one(client) for client in range(number)]


def _gone(absent: Mapping[str, Collection[int]], number: int) -> Callable:
    for stage, places in absent.items():
        checks.one_of("stage of `absent`", stage, STAGES)
        if strangers := [p for p in places if p not in range(number)]:
            raise ValueError(f"absent['{stage}'] has {strangers}; expected 0 to {number - 1}.")

    def left(stage: str, places: Collection[int]) -> list[int]:
        return [place for place in places if place not in absent.get(stage, ())]

    return left
