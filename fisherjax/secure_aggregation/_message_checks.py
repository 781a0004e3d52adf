"""Check the messages of clients and the server: their senders, their stage and their number."""

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from fisherjax._core import checks
from fisherjax.secure_aggregation import keys
from fisherjax.secure_aggregation.messages import Keys, Masked, Sealed, Setting, Shares

# The message that clients send at each stage.
_KINDS = {"advertise": Keys, "share": Sealed, "mask": Masked, "unmask": Shares}


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
        # Nobody could tell which of two messages the other clients have seen.
        if place in found:
            raise ValueError(
                f"Client {place} sent two messages of stage '{stage}'; expected one from each."
            )
        found[place] = message._replace(client=place)
    # Checked at every stage, because clients may drop out at each of them.
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
        # A key under another client's name would let its owner open that client's boxes.
        if check_place(agreed, entry.client, "The roster has keys of client") != place:
            raise ValueError(
                f"The roster has keys of client {entry.client} at the place of client {place}; "
                "expected the keys of each client at its own place."
            )
        # Clients with the same key would share all secrets that are derived from it.
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
