"""Codecs encode the updates of clients with fewer bits; the server decodes them.

A codec replaces arrays by `Encoded` nodes that can decode themselves. So codecs compose, an update
describes its own encoding, and one function, `decode`, decodes every update.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import jax

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.algorithms.base import Algorithm, Report, Update, as_sequence
from fisherjax.compression.encoded import decode
from fisherjax.fisher import Dense, Kronecker
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params


class Codec(NamedTuple):
    """Encoding of an update with fewer bits.

    Attributes:
        encode: Function (values of an update, params that the client started from or None) ->
            values with some arrays replaced by `Encoded` nodes.
        name: Description of the codec; the server accepts only updates of a codec of this name.
        needs_start: Whether `encode` needs the params that the client started from, which the
            server must have too.
    """

    encode: Callable[[Any, Params | None], Any]
    name: str
    needs_start: bool = False


def compose(*codecs: Codec) -> Codec:
    """Compose codecs: the first encodes the update, each other one the result of the one before.

    Example:
        >>> from fisherjax import compression
        >>> compose(compression.differences(), compression.quantized(8)).name
        'differences, 8 bits'
    """
    for codec in codecs:
        _check_codec(codec)
    return _composed(codecs)


@cached
def _composed(codecs: tuple[Codec, ...]) -> Codec:
    def encode(values: Any, start: Params | None) -> Any:
        for codec in codecs:
            values = codec.encode(values, start)
        return values

    name = ", ".join(codec.name for codec in codecs)
    return Codec(encode, name, any(codec.needs_start for codec in codecs))


@overload
def compressed(algorithm: Algorithm[Report], codec: Codec) -> Algorithm[Report]: ...


@overload
def compressed(
    algorithm: Sequence[Algorithm[Report]], codec: Codec
) -> tuple[Algorithm[Report], ...]: ...


def compressed(algorithm: Any, codec: Codec) -> Any:
    """Make an algorithm whose clients encode their updates and whose server decodes them.

    Args:
        algorithm: Algorithm, or a sequence of algorithms such as natural_gradient's, which are all
            compressed in the same way.
        codec: Codec such as `quantized(8)` or `water_filling(0.5)`, or several by `compose`.

    Returns:
        The algorithm, or a tuple of algorithms, with updates {"update": encoded values}. The size
        of an update is that of the encoded arrays, in rounds and in files. Running statistics are
        sent as they are.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the codec needs the model that clients start from, and the algorithm sends
            another model to each client.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
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
    _check_codec(codec)
    found = tuple(_compressed(each, codec) for each in as_sequence(algorithm))
    return found[0] if isinstance(algorithm, Algorithm) else found


@cached
def _compressed(algorithm: Algorithm, codec: Codec) -> Algorithm:
    if codec.needs_start and algorithm.link.personal:
        raise ValueError(
            f"The codec '{codec.name}' sends differences to the model that clients start from, but "
            "this method sends every client another model; expected a codec such as quantized(8)."
        )

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        values, local = algorithm.summarize(key, trained, examples, local)
        # The codec sees the values only, so that it works for every method.
        statistics = {name: x for name, x in values.items() if name == "statistics"}
        values = {name: x for name, x in values.items() if name not in statistics}
        return {"update": codec.encode(values, trained.start)} | statistics, local

    def decoded(values: dict[str, Any], params: Params) -> dict[str, Any]:
        # One client after another, because decoding takes many times the memory of the upload.
        each = jax.lax.map(lambda own: decode(own, params), values["update"])
        return algorithm.decode(each, params)

    # The kind names the codec, so that updates of two codecs cannot be merged by mistake.
    kind = f"{algorithm.kind}; {codec.name}"
    return algorithm._replace(summarize=summarize, decode=decoded, kind=kind)


def encode(update: Update, codec: Codec, *, start: Params | None = None) -> Update:
    """Encode stacked updates, with the result that clients of a `compressed` algorithm would send.

    Args:
        update: Result of `merging.summarize`, leaves [M, ...].
        codec: Codec that encodes them; running statistics stay as they are.
        start: Params that all clients started from, for differences.

    Example:
        >>> import jax.numpy as jnp
        >>> from fisherjax import compression
        >>> update = Update({"params": jnp.ones((2, 100))}, "params")
        >>> size(encode(update, compression.quantized(4)))
        108
    """
    _check_codec(codec)
    values = {"update": _encode(codec, update.values, start)}
    return dataclasses.replace(update, values=values, kind=f"{update.kind}; {codec.name}")


@partial(jit, static_argnums=0)
def _encode(codec: Codec, values: dict[str, Any], start: Params | None) -> Any:
    return jax.lax.map(lambda own: codec.encode(own, start), values)


def size(values: Any) -> int:
    """Count the bytes of all arrays that an update sends, including running statistics.

    `values` may be any pytree, and arrays may be `jax.ShapeDtypeStruct`.

    Example:
        >>> import jax.numpy as jnp
        >>> size({"params": jnp.zeros(3)})
        12
    """
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(values))


def _check_codec(codec: Any) -> None:
    """Raise TypeError for anything but a `Codec`."""
    checks.instance("codec", codec, Codec, "a Codec such as compression.quantized(8)")


def change_matrices(change: Callable[[Array], Any], values: Any) -> Any:
    """Apply a function to every symmetric matrix: factors, dense Fishers and Gram matrices.

    The factors of a layer with groups are many and small, and stay as they are.
    """

    def factor(x: Array) -> Any:
        # A factor [a] is a diagonal, and no matrix.
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
