"""Run secure aggregation of all clients in one process, for pytrees and for algorithms."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import merging
from fisherjax._core import checks
from fisherjax._core.secrecy import checked_entropy
from fisherjax._upload_checks import check_weights, stacked
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.clients import shares
from fisherjax.merging._running_statistics import add_up
from fisherjax.merging._server_half import decode_and_screen, split_params
from fisherjax.secure_aggregation import fixed_point, keys, protocol
from fisherjax.secure_aggregation._message_checks import checked_places
from fisherjax.secure_aggregation.messages import Setting
from fisherjax.secure_aggregation.protocol import Entropy
from fisherjax.typing import Params, Weights


class SecureSum(NamedTuple):
    """The sum over the clients whose vectors arrived, in float64 and int64, and these clients."""

    total: Any
    survivors: tuple[int, ...]


def secure_sum(
    contributions: Iterable[Any],
    bound: Any,
    *,
    entropy: Entropy,
    threshold: int | None = None,
    bits: int = 32,
    absent: Mapping[str, Iterable[int]] | None = None,
    signing: Sequence[bytes] = (),
    noise: fixed_point.Noise | None = None,
) -> SecureSum:
    """Run all rounds of `protocol` with M clients, and return the exact sum of rounded values.

    Args:
        contributions: One pytree for each client, all of the same structure and shapes, or an array
            of one row for each.
        bound: Largest absolute value of an entry: one number, or one for each leaf.
        entropy: Function from a number of bytes to random bytes: `os.urandom`, or that of a seeded
            generator in tests.
        threshold: Number of clients that have to stay until the end, more than half of all (default
            2 M // 3 + 1, which is the least with `signing`).
        bits: Bits of the ring, 32 (default) or 64.
        absent: Clients that drop out, by the stage before which they do, one of `protocol.stages`.
        signing: Private Ed25519 key of each client, of 32 bytes, with which it signs its messages.
            All parties have to know the public keys beforehand.
        noise: Integers that each client adds before it masks its numbers; see `fixed_point.Noise`.

    Raises:
        ValueError: If fewer clients stay than the threshold, a contribution is not finite or
            exceeds its bound, or a number is out of range. Contributions are checked before any key
            is drawn; leave out a client that has none by `absent={"advertise": [client]}`.
        ModuleNotFoundError: If the extra `secure` is not installed.

    Example:
        >>> import os
        >>> import numpy as np
        >>> found = secure_sum(list(np.eye(3)), 1.0, entropy=os.urandom)
        >>> print(found.total)
        [1. 1. 1.]
        >>> lost = {"mask": [1]}
        >>> secure_sum(list(np.eye(3)), 1.0, threshold=2, entropy=os.urandom, absent=lost).total
        array([1., 0., 1.])
    """
    entropy = checked_entropy(entropy)
    # The keys of a dict would be taken for contributions, and so would the letters of a text.
    each = None if isinstance(contributions, (Mapping, str, bytes)) else contributions
    if not isinstance(each, Iterable) or getattr(each, "shape", None) == ():
        raise TypeError(
            f"contributions is {checks.kind_of(contributions)}; expected a list of one pytree for "
            "each client, in the order of their places."
        )
    contributions = list(each)
    if not contributions:
        raise ValueError("There are no contributions; expected one pytree for each client.")
    if noise is not None:
        checks.instance("noise", noise, fixed_point.Noise, "fixed_point.Noise(draw, room)")
        checks.function("noise.draw", noise.draw, "draw(leaf) -> integers of the leaf's shape")
    checks.instance("signing", signing, Iterable, "a private Ed25519 key for each client, or ()")
    signing = tuple(signing)
    number, draw = len(contributions), None if noise is None else noise.draw
    room = 0.0 if noise is None else noise.room
    ring = fixed_point.ring(contributions[0], bound, number, bits, room)
    # The session is public, and new for each sum.
    public = (entropy(16), fixed_point.digest(ring), tuple(map(keys.verifier, signing)))
    agreed = protocol.setting(number, threshold, ring.length, bits, *public)
    # Checked first, because a misspelled stage would otherwise mean that nobody drops out.
    present = _presence({} if absent is None else absent, agreed)
    # A client that drops out before its vector is due need not have one that is sound.
    early = ("advertise", "share", "accept", "mask")
    due = reduce(lambda places, stage: present(stage, places), early, range(number))
    rows = {u: fixed_point.encode(ring, contributions[u], f"client {u}", draw) for u in due}
    return _run(agreed, ring, rows, present, entropy, signing)


def _run(
    agreed: Setting,
    ring: fixed_point.Ring,
    rows: Mapping[int, np.ndarray],
    present: Callable[[str, Collection[int]], list[int]],
    entropy: Entropy,
    signing: Sequence[bytes],
) -> SecureSum:
    """Play the rounds of all parties: `rows` are the vectors of the clients that mask one."""
    clients: dict[int, Any] = {}

    def sent_by(stage: str, places: Collection[int], step: Callable[[int], Any]) -> list[Any]:
        """Let the clients that are present take a step, and return their messages."""
        messages = []
        for place in present(stage, places):
            clients[place], message = step(place)
            messages.append(message)
        return messages

    # Round 0: every client draws its keys, and the server sends the public ones to all.
    sent = sent_by(
        "advertise",
        range(agreed.num_clients),
        lambda u: protocol.advertise(agreed, u, entropy, signing[u] if signing else b""),
    )
    roster = protocol.roster(agreed, sent)
    # Round 1: every client shares its secrets, in boxes that the server passes on and others open.
    sent = sent_by("share", roster, lambda u: protocol.share(agreed, clients[u], roster, entropy))
    boxes = protocol.deliver(agreed, roster, sent)
    sent = sent_by("accept", boxes, lambda u: protocol.accept(agreed, clients[u], boxes[u]))
    partners = protocol.partners(agreed, roster, sent)
    # Round 2: every client masks its vector.
    masked = sent_by(
        "mask", partners, lambda u: protocol.mask(agreed, clients[u], partners, rows[u])
    )
    stayed = protocol.survivors(agreed, roster, partners, masked)
    left, seen = stayed, []
    # Round 3: with signatures, clients confirm to each other who stayed.
    if agreed.verifiers:
        sent = sent_by("confirm", stayed, lambda u: protocol.confirm(agreed, clients[u], stayed))
        seen = protocol.confirmed(agreed, roster, partners, stayed, sent)
        left = tuple(message.client for message in seen)
    # Round 4: the clients that stayed send the shares with which the server removes the masks.
    answers = sent_by("unmask", left, lambda u: protocol.unmask(agreed, clients[u], stayed, seen))
    total = protocol.finish(agreed, roster, partners, masked, answers)
    return SecureSum(fixed_point.decode(ring, total), stayed)


def secure_merge(
    algorithm: Algorithm,
    params: Params,
    updates: Update | Sequence[Update],
    weights: Weights | None = None,
    *,
    state: Any = None,
    **how: Any,
) -> tuple[Params, Any, Any]:
    """Merge client updates of which the server sees only the sum.

    Each client reduces its own update with its own weight (`contributions`), and `secure_sum` adds
    these up. The first arguments, `state` and the results are those of `merging.merge`, all others
    those of `secure_sum`; `bound` is for the entries of `contributions`.

    Raises:
        ValueError: For the reasons of `merging.merge` and `secure_sum`, and if the algorithm needs
            each client's update (its `reduce` is None).
        TypeError: If `secure_sum` has no such argument.

    Example:
        >>> import os
        >>> import fisherjax as fj
        >>> updates = fj.algorithms.Update({"params": {"w": jnp.eye(3)}}, "params")
        >>> average = fj.algorithms.fedavg()
        >>> how = {"bound": 1.0, "entropy": os.urandom}
        >>> merged, _, _ = secure_merge(average, {"w": jnp.zeros(3)}, updates, **how)
        >>> print(merged["w"].round(4))
        [0.3333 0.3333 0.3333]
    """
    updates = stacked(algorithm, updates)
    terms = contributions(algorithm, params, updates, weights)
    total, stayed = secure_sum(terms, **how)
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


def _presence(
    absent: Mapping[str, Iterable[int]], agreed: Setting
) -> Callable[[str, Collection[int]], list[int]]:
    """Make the function from a stage and clients to those that are still present."""
    checks.instance("absent", absent, Mapping, 'a dict from stage to places, such as {"mask": [1]}')
    gone: dict[str, tuple[int, ...]] = {}
    for stage, places in absent.items():
        checks.one_of("stage of `absent`", stage, protocol.stages(agreed))
        gone[stage] = checked_places(agreed, places, f"absent['{stage}'] has client")
    return lambda stage, places: [x for x in places if x not in gone.get(stage, ())]
