"""What a client is asked for and what it answers, whatever it computes."""

import hashlib
from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Context, RecordDict

from fisherjax import files, tree
from fisherjax._finite_uploads import finite_leaves
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.clients import Federation
from fisherjax.flower import _secure, _uploads, _wire
from fisherjax.flower._secure import Secure
from fisherjax.flower._secure_client import Member, masked
from fisherjax.flower._state import key_of
from fisherjax.rounds import Federated
from fisherjax.typing import Key, Params


class Client(NamedTuple):
    """Arguments of `client_app`, checked."""

    experiment: Federated
    params: Params
    load: Callable[[Context], Any]
    exchanges: tuple[tuple[Algorithm, ...], ...]
    folder: Path | None
    key: Key | None
    secure: Secure | Callable[[Context], Secure] | None


class Request(NamedTuple):
    """A message of the server, and what the client needs to answer it.

    Attributes:
        about: Description of the message.
        file: Bytes of its arrays.
        place: Number of the client.
        federation: The client's examples, as a federation of one client.
        context: Flower's context of the client.
    """

    about: dict[str, Any]
    file: bytes | None
    place: int
    federation: Federation
    context: Context


def place_of(context: Context) -> int:
    """Return the number of the client; raise ValueError if the node has none."""
    place = context.node_config.get("partition-id")
    if type(place) is not int or place < 0:
        raise ValueError(
            f"The node's configuration has partition-id {place!r}; expected the number of the "
            'client, from 0: start it with --node-config "partition-id=0".'
        )
    return place


def member_of(client: Client, context: Context) -> Member:
    """Return a client of secure sums, whose terms may depend on its node."""
    if client.secure is None:
        raise ValueError(
            "The server adds up secure sums, but this client has no terms of them; expected the "
            "same `secure` on both sides."
        )
    secure = _secure.of_client(client.secure, client.folder, context)
    return Member(secure, place_of(context), client.folder, context)


def check_same_algorithm(own: Algorithm, about: Mapping[str, Any]) -> None:
    """Raise ValueError if the server merges other updates than this client sends."""
    kind = _wire.field(about, "kind", str)
    if kind != own.kind:
        raise ValueError(
            f"The server merges '{kind}', but this client sends '{own.kind}'; expected the same "
            "algorithm on both sides."
        )


def key_for(client: Client, request: Request) -> Key:
    """Return the key of a message, from the client's own if it has one."""
    about = request.about
    if client.key is not None:
        # Folded by all that the server sent, which it may send anew with the number of an earlier
        # round: noise that was drawn twice would cancel in the difference of the replies.
        sent = hashlib.sha256(repr(sorted(about.items())).encode() + (request.file or b""))
        words = np.frombuffer(sent.digest(), np.uint32)
        return reduce(jax.random.fold_in, words, client.key)
    return key_of(_wire.field(about, "key", bytes), _wire.field(about, "key-kind", str))


def check_finite(update: Update, after: Any) -> None:
    """Raise ValueError if a client's update, or what it would keep, is not finite."""
    finite = finite_leaves((update, after))
    if not finite.all():
        name = tree.names((update, after))[int(finite.argmin())]
        raise ValueError(
            f"This client's update is not finite ({name}): it diverged. Train with a smaller "
            "learning rate."
        )


def reply(
    client: Client,
    update: Update,
    request: Request,
    loss: Any,
    algorithm: Algorithm,
    params: Params,
) -> RecordDict:
    """Return the reply with an update: as a file, or masked as a term of a secure sum."""
    size = int(request.federation.sizes[0])
    is_asked = "partners" in request.about
    if is_asked != (client.secure is not None):
        asked, has = ("a masked", "no") if is_asked else ("an open", "has")
        raise ValueError(
            f"The server asks for {asked} upload, but this client has {has} terms of secure sums; "
            "expected the same `secure` on both sides."
        )
    if client.secure is not None:
        member = member_of(client, request.context)
        about, file = masked(member, request.about, algorithm, params, update, size)
        return _wire.content(about, file)
    one = files.of_client(update, 0)
    method = _uploads.method_of(one, client.experiment.model)
    sent = _uploads.write(one, method, str(request.place), size)
    about = {
        "partition-id": request.place,
        "round": _wire.field(request.about, "round", int),
        "layout": sent.layout,
        "examples": float(size),
        "loss": float(loss),
    }
    return _wire.content(about, sent.file)
