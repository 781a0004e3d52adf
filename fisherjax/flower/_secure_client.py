"""A client's part in a secure sum: one message after another, and what it keeps between them."""

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ConfigRecord, Context

from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.flower import _secure, _wire
from fisherjax.flower._secure import Plan, Secure
from fisherjax.secure_aggregation import fixed_point, protocol
from fisherjax.secure_aggregation.messages import Client, Confirmed, Keys, Setting
from fisherjax.typing import Params

_RECORD, _PLAN, _OWN = "fisherjax-secure", "plan", "own"


class Boxes(NamedTuple):
    """The boxes that the server passes on to a client."""

    boxes: Mapping[int, bytes]


class Roster(NamedTuple):
    """The public keys of all clients of a sum, by place."""

    keys: Mapping[int, Keys]


class Group(NamedTuple):
    """Clients that the server names, and what they confirmed of each other."""

    places: tuple[int, ...]
    confirmed: tuple[Confirmed, ...] = ()


class Member(NamedTuple):
    """A client of secure sums: its terms, its number, its folder and Flower's context of it."""

    secure: Secure
    place: int
    folder: Path | None
    context: Context


class Sum(NamedTuple):
    """A client's view of a sum.

    Attributes:
        agreed: Public parameters.
        plan: What the server said of them.
        own: The client's secret state.
    """

    agreed: Setting
    plan: Plan
    own: Client


def answer(member: Member, about: Mapping[str, Any]) -> dict[str, Any]:
    """Answer a message of a sum but the one for which the client trains."""
    stage = _wire.field(about, "stage", str)
    if stage == "advertise":
        found = _advertised(member, about)
    else:
        steps = {"share": _share, "accept": _accept, "confirm": _confirm, "unmask": _unmask}
        if stage not in steps:
            raise ValueError(f"the message has stage {stage!r:.40}; expected one of {list(steps)}")
        opened = _opened(member)
        found = _kept(member, opened, steps[stage](opened, about), stage)
    return {"stage": stage, "answer": found}


def masked(
    member: Member,
    about: Mapping[str, Any],
    algorithm: Algorithm,
    params: Params,
    update: Update,
    examples: int,
) -> tuple[dict[str, Any], bytes]:
    """Mask a client's term; return a description and the bytes of the vector's file."""
    opened = _opened(member)
    term = _secure.term(algorithm, params, update, float(examples), member.secure)
    encoding = _secure.ring(member.secure, term, opened.agreed.num_clients)
    if fixed_point.digest(encoding) != opened.agreed.encoding:
        raise ValueError(
            "The server agreed on another encoding of the sum; expected the same algorithm, "
            "network, bound and bits on both sides."
        )
    try:
        values = fixed_point.encode(encoding, term, f"client {member.place}")
    except ValueError as error:
        # The server gets the text of an error, which must not tell of the numbers.
        warnings.warn(str(error), stacklevel=2)
        raise ValueError(
            "This client's term of the sum exceeds the agreed bound or is not finite; its own log "
            "says which leaf. Agree on a larger bound, or train with a smaller learning rate."
        ) from None
    group = _secure.read(Group, about.get("partners"))
    own, message = protocol.mask(opened.agreed, opened.own, group.places, values)
    text = _kept(member, opened, (own, message), "mask")
    return {"stage": "mask", "answer": text}, _secure.vector_file(message.values)


def _advertised(member: Member, about: Mapping[str, Any]) -> str:
    secure, place = member.secure, member.place
    plan = _secure.read(Plan, about.get("plan"))
    agreed = _secure.agreed(secure, plan)
    if place not in plan.clients:
        raise ValueError(
            f"the sum is of the clients {list(plan.clients)}; expected client {place} among them"
        )
    where = plan.clients.index(place)
    own, message = protocol.advertise(agreed, where, os.urandom, secure.signing)
    return _kept(member, Sum(agreed, plan, own), (own, message), "advertise")


def _share(opened: Sum, about: Mapping[str, Any]) -> tuple[Client, Any]:
    roster = _secure.read(Roster, about.get("given")).keys
    return protocol.share(opened.agreed, opened.own, roster, os.urandom)


def _accept(opened: Sum, about: Mapping[str, Any]) -> tuple[Client, Any]:
    boxes = _secure.read(Boxes, about.get("given")).boxes
    return protocol.accept(opened.agreed, opened.own, boxes)


def _confirm(opened: Sum, about: Mapping[str, Any]) -> tuple[Client, Any]:
    group = _secure.read(Group, about.get("given"))
    return protocol.confirm(opened.agreed, opened.own, group.places)


def _unmask(opened: Sum, about: Mapping[str, Any]) -> tuple[Client, Any]:
    group = _secure.read(Group, about.get("given"))
    return protocol.unmask(opened.agreed, opened.own, group.places, group.confirmed)


def _opened(member: Member) -> Sum:
    """Return the client's part in the sum that it advertised last."""
    record = member.context.state.get(_RECORD)
    if not isinstance(record, ConfigRecord):
        raise ValueError(
            "this client takes part in no secure sum, or its process was started anew since; "
            "expected the stage 'advertise' first"
        )
    plan = _secure.read(Plan, record[_PLAN])
    own = _secure.read(Client, record[_OWN])
    # The signing key is not kept with the rest.
    own = own._replace(signing=member.secure.signing)
    return Sum(_secure.agreed(member.secure, plan), plan, own)


def _kept(member: Member, opened: Sum, result: tuple[Client, Any], stage: str) -> str:
    """Keep a client's state after a stage, and return its message as text."""
    own, message = result
    if member.folder is not None:
        _spend(member.folder, opened, stage)
    texts = {_PLAN: _secure.written(opened.plan)}
    texts[_OWN] = _secure.written(own._replace(signing=b""))
    member.context.state[_RECORD] = ConfigRecord(texts)
    return _secure.written(message)


def _spend(folder: Path, opened: Sum, stage: str) -> None:
    """Note in a folder that a stage was answered, which only one process can do.

    Two processes that have one state could answer twice, and two answers reveal secrets.
    """
    name = f"{opened.agreed.session.hex()[:32]}-{opened.own.place}-{stage}"
    place = folder / "sums"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        (place / name).touch(exist_ok=False)
    except FileExistsError:
        raise ValueError(
            f"this client has answered stage '{stage}' of this sum already; expected each stage "
            "once. Do not continue with a server that asks twice."
        ) from None
