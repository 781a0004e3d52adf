"""The server's part in a secure sum: pass messages on, leave out clients, and unmask the sum."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import merging
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.flower import _received, _secure, _wire
from fisherjax.flower._grid import Reply
from fisherjax.flower._received import Arrived, Merged, Request
from fisherjax.flower._secure import Plan, Secure
from fisherjax.flower._secure_client import Boxes, Group, Roster
from fisherjax.secure_aggregation import fixed_point, protocol
from fisherjax.secure_aggregation._masks import mask_view, plan_view, roster_view, survivors_view
from fisherjax.secure_aggregation._message_checks import by_client, check_enough, different_keys
from fisherjax.secure_aggregation.messages import (
    Accepted,
    Confirmed,
    Keys,
    Masked,
    Sealed,
    Setting,
    Shares,
)
from fisherjax.typing import Key, Params

Ask = Callable[[Mapping[int, dict[str, Any]]], Iterable[Reply]]
"""Descriptions by partition-id -> replies, in the order in which they come."""


class Begun(NamedTuple):
    """A sum whose clients can mask their vectors.

    Attributes:
        agreed: Public parameters.
        plan: What the clients were told of them.
        encoding: Encoding of a term.
        like: Shapes of a term.
        roster: Public keys by place.
        partners: Places of the clients between which there are masks.
    """

    agreed: Setting
    plan: Plan
    encoding: fixed_point.Ring
    like: Any
    roster: dict[int, Keys]
    partners: tuple[int, ...]

    @property
    def clients(self) -> dict[int, int]:
        """Return the places of the partners by partition-id."""
        return {self.plan.clients[place]: place for place in self.partners}


def term_like(algorithm: Algorithm, params: Params, expected: Update, secure: Secure) -> Any:
    """Return a term of the shapes of one client's update."""
    zeros = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), expected)
    return _secure.term(algorithm, params, zeros, secure.most_examples, secure)


def begin(
    request: Request, secure: Secure, params: Params, clients: Iterable[int], ask: Ask
) -> Begun:
    """Run the stages up to the masks.

    Raises:
        ValueError: If too few clients are left.
    """
    like = term_like(request.algorithm, params, request.expected, secure)
    plan, encoding = _secure.draw_plan(tuple(sorted(clients)), secure, like, os.urandom)
    agreed = _secure.agreed(secure, plan)

    def stage(name: str, kind: Any, view: bytes, given: Mapping[int, Any], **common: Any) -> Any:
        about = {
            plan.clients[place]: common
            | {"stage": name}
            | ({} if one is None else {"given": _secure.written(one)})
            for place, one in given.items()
        }
        return messages(request, agreed, plan, name, kind, view, ask(about))

    everybody = dict.fromkeys(range(agreed.num_clients))
    sent = stage("advertise", Keys, plan_view(agreed), everybody, plan=_secure.written(plan))
    roster: dict[int, Keys] = {}
    for place, message in sent.items():
        try:
            roster = different_keys({**roster, place: message})
        except ValueError as error:
            request.leave_out(plan.clients[place], error)
    check_enough(agreed, len(roster), "advertise")
    view = roster_view(agreed, roster)
    sealed = stage("share", Sealed, view, dict.fromkeys(roster, Roster(roster)))
    boxes = protocol.deliver(agreed, roster, sealed.values())
    given = {place: Boxes(own) for place, own in boxes.items()}
    accepted = stage("accept", Accepted, view, given)
    partners = protocol.partners(agreed, roster, accepted.values())
    for place in set(accepted) - set(partners):
        reason = ValueError("its boxes of shares did not open, or it opened none of the others'")
        request.leave_out(plan.clients[place], reason)
    return Begun(agreed, plan, encoding, like, roster, partners)


