"""The uniform quantiser, and differences in place of weights."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.compression.base import Codec, change_params, is_number
from fisherjax.compression.encoded import Encoded, Leaves, check_field, check_shape
from fisherjax.typing import Array, Params

_MOST = 24  # float32 holds no more


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Codes(Encoded):
    """An array as whole numbers of so many bits, and the largest entry.

    Attributes:
        packed: The bits of all codes, one after another, uint8.
        largest: max |x|, float32.
        bits: Of a code, its sign among them.
        shape: Of the array.
        dtype: Of the array, by name.
    """

    packed: Array
    largest: Array
    bits: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Give largest * code / levels."""
        del inner, leaves
        self.declared(lambda x: x)
        levels = 2 ** (self.bits - 1) - 1
        count = math.prod(self.shape)
        bits = jnp.unpackbits(self.packed, count=count * self.bits).reshape(count, self.bits)
        place = jnp.arange(self.bits - 1, -1, -1)
        codes = (bits.astype(jnp.int32) << place).sum(1) - levels
        # The quotient first: XLA would divide `largest`, and find a level too small for float32.
        values = self.largest * jax.lax.optimization_barrier(codes / levels)
        return values.astype(self.dtype).reshape(self.shape)

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Say how large the array is, for which as many bytes came as its codes take."""
        del inner
        if type(self.bits) is not int or not 2 <= self.bits <= _MOST:
            raise ValueError(f"Codes have {self.bits!s:.80} bits; expected 2 to {_MOST}")
        found = check_shape(self.shape, self.dtype)
        came = check_field("packed", self.packed, 1, jnp.uint8).shape[0]
        check_field("largest", self.largest, 0)
        # Missing bits would be read as zeros.
        if came != (expected := -(-math.prod(self.shape) * self.bits // 8)):
            raise ValueError(
                f"An array {self.shape} of {self.bits} bits came as {came} bytes; expected "
                f"{expected}."
            )
        return found


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Difference(Encoded):
    """How far a leaf is from where it started.

    Attributes:
        value: The difference, an array or what stands for one.
        leaf: Its name.
    """

    value: Any
    leaf: str = dataclasses.field(metadata={"static": True})

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Add the start."""
        difference = inner(self.value)
        return difference + leaves[self.leaf].astype(difference.dtype)

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Say how large the leaf is."""
        if not isinstance(self.leaf, str):
            raise ValueError(f"A difference is of {self.leaf!r:.80}; expected the name of a leaf")
        return check_field(f"the difference of '{self.leaf}'", inner(self.value), None, jnp.number)


@cached
def quantized(bits: int | Mapping[str, int]) -> Codec:
    """Make the uniform quantiser of every array of an update, each by its own largest entry m.

        Q(x) = m round(L x / m) / L,   L = 2^(bits - 1) - 1,   |Q(x) - x| <= m / (2 L).

    Args:
        bits: Of an entry, its sign among them, 2 to 24; or by what is sent, {"params": 16,
            "fisher": 8}: what is not listed stays as it is. Single numbers and integers do, too.

    Returns:
        The codec: ceil(n bits / 8) bytes for n entries, and 4 for their scale.

    Raises:
        ValueError: If bits are out of range; on encoding, if an update has nothing of that name.

    Example:
        >>> sent = quantized(4).encode({"params": jnp.linspace(-1, 1, 15)}, None)["params"]
        >>> print(sent.packed.nbytes, (7 * sent.decode(None, {})).round()[:3])
        8 [-7. -6. -5.]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, appendix C. Their text divides 32 by
        a factor s_q, bits = floor(32 / s_q); their code takes 9 bits for factors where the text has
        8. An array of zeros comes back as zeros, where their code divides by zero.
    """
    asked = {"": bits} if isinstance(bits, int) else dict(bits)
    for name, number in asked.items():
        checks.count("bits" if not name else f"bits['{name}']", number)
        if not 2 <= number <= _MOST:
            raise ValueError(
                f"bits{f' of {name}' if name else ''} is {number}; expected 2 to {_MOST}: one is "
                "the sign, and float32 has no more."
            )

    def encode(values: dict[str, Any], start: Params | None) -> dict[str, Any]:
        del start
        if "" in asked:
            return codes(values, asked[""])
        if unknown := asked.keys() - values.keys():
            raise ValueError(
                f"bits are given for {sorted(unknown)}, but this update holds {sorted(values)}."
            )
        return {n: codes(x, asked[n]) if n in asked else x for n, x in values.items()}

    words = ", ".join(f"{n} bits{f' of {name}' if name else ''}" for name, n in asked.items())
    return Codec(encode, words)


def codes(values: Any, bits: int) -> Any:
    """Quantise every array."""
    return jax.tree.map(lambda leaf: _codes(leaf, bits) if is_number(leaf) else leaf, values)


def _codes(x: Array, bits: int) -> Codes:
    levels = 2 ** (bits - 1) - 1
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32)).ravel()
    largest = jnp.abs(wide).max()
    # What is not finite makes the scale not finite, and the server sees it.
    scaled = wide / jnp.where(largest > 0, largest, 1)
    code = jnp.round(jnp.nan_to_num(scaled) * levels).astype(jnp.int32) + levels
    bit = (code[:, None] >> jnp.arange(bits - 1, -1, -1)) & 1
    # Rounded up for a float64 array: a code never decodes to more than what it stands for.
    kept = largest.astype(jnp.float32)
    return Codes(jnp.packbits(bit.astype(jnp.uint8)), kept, bits, x.shape, x.dtype.name)


@cached
def differences() -> Codec:
    """Make the codec that sends W_i - W, how far a client went, in place of its weights W_i.

    Differences are smaller than weights, so that the same bits are a finer scale.

    Raises:
        ValueError: On encoding, if it is not known what the client started from.

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
                "What the clients started from is not known: expected what training.train returned "
                "or Trained(params, start), to send differences to it."
            )
        return from_start(values, start)

    return Codec(encode, "differences", needs_start=True)


def from_start(values: dict[str, Any], start: Params) -> dict[str, Any]:
    """Write "params" as differences; of shared leaves only, they are looked up by name."""
    leaves = tree.by_name(start)
    return change_params(lambda name, x: Difference(x - leaves[name], name), values)
