"""The four messages of secure aggregation: the server learns only the sum of clients' vectors.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, Practical secure
aggregation for privacy-preserving machine learning, CCS 2017, figure 4, for an honest but curious
server: without signatures and without the consistency check of round 3.

    y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)   mod 2^bits

The pairwise masks of the seeds s_uv cancel in the sum. For a client that drops out before it sends
y_u, the server asks the others for shares of the key from which its s_uv are derived. For a client
that sent y_u, the server asks for shares of b_u. It never gets both for the same client.

Every step is a pure function of a party's state and the messages that it received, so that any
transport can carry the messages. A client keeps its state in `Client`; the server keeps the
messages.

    client                                   server
    advertise -> Keys                        roster: Keys of all
    share -> Sealed                          deliver: each client's boxes
    mask -> Masked                           survivors: clients that sent it
    unmask -> Shares                         finish: the sum
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fisherjax._core import checks
from fisherjax.secure_aggregation import keys, shares
from fisherjax.secure_aggregation._message_checks import (
    by_client,
    check_enough,
    check_place,
    checked_roster,
)
from fisherjax.secure_aggregation.fixed_point import unsigned
from fisherjax.secure_aggregation.messages import Client, Keys, Masked, Sealed, Setting, Shares

Entropy = Callable[[int], bytes]
"""Number of bytes -> random bytes, such as `os.urandom`."""


def setting(num_clients: int, threshold: int, length: int, bits: int, session: bytes) -> Setting:
    """Make the public parameters of a sum; see `Setting`.

    Raises:
        ValueError: If the threshold is above the number of clients, or below two, where one
            client's shares would reveal the vector of another.
    """
    checks.count("num_clients", num_clients)
    checks.count("threshold", threshold)
    checks.one_of("bits", bits, (32, 64))
    checks.instance("session", session, bytes, "bytes that are unique to this sum")
    # With a threshold of one, the server needs no second client to remove a client's mask.
    if not 2 <= threshold <= num_clients:
        raise ValueError(
            f"threshold is {threshold} with {num_clients} clients; expected 2 to {num_clients}. A "
            "sum over one client is not secret, and no more than all clients can stay."
        )
    return Setting(num_clients, threshold, checks.count("length", length), bits, session)


# Round 0


def advertise(agreed: Setting, place: int, entropy: Entropy) -> tuple[Client, Keys]:
    """Draw a client's keys, and make its message of round 0."""
    place = check_place(setting(*agreed), place, "place is")
    (box, public_box), (mask, public_mask) = keys.pair(entropy), keys.pair(entropy)
    return Client(place, (box, mask)), Keys(place, public_box, public_mask)


def roster(agreed: Setting, messages: Iterable[Keys]) -> dict[int, Keys]:
    """Collect the public keys of all clients, which the server sends to each of them."""
    return checked_roster(agreed, by_client(agreed, messages, "advertise"))


# Round 1


def share(
    agreed: Setting, own: Client, roster: Mapping[int, Keys], entropy: Entropy
) -> tuple[Client, Sealed]:
    """Share a client's secrets among all clients, each share in a box that its receiver can open.

    Raises:
        ValueError: If the roster has an invalid place or key, a key twice, or other keys than the
            client's own at its place. A server with such a roster could read secrets.
    """
    roster = checked_roster(setting(*agreed), roster)
    # A server that replaces a client's keys would sit between it and all others.
    public_keys = tuple(map(keys.public, own.private_keys))
    listed = roster.get(own.place)
    if listed is None or (listed.box, listed.mask) != public_keys:
        raise ValueError(
            f"The roster that client {own.place} got has {'no' if listed is None else 'other'} "
            "keys of its own; expected the keys that it advertised. Do not continue with this "
            "server: it may try to read secrets."
        )
    # Only the mask key is shared: with the box key, others could read the boxes for this client.
    seed, places = entropy(keys.SECRET), sorted(roster)
    how = (agreed.threshold, places, entropy)
    seeds, masks = shares.split(seed, *how), shares.split(own.private_keys[1], *how)
    boxes = {}
    for place in places:
        if place != own.place:
            # The header names the pair, so that the server cannot pass a box on to somebody else.
            key, header = _box_key(agreed, own, roster[place], own.place, place)
            boxes[place] = keys.seal(key, seeds[place] + masks[place], header, entropy)
    own_share = seeds[own.place] + masks[own.place]
    client = own._replace(seed=seed, roster=roster, own_share=own_share)
    return client, Sealed(own.place, boxes)