def merge(
    request: Request,
    params: Params,
    replies: Iterable[Reply],
    state: Any,
    key: Key,
    *,
    begun: Begun,
    ask: Ask,
) -> Merged:
    """Collect the masked vectors, unmask their sum, and merge it.

    Raises:
        ValueError: If too few clients are left, or the merged model is not finite.
    """
    agreed, plan, roster, partners = begun.agreed, begun.plan, begun.roster, begun.partners
    view = mask_view(agreed, roster, partners)
    masked = messages(request, agreed, plan, "mask", Masked, view, replies)
    stayed = protocol.survivors(agreed, roster, partners, masked.values())
    if len(stayed) < request.terms.min_replies:
        raise ValueError(
            f"there are {len(stayed)} masked vectors; expected at least "
            f"{request.terms.min_replies} (min_replies)"
        )
    view, group = survivors_view(view, stayed), Group(stayed)

    def stage(name: str, kind: Any, asked: Iterable[int]) -> dict[int, Any]:
        about = {"stage": name, "given": _secure.written(group)}
        sent = ask({plan.clients[place]: about for place in asked})
        return messages(request, agreed, plan, name, kind, view, sent)

    left: Iterable[int] = stayed
    if agreed.verifiers:
        confirmed = stage("confirm", Confirmed, stayed)
        seen = protocol.confirmed(agreed, roster, partners, stayed, confirmed.values())
        group, left = Group(stayed, tuple(seen)), confirmed
    answers = stage("unmask", Shares, left)
    lost = set(partners) - set(stayed)
    for place, one in list(answers.items()):
        if set(one.seeds) != set(stayed) or set(one.keys) != lost:
            request.leave_out(plan.clients[place], ValueError("its shares are of other clients"))
            del answers[place]
    found = fixed_point.decode(begun.encoding, _unmasked(request, begun, masked, answers))
    sums = jax.tree.map(lambda x, like: jnp.asarray(x, like.dtype), found, begun.like)
    clients = [plan.clients[place] for place in stayed]
    how = {"frozen": request.expected.frozen, "state": state, "key": key}
    merged = merging.merge_sums(request.algorithm, params, sums, jnp.array(clients), **how)
    # Weights and losses are the clients' own.
    unknown = float("nan")
    arrived = [Arrived(place, request.expected, unknown, unknown) for place in clients]
    return Merged(*merged, arrived)


def _unmasked(
    request: Request, begun: Begun, masked: Mapping[int, Masked], answers: Mapping[int, Shares]
) -> np.ndarray:
    """Unmask the sum; leave out the answers with wrong shares, as long as the others tell them."""
    told = begun.agreed, begun.roster, begun.partners, masked.values()
    while True:
        try:
            return protocol.finish(*told, answers.values())
        except protocol.WrongShares as error:
            if not error.clients:
                raise
            for place in error.clients:
                reason = ValueError("its shares of the others' secrets are wrong")
                request.leave_out(begun.plan.clients[place], reason)
            answers = {u: x for u, x in answers.items() if u not in error.clients}


def messages(
    request: Request,
    agreed: Setting,
    plan: Plan,
    stage: str,
    kind: Any,
    view: bytes,
    replies: Iterable[Reply],
) -> dict[int, Any]:
    """Return the sound messages of a stage, by place; leave out the clients of all others.

    Raises:
        ValueError: If there are fewer than the threshold.
    """
    found, alone = {}, agreed._replace(threshold=1)
    for node, reply in replies:
        client = request.places[node]
        try:
            about, file = _received.checked_content(reply)
            if _wire.field(about, "stage", str) != stage:
                raise ValueError(f"its reply is not of stage '{stage}'")
            message, place = _secure.read(kind, about.get("answer")), plan.clients.index(client)
            if kind is Masked:
                values = _secure.vector(file or b"", agreed, request.terms.limits)
                message = message._replace(values=values)
            if message.client != place:
                raise ValueError(f"its message is of place {message.client}; expected {place}")
            # Each by itself, so that the garbage of one does not stop the others.
            found[place] = by_client(alone, [message], stage, view)[place]
        # Whatever one client sends, the sum goes on for the others.
        except Exception as error:
            request.leave_out(client, error)
    check_enough(agreed, len(found), stage)
    return dict(sorted(found.items()))
