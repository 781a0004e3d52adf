"""The messages of secure aggregation: the server learns only the sum of clients' vectors.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, Practical secure
aggregation for privacy-preserving machine learning, CCS 2017, figure 4. Messages are signed, and
survivors confirmed, if the setting has `verifiers`: then the server need not be honest.

    y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)   mod 2^bits

The pairwise masks of the seeds s_uv cancel in the sum. For a client that drops out before it sends
y_u, the server asks the others for shares of the key from which its s_uv are derived. For a client
that sent y_u, the server asks for shares of b_u. It never gets both for the same client.

Every step is a function of a party's state and the messages that it received, so that any transport
can carry the messages. A client keeps its state in `Client`; the server keeps the messages.

    client                                   server
    advertise -> Keys                        roster: Keys of all
    share -> Sealed                          deliver: each client's boxes
    accept -> Accepted                       partners: clients whose boxes opened
    mask -> Masked                           survivors: clients that sent it
    confirm -> Confirmed, if signed          confirmed: all of them
    unmask -> Shares                         finish: the sum

The paper has no `accept`: there, one box that does not open stops its receiver.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from fisherjax._core import checks
from fisherjax._core.secrecy import checked_entropy
from fisherjax.secure_aggregation import keys, shares
from fisherjax.secure_aggregation._masks import (
    add_pair,
    box_key,
    commitment,
    expanded,
    mask_view,
    pair_key,
    plan_view,
    roster_view,
    self_key,
    survivors_view,
)
from fisherjax.secure_aggregation._message_checks import (
    by_client,
    check_enough,
    check_place,
    check_vector,
    checked_places,
    checked_roster,
    tagged,
)
from fisherjax.secure_aggregation._server import (
    WrongShares,
    confirmed,
    deliver,
    finish,
    known_to,
    partners,
    roster,
    survivors,
)
from fisherjax.secure_aggregation._setting import checked_setting, setting, stages
from fisherjax.secure_aggregation.messages import (
    Accepted,
    Client,
    Confirmed,
    Keys,
    Masked,
    Sealed,
    Setting,
    Shares,
)

__all__ = [
    "Entropy",
    "WrongShares",
    "accept",
    "advertise",
    "confirm",
    "confirmed",
    "deliver",
    "finish",
    "mask",
    "partners",
    "roster",
    "setting",
    "share",
    "stages",
    "survivors",
    "unmask",
]

Entropy = Callable[[int], bytes]
"""Number of bytes -> random bytes, such as `os.urandom`."""


# Round 0


def advertise(
    agreed: Setting, place: int, entropy: Entropy, signing: bytes = b""
) -> tuple[Client, Keys]:
    """Draw a client's keys, and make its message of round 0.

    `signing` is the client's private Ed25519 key of 32 bytes, if messages are signed.
    """
    agreed = checked_setting(agreed)
    place, entropy = check_place(agreed, place, "place is"), checked_entropy(entropy)
    if (keys.verifier(signing) if signing else None) != (
        agreed.verifiers[place] if agreed.verifiers else None
    ):
        raise ValueError(
            f"The signing key of client {place} is {'another' if signing else 'missing'}; expected "
            f"{'that of its verifier' if agreed.verifiers else 'none'} in the setting."
        )
    (box, public_box), (mask, public_mask) = keys.pair(entropy), keys.pair(entropy)
    seed, plan = entropy(keys.SECRET), plan_view(agreed)
    own = Client(place, (box, mask), seed, signing, plan, set())
    message = Keys(place, public_box, public_mask, commitment(agreed, seed), plan)
    return _sent(own, "advertise", message)


# Round 1


def share(
    agreed: Setting, own: Client, roster: Mapping[int, Keys], entropy: Entropy
) -> tuple[Client, Sealed]:
    """Share a client's secrets among all clients, each share in a box that its receiver can open.

    Raises:
        ValueError: If the roster has an invalid place or key, a key twice, or other keys than the
            client's own at its place. A server with such a roster could read secrets.
    """
    agreed = _begin(agreed, own, "share")
    roster, entropy = checked_roster(agreed, roster), checked_entropy(entropy)
    # A server that replaces a client's keys would sit between it and all others.
    published = (*map(keys.public, own.private_keys), commitment(agreed, own.seed))
    listed = roster.get(own.place)
    if listed is None or listed[1:4] != published:
        raise ValueError(
            f"The roster that client {own.place} got has {'no' if listed is None else 'other'} "
            "keys of its own; expected the keys that it advertised. Do not continue with this "
            "server: it may try to read secrets."
        )
    # Only the mask key is shared: with the box key, others could read the boxes for this client.
    how = (agreed.threshold, list(roster), entropy)
    seeds, masks = shares.split(own.seed, *how), shares.split(own.private_keys[1], *how)
    boxes, view = {}, roster_view(agreed, roster)
    for place, other in roster.items():
        if place != own.place:
            # The header names the pair, so that the server cannot pass a box on to somebody else.
            key, header = box_key(view, own, other, own.place, place)
            boxes[place] = keys.seal(key, seeds[place] + masks[place], header, entropy)
    kept = {own.place: seeds[own.place] + masks[own.place]}
    return _sent(own, "share", Sealed(own.place, boxes, view), roster=roster, shares=kept)


def accept(agreed: Setting, own: Client, boxes: Mapping[int, bytes]) -> tuple[Client, Accepted]:
    """Open the boxes that a client received, and name the clients whose boxes hold two shares.

    A box that does not open, or that is missing, is no error: the server learns of it, and leaves
    a client out if need be, before any vector is masked.
    """
    agreed = _begin(agreed, own, "accept")
    what = f"Client {own.place} got a box of client"
    checks.instance(f"What client {own.place} got", boxes, Mapping, "boxes by sender")
    known_to(own.roster.keys() - {own.place}, [check_place(agreed, x, what) for x in boxes])
    view, found = roster_view(agreed, own.roster), dict(own.shares)
    for other, box in sorted(boxes.items()):
        key, header = box_key(view, own, own.roster[other], other, own.place)
        try:
            text = keys.unseal(key, box, header)
            for part in (text[: shares.SIZE], text[shares.SIZE :]):
                shares.number(own.place, part)
        except ValueError:
            continue
        found[int(other)] = text
    senders = tuple(sorted(found.keys() - {own.place}))
    return _sent(own, "accept", Accepted(own.place, senders, view), shares=found)


# Round 2


def mask(
    agreed: Setting, own: Client, partners: Iterable[int], values: np.ndarray
) -> tuple[Client, Masked]:
    """Add to a client's vector its own mask and the pairwise masks with its partners.

    Raises:
        ValueError: If there are too few partners, one whose box did not open is among them, or the
            vector has another length or type than agreed.
    """
    agreed = _begin(agreed, own, "mask")
    partners = _group(agreed, own, partners, own.shares, "accept")
    check_vector(agreed, f"The vector of client {own.place}", values)
    view = mask_view(agreed, own.roster, partners)
    # It hides the vector even if the server learns all pairwise masks of a client that was slow.
    masked = values + expanded(agreed, self_key(view, own.seed))
    for other in partners:
        if other != own.place:
            key = pair_key(view, own.private_keys[1], own.place, own.roster[other])
            add_pair(agreed, masked, key, own.place, other)
    return _sent(own, "mask", Masked(own.place, masked, view), partners=partners)


# Round 3


def confirm(agreed: Setting, own: Client, stayed: Iterable[int]) -> tuple[Client, Confirmed]:
    """Sign the list of survivors that a client got, so that all clients answer for the same list.

    Only for signed messages: nobody could check a list that is not signed.
    """
    agreed = _begin(agreed, own, "confirm")
    stayed = _group(agreed, own, stayed, own.partners, "mask")
    view = survivors_view(mask_view(agreed, own.roster, own.partners), stayed)
    return _sent(own, "confirm", Confirmed(own.place, view), stayed=stayed)


# Round 4


def unmask(
    agreed: Setting, own: Client, stayed: Iterable[int], confirmations: Iterable[Confirmed] = ()
) -> tuple[Client, Shares]:
    """Return a client's shares of the seeds of clients that stayed and the keys of all others.

    A second answer could reveal a client's vector, so that there is only one.

    Raises:
        ValueError: If the client has sent its shares before, if `stayed` cannot be the clients
            whose vectors arrived, or if messages are signed and fewer clients than the threshold
            confirmed the same survivors.
    """
    agreed = _begin(agreed, own, "unmask")
    stayed = _group(agreed, own, stayed, own.partners, "mask")
    view = survivors_view(mask_view(agreed, own.roster, own.partners), stayed)
    if agreed.verifiers:
        known_to(stayed, by_client(agreed, confirmations, "confirm", view))
    # Otherwise the server could have enough signatures of two lists.
    if agreed.verifiers and stayed != own.stayed:
        raise ValueError(
            f"Now client {own.place} got the survivors {list(stayed)}, but it signed the survivors "
            f"{list(own.stayed)}; expected the same. Do not continue with this server."
        )
    seeds = {u: own.shares[u][: shares.SIZE] for u in stayed}
    masks = {u: own.shares[u][shares.SIZE :] for u in own.partners if u not in stayed}
    return _sent(own, "unmask", Shares(own.place, seeds, masks, view))


def _begin(agreed: Setting, own: Client, stage: str) -> Setting:
    """Return the setting if it is a client's turn to send the message of a stage, only once."""
    agreed = checked_setting(agreed)
    checks.instance("own", own, Client, "the client's state, which the stage before returned")
    order = stages(agreed)
    checks.one_of("The stage", stage, order)
    before = order[order.index(stage) - 1]
    # Two answers from one state, such as two vectors under the same masks, would reveal secrets.
    if stage in own.spent or own.stage != before:
        raise ValueError(
            f"Client {own.place} has sent its message of stage '{own.stage}' and of "
            f"{sorted(own.spent)} already; expected a state after stage '{before}' for stage "
            f"'{stage}', once per sum."
        )
    if own.plan != plan_view(agreed):
        raise ValueError(
            f"Client {own.place} drew its keys for another setting; expected the same at every "
            "stage."
        )
    return agreed


def _sent(own: Client, stage: str, message: Any, **received: Any) -> tuple[Client, Any]:
    """Return a client's state after a stage, and its message with a tag."""
    own.spent.add(stage)
    return own._replace(stage=stage, **received), tagged(own.signing, message)


def _group(
    agreed: Setting, own: Client, places: Iterable[int], known: Iterable[int], stage: str
) -> tuple[int, ...]:
    """Return clients that the server names, sorted; raise if they cannot be those after a stage."""
    found = checked_places(agreed, places, f"Client {own.place} got the client")
    check_enough(agreed, len(found), stage)
    if not {own.place} <= set(found) <= set(known):
        raise ValueError(
            f"Client {own.place} got the clients {list(found)} after stage '{stage}'; expected "
            f"some of {sorted(known)}, client {own.place} among them."
        )
    return found
