"""Secure sums over Flower: their terms, and their messages as texts.

The server learns the sum of the clients' terms, `algorithm.reduce` of each update, and no term by
itself. `secure_aggregation.protocol` has the messages; here they travel as Flower's, the masked
vector as the reply to the message that a client trains for.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import jax.numpy as jnp
import numpy as np
from flwr.app import Context

from fisherjax import files
from fisherjax._core import checks
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.flower import _wire
from fisherjax.merging._running_statistics import add_up
from fisherjax.merging._server_half import decode_and_screen, split_params
from fisherjax.secure_aggregation import fixed_point, keys, protocol
from fisherjax.secure_aggregation.messages import Setting
from fisherjax.typing import Params

# Texts of 10,000 clients with their keys and shares have 10 MB.
_LONGEST = 2**26


class Secure(NamedTuple):
    """Terms of secure sums, the same on the server and on all clients.

    Without `verifiers` the server must be honest: it follows the protocol, though it may look at
    all that it gets. With them it need not be, see `docs/how_to/flower_secure.md`.

    Attributes:
        bound: Largest absolute value of an entry of a client's term, `algorithm.reduce` of its
            update at a weight of at most one. A client with a larger one takes no part.
        most_examples: Number of examples that weighs one. A client with more weighs one, too; the
            weight of others is their number divided by this one.
        threshold: Number of clients that have to stay until the end of a sum of m clients (default
            2 m // 3 + 1).
        bits: Bits of the ring, 64 (default) or 32; entries are rounded to bound m / 2^bits.
        least: Least number of clients of a sum (default 3). A client refuses to be added to fewer,
            as the sum of two tells each of them what the other sent.
        verifiers: Public Ed25519 key of each client, by partition-id, if messages are signed:
            `secure_aggregation.keys.verifier(signing)`.
        signing: Private Ed25519 key of a client, 32 bytes, which the server does not have.
    """

    bound: float
    most_examples: float
    threshold: int | None = None
    bits: int = 64
    least: int = 3
    verifiers: tuple[bytes, ...] = ()
    signing: bytes = b""


class Plan(NamedTuple):
    """What the server says of a sum: its clients by partition-id, and the public parameters.

    Attributes:
        clients: Partition-ids of the clients, in the order of their places in the sum.
        length: Length of the vectors.
        session: Bytes that are unique to the sum.
        encoding: Hash of the encoding.
    """

    clients: tuple[int, ...]
    length: int
    session: bytes
    encoding: bytes


def checked(secure: Any) -> Secure:
    """Check the types and ranges of terms.

    Raises:
        TypeError: If an attribute has the wrong type.
        ValueError: If a number is out of range.
    """
    checks.instance("secure", secure, Secure, "flower.Secure(bound=10.0, most_examples=1000)")
    checks.positive("bound", secure.bound)
    checks.positive("most_examples", secure.most_examples)
    checks.one_of("bits", secure.bits, (32, 64))
    checks.count("least", secure.least, 2)
    checks.instance("verifiers", secure.verifiers, tuple, "a tuple of public Ed25519 keys")
    checks.instance("signing", secure.signing, bytes, "the 32 bytes of a private Ed25519 key")
    return secure


def of_client(
    secure: Secure | Callable[[Context], Secure], folder: Path | None, context: Context
) -> Secure:
    """Return the terms of a client, which may depend on the configuration of its node."""
    found = checked(secure(context) if callable(secure) else secure)
    if bool(found.signing) != bool(found.verifiers):
        raise ValueError(
            "secure has verifiers without signing, or signing without verifiers; expected the "
            "private key of this client and the public keys of all, or neither."
        )
    if found.signing and folder is None:
        raise ValueError(
            "Signed sums need a folder, in which the client notes what it has answered: pass "
            "folder to client_app."
        )
    return found


def check_sums(algorithm: Algorithm) -> None:
    """Check that an algorithm's updates add up.

    Raises:
        ValueError: If it needs each client's update.
    """
    if algorithm.reduce is None:
        raise ValueError(
            f"'{algorithm.kind}' needs each client's update (its reduce is None), so that no sum "
            "can hide them; expected a method with a reduce, such as fedavg, fedfisher with "
            "fisher=fisher.diagonal, or fedfisher_sketched, or no `secure`."
        )


def agreed(secure: Secure, plan: Plan) -> Setting:
    """Return the public parameters of a sum.

    Raises:
        ValueError: If the sum has too few clients, or one twice, or one without a key.
    """
    number = len(plan.clients)
    if number < secure.least or len(set(plan.clients)) != number or min(plan.clients) < 0:
        raise ValueError(
            f"the sum is of the clients {list(plan.clients)}; expected at least {secure.least} "
            "different ones (least)"
        )
    if secure.verifiers and max(plan.clients) >= len(secure.verifiers):
        raise ValueError(
            f"the sum is of the clients {list(plan.clients)}, but there are verifiers of "
            f"{len(secure.verifiers)} clients; expected one for each client"
        )
    verifiers = [secure.verifiers[place] for place in plan.clients] if secure.verifiers else ()
    public = plan.session, plan.encoding, verifiers
    return protocol.setting(number, secure.threshold, plan.length, secure.bits, *public)


def ring(secure: Secure, term: Any, number: int) -> fixed_point.Ring:
    """Return the encoding of a term, or of one of its shapes, for a number of clients."""
    return fixed_point.ring(term, secure.bound, number, secure.bits)


def term(
    algorithm: Algorithm, params: Params, update: Update, examples: float, secure: Secure
) -> Any:
    """Return a client's term of the sum, from its update, stacked [1, ...].

    Raises:
        ValueError: If it is not finite.
    """
    weight = jnp.array([min(examples / secure.most_examples, 1.0)], float)
    parts = split_params(params, update)
    found = decode_and_screen(algorithm, parts, update, weight, "raise")
    assert algorithm.reduce is not None
    values, statistics = found.values
    return add_up(algorithm.reduce, values, statistics, found.weights)


def vector_file(values: np.ndarray) -> bytes:
    """Return a vector as the bytes of a file."""
    return _wire.written(partial(files.save_arrays, tree={"values": values}))


def vector(file: bytes, agreed: Setting, limits: files.Limits) -> np.ndarray:
    """Return the vector of a file."""
    like = {"values": np.empty(agreed.length, fixed_point.unsigned(agreed.bits))}
    found = _wire.read(file, partial(files.load_arrays, like=like, limits=limits))
    return np.asarray(found["values"])


def written(value: Any) -> str:
    r"""Write a named tuple of a message or a client's state as text; arrays are left out.

    Example:
        >>> text = written(Plan((0, 2), 5, b"\x01", b""))
        >>> text
        '{"clients": [0, 2], "length": 5, "session": "01", "encoding": ""}'
        >>> read(Plan, text).session
        b'\x01'
    """
    return json.dumps(_plain(value))


def read(kind: Any, text: Any) -> Any:
    """Read a named tuple that `written` wrote.

    Raises:
        ValueError: If the text is not one of this kind.
    """
    try:
        if type(text) is not str or len(text) > _LONGEST:
            raise ValueError(f"it is no text of at most {_LONGEST} characters")
        return _typed(kind, json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"the message has no {kind.__name__} of a secure sum ({error!s:.80}); expected that "
            "of the same version on the other side"
        ) from error


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(x) for name, x in value._asdict().items()}
    match value:
        case bytes():
            return value.hex()
        case np.ndarray():
            return None
        case Mapping():
            return [[int(key), _plain(x)] for key, x in sorted(value.items())]
        case set():
            return sorted(value)
        case tuple():
            return [_plain(x) for x in value]
    return value


def _typed(kind: Any, value: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is bytes:
        return bytes.fromhex(value)
    if kind is np.ndarray:
        return None
    if hasattr(kind, "_fields"):
        hints = get_type_hints(kind)
        return kind(*(_typed(hints[name], value[name]) for name in kind._fields))
    if origin is tuple and len(parts) == 2 and parts[1] is Ellipsis:
        return tuple(_typed(parts[0], x) for x in value)
    if origin is tuple:
        return tuple(_typed(part, x) for part, x in zip(parts, value, strict=True))
    if origin is set:
        return {_typed(parts[0], x) for x in value}
    if origin is not None and issubclass(origin, Mapping):
        found = [(_typed(parts[0], key), _typed(parts[1], x)) for key, x in value]
        if len(dict(found)) != len(found):
            raise ValueError("a key is there twice")
        return dict(found)
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value


def draw_plan(
    clients: tuple[int, ...], secure: Secure, like: Any, entropy: Callable[[int], bytes]
) -> tuple[Plan, fixed_point.Ring]:
    """Draw the session of a sum, and return what the server says of it, and its encoding."""
    encoding = ring(secure, like, len(clients))
    digest = fixed_point.digest(encoding)
    return Plan(clients, encoding.length, entropy(keys.SECRET), digest), encoding
