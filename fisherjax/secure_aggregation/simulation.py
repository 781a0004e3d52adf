"""Run secure aggregation of all clients in one process, for pytrees and for algorithms."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import merging
from fisherjax._core import checks
from fisherjax._upload_checks import check_weights, stacked
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.clients import shares
from fisherjax.merging._running_statistics import add_up
from fisherjax.merging._server_half import decode_and_screen, split_params
from fisherjax.secure_aggregation import fixed_point, protocol
from fisherjax.secure_aggregation.protocol import Entropy
from fisherjax.typing import Params, Weights

# The paper's rounds in which clients send something, in order.
STAGES = ("advertise", "share", "mask", "unmask")


class SecureSum(NamedTuple):
    """The sum over the clients whose vectors arrived, in float64 and int64, and these clients."""

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
    """Run all rounds of `protocol` with M clients, and return the exact sum of rounded values.

    Args:
        contributions: One pytree for each client, all of the same structure and shapes.
        bound: Largest absolute value of an entry: one number, or one for each leaf.
        threshold: Number of clients that have to stay until the end, at least two.
        entropy: Function from a number of bytes to random bytes: `os.urandom`, or that of a seeded
            generator in tests.
        bits: Bits of the ring, 32 (default) or 64.
        absent: Clients that drop out, by the stage before which they do: "advertise", "share",
            "mask" or "unmask".

    Raises:
        ValueError: If fewer clients stay than the threshold, a contribution is not finite or
            exceeds its bound, or a number is out of range.
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
        raise ValueError("There are no contributions; expected one pytree for each client.")
    number = len(contributions)
    # Checked first, because a misspelled stage would otherwise mean that nobody drops out.
    present = _presence(absent or {}, number)
    ring = fixed_point.ring(contributions[0], bound, number, bits)
    # The session is public, and new for each sum.
    agreed = protocol.setting(number, threshold, ring.length, bits, entropy(16))
    # Round 0: every client draws its keys, and the server sends the public ones to all.
    clients, sent = {}, []
    for place in present("advertise", range(number)):
        clients[place], message = protocol.advertise(agreed, place, entropy)
        sent.append(message)
    roster = protocol.roster(agreed, sent)
    # Round 1: every client shares its secrets, in boxes that the server passes on.
    sent = []
    for place in present("share", clients):
        clients[place], message = protocol.share(agreed, clients[place], roster, entropy)
        sent.append(message)
    boxes = protocol.deliver(agreed, sent)
    # Round 2: every client encodes its contribution and masks it.
    masked = []
    for place in present("mask", boxes):
        # Only here are contributions read: a client that drops out before need not have one that is
        # sound.
        values = fixed_point.encode(ring, contributions[place], f"client {place}")
        clients[place], message = protocol.mask(agreed, clients[place], boxes[place], values)
        masked.append(message)
    stayed = protocol.survivors(agreed, masked)
    # Round 4: the clients that stayed send the shares with which the server removes the masks.
    answers = []
    for place in present("unmask", stayed):
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
    """Merge client updates of which the server sees only the sum.

    Each client reduces its own update with its own weight (`contributions`), and `secure_sum` adds
    these up. The first four arguments and the results are those of `merging.merge`, the other
    arguments those of `secure_sum`; `bound` is for the entries of `contributions`.

    Raises:
        ValueError: For the reasons of `merging.merge` and `secure_sum`, and if the algorithm needs
            each client's update (its `reduce` is None).

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
    terms = contributions(algorithm, params, updates, weights)
    how = {"threshold": threshold, "entropy": entropy, "bits": bits, "absent": absent}
    total, stayed = secure_sum(terms, bound, **how)
    # Sums are float64 on the host. The merge takes the dtypes that `reduce` returned.
    sums = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), total, terms[0])
    how = {"frozen": updates.frozen, "state": state}
    return merging.merge_sums(algorithm, params, sums, jnp.array(stayed), **how)


def contributions(
    algorithm: Algorithm,
    params: Params,
    updates: Update | Sequence[Update],
    weights: Weights | None = None,
) -> list[Any]:
    """Compute each client's term of the sum: `algorithm.reduce` of its own update and weight.

    Weights are normalised to sum one, so that sums do not grow with the number of examples. For a
    network with running statistics the term is a `merging.SumsAndStatistics`, which also has the
    weighted statistics. Pass the sum to `merging.merge_sums`, with `frozen=updates.frozen`.

    Example:
        >>> import fisherjax as fj
        >>> updates = fj.algorithms.Update({"params": {"w": jnp.eye(2)}}, "params")
        >>> own = contributions(fj.algorithms.fedavg(), {"w": jnp.zeros(2)}, updates, [1, 3])
        >>> print(own[1].total["w"], own[1].weight)
        [0.   0.75] 0.75
    """
    update, reduce = stacked(algorithm, updates), algorithm.reduce
    # Without a `reduce` there is no term that a client could compute alone.
    if reduce is None:
        raise ValueError(
            "This method needs each client's update (its reduce is None), as FedFisher with K-FAC "
            "does, so that no sum can hide them; expected a method with a reduce, such as "
            "algorithms.fedfisher_sketched(model) for K-FAC."
        )
    number = jax.tree.leaves(update)[0].shape[0]
    # Normalised before the bound is applied, as large weights would exceed it.
    weights = jnp.asarray(shares(check_weights(weights, number)), float)
    parts = split_params(params, update)
    # Refused here, because nobody can see under the masks which client is not finite.
    kept = decode_and_screen(algorithm, parts, update, weights, "raise").values

    def contribution(client: int) -> Any:
        # A slice of length one, because `reduce` expects the axis of clients.
        values, statistics = jax.tree.map(lambda x: x[client : client + 1], kept)
        return add_up(reduce, values, statistics, weights[client][None])

    return [contribution(client) for client in range(number)]


def _presence(absent: Mapping[str, Collection[int]], number: int) -> Callable:
    """Make the function from a stage and clients to those that are still present."""
    for stage, places in absent.items():
        checks.one_of("stage of `absent`", stage, STAGES)
        if strangers := [p for p in places if p not in range(number)]:
            raise ValueError(
                f"absent['{stage}'] has {strangers}; expected places of clients, 0 to {number - 1}."
            )

    def left(stage: str, places: Collection[int]) -> list[int]:
        return [place for place in places if place not in absent.get(stage, ())]

    return left