def deliver(agreed: Setting, messages: Iterable[Sealed]) -> dict[int, dict[int, bytes]]:
    """Sort the boxes by receiver and then by sender, among the clients that sent boxes."""
    sent = by_client(agreed, messages, "share")
    for sender, sealed in sent.items():
        for to in sealed.boxes:
            check_place(agreed, to, f"Client {sender} sent a box for client")
        # Without its share, a receiver could not help to remove the sender's masks later.
        if missing := sorted(sent.keys() - sealed.boxes.keys() - {sender}):
            raise ValueError(
                f"Client {sender} sent no box for clients {missing}; expected one for every other "
                "client in the roster."
            )
    return {to: {u: sent[u].boxes[to] for u in sent if u != to} for to in sent}


# Round 2


def mask(
    agreed: Setting, own: Client, boxes: Mapping[int, bytes], values: np.ndarray
) -> tuple[Client, Masked]:
    """Add to a client's vector its own mask and the pairwise masks with the boxes' senders."""
    what = f"Client {own.place} got a box of client"
    boxes = {check_place(agreed, other, what): box for other, box in boxes.items()}
    others = sorted(boxes)
    if own.place in boxes or not all(isinstance(box, bytes) for box in boxes.values()):
        raise ValueError(
            f"Client {own.place} got boxes of clients {others}; expected bytes, of others only, "
            "as protocol.deliver returns them."
        )
    check_enough(setting(*agreed), len(others) + 1, "share")
    if strangers := set(others) - set(own.roster):
        raise ValueError(
            f"Client {own.place} got boxes of clients {sorted(strangers)}, which advertised no "
            f"keys; expected boxes of clients in the roster, {sorted(own.roster)}."
        )
    # Two vectors under the same masks would reveal their difference.
    if own.boxes:
        raise ValueError(f"Client {own.place} has sent its vector already; expected once per sum.")
    dtype = unsigned(agreed.bits)
    if values.shape != (agreed.length,) or values.dtype != dtype:
        raise ValueError(
            f"The vector of client {own.place} has shape {values.shape} and dtype {values.dtype}; "
            f"expected ({agreed.length},) and {np.dtype(dtype)}."
        )
    # It hides the vector even if the server learns all pairwise masks of a client that was slow.
    masked = values + _expanded(agreed, self_key(agreed, own.seed))
    for other in others:
        key = pair_key(agreed, own.private_keys[1], own.place, own.roster[other])
        _add_pair(agreed, masked, key, own.place, other)
    return own._replace(boxes=boxes), Masked(own.place, masked)


def survivors(agreed: Setting, messages: Iterable[Masked]) -> tuple[int, ...]:
    """Find the clients whose vectors arrived; the server sends the result to each of them."""
    return tuple(sorted(by_client(agreed, messages, "mask")))


# Round 4 of the paper (round 3 is the consistency check, which is left out)


def unmask(agreed: Setting, own: Client, stayed: Iterable[int]) -> tuple[Client, Shares]:
    """Return a client's shares of the seeds of clients that stayed and the keys of all others.

    Raises:
        ValueError: If the client has sent its shares before, if `stayed` cannot be the clients
            whose vectors arrived, or a box does not open.
    """
    known = set(own.boxes) | {own.place}
    stayed = {check_place(agreed, x, f"Client {own.place} got the survivor") for x in stayed}
    check_enough(setting(*agreed), len(stayed), "mask")
    # A server that asks twice could name a client as lost and as present, and remove all of its
    # masks.
    if own.answered:
        raise ValueError(
            f"Client {own.place} has sent its shares already; expected once per sum, because a "
            "second answer could reveal a client's vector."
        )
    if not {own.place} <= stayed <= known:
        raise ValueError(
            f"Client {own.place} got the survivors {sorted(stayed)}; expected some of "
            f"{sorted(known)}, client {own.place} among them."
        )
    found: dict[int, bytes] = {own.place: own.own_share}
    for other, box in own.boxes.items():
        key, header = _box_key(agreed, own, own.roster[other], other, own.place)
        found[other] = keys.unseal(key, box, header)
        if len(found[other]) != 2 * shares.SIZE:
            raise ValueError(
                f"The box of client {other} for client {own.place} holds {len(found[other])} "
                f"bytes; expected {2 * shares.SIZE}, two shares."
            )
    seeds = {u: found[u][: shares.SIZE] for u in sorted(stayed)}
    masks = {u: found[u][shares.SIZE :] for u in sorted(known - stayed)}
    return own._replace(answered=True), Shares(own.place, seeds, masks)


