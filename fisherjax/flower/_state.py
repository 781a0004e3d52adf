"""What the server keeps between rounds, what it accepts, and what both sides compute of a round."""

import hashlib
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import files, leaves, tree
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape
from fisherjax.algorithms.base import Algorithm, Update, send_params
from fisherjax.clients import Federation
from fisherjax.flower._secure import Secure
from fisherjax.leaves import Leaves
from fisherjax.rounds import Federated
from fisherjax.rounds._messages import download
from fisherjax.typing import AnyArray, Key, Params

# The server's noise is drawn from keys that are folded with numbers of `clients`.
_PUBLIC = 1_000


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
        connect: Seconds for which the server waits until all clients are connected before its first
            round, and until `min_replies` of them are before others (default 60).
        min_replies: Number of sound uploads without which a round changes nothing (default 1).
        max_weight: Largest number of examples that a client may claim as its weight (default: any).
            More counts as this number, with a warning.
        limits: Limits for the size of uploads, which are checked before memory is allocated.
    """

    timeout: float = 3600.0
    connect: float = 60.0
    min_replies: int = 1
    max_weight: float = math.inf
    limits: files.Limits = files.Limits()


class Report(NamedTuple):
    """Record of one round.

    Attributes:
        number: Number of the round, from 0.
        clients: Numbers of the clients whose uploads were merged; empty if the round failed.
        weights: Their weights, numbers of examples that `max_weight` bounds; NaN in secure sums.
        loss: Mean training loss of these clients in nats in the last local epoch; NaN if one of
            them does not send it, or if the round failed.
        left_out: Reason for which each other client was left out, by its number; and the reason for
            which the round failed, if it did, by "round".
        info: What the algorithm reports.
    """

    number: int
    clients: tuple[int, ...]
    weights: tuple[float, ...]
    loss: float
    left_out: dict[int | str, str]
    info: Any


class Setup(NamedTuple):
    """Arguments of `strategy`, checked.

    Attributes:
        experiment: The algorithm and the model.
        example: Examples of the shapes that clients have, as a federation of one client.
        expected: Shapes of one client's update.
        num_clients: Number of clients M.
        cohort: Number of clients in a round.
        key: Key of the run.
        exchanges: Messages without training.
        terms: What is accepted of clients.
        secure: Terms of secure sums; None if clients send their updates.
    """

    experiment: Federated
    example: Federation
    expected: Update
    num_clients: int
    cohort: int
    key: Key
    exchanges: tuple[tuple[Algorithm, ...], ...]
    terms: Terms
    secure: Secure | None


def check_terms(terms: Terms) -> None:
    """Check the types and ranges of terms."""
    checks.instance("terms", terms, Terms, "flower.Terms(timeout=600.0)")
    checks.positive("timeout", terms.timeout)
    checks.number("connect", terms.connect)
    checks.count("min_replies", terms.min_replies)
    if terms.max_weight != math.inf:
        checks.positive("max_weight", terms.max_weight)
    checks.instance("limits", terms.limits, files.Limits, "files.Limits(arrays=50_000)")


def download_shapes(experiment: Federated, parts: Leaves, num_clients: int) -> dict[str, Any]:
    """Return the shapes and dtypes of what the server sends to a client."""

    def first(parts: Leaves) -> dict[str, Any]:
        state = experiment.algorithm.link.init(parts.trained, num_clients)
        return download(experiment.algorithm, parts, state, 0)

    return eval_shape(first, parts)


def exchanged(algorithm: Algorithm, parts: Leaves, start: Any) -> dict[str, Any]:
    """Return what the server sends in an exchange: its model, and what the algorithm adds."""
    # Most methods add nothing.
    is_model = algorithm.link.broadcast is send_params
    params = leaves.join(parts.trained, parts.statistics)
    return {"params": params} if is_model else {"params": params, "start": start}


def digest(params: Params) -> str:
    """Compute the SHA-256 of all leaves with their names."""
    found = hashlib.sha256()
    for name, leaf in tree.by_name(params).items():
        array = np.asarray(leaf)
        found.update(f"{name} {array.dtype.name} {array.shape} ".encode())
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def key_fields(key: Key, draws: bool) -> dict[str, Any]:
    """Describe the key of a round in a message; `draws` is whether the server draws noise."""
    if draws:
        # The key from which the server draws noise stays with it; clients get one of its outputs.
        key = jax.random.fold_in(key, _PUBLIC)
    words = np.asarray(jax.random.key_data(key), np.uint32)
    return {"key": words.tobytes(), "key-kind": str(jax.random.key_impl(key))}


def key_of(words: bytes, kind: str) -> Key:
    """Return the key of a message; raise ValueError if it is none."""
    try:
        return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(words, np.uint32)), impl=kind)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the message has no key of kind {kind!r:.40}: {error}") from error
