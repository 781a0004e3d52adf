"""The server's half of secure aggregation: check messages, pass them on, and unmask the sum."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain, combinations, islice

import numpy as np

from fisherjax.secure_aggregation import keys, shares
from fisherjax.secure_aggregation._masks import (
    add_pair,
    commitment,
    expanded,
    mask_view,
    pair_key,
    plan_view,
    roster_view,
    self_key,
    survivors_view,
)
from fisherjax.secure_aggregation._message_checks import (
    by_client,
    by_place,
    check_enough,
    checked_places,
    checked_roster,
    different_keys,
)
from fisherjax.secure_aggregation._setting import checked_setting
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

_PARTNER = "The partners have client"
_TRIES = 1000  # sets of clients that are tried for those whose shares are wrong


class WrongShares(ValueError):
    """Shares that do not recover what their owner published.

    Attributes:
        clients: Clients whose shares are wrong; empty if the answers of the others do not tell.
    """

    def __init__(self, message: str, clients: tuple[int, ...]) -> None:
        super().__init__(message)
        self.clients = clients


def roster(agreed: Setting, messages: Iterable[Keys]) -> dict[int, Keys]:
    """Collect the public keys of all clients, which the server sends to each of them."""
    agreed = checked_setting(agreed)
    return different_keys(by_client(agreed, messages, "advertise", plan_view(agreed)))


def deliver(
    agreed: Setting, roster: Mapping[int, Keys], messages: Iterable[Sealed]
) -> dict[int, dict[int, bytes]]:
    """Sort the boxes by receiver and then by sender, among the clients that sent boxes."""
    agreed, roster = _agreed(agreed, roster)
    sent = by_client(agreed, messages, "share", roster_view(agreed, roster))
    known_to(roster, sent)
    return {
        to: {u: sealed.boxes[to] for u, sealed in sent.items() if u != to and to in sealed.boxes}
        for to in sent
    }


def partners(
    agreed: Setting, roster: Mapping[int, Keys], messages: Iterable[Accepted]
) -> tuple[int, ...]:
    """Find clients that hold shares of each other; the server sends the result to each of them.

    As long as a box of one client did not open for another, the client with most such boxes, sent
    or received, is left out, with a warning. One client cannot stop the others by garbage.
    """
    agreed, roster = _agreed(agreed, roster)
    reports = by_client(agreed, messages, "accept", roster_view(agreed, roster))
    known_to(roster, reports)
    left = set(reports)
    while faults := [(u, v) for v in left for u in left - {v} if u not in reports[v].senders]:
        total, sent = Counter(x for fault in faults for x in fault), Counter(u for u, _ in faults)
        # A sender is blamed before a receiver, because a receiver gains nothing by refusing a box.
        worst = max(total, key=lambda place: (total[place], sent[place], place))
        left.remove(worst)
        closed = sorted(v for u, v in faults if u == worst)
        missing = sorted(u for u, v in faults if v == worst)
        warnings.warn(
            f"Client {worst} is left out of the sum: its boxes did not arrive at or open for "
            f"clients {closed}, nor those of clients {missing} for it.",
            stacklevel=2,
        )
    check_enough(agreed, len(left), "accept")
    return tuple(sorted(left))


def survivors(
    agreed: Setting,
    roster: Mapping[int, Keys],
    partners: Collection[int],
    messages: Iterable[Masked],
) -> tuple[int, ...]:
    """Find the clients whose vectors arrived; the server sends the result to each of them."""
    agreed, roster = _agreed(agreed, roster)
    partners = checked_places(agreed, partners, _PARTNER)
    view = mask_view(agreed, roster, partners)
    return known_to(partners, by_client(agreed, messages, "mask", view))


def confirmed(
    agreed: Setting,
    roster: Mapping[int, Keys],
    partners: Collection[int],
    stayed: Collection[int],
    messages: Iterable[Confirmed],
) -> list[Confirmed]:
    """Collect the signatures of the survivors, which the server sends to each of them."""
    agreed, roster = _agreed(agreed, roster)
    partners = checked_places(agreed, partners, _PARTNER)
    stayed = checked_places(agreed, stayed, "The survivors have client")
    view = survivors_view(mask_view(agreed, roster, partners), stayed)
    found = by_client(agreed, messages, "confirm", view)
    known_to(stayed, found)
    return list(found.values())


def finish(
    agreed: Setting,
    roster: Mapping[int, Keys],
    partners: Collection[int],
    masked: Iterable[Masked],
    answers: Iterable[Shares],
) -> np.ndarray:
    """Remove the masks from the sum of all vectors that arrived, modulo 2^bits.

    Raises:
        ValueError: If fewer clients answered than the threshold, so that the sum cannot be
            unmasked; or if a message comes from, or is about, a client that it cannot be.
        WrongShares: If a recovered secret is not the one that its owner published. The sum goes on
            without the answers of its `clients`.
    """
    agreed = checked_setting(agreed)
    roster = checked_roster(agreed, roster)
    partners = checked_places(agreed, partners, _PARTNER)
    view = mask_view(agreed, roster, partners)
    arrived = by_client(agreed, masked, "mask", view)
    stayed = known_to(partners, arrived)
    answered = by_client(agreed, answers, "unmask", survivors_view(view, stayed))
    known_to(stayed, answered)
    lost = sorted(set(partners) - set(stayed))
    for place, answer in answered.items():
        # With a client's seed and its key the server would know its vector: it gets one of them.
        if set(answer.seeds) != set(stayed) or set(answer.keys) != set(lost):
            raise ValueError(
                f"Client {place} answered for the seeds of clients {sorted(answer.seeds)} and the "
                f"keys of clients {sorted(answer.keys)}; expected seeds of {list(stayed)}, whose "
                f"vectors arrived, and keys of {lost}, whose vectors did not."
            )
    # All secrets have shares at the same places, so that their coefficients are computed once.
    coefficients = shares.interpolation(list(answered))

    def secret(kind: str, owner: int, is_right: Callable[[bytes], bool]) -> bytes:
        collected = {place: getattr(answer, kind)[owner] for place, answer in answered.items()}
        found = _recovered(collected, coefficients)
        if found is None or not is_right(found):
            raise _blamed(agreed, kind, owner, collected, is_right)
        return found

    total = np.zeros(agreed.length, unsigned(agreed.bits))
    for place, message in arrived.items():
        published = roster[place].seed
        seed = secret("seeds", place, lambda x, y=published: commitment(agreed, x) == y)
        total += message.values
        total -= expanded(agreed, self_key(view, seed))
    for place in lost:
        published = roster[place].mask
        private = secret("keys", place, lambda x, y=published: keys.public(x) == y)
        for other in stayed:
            # The mask that the lost client would have added cancels that of the other client.
            key = pair_key(view, private, place, roster[other])
            add_pair(agreed, total, key, place, other)
    return total


def _agreed(agreed: Setting, roster: Mapping[int, Keys]) -> tuple[Setting, dict[int, Keys]]:
    """Return setting and roster in the types in which clients hash them."""
    agreed = checked_setting(agreed)
    return agreed, by_place(agreed, roster)


def known_to(known: Iterable[int], found: Iterable[int]) -> tuple[int, ...]:
    """Return the senders of messages; raise ValueError if one of them was gone before."""
    if strangers := sorted(set(found) - set(known)):
        raise ValueError(
            f"Clients {strangers} are in later messages but not in earlier ones; expected some of "
            f"{sorted(known)}."
        )
    return tuple(sorted(found))


def _recovered(collected: Mapping[int, bytes], coefficients: Mapping[int, int]) -> bytes | None:
    try:
        return shares.combine(collected, keys.SECRET, coefficients)
    except ValueError:
        return None


def _blamed(
    agreed: Setting,
    kind: str,
    owner: int,
    collected: Mapping[int, bytes],
    is_right: Callable[[bytes], bool],
) -> WrongShares:
    """Return the error of shares that are wrong, naming who sent them if the others recover it."""

    def recovers(rest: set[int]) -> bool:
        kept = {place: collected[place] for place in rest}
        found = _recovered(kept, shares.interpolation(list(kept)))
        return found is not None and is_right(found)

    numbers = range(1, len(collected) - agreed.threshold + 1)
    # One that lies is found among any number of clients, several that do among a few.
    sets = islice(chain.from_iterable(combinations(sorted(collected), n) for n in numbers), _TRIES)
    liars = next((x for x in sets if recovers(collected.keys() - set(x))), ())
    return WrongShares(
        f"The shares of the {kind[:-1]} of client {owner} do not recover what it published: those "
        f"of clients {list(liars or sorted(collected))} are wrong, or client {owner} shared "
        "another secret; expected the shares from its boxes. Leave out the answers that are wrong, "
        "if enough are left.",
        liars,
    )
