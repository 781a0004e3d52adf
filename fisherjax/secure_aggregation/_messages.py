"""Messages between clients and the server, the state of a client, and their checks."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fisherjax._core import checks
from fisherjax.secure_aggregation import keys


class Setting(NamedTuple):
    """The public parameters of one sum, made by `protocol.setting`.

    Attributes:
        num_clients: Number of clients; their places are 0 to num_clients - 1.
        threshold: Number of clients that have to stay until the end.
        length: Length of the vectors.
        bits: Bits of each entry, 32 or 64.
        session: Bytes that are unique to this sum.
    """

    num_clients: int
    threshold: int
    length: int
    bits: int
    session: bytes


class Keys(NamedTuple):
    """Message of round 0: a client's public keys, one for boxes and one for masks."""

    client: int
    box: bytes
    mask: bytes


class Sealed(NamedTuple):
    """Message of round 1: a client's shares, encrypted in a box for each other client."""

    client: int
    boxes: dict[int, bytes]


class Masked(NamedTuple):
    """Message of round 2: a client's vector plus all its masks."""

    client: int
    values: np.ndarray


class Shares(NamedTuple):
    """Message of round 4: a client's shares of others' secrets, by client.

    Attributes:
        client: The client that sends the shares.
        seeds: Shares of the seeds of the clients whose vectors arrived.
        keys: Shares of the private mask keys of the clients whose vectors did not.
    """

    client: int
    seeds: dict[int, bytes]
    keys: dict[int, bytes]


_KINDS = {"advertise": Keys, "share": Sealed, "mask": Masked, "unmask": Shares}


class Client(NamedTuple):
    """The secret state of a client between messages, which it never sends.

    Attributes:
        place: The client's number, from 0.
        private_keys: Private keys, for boxes and for masks.
        seed: b_u, the seed of the client's own mask.
        roster: Public keys of all clients.
        own_share: The client's share of its own seed and mask key.
        boxes: Boxes that the client received, by sender. Each holds shares of the sender's secrets.
        answered: Whether the client has sent its shares, which it does only once.
    """

    place: int
    private_keys: tuple[bytes, bytes]
    seed: bytes = b""
    roster: Mapping[int, Keys] = {}
    own_share: bytes = b""
    boxes: Mapping[int, bytes] = {}
    answered: bool = False


def check_place(agreed: Setting, place: Any, what: str) -> int:
    """Return a client's place as a Python integer; raise if it is not 0 to num_clients - 1.

    The share of place u is a polynomial at u + 1, so that the share of place -1 would be the
    secret itself. `what` begins the error.
    """
    is_integer = isinstance(place, numbers.Integral) and not isinstance(place, bool)
    if not is_integer or not 0 <= int(place) < agreed.num_clients:
        last = agreed.num_clients - 1
        raise ValueError(f"{what} {place!r}; expected an integer of 0 to {last}, a client's place.")
    return int(place)


def by_client(agreed: Setting, messages: Iterable[Any], stage: str) -> dict[int, Any]:
    """Sort messages by sender.

    Raises:
        ValueError: If a sender is unknown or sent two messages, or there are too few messages.
        TypeError: If a message is of another stage.
    """
    found: dict[int, Any] = {}
    kind = _KINDS[stage]
    for message in messages:
        checks.instance(f"A message of stage '{stage}'", message, kind, kind.__name__)
        place = check_place(agreed, message.client, f"Stage '{stage}' has a message of client")
        if place in found:
            raise ValueError(
                f"Client {place} sent two messages of stage '{stage}'; expected one from each."
            )
        found[place] = message._replace(client=place)
    check_enough(agreed, len(found), stage)
    return dict(sorted(found.items()))


def check_enough(agreed: Setting, number: int, stage: str) -> None:
    """Check that at least as many clients are left as the threshold requires."""
    if number < agreed.threshold:
        raise ValueError(
            f"{number} clients are left after stage '{stage}', fewer than the threshold "
            f"{agreed.threshold}. The sum cannot be unmasked, and nothing is revealed: start a new "
            "sum with the clients that are left."
        )


def checked_roster(agreed: Setting, roster: Mapping[int, Keys]) -> dict[int, Keys]:
    """Check the public keys of all clients, and return them by place.

    Raises:
        ValueError: If a place is not that of its keys, a key is invalid or occurs twice, or there
            are too few clients.
    """
    found: dict[int, Keys] = {}
    owners: dict[bytes, int] = {}
    for place, entry in roster.items():
        place = check_place(agreed, place, "The roster has an entry of client")
        checks.instance(f"The roster's entry of client {place}", entry, Keys, "protocol's Keys")
        if check_place(agreed, entry.client, "The roster has keys of client") != place:
            raise ValueError(
                f"The roster has keys of client {entry.client} at the place of client {place}; "
                "expected the keys of each client at its own place."
            )
        for use, public in (("box", entry.box), ("mask", entry.mask)):
            keys.check_public(f"The {use} key of client {place}", public)
            if public in owners:
                raise ValueError(
                    f"Clients {owners[public]} and {place} have the same key; expected that each "
                    "client draws its own keys."
                )
            owners[public] = place
        found[place] = entry._replace(client=place)
    check_enough(agreed, len(found), "advertise")
    return found
