"""The four messages by which clients add up vectors that the server never sees.

Bonawitz, Ivanov, Kreuter, Marcedone, McMahan, Patel, Ramage, Segal, Seth, Practical secure
aggregation for privacy-preserving machine learning, CCS 2017, figure 4, for an honest but curious
server: without signatures and without the consistency check of round 3.

    y_u = x_u + PRG(b_u) + sum_{v > u} PRG(s_uv) - sum_{v < u} PRG(s_uv)   mod 2^bits

Pairwise masks s_uv cancel; of clients that drop out before they send y_u, the server asks the
others for shares of the key that s_uv follow from, and of those that sent it for shares of b_u,
never for both. Every step is a pure function of what a party knows and the messages that it got:
any transport carries them. A client keeps what the next step needs in `Client`; a server keeps the
messages.

    client                                   server
    advertise -> Keys                        roster: Keys of all
    share -> Sealed                          delivered: each client's boxes
    mask -> Masked                           survivors: who sent it
    unmask -> Shares                         finish: the sum
"""

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from fisherjax._core import checks
from fisherjax.secure_aggregation import keys, shares
from fisherjax.secure_aggregation._messages import (
    Client,
    Keys,
    Masked,
    Sealed,
    Setting,
    Shares,
    by_client,
    check_enough,
    check_place,
    checked_roster,
)

Entropy = Callable[[int], bytes]
"""Number of bytes -> random bytes, such as `os.urandom`."""


def setting(num_clients: int, threshold: int, length: int, bits: int, session: bytes) -> Setting:
    """Agree on a sum; see `Setting`.

    Raises:
        ValueError: If the threshold is below two, at which one client's shares would reveal
            another's vector, or above the number of clients.
    """
    checks.count("num_clients", num_clients)
    checks.count("threshold", threshold)
    checks.one_of("bits", bits, (32, 64))
    checks.instance("session", session, bytes, "bytes that no other sum is made with")
    if not 2 <= threshold <= num_clients:
        raise ValueError(
            f"threshold is {threshold} with {num_clients} clients; expected 2 to {num_clients}: a "
            "sum of one is no secret, and more than all cannot stay."
        )
    return Setting(num_clients, threshold, checks.count("length", length), bits, session)


# Round 0


def advertise(agreed: Setting, place: int, entropy: Entropy) -> tuple[Client, Keys]:
    """Draw a client's keys."""
    place = check_place(setting(*agreed), place, "place is")
    (box, public_box), (mask, public_mask) = keys.pair(entropy), keys.pair(entropy)
    return Client(place, (box, mask)), Keys(place, public_box, public_mask)


def roster(agreed: Setting, messages: Iterable[Keys]) -> dict[int, Keys]:
    """Collect everybody's public keys, which the server sends to each of them."""
    return checked_roster(agreed, by_client(agreed, messages, "advertise"))


# Round 1


def share(
    agreed: Setting, own: Client, roster: Mapping[int, Keys], entropy: Entropy
) -> tuple[Client, Sealed]:
    """Share a client's secrets among all, each share in a box that only its receiver can open.

    Raises:
        ValueError: If the roster has a place that is none or not its sender's, a key that is none
            or there twice, or not the client's own keys: whoever sent it could read secrets.
    """
    roster = checked_roster(setting(*agreed), roster)
    mine = tuple(map(keys.public, own.private))
    listed = roster.get(own.place)
    if listed is None or (listed.box, listed.mask) != mine:
        raise ValueError(
            f"The roster that client {own.place} got has {'no' if listed is None else 'other'} "
            "keys of its own; expected those that it advertised: do not go on with this server."
        )
    seed, places = entropy(keys.SECRET), sorted(roster)
    how = (agreed.threshold, places, entropy)
    seeds, masks = shares.split(seed, *how), shares.split(own.private[1], *how)
    boxes = {}
    for place in places:
        if place != own.place:
            key, header = _box_key(agreed, own, roster[place], own.place, place)
            boxes[place] = keys.seal(key, seeds[place] + masks[place], header, entropy)
    kept = seeds[own.place] + masks[own.place]
    return own._replace(seed=seed, roster=roster, own=kept), Sealed(own.place, boxes)


def delivered(agreed: Setting, messages: Iterable[Sealed]) -> dict[int, dict[int, bytes]]:
    """Sort the boxes by receiver, among those who sent some, and then by sender."""
    sent = by_client(agreed, messages, "share")
    for sender, sealed in sent.items():
        for to in sealed.boxes:
            check_place(agreed, to, f"Client {sender} sent a box for client")
        if missing := sorted(sent.keys() - sealed.boxes.keys() - {sender}):
            raise ValueError(
                f"Client {sender} sent no box for clients {missing}; expected one for everybody "
                "in the roster."
            )
    return {to: {u: sent[u].boxes[to] for u in sent if u != to} for to in sent}


# Round 2


