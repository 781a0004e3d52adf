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
        encoding: What else all clients have to agree on, such as `fixed_point.digest` of their
            encoding; parties with other bytes refuse each other's messages.
        verifiers: Public Ed25519 key of each client, known to all before the sum, if messages are
            signed.
    """

    num_clients: int
    threshold: int
    length: int
    bits: int
    session: bytes
    encoding: bytes = b""
    verifiers: tuple[bytes, ...] = ()


# Every message ends with the hash of what its sender has seen of the sum, and with a tag: its
# signature, or its checksum if messages are not signed.


class Keys(NamedTuple):
    """Message of round 0: a client's public keys, and a commitment to the seed of its own mask.

    Attributes:
        client: The client whose keys these are.
        box: Public key for boxes.
        mask: Public key for masks.
        seed: Hash of the seed, which the seed is compared with when it is recovered.
        view: Hash of the setting.
        tag: Signature or checksum of all other fields.
    """

    client: int
    box: bytes
    mask: bytes
    seed: bytes = b""
    view: bytes = b""
    tag: bytes = b""


class Sealed(NamedTuple):
    """Message of round 1: a client's shares, encrypted in a box for each other client."""

    client: int
    boxes: Mapping[int, bytes]
    view: bytes = b""
    tag: bytes = b""


class Accepted(NamedTuple):
    """Answer to the boxes: the clients whose boxes opened and hold two shares."""

    client: int
    senders: tuple[int, ...]
    view: bytes = b""
    tag: bytes = b""


class Masked(NamedTuple):
    """Message of round 2: a client's vector plus all its masks."""

    client: int
    values: np.ndarray
    view: bytes = b""
    tag: bytes = b""


class Confirmed(NamedTuple):
    """Message of round 3: a signature of the survivors, who are part of the view."""

    client: int
    view: bytes = b""
    tag: bytes = b""


class Shares(NamedTuple):
    """Message of round 4: a client's shares of others' secrets, by client.

    Attributes:
        client: The client that sends the shares.
        seeds: Shares of the seeds of the clients whose vectors arrived.
        keys: Shares of the private mask keys of the clients whose vectors did not.
        view: Hash of setting, roster, partners and survivors.
        tag: Signature or checksum of all other fields.
    """

    client: int
    seeds: Mapping[int, bytes]
    keys: Mapping[int, bytes]
    view: bytes = b""
    tag: bytes = b""


class Client(NamedTuple):
    """The secret state of a client between messages, which it never sends.

    Attributes:
        place: The client's number, from 0.
        private_keys: Private keys, for boxes and for masks.
        seed: b_u, the seed of the client's own mask.
        signing: Private Ed25519 key, or none.
        plan: Hash of the setting in which the keys were drawn.
        spent: Stages whose message was made. All states of a client share this set, so that no
            stage can be repeated from an older state.
        stage: The last of these stages.
        roster: Public keys of all clients.
        shares: Shares of secrets, by the client whose secrets they are; its own among them.
        partners: Clients between which there are masks.
        stayed: Clients that it confirmed as survivors.
    """

    place: int
    private_keys: tuple[bytes, bytes]
    seed: bytes
    signing: bytes
    plan: bytes
    # A pure function could be called twice with one state, and two vectors under the same masks
    # reveal their difference.
    spent: set[str]
    stage: str = "advertise"
    # Empty until the round in which they are received.
    roster: Mapping[int, Keys] = {}
    shares: Mapping[int, bytes] = {}
    partners: tuple[int, ...] = ()
    stayed: tuple[int, ...] = ()
