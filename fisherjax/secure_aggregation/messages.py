"""Messages between clients and the server, and the state of a client between them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


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
    # Empty until the round in which they are drawn or received.
    seed: bytes = b""
    roster: Mapping[int, Keys] = {}
    own_share: bytes = b""
    boxes: Mapping[int, bytes] = {}
    # States are never changed in place, so that a party that fails can go on from the last one.
    answered: bool = False
