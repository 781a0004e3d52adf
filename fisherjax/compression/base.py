"""Codecs: what a client makes of its update before it is sent, and how the server undoes it.

A codec replaces arrays by nodes that know how they are undone, so that codecs compose, an update
says itself what was done to it, and one function decodes whatever arrives.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.algorithms.base import Algorithm, Report, Update, as_sequence
from fisherjax.fisher import Dense, Kronecker
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params

_FLOATS = "float16", "bfloat16", "float32", "float64"
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

    @abc.abstractmethod
    def declared(self, inner: Callable[[Any], Any]) -> Any:
        """Return shape and type of what `decode` gives, by those of the fields: see `declared`.

        `inner` does the same for what is in a field. It raises ValueError where fields fit neither
        each other nor the bytes that came.
        """


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


def declared(values: Any, most: float = math.inf) -> Any:
    """Return the shapes and types that an encoded update says it decodes to, without decoding it.

    What decodes an upload of somebody else asks this first: few bytes can stand for an array that
    no memory holds.

    Args:
        values: Of one client, encoded; arrays may be `jax.ShapeDtypeStruct`.
        most: How many bytes all that is decoded may take, what is decoded on the way included.

    Returns:
        The values with a `jax.ShapeDtypeStruct` in place of every array and every node.

    Raises:
        ValueError: If a node's fields do not fit each other, or it decodes to more bytes.

    Example:
        >>> from fisherjax import compression
        >>> sent = compression.roots(1).encode({"grams": {"w": jnp.eye(1000)}}, None)
        >>> declared(sent)["grams"]["w"].shape, size(sent)
        ((1000, 1000), 4000)
    """
    total = 0

    def inner(values: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, value: at(path, one, value), values, is_leaf=is_encoded
        )

    def one(value: Any) -> Any:
        nonlocal total
        if not is_encoded(value):
            has_shape = hasattr(value, "shape") and hasattr(value, "dtype")
            return jax.ShapeDtypeStruct(value.shape, value.dtype) if has_shape else value
        found = value.declared(inner)
        total += sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(found))
        if total > most:
            shapes = [list(x.shape) for x in jax.tree.leaves(found)]
            raise ValueError(
                f"A {type(value).__name__} decodes to arrays of shapes {shapes!s:.80}; all that "
                f"is decoded would take {total:.3g} bytes, more than {most:.3g}"
            )
        return found

    return inner(values)


def at(path: Any, function: Callable[[Any], Any], value: Any) -> Any:
    """Call a function of what is at a path of a pytree, which its errors then name."""
    try:
        return function(value)
    except ValueError as error:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise ValueError(f"{name}: {error}" if name else str(error)) from error


@overload
def compressed(algorithm: Algorithm[Report], codec: Codec) -> Algorithm[Report]: ...


@overload
def compressed(
    algorithm: Sequence[Algorithm[Report]], codec: Codec
) -> tuple[Algorithm[Report], ...]: ...


def compressed(algorithm: Any, codec: Codec) -> Any:
    """Let clients send what a codec makes of their updates; the server decodes and goes on.

    Args:
        algorithm: Any, or a sequence of them, such as natural_gradient's, each of which is
            compressed alike.
        codec: Such as `quantized(8)`, `water_filling(0.5)`, or several by `compose`.

    Returns:
        The algorithm, or a tuple of them, with updates {"update": encoded values}. Their bytes are
        those of the arrays in them: `rounds` counts them, and files hold them. Running statistics
        are sent as they are.

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
    check_codec(codec)
    found = tuple(_compressed(each, codec) for each in as_sequence(algorithm))
    return found[0] if isinstance(algorithm, Algorithm) else found


@cached
def _compressed(algorithm: Algorithm, codec: Codec) -> Algorithm:
    if codec.needs_start and algorithm.link.personal:
        raise ValueError(
            f"The codec '{codec.name}' sends differences to what clients start from, but this "
            "method sends every client another model; expected a codec such as quantized(8)."
        )

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        values, local = algorithm.summarize(key, trained, examples, local)
        return {"update": codec.encode(values, trained.start)}, local

    def decoded(values: dict[str, Any], params: Params) -> dict[str, Any]:
        # One client after another: what is unpacked on the way is many times what was sent.
        each = jax.lax.map(lambda own: decode(own, params), values["update"])
        return algorithm.decode(each, params)

    kind = _kind(algorithm.kind, codec)
    return algorithm._replace(summarize=summarize, decode=decoded, kind=kind)


def encode(update: Update, codec: Codec, *, start: Params | None = None) -> Update:
    """Compress stacked updates that were made before, as `compressed` would have sent them.

    Running statistics stay as they are.

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
    values = {"update": _encode(codec, update.values, start)}
    # Codecs are of what is trained.
    return dataclasses.replace(update, values=values, kind=_kind(update.kind, codec))


@partial(jit, static_argnums=0)
def _encode(codec: Codec, values: dict[str, Any], start: Params | None) -> Any:
    return jax.lax.map(lambda own: codec.encode(own, start), values)


def _kind(kind: str, codec: Codec) -> str:
    return f"{kind}; {codec.name}"


def size(values: Any) -> int:
    """Count the bytes of all arrays in an update, as they are sent: of statistics too.

    Frozen leaves have none, as they are not sent.

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


def check_field(name: str, found: Any, ndim: int | None = None, dtype: Any = None) -> Any:
    """Refuse a field of a node that is not one array, of so many axes and that type."""
    is_array = hasattr(found, "shape") and hasattr(found, "dtype")
    if (
        not is_array
        or (ndim is not None and len(found.shape) != ndim)
        or not jnp.issubdtype(found.dtype, jnp.floating if dtype is None else dtype)
    ):
        wanted = "floating" if dtype is None else jnp.dtype(dtype).name
        axes = "" if ndim is None else f" with {ndim} axes"
        given = f"{found.dtype}{list(found.shape)}" if is_array else type(found).__name__
        raise ValueError(f"{name} is {given}; expected one array of {wanted} numbers{axes}")
    return found


def check_shape(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """Refuse what a node says of its array, unless it is a shape and a floating type."""
    is_shape = isinstance(shape, tuple) and all(type(axis) is int and axis >= 0 for axis in shape)
    # NumPy takes neither more axes nor more entries.
    if not is_shape or len(shape) > 32 or math.prod(shape) >= 2**60 or dtype not in _FLOATS:
        raise ValueError(
            f"An array of shape {shape!s:.80} and type {dtype!s:.80} is none; expected whole "
            f"numbers, zero or more, and one of {', '.join(_FLOATS)}"
        )
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


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
