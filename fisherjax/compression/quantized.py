"""Codecs of single arrays: the uniform quantiser, and differences in place of weights."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.compression.base import Codec
from fisherjax.compression.encoded import Encoded, Leaves, check_field, check_shape
from fisherjax.typing import Array, Params

_MOST = 24  # bits; the significand of float32 holds no more


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes(Encoded):
    """Array as integer codes of a fixed number of bits, and its largest magnitude.

    Attributes:
        packed: Bits of all codes, one after another, uint8.
        largest: Largest magnitude max |x|, float32.
        bits: Number of bits of a code, including the sign.
        shape: Shape of the array.
        dtype: Name of the array's dtype.
    """

    packed: Array
    largest: Array
    bits: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Return the array largest * code / levels."""
        del inner, leaves
        # Shapes of an upload from elsewhere are claims until this check.
        self.declared(lambda x: x)
        levels = 2 ** (self.bits - 1) - 1
        count = math.prod(self.shape)
        bits = jnp.unpackbits(self.packed, count=count * self.bits).reshape(count, self.bits)
        # The highest bit comes first, as `packbits` writes it.
        place = jnp.arange(self.bits - 1, -1, -1)
        codes = (bits.astype(jnp.int32) << place).sum(1) - levels
        # Without the barrier, XLA would divide `largest` first, which may underflow in float32.
        values = self.largest * jax.lax.optimization_barrier(codes / levels)
        return values.astype(self.dtype).reshape(self.shape)

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the array, if its codes have the right number of bytes."""
        del inner
        if type(self.bits) is not int or not 2 <= self.bits <= _MOST:
            raise ValueError(f"Codes have {self.bits!s:.80} bits; expected 2 to {_MOST}")
        found = check_shape(self.shape, self.dtype)
        came = check_field("packed", self.packed, 1, jnp.uint8).shape[0]
        check_field("largest", self.largest, 0)
        # Missing bits would be decoded as zeros.
        if came != (expected := -(-math.prod(self.shape) * self.bits // 8)):
            raise ValueError(
                f"An array of shape {self.shape} with {self.bits} bits per entry has codes of "
                f"{came} bytes; expected {expected} bytes."
            )
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Difference(Encoded):
    """Difference of a leaf to the model that the client started from.

    Attributes:
        value: Difference, an array or a node that stands for one.
        leaf: Name of the leaf.
    """

    value: Any
    leaf: str = dataclasses.field(metadata={"static": True})

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Return the sum of the difference and the start."""
        difference = inner(self.value)
        return difference + leaves[self.leaf].astype(difference.dtype)

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the leaf."""
        if not isinstance(self.leaf, str):
            raise ValueError(f"A difference is of {self.leaf!r:.80}; expected the name of a leaf")
        return check_field(f"the difference of '{self.leaf}'", inner(self.value), None, jnp.number)


@cached
def quantized(bits: int | Mapping[str, int], *, ceiling: bool = False) -> Codec:
    """Make the uniform quantiser of arrays, each scaled by its own largest magnitude m.

        Q(x) = m round(L x / m) / L,   L = 2^(bits - 1) - 1,   |Q(x) - x| <= m / (2 L).

    Args:
        bits: Number of bits of an entry, including the sign, 2 to 24; or a number for each value of
            the update, such as {"params": 16, "fisher": 8}. Other values, single numbers and
            integers stay as they are.
        ceiling: Whether entries are rounded up, as the text of the paper has it, instead of to the
            nearest level. The error is then up to m / L, and its mean is not zero.

    Returns:
        The codec. An array of n entries takes ceil(n bits / 8) bytes, and 4 bytes for its scale.

    Raises:
        ValueError: If bits are out of range; on encoding, if an update has no value of a name.

    Example:
        >>> sent = quantized(4).encode({"params": jnp.linspace(-1, 1, 15)}, None)["params"]
        >>> print(sent.packed.nbytes, (7 * sent.decode(None, {})).round()[:3])
        8 [-7. -6. -5.]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, appendix C. The paper divides 32
        by a factor s_q, bits = floor(32 / s_q); its code takes 9 bits for factors where the paper
        has 8. An array of zeros is decoded to zeros here; the paper's code divides by zero.
    """
    asked = {"": bits} if isinstance(bits, int) else dict(bits)
    for name, number in asked.items():
        checks.count("bits" if not name else f"bits['{name}']", number)
        if not 2 <= number <= _MOST:
            raise ValueError(
                f"bits{f' of {name}' if name else ''} is {number}; expected 2 to {_MOST}: one bit "
                f"is the sign, and float32 has {_MOST} bits."
            )

    def encode(values: dict[str, Any], start: Params | None) -> dict[str, Any]:
        del start
        if "" in asked:
            return codes(values, asked[""], ceiling)
        if unknown := asked.keys() - values.keys():
            raise ValueError(
                f"bits are given for {sorted(unknown)}, but this update holds {sorted(values)}."
            )
        return {n: codes(x, asked[n], ceiling) if n in asked else x for n, x in values.items()}

    words = ", ".join(f"{n} bits{f' of {name}' if name else ''}" for name, n in asked.items())
    return Codec(encode, f"{words}, rounded up" if ceiling else words)


def codes(values: Any, bits: int, ceiling: bool = False) -> Any:
    """Quantise the floating arrays of a pytree; those of one entry would not become smaller."""

    def one(leaf: Array) -> Any:
        is_large = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size > 1
        return _codes(leaf, bits, ceiling) if is_large else leaf

    return jax.tree.map(one, values)


def _codes(x: Array, bits: int, ceiling: bool) -> Codes:
    levels = 2 ** (bits - 1) - 1
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)).ravel()
    largest = jnp.abs(wide).max()
    # Entries that are not finite make the scale not finite, so that the server notices.
    scaled = wide / jnp.where(largest > 0, largest, 1)
    round_ = jnp.ceil if ceiling else jnp.round
    code = round_(jnp.nan_to_num(scaled) * levels).astype(jnp.int32) + levels
    bit = (code[:, None] >> jnp.arange(bits - 1, -1, -1)) & 1
    # The scale is stored in float32, also for a float64 array.
    kept = largest.astype(jnp.float32)
    return Codes(jnp.packbits(bit.astype(jnp.uint8)), kept, bits, x.shape, x.dtype.name)


@cached
def differences() -> Codec:
    """Make the codec that sends the difference W_i - W to the start instead of weights W_i.

    Differences are smaller than weights, so that the same number of bits has a finer scale.

    Raises:
        ValueError: On encoding, if the params that the client started from are unknown.

    Example:
        >>> sent = differences().encode(
        ...     {"params": {"w": jnp.array([5.0])}}, {"w": jnp.array([4.0])}
        ... )
        >>> print(sent["params"]["w"].value)
        [1.]
    """

    def encode(values: dict[str, Any], start: Params | None) -> dict[str, Any]:
        if start is None:
            raise ValueError(
                "The model that the clients started from is unknown; expected the result of "
                "training.train, or Trained(params, start), to send differences to it."
            )
        if "params" not in values:
            return values
        # By name, as the client may train only some of the leaves of the start.
        leaves, params = tree.by_name(start), values["params"]
        sent = [Difference(x - leaves[name], name) for name, x in tree.by_name(params).items()]
        return values | {"params": jax.tree.unflatten(jax.tree.structure(params), sent)}

    return Codec(encode, "differences", needs_start=True)
