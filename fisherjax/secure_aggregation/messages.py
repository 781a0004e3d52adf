"""What clients and the server send one another and keep: nouns of `protocol`."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np


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


def by_client(agreed: Setting, messages: Iterable[Any], stage: str) -> dict[int, Any]:
    """Sort messages by sender; refuse strangers, two of one client, and too few."""
    found: dict[int, Any] = {}
    for message in messages:
        if message.client in found:
            raise ValueError(
                f"Client {message.client} sent two messages of stage '{stage}'; expected one of "
                "each client."
            )
        if not 0 <= message.client < agreed.num_clients:
            raise ValueError(
                f"Stage '{stage}' has a message of client {message.client}; expected 0 to "
                f"{agreed.num_clients - 1}."
            )
        found[message.client] = message
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
