"""What parties have seen of a sum, as hashes, and the masks whose keys are derived from them.

Each view is a hash of the one before and of what was added, so that parties with equal views agree
on everything so far. Keys are derived from views: masks of parties that disagree do not cancel, and
their boxes do not open.
"""

from collections.abc import Iterable, Mapping

import numpy as np

from fisherjax.secure_aggregation import keys
from fisherjax.secure_aggregation.fixed_point import unsigned
from fisherjax.secure_aggregation.messages import Client, Keys, Setting


def plan_view(agreed: Setting) -> bytes:
    """Compute the hash of a setting."""
    return keys.digest("plan", *agreed)


def roster_view(agreed: Setting, roster: Mapping[int, Keys]) -> bytes:
    """Compute the hash of a setting and all public keys."""
    listed = [(place, *roster[place][1:4]) for place in sorted(roster)]
    return keys.digest("roster", plan_view(agreed), *listed)


def mask_view(agreed: Setting, roster: Mapping[int, Keys], partners: Iterable[int]) -> bytes:
    """Compute the hash of setting, public keys and the clients between which there are masks."""
    return keys.digest("partners", roster_view(agreed, roster), *sorted(partners))


def survivors_view(before: bytes, stayed: Iterable[int]) -> bytes:
    """Compute the hash of `mask_view` and the clients whose vectors arrived."""
    return keys.digest("survivors", before, *sorted(stayed))


def commitment(agreed: Setting, seed: bytes) -> bytes:
    """Compute what a client publishes about its seed, which it cannot change afterwards."""
    return keys.derive(seed, agreed.session, "commitment")


def box_key(
    view: bytes, own: Client, other: Keys, sender: int, receiver: int
) -> tuple[bytes, bytes]:
    """Derive the key of a box, and the header that is authenticated with it."""
    use = f"box {sender} {receiver}"
    return keys.derive(
        keys.exchange(own.private_keys[0], other.box), view, use
    ), view + use.encode()


def self_key(view: bytes, seed: bytes) -> bytes:
    """Derive the key of a client's own mask from its seed."""
    return keys.derive(seed, view, "self mask")


def pair_key(view: bytes, private: bytes, place: int, other: Keys) -> bytes:
    """Derive the key of the mask of two clients; both derive the same key."""
    use = "pair mask {} {}".format(*sorted((place, other.client)))
    return keys.derive(keys.exchange(private, other.mask), view, use)


def expanded(agreed: Setting, key: bytes) -> np.ndarray:
    """Expand a key to a mask, a vector [length] modulo 2^bits."""
    dtype = np.dtype(unsigned(agreed.bits)).newbyteorder("<")
    return np.frombuffer(keys.keystream(key, agreed.length * dtype.itemsize), dtype)


def add_pair(agreed: Setting, total: np.ndarray, key: bytes, place: int, other: int) -> None:
    """Add the mask of two clients in place: with a plus sign for the smaller of the two places."""
    drawn = expanded(agreed, key)
    if place < other:
        total += drawn
    else:
        total -= drawn
