"""Check the messages of clients and the server: sender, form, tag, view and number."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fisherjax._core import checks
from fisherjax.secure_aggregation import keys, shares
from fisherjax.secure_aggregation._masks import plan_view
from fisherjax.secure_aggregation.fixed_point import unsigned
from fisherjax.secure_aggregation.messages import (
    Accepted,
    Confirmed,
    Keys,
    Masked,
    Sealed,
    Setting,
    Shares,
)

# The message that clients send at each stage.
_KINDS: dict[str, Any] = {
    "advertise": Keys,
    "share": Sealed,
    "accept": Accepted,
    "mask": Masked,
    "confirm": Confirmed,
    "unmask": Shares,
}


def check_place(agreed: Setting, place: Any, what: str) -> int:
    """Return a client's place as a Python integer; raise if it is not 0 to num_clients - 1.

    The share of place u is a polynomial at u + 1, so that the share of place -1 would be the
    secret itself. `what` begins the error.
    """
    if not checks.is_integer(place) or not 0 <= int(place) < agreed.num_clients:
        last = agreed.num_clients - 1
        raise ValueError(f"{what} {place!r}; expected an integer of 0 to {last}, a client's place.")
    return int(place)


def checked_places(agreed: Setting, places: Iterable[Any], what: str) -> tuple[int, ...]:
    """Return places of clients sorted, each once, as Python integers; raise if one is no place."""
    if not isinstance(places, Iterable) or getattr(places, "shape", None) == ():
        raise TypeError(f"{what}s {places!r}; expected places of clients, such as [0, 1].")
    return tuple(sorted({check_place(agreed, place, what) for place in places}))


def check_vector(agreed: Setting, what: str, values: Any) -> None:
    """Check that a vector has the length and the type of the setting."""
    checks.instance(what, values, np.ndarray, "a NumPy array")
    # NumPy would broadcast a shorter vector, and widen numbers of another type.
    dtype = np.dtype(unsigned(agreed.bits))
    if values.shape != (agreed.length,) or values.dtype != dtype:
        raise ValueError(
            f"{what} has shape {values.shape} and dtype {values.dtype}; expected "
            f"({agreed.length},) and {dtype}."
        )


def check_enough(agreed: Setting, number: int, stage: str) -> None:
    """Check that at least as many clients are left as the threshold requires."""
    if number < agreed.threshold:
        raise ValueError(
            f"{number} clients are left after stage '{stage}', fewer than the threshold "
            f"{agreed.threshold}. The sum cannot be unmasked, and nothing is revealed: start a new "
            "sum with the clients that are left."
        )


def tagged(signing: bytes, message: Any) -> Any:
    """Return a message with its tag: a signature, or a checksum if there is no signing key."""
    text = _text(message)
    return message._replace(tag=keys.sign(signing, text) if signing else text)


def by_client(agreed: Setting, messages: Iterable[Any], stage: str, view: bytes) -> dict[int, Any]:
    """Check messages, and sort them by sender.

    Every party that reads a message calls this first, the server and clients alike. What it raises
    names the sender, so that the others can go on without this message.

    Raises:
        ValueError: If a sender is unknown or sent two messages, a message was changed, is of
            another view, or is not formed as the stage's, or there are too few messages.
        TypeError: If a message or a part of it is of another type.
    """
    checks.instance(f"Messages of stage '{stage}'", messages, Iterable, "an iterable of messages")
    found: dict[int, Any] = {}
    kind = _KINDS[stage]
    for message in messages:
        checks.instance(f"A message of stage '{stage}'", message, kind, kind.__name__)
        place = check_place(agreed, message.client, f"Stage '{stage}' has a message of client")
        # Nobody could tell which of two messages the other clients have seen.
        if place in found:
            raise ValueError(
                f"Client {place} sent two messages of stage '{stage}'; expected one from each."
            )
        found[place] = message._replace(client=place)
        _check_tag(agreed, found[place], stage)
        _check_form(agreed, found[place])
        if not isinstance(message.view, bytes) or message.view != view:
            raise ValueError(
                f"Client {place} made its message of stage '{stage}' with another view of the sum; "
                "expected the same setting (session, threshold, encoding), roster, partners and "
                "survivors as those of the receiver. Leave this message out, or start a new sum."
            )
    # Checked at every stage, because clients may drop out at each of them.
    check_enough(agreed, len(found), stage)
    return dict(sorted(found.items()))


def checked_roster(agreed: Setting, roster: Mapping[int, Keys]) -> dict[int, Keys]:
    """Check the public keys of all clients, and return them by place.

    Raises:
        ValueError: If a place is not that of its keys, a key is invalid or occurs twice, or there
            are too few clients.
    """
    listed = by_place(agreed, roster)
    return different_keys(by_client(agreed, listed.values(), "advertise", plan_view(agreed)))


def by_place(agreed: Setting, roster: Mapping[int, Keys]) -> dict[int, Keys]:
    """Return a roster by Python's integers; raise if a place is not that of its keys."""
    checks.instance("The roster", roster, Mapping, "the keys of each client by place")
    found = {}
    for place, entry in roster.items():
        place = check_place(agreed, place, "The roster has an entry of client")
        checks.instance(f"The roster's entry of client {place}", entry, Keys, "protocol's Keys")
        # A key under another client's name would let its owner open that client's boxes.
        if check_place(agreed, entry.client, "The roster has keys of client") != place:
            raise ValueError(
                f"The roster has keys of client {entry.client} at the place of client {place}; "
                "expected the keys of each client at its own place."
            )
        found[place] = entry
    return found


