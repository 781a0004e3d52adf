"""What the server keeps between rounds, what it accepts, and what both sides compute of a round."""

import hashlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import files, leaves, tree
from fisherjax._core.compiler import eval_shape
from fisherjax.clients import Federation
from fisherjax.leaves import Leaves
from fisherjax.rounds import Federated
from fisherjax.typing import AnyArray, Key, Params


class ServerState(NamedTuple):
    """State of the server between two rounds, a pytree of numbers and arrays.

    Attributes:
        number: Number of the next round, from 0.
        params: Global model.
        algorithm: What the server keeps for the algorithm, such as SCAFFOLD's control variate.
        accepted: [M] the last round in which each client's upload was merged; -1 if none was.
    """

    number: int
    params: Params
    algorithm: Any
    accepted: AnyArray


class Terms(NamedTuple):
    """What the server accepts of clients.

    Attributes:
        timeout: Seconds for which the server waits for the replies of a round (default one hour).
        min_replies: Number of sound uploads without which a round changes nothing (default 1).
        max_weight: Largest number of examples that a client may claim as its weight (default: any).
            More counts as this number, with a warning.
        limits: Limits for the size of uploads, which are checked before memory is allocated.
    """

    timeout: float = 3600.0
    min_replies: int = 1
    max_weight: float = math.inf
    limits: files.Limits = files.Limits()


def parts_of(experiment: Federated, params: Params, federation: Federation) -> Leaves:
    """Split params into trained leaves, statistics and frozen leaves."""
    length = min(experiment.batch_size, federation.indices.shape[1])
    return leaves.split(experiment.model, params, federation.inputs, length)


def download(experiment: Federated, parts: Leaves, state: Any, place: int) -> dict[str, Any]:
    """Return what the server sends to a client: the algorithm's message, and shared statistics."""
    link = experiment.algorithm.link
    message = link.broadcast(parts.trained, state, jnp.asarray(place) if link.personal else None)
    kept = link.keeps(parts.statistics)
    shared = tree.by_name(parts.statistics).items()
    return {"message": message, "statistics": {n: x for n, x in shared if n not in kept}}


def download_shapes(experiment: Federated, parts: Leaves, num_clients: int) -> dict[str, Any]:
    """Return the shapes and dtypes of what the server sends to a client."""

    def first(parts: Leaves) -> dict[str, Any]:
        state = experiment.algorithm.link.init(parts.trained, num_clients)
        return download(experiment, parts, state, 0)

    return eval_shape(first, parts)


def digest(params: Params) -> str:
    """Compute the SHA-256 of all leaves with their names."""
    found = hashlib.sha256()
    for name, leaf in tree.by_name(params).items():
        array = np.asarray(leaf)
        found.update(f"{name} {array.dtype.name} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def key_fields(key: Key) -> dict[str, Any]:
    """Describe a key in a message."""
    words = np.asarray(jax.random.key_data(key), np.uint32)
    return {"key": words.tobytes(), "key-kind": str(jax.random.key_impl(key))}


def key_of(words: bytes, kind: str) -> Key:
    """Return the key of a message."""
    return jax.random.wrap_key_data(np.frombuffer(words, np.uint32), impl=kind)