def mask(
    agreed: Setting, own: Client, boxes: Mapping[int, bytes], values: np.ndarray
) -> tuple[Client, Masked]:
    """Add a client's masks to its vector, those with the senders of its boxes and its own."""
    said = f"Client {own.place} got a box of client"
    boxes = {check_place(agreed, other, said): box for other, box in boxes.items()}
    others = sorted(boxes)
    if own.place in boxes or not all(isinstance(box, bytes) for box in boxes.values()):
        raise ValueError(
            f"Client {own.place} got boxes of clients {others}; expected bytes, of others only."
        )
    check_enough(setting(*agreed), len(others) + 1, "share")
    if strangers := set(others) - set(own.roster):
        raise ValueError(f"Boxes came from clients {sorted(strangers)}, who advertised no keys.")
    if own.boxes:
        raise ValueError(f"Client {own.place} has sent its vector already; it does so once.")
    dtype = _dtype(agreed)
    if values.shape != (agreed.length,) or values.dtype != dtype:
        raise ValueError(
            f"The vector of client {own.place} has shape {values.shape} and dtype {values.dtype}; "
            f"expected ({agreed.length},) and {np.dtype(dtype)}."
        )
    masked = values + _stretched(agreed, self_key(agreed, own.seed))
    for other in others:
        key = pair_key(agreed, own.private[1], own.place, own.roster[other])
        _add_pair(agreed, masked, key, own.place, other)
    return own._replace(boxes=boxes), Masked(own.place, masked)


def survivors(agreed: Setting, messages: Iterable[Masked]) -> tuple[int, ...]:
    """Say whose vectors arrived, which the server tells each of them."""
    return tuple(sorted(by_client(agreed, messages, "mask")))


# Round 4 of the paper; round 3 is left out


def unmask(agreed: Setting, own: Client, stayed: Iterable[int]) -> tuple[Client, Shares]:
    """Give a client's shares of the seeds of who stayed, and of the keys of who did not."""
    known = set(own.boxes) | {own.place}
    stayed = {check_place(agreed, x, f"Client {own.place} was told of client") for x in stayed}
    check_enough(setting(*agreed), len(stayed), "mask")
    if own.answered:
        raise ValueError(f"Client {own.place} has given its shares away; it does so once.")
    if not {own.place} <= stayed <= known:
        raise ValueError(
            f"Clients {sorted(stayed)} are said to have sent their vectors; expected some of "
            f"{sorted(known)}, client {own.place} among them."
        )
    found: dict[int, bytes] = {own.place: own.own}
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
    """Take the masks off the sum of all vectors that arrived, modulo 2^bits.

    Raises:
        ValueError: If fewer than the threshold answered: then nothing can be computed. If a
            message is of a client, or tells of one, that it cannot be of.
    """
    roster = checked_roster(agreed, roster)
    arrived = by_client(agreed, masked, "mask")
    answered = by_client(agreed, answers, "unmask")
    places, anyone = list(answered), next(iter(answered.values()))
    for place, answer in answered.items():
        if set(answer.seeds) != set(arrived) or set(answer.keys) != set(anyone.keys):
            raise ValueError(
                f"Client {place} answered for others than the vectors of {sorted(arrived)}; "
                "expected shares of the seeds of those, and of the keys of all who were lost."
            )
    lost = {check_place(agreed, x, "The answers tell of client") for x in anyone.keys}
    if strangers := sorted(((lost | set(arrived)) - set(roster)) | (set(answered) - set(arrived))):
        raise ValueError(
            f"Clients {strangers} are in messages without having been in those before; expected "
            f"those of the roster {sorted(roster)}, and answers of who sent a vector."
        )
    if both := sorted(lost & set(arrived)):
        raise ValueError(
            f"The answers hold shares of the keys of clients {both}, whose vectors arrived; "
            "expected only those of who was lost."
        )
    coefficients = shares.interpolation(places)

    def secret(kind: str, of: int) -> bytes:
        own = {place: getattr(answered[place], kind)[of] for place in places}
        return shares.combine(own, keys.SECRET, coefficients)

    total = np.zeros(agreed.length, _dtype(agreed))
    for message in arrived.values():
        total += message.values
    for stayed in arrived:
        total -= _stretched(agreed, self_key(agreed, secret("seeds", stayed)))
    for place in sorted(lost):
        private = secret("keys", place)
        for stayed in arrived:
            # What the one that was lost would have sent cancels what the other has added.
            key = pair_key(agreed, private, place, roster[stayed])
            _add_pair(agreed, total, key, place, stayed)
    return total


def self_key(agreed: Setting, seed: bytes) -> bytes:
    """Derive the key of a client's own mask from its seed."""
    return keys.derived(seed, agreed.session, "self mask")


def pair_key(agreed: Setting, private: bytes, place: int, other: Keys) -> bytes:
    """Derive the key of the mask that two clients share; the same from either side."""
    use = "pair mask {} {}".format(*sorted((place, other.client)))
    return keys.derived(keys.agreed(private, other.mask), agreed.session, use)


def _box_key(
    agreed: Setting, own: Client, other: Keys, sender: int, receiver: int
) -> tuple[bytes, bytes]:
    """Derive the key of a box, and the header that it is bound to."""
    use = f"box {sender} {receiver}"
    key = keys.derived(keys.agreed(own.private[0], other.box), agreed.session, use)
    return key, agreed.session + use.encode()


def _dtype(agreed: Setting) -> type:
    return np.uint32 if agreed.bits == 32 else np.uint64


def _stretched(agreed: Setting, key: bytes) -> np.ndarray:
    dtype = np.dtype(_dtype(agreed)).newbyteorder("<")
    return np.frombuffer(keys.keystream(key, agreed.length * dtype.itemsize), dtype)


def _add_pair(agreed: Setting, total: np.ndarray, key: bytes, place: int, other: int) -> None:
    """Add the mask that two clients share, in place: positive for the smaller of the two."""
    drawn = _stretched(agreed, key)
    if place < other:
        total += drawn
    else:
        total -= drawn