def different_keys(roster: dict[int, Keys]) -> dict[int, Keys]:
    """Return a roster; raise ValueError if it has a key or a commitment twice."""
    owners: dict[bytes, int] = {}
    for place, entry in roster.items():
        box = keys.check_public(f"The box key of client {place}", entry.box)
        mask = keys.check_public(f"The mask key of client {place}", entry.mask)
        for point in (box, mask, entry.seed):
            # Clients with the same key would share all secrets that are derived from it.
            if point in owners:
                raise ValueError(
                    f"Clients {owners[point]} and {place} have the same key; expected that each "
                    "client draws its own keys."
                )
            owners[point] = place
    return roster


def _check_tag(agreed: Setting, message: Any, stage: str) -> None:
    text, place = _text(message), message.client
    if not agreed.verifiers and (not isinstance(message.tag, bytes) or message.tag != text):
        raise ValueError(
            f"The message of client {place} of stage '{stage}' was changed on the way: its "
            "checksum is that of another; expected the message as its sender made it."
        )
    if agreed.verifiers and not keys.is_signed(agreed.verifiers[place], message.tag, text):
        raise ValueError(
            f"The message of stage '{stage}' that came as that of client {place} is not signed by "
            "it; expected the message as its sender made it."
        )


def _text(message: Any) -> bytes:
    """Compute the hash of a message without its tag, and of its kind."""
    return keys.digest(type(message).__name__, *message[:-1])


def _check_form(agreed: Setting, message: Any) -> None:
    """Check the types and sizes of what a message holds."""
    who = f"client {message.client}"
    match message:
        case Keys():
            if not isinstance(message.seed, bytes) or len(message.seed) != keys.SECRET:
                raise ValueError(
                    f"The commitment of {who} to its seed is {message.seed!r}; expected "
                    f"{keys.SECRET} bytes."
                )
        case Sealed():
            checks.instance(f"What {who} sent", message.boxes, Mapping, "boxes by receiver")
            size = keys.SEAL + 2 * shares.SIZE
            for to, box in message.boxes.items():
                to = check_place(agreed, to, f"A box of {who} is for client")
                # Otherwise the server would pass on whatever a client sends, of any size.
                if not isinstance(box, bytes) or len(box) != size:
                    is_bytes = isinstance(box, bytes)
                    given = f"has {len(box)} bytes" if is_bytes else f"is {checks.kind_of(box)}"
                    raise ValueError(
                        f"The box of {who} for client {to} {given}; expected the {size} bytes of "
                        "two sealed shares. Leave this message out."
                    )
        case Accepted():
            checks.instance(f"What {who} accepted", message.senders, Sequence, "places of senders")
            for sender in message.senders:
                check_place(agreed, sender, f"A box that {who} accepted is of client")
        case Masked():
            check_vector(agreed, f"The vector of {who}", message.values)
        case Shares():
            for kind, found in (("seeds", message.seeds), ("keys", message.keys)):
                checks.instance(f"The {kind} of {who}", found, Mapping, "shares by client")
                for owner, share in found.items():
                    check_place(agreed, owner, f"A share of {kind} of {who} is of client")
                    shares.number(message.client, share)
