"""Nodes that stand for encoded arrays; how they are decoded, and how their claims are checked.

Few bytes can claim to stand for an array that no memory holds. Before an upload from elsewhere is
decoded, `declared` computes the shapes that it decodes to.
"""

import abc
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.typing import Array, Params

_FLOATS = "float16", "bfloat16", "float32", "float64"
Leaves: TypeAlias = dict[str, Array]
"""Leaves of the model that clients started from, by name."""


class Encoded(abc.ABC):
    """Node that stands for one array or several; a frozen dataclass of arrays."""

    @abc.abstractmethod
    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Any:
        """Return the decoded arrays; `inner` decodes the content of a field."""

    @abc.abstractmethod
    def declared(self, inner: Callable[[Any], Any]) -> Any:
        """Return the shapes and dtypes of the decoded arrays, from those of the fields.

        `inner` does the same for the content of a field. Raise ValueError if the fields do not fit
        each other or the bytes that arrived. See the function `declared`.
        """


def decode(values: Any, params: Params) -> Any:
    """Decode the values of one client's update, whatever codecs encoded them.

    `params` are those that the client started from.

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
    """Return the shapes and dtypes that an encoded update decodes to, without decoding it.

    Args:
        values: Encoded values of one client; arrays may be `jax.ShapeDtypeStruct`.
        most: Maximum number of bytes of all decoded arrays, including those that nodes within
            nodes decode to (default: no limit).

    Returns:
        The values with a `jax.ShapeDtypeStruct` in place of every array and every node.

    Raises:
        ValueError: If fields of a node do not fit each other, or decoding takes more bytes.

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
        # Nodes within nodes count too, because decoding holds their arrays at the same time.
        total += sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(found))
        if total > most:
            shapes = [list(x.shape) for x in jax.tree.leaves(found)]
            raise ValueError(
                f"A {type(value).__name__} decodes to arrays of shapes {shapes!s:.80}; all "
                f"decoded arrays would take {total:.3g} bytes, more than {most:.3g}"
            )
        return found

    return inner(values)


def at(path: Any, function: Callable[[Any], Any], value: Any) -> Any:
    """Call a function with the value at a path of a pytree, and name the path in its errors."""
    try:
        return function(value)
    except ValueError as error:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        raise ValueError(f"{name}: {error}" if name else str(error)) from error


def is_encoded(value: Any) -> bool:
    """Return whether a value is a node that stands for arrays."""
    return isinstance(value, Encoded)


def check_field(name: str, found: Any, ndim: int | None = None, dtype: Any = None) -> Any:
    """Return a field of a node after checking that it is one array of this rank and dtype.

    None means any rank, and any floating dtype.
    """
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
    """Check the shape and the floating dtype that a node claims for its array, and return both."""
    is_shape = isinstance(shape, tuple) and all(type(axis) is int and axis >= 0 for axis in shape)
    # NumPy supports neither more axes nor more entries.
    if not is_shape or len(shape) > 32 or math.prod(shape) >= 2**60 or dtype not in _FLOATS:
        raise ValueError(
            f"An array of shape {shape!s:.80} and type {dtype!s:.80} is impossible; expected "
            f"non-negative integers and one of {', '.join(_FLOATS)}"
        )
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
