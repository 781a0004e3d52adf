"""Nodes that stand for encoded arrays."""

import abc
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.typing import Array, Params

_FLOATS = "float16", "bfloat16", "float32", "float64"
Leaves = dict[str, Array]
"""The leaves of the model that clients started from, by name."""


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
        >>> declared(sent)["grams"]["w"].shape, compression.size(sent)
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


def is_encoded(value: Any) -> bool:
    """Say whether a value stands for something else."""
    return isinstance(value, Encoded)


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