def finish(
    agreed: Setting,
    roster: Mapping[int, Keys],
    masked: Iterable[Masked],
    answers: Iterable[Shares],
) -> np.ndarray:
    """Remove the masks from the sum of all vectors that arrived, modulo 2^bits.

    Raises:
        ValueError: If fewer clients answered than the threshold, so that the sum cannot be
            unmasked; or if a message comes from, or is about, a client that it cannot be.
    """
    roster = checked_roster(agreed, roster)
    arrived = by_client(agreed, masked, "mask")
    answered = by_client(agreed, answers, "unmask")
    places, anyone = list(answered), next(iter(answered.values()))
    for place, answer in answered.items():
        # Answers that disagree about who dropped out belong to different sums.
        if set(answer.seeds) != set(arrived) or set(answer.keys) != set(anyone.keys):
            raise ValueError(
                f"Client {place} answered for other clients than expected: shares of the seeds of "
                f"clients {sorted(arrived)}, whose vectors arrived, and of the keys of all clients "
                "that dropped out."
            )
    lost = {check_place(agreed, x, "The answers have keys of client") for x in anyone.keys}
    if strangers := sorted(((lost | set(arrived)) - set(roster)) | (set(answered) - set(arrived))):
        raise ValueError(
            f"Clients {strangers} are in later messages but not in earlier ones; expected clients "
            f"of the roster {sorted(roster)}, and answers of clients that sent a vector."
        )
    # With a client's seed and its key the server would know its vector: it gets one of them only.
    if both := sorted(lost & set(arrived)):
        raise ValueError(
            f"The answers hold shares of the keys of clients {both}, whose vectors arrived; "
            "expected shares of the keys of clients that dropped out only."
        )
    # All secrets have shares at the same places, so that their coefficients are computed once.
    coefficients = shares.interpolation(places)

    def secret(kind: str, owner: int) -> bytes:
        collected = {place: getattr(answered[place], kind)[owner] for place in places}
        return shares.combine(collected, keys.SECRET, coefficients)

    total = np.zeros(agreed.length, unsigned(agreed.bits))
    for message in arrived.values():
        total += message.values
    for stayed in arrived:
        total -= _expanded(agreed, self_key(agreed, secret("seeds", stayed)))
    for place in sorted(lost):
        private = secret("keys", place)
        for stayed in arrived:
            # The mask that the lost client would have added cancels that of the other client.
            key = pair_key(agreed, private, place, roster[stayed])
            _add_pair(agreed, total, key, place, stayed)
    return total


def self_key(agreed: Setting, seed: bytes) -> bytes:
    """Derive the key of a client's own mask from its seed."""
    return keys.derive(seed, agreed.session, "self mask")


def pair_key(agreed: Setting, private: bytes, place: int, other: Keys) -> bytes:
    """Derive the key of the mask of two clients; both derive the same key."""
    use = "pair mask {} {}".format(*sorted((place, other.client)))
    return keys.derive(keys.exchange(private, other.mask), agreed.session, use)


def _box_key(
    agreed: Setting, own: Client, other: Keys, sender: int, receiver: int
) -> tuple[bytes, bytes]:
    """Derive the key of a box, and the header that is authenticated with it."""
    use = f"box {sender} {receiver}"
    key = keys.derive(keys.exchange(own.private_keys[0], other.box), agreed.session, use)
    return key, agreed.session + use.encode()


def _expanded(agreed: Setting, key: bytes) -> np.ndarray:
    dtype = np.dtype(unsigned(agreed.bits)).newbyteorder("<")
    return np.frombuffer(keys.keystream(key, agreed.length * dtype.itemsize), dtype)


def _add_pair(agreed: Setting, total: np.ndarray, key: bytes, place: int, other: int) -> None:
    """Add the mask of two clients in place: with a plus sign for the smaller of the two places."""
    drawn = _expanded(agreed, key)
    if place < other:
        total += drawn
    else:
        total -= drawn
