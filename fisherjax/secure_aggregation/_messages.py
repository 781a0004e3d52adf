"""What clients and the server send one another and keep: nouns of `protocol`."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fisherjax._core import checks
from fisherjax.secure_aggregation import keys


class Setting(NamedTuple):
    """What everybody knows beforehand, made by `setting`.

    Attributes:
        num_clients: Places are 0 to num_clients - 1.
        threshold: How many clients have to stay to the end.
        length: Of the vectors.
        bits: Of their numbers.
        session: Bytes that no other sum is made with.
    """

    num_clients: int
    threshold: int
    length: int
    bits: int
    session: bytes


class Keys(NamedTuple):
    """Round 0: a client's public keys, one for boxes and one for masks."""

    client: int
    box: bytes
    mask: bytes


class Sealed(NamedTuple):
    """Round 1: a client's shares, in a box for each other client."""

    client: int
    boxes: dict[int, bytes]


class Masked(NamedTuple):
    """Round 2: a client's vector under all its masks."""

    client: int
    values: np.ndarray


class Shares(NamedTuple):
    """Round 4: a client's shares of seeds of those who stayed, and of keys of those who did not."""

    client: int
    seeds: dict[int, bytes]
    keys: dict[int, bytes]


_KINDS = {"advertise": Keys, "share": Sealed, "mask": Masked, "unmask": Shares}


class Client(NamedTuple):
    """What a client keeps between messages, and never sends.

    Attributes:
        place: Among all clients.
        private: Its private keys, for boxes and for masks.
        seed: b_u, of its own mask.
        roster: Everybody's public keys.
        own: Its share of its own seed and key.
        boxes: What others sent it, by sender; they have a share of its secrets, as it has of
            theirs.
        answered: Whether it gave its shares away, which it does once.
    """

    place: int
    private: tuple[bytes, bytes]
    seed: bytes = b""
    roster: Mapping[int, Keys] = {}
    own: bytes = b""
    boxes: Mapping[int, bytes] = {}
    answered: bool = False


def check_place(agreed: Setting, place: Any, said: str) -> int:
    """Return a client's place as Python's integer; refuse any other than 0 to num_clients - 1.

    A share of place u is a polynomial at u + 1: who is given another place, such as -1, may be
    given the secret itself.
    """
    is_integer = isinstance(place, numbers.Integral) and not isinstance(place, bool)
    if not is_integer or not 0 <= int(place) < agreed.num_clients:
        last = agreed.num_clients - 1
        raise ValueError(f"{said} {place!r}; expected an integer of 0 to {last}, a client's place.")
    return int(place)


def by_client(agreed: Setting, messages: Iterable[Any], stage: str) -> dict[int, Any]:
    """Sort messages by sender; refuse strangers, two of one client, and too few."""
    found: dict[int, Any] = {}
    kind = _KINDS[stage]
    for message in messages:
        checks.instance(f"A message of stage '{stage}'", message, kind, kind.__name__)
        place = check_place(agreed, message.client, f"Stage '{stage}' has a message of client")
        if place in found:
            raise ValueError(
                f"Client {place} sent two messages of stage '{stage}'; expected one of each client."
            )
        found[place] = message._replace(client=place)
    check_enough(agreed, len(found), stage)
    return dict(sorted(found.items()))


def check_enough(agreed: Setting, number: int, stage: str) -> None:
    """Refuse to go on with fewer clients than the threshold."""
    if number < agreed.threshold:
        raise ValueError(
            f"{number} clients are left after stage '{stage}', fewer than the threshold "
            f"{agreed.threshold}: the sum cannot be unmasked, and nothing is revealed. Start anew "
            "with those who are there."
        )


def checked_roster(agreed: Setting, roster: Mapping[int, Keys]) -> dict[int, Keys]:
    """Refuse places that are none or not their senders', and keys that are none or there twice."""
    found: dict[int, Keys] = {}
    owners: dict[bytes, int] = {}
    for place, own in roster.items():
        place = check_place(agreed, place, "The roster has an entry of client")
        checks.instance(f"The roster's entry of client {place}", own, Keys, "protocol's Keys")
        if check_place(agreed, own.client, "The roster has keys of client") != place:
            raise ValueError(
                f"The roster has keys of client {own.client} at the place of client {place}; "
                "expected each at its own."
            )
        for use, public in (("box", own.box), ("mask", own.mask)):
            keys.check_public(f"The {use} key of client {place}", public)
            if public in owners:
                raise ValueError(
                    f"Clients {owners[public]} and {place} have the same key: one is duplicated. "
                    "Each has to draw its own."
                )
            owners[public] = place
        found[place] = own._replace(client=place)
    check_enough(agreed, len(found), "advertise")
    return found
