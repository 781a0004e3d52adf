"""Codecs: what a client makes of its update before it is sent, and how the server undoes it.

A codec replaces arrays by nodes that know how they are undone, so that codecs compose, an update
says itself what was done to it, and one function decodes whatever arrives.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import checks, tree
from fisherjax.algorithms.base import Algorithm, Update, check_algorithm
from fisherjax.compiler import jit
from fisherjax.configuration import cached
from fisherjax.fisher import Dense, Kronecker
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params

Leaves = dict[str, Array]
"""The leaves of the model that clients started from, by name."""


class Codec(NamedTuple):
    """A way to write an update with fewer bits.

    Attributes:
        encode: (values of an update, params that the client started from, or None) -> values with
            some arrays replaced by `Encoded` nodes.
        name: In words: the server refuses updates of another codec.
        needs_start: Whether it works with none but the model that the server has, too.
    """

    encode: Callable[[Any, Params | None], Any]
    name: str
    needs_start: bool = False


class Encoded(abc.ABC):
    """What stands for an array, or for several; a frozen dataclass of arrays."""

    @abc.abstractmethod
    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Any:
        """Give what was encoded; `inner` decodes what is in a field."""


def compose(*codecs: Codec) -> Codec:
    """Apply codecs one after another: the first to the update, the next to what that made.

    Example:
        >>> from fisherjax import compression
        >>> compose(compression.differences(), compression.quantized(8)).name
        'differences, 8 bits'
    """
    for codec in codecs:
        check_codec(codec)
    return _composed(codecs)


@cached
def _composed(codecs: tuple[Codec, ...]) -> Codec:
    def encode(values: Any, start: Params | None) -> Any:
        for codec in codecs:
            values = codec.encode(values, start)
        return values

    name = ", ".join(codec.name for codec in codecs)
    return Codec(encode, name, any(codec.needs_start for codec in codecs))


def decode(values: Any, params: Params) -> Any:
    """Undo whatever codecs did to the update of one client, given what the client started from.

    Example:
        >>> from fisherjax import compression
        >>> sent = compression.quantized(2).encode({"params": jnp.array([-3.0, 0.5, 3.0])}, None)
        >>> print(decode(sent, jnp.zeros(3))["params"])
        [-3.  0.  3.]
    """
    leaves = tree.by_name(params)

    def inner(values: Any) -> Any:
        return jax.tree.map(one, values, is_leaf=is_encoded)

    def one(value: Any) -> Any:
        return value.decode(inner, leaves) if is_encoded(value) else value

    return inner(values)


@cached
def compressed(algorithm: Algorithm, codec: Codec) -> Algorithm:
    """Let clients send what a codec makes of their updates; the server decodes and goes on.

    Args:
        algorithm: Any. Its further messages, if it has some, are compressed alike.
        codec: Such as `quantized(8)`, `water_filling(0.5)`, or several by `compose`.

    Returns:
        The algorithm, with updates {"update": encoded values}. Their bytes are those of the arrays
        in them: `rounds` counts them, and files hold them.

    Raises:
        TypeError: If an argument has the wrong kind.
        ValueError: If the codec needs what clients start from, and the algorithm sends each another
            model.

    Example:
        >>> import fisherjax as fj
        >>> method = compressed(fj.algorithms.fedavg(), fj.compression.quantized(8))
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.zeros(2)), [[0], [1]])
        >>> models = [jnp.arange(1000.0), jnp.arange(1000.0) + 10]
        >>> sent = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
        >>> size(sent) / 2  # bytes of a client: a byte for each number and a scale
        1004.0
        >>> merged = fj.merging.merge(method, models[0], sent)[0]
        >>> bool(jnp.abs(merged - models[0] - 5).max() < 1009 / 254)
        True
    """
    check_algorithm(algorithm)
    check_codec(codec)
    if codec.needs_start and algorithm.personal:
        raise ValueError(
            f"The codec '{codec.name}' sends differences to what clients start from, but this "
            "method sends every client another model; expected a codec such as quantized(8)."
        )

    def summarize(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        values, private = algorithm.summarize(key, trained, examples, private)
        return {"update": codec.encode(values, trained.start)}, private

    def decoded(values: dict[str, Any], params: Params) -> dict[str, Any]:
        # One client after another: what is unpacked on the way is many times what was sent.
        each = jax.lax.map(lambda own: decode(own, params), values["update"])
        return algorithm.decode(each, params)

    then = None if algorithm.then is None else compressed(algorithm.then, codec)
    kind = _kind(algorithm.kind, codec)
    return algorithm._replace(summarize=summarize, decode=decoded, kind=kind, then=then)


def encode(update: Update, codec: Codec, *, start: Params | None = None) -> Update:
    """Compress stacked updates that were made before, as `compressed` would have sent them.

    Args:
        update: What `merging.summarize` returned, leaves [M, ...].
        codec: Any.
        start: What all clients started from, for differences.

    Example:
        >>> from fisherjax import compression
        >>> update = Update({"params": jnp.ones((2, 100))}, "params")
        >>> size(encode(update, compression.quantized(4)))
        108
    """
    check_codec(codec)
    return Update({"update": _encode(codec, update.values, start)}, _kind(update.kind, codec))


@partial(jit, static_argnums=0)
def _encode(codec: Codec, values: dict[str, Any], start: Params | None) -> Any:
    return jax.lax.map(lambda own: codec.encode(own, start), values)


def _kind(kind: str, codec: Codec) -> str:
    return f"{kind}; {codec.name}"


def size(values: Any) -> int:
    """Count the bytes of all arrays in an update, as they are sent.

    Example:
        >>> size({"params": jnp.zeros(3)})
        12
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(values))


def check_codec(codec: Any) -> None:
    """Refuse what is no `Codec`."""
    checks.instance("codec", codec, Codec, "a Codec such as compression.quantized(8)")


def is_encoded(value: Any) -> bool:
    """Say whether a value stands for something else."""
    return isinstance(value, Encoded)


def is_number(leaf: Any) -> bool:
    """Say whether a leaf is floating and has more than one entry: one alone is not worth it."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 1


def change_params(change: Callable[[str, Array], Any], values: dict[str, Any]) -> dict[str, Any]:
    """Change every leaf of "params", given its name; updates without it stay."""
    if "params" not in values:
        return values
    params = values["params"]
    leaves = map(change, tree.names(params), jax.tree.leaves(params))
    return values | {"params": jax.tree.unflatten(jax.tree.structure(params), leaves)}


def change_matrices(change: Callable[[Array], Any], values: Any) -> Any:
    """Change every symmetric matrix: factors, dense Fishers, Gram matrices."""

    def factor(x: Array) -> Any:
        return change(x) if x.ndim == 2 else x

    def one(value: Any) -> Any:
        if isinstance(value, Kronecker):
            return dataclasses.replace(value, factors=jax.tree.map(factor, value.factors))
        if isinstance(value, Dense):
            return dataclasses.replace(value, matrix=change(value.matrix))
        return value

    changed = jax.tree.map(one, values, is_leaf=lambda x: isinstance(x, Kronecker | Dense))
    if "grams" in values:
        changed["grams"] = jax.tree.map(change, values["grams"])
    return changed
