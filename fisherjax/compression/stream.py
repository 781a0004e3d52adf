"""Streams of a given size, in which each column of an array has as many bits as it needs.

All columns of an array are rounded to multiples of one step, and each has the bits that its largest
entry needs, so that one number defines rank and precision. The step of an array is a level divided
by the root of the cost of an error of its entries; columns whose entries are all below half a step
take no bits. Bisection finds the level that fills the bytes.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax.compression.encoded import Encoded, Leaves, at, check_field, check_shape
from fisherjax.typing import Array

_WIDEST = 15  # bits of a code, the largest number that four bits can store
_MOST = -(-(2**31) // _WIDEST)  # numbers; an int32 must be able to count their bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slot:
    """Place of an array in a stream.

    Attributes:
        step: Distance of neighbouring values, float32.
        widths: Number of bits of the codes of each column, two columns in a byte, uint8; zero for
            columns of zeros.
        shape: Shape of the array, with columns along its last axis; a vector is one column.
        dtype: Name of the array's dtype.
    """

    step: Array
    widths: Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    def declared(self) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the array, and check that its columns have widths."""
        found = check_shape(self.shape, self.dtype)
        check_field("step", self.step, 0)
        came = check_field("widths", self.widths, 1, jnp.uint8).shape[0]
        if not math.prod(self.shape) or came != (_column_shape(self.shape)[1] + 1) // 2:
            raise ValueError(
                f"An array of shape {self.shape} in a stream has widths of {came} bytes; expected "
                "an array with entries, and half a byte for each of its columns"
            )
        return found

    def bits(self) -> int:
        """Count the bits of its codes; zero if the values of the widths are unknown."""
        # Shapes alone may stand in for the arrays.
        if not isinstance(self.widths, np.ndarray | jax.Array) or checks.is_traced(self.widths):
            return 0
        widths = np.asarray(self.widths)
        return _column_shape(self.shape)[0] * int((widths >> 4).sum() + (widths & 15).sum())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stream(Encoded):
    """Arrays whose columns have as many bits as each needs, one after another.

    Attributes:
        values: Update with a `Slot` for each of these arrays.
        bits: Codes of all arrays, row by row, and zeros up to the agreed size, uint8.
    """

    values: Any
    bits: Array

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Any:
        """Read the arrays, and decode the nodes that contain them."""
        del leaves
        slots, structure = jax.tree.flatten(self.values, is_leaf=lambda x: isinstance(x, Slot))
        places = [place for place, slot in enumerate(slots) if isinstance(slot, Slot)]
        found = _read([slots[place] for place in places], self.bits)
        for place, array in zip(places, found, strict=True):
            slots[place] = array
        return inner(jax.tree.unflatten(structure, slots))

    def declared(self, inner: Callable[[Any], Any]) -> Any:
        """Return the shapes and dtypes of all arrays, and check that the stream has their bits."""

        def one(node: Any) -> Any:
            if not isinstance(node, Slot):
                return node
            if (entries := math.prod((found := node.declared()).shape)) >= _MOST:
                raise ValueError(f"It has {entries} numbers in a stream; expected below {_MOST}")
            return found

        def is_slot(x: Any) -> bool:
            return isinstance(x, Slot)

        own = jax.tree_util.tree_map_with_path(
            lambda path, node: at(path, one, node), self.values, is_leaf=is_slot
        )
        found = inner(own)
        nodes = jax.tree.leaves(self.values, is_leaf=is_slot)
        slots = [node for node in nodes if isinstance(node, Slot)]
        came = 8 * check_field("bits", self.bits, 1, jnp.uint8).shape[0]
        entries = sum(math.prod(slot.shape) for slot in slots)
        needed = sum(slot.bits() for slot in slots)
        if entries >= _MOST or needed > came or (slots and not came):
            raise ValueError(
                f"A stream of {entries} numbers needs {needed} bits, but has {came}; expected at "
                f"least as many, and fewer than {_MOST} numbers"
            )
        return found


class Priced(NamedTuple):
    """Array to be rounded, and the cost of a squared error of one of its entries."""

    array: Array
    cost: Array


def filled(values: Any, budget: int) -> Stream:
    """Round all `Priced` arrays as finely as a number of bits allows."""
    nodes, structure = jax.tree.flatten(values, is_leaf=lambda x: isinstance(x, Priced))
    # The order of the pytree is that of the stream: the server reads arrays in the same order.
    places = [place for place, node in enumerate(nodes) if isinstance(node, Priced)]
    arrays = [nodes[place].array for place in places]
    columns = [x.reshape(_column_shape(x.shape)) for x in arrays]
    tables = sum(4 + (x.shape[1] + 1) // 2 for x in columns)
    rest = [node for node in nodes if not isinstance(node, Priced)]
    # The tables and the values that stay as they are take their part of the size first.
    room = budget // 8 - tables - sum(x.size * x.dtype.itemsize for x in rest)
    entries = sum(x.size for x in columns)
    # More bits than the widest codes need would only be zeros.
    room = min(room, -(-entries * _WIDEST // 8))
    if room <= 0:
        raise ValueError(
            f"size is {budget // 8} bytes for an update whose tables of steps and widths take "
            f"{budget // 8 - room} bytes; expected more. Use a larger size."
        )
    if entries >= _MOST:
        raise ValueError(
            f"An update of {entries} numbers has more bits than an int32 can count; expected fewer "
            f"than {_MOST} numbers. Use compose(triangles(), quantized(8))."
        )
    # All arrays compete for the bits of one stream, so that their total is exact.
    steps, widths = divided(columns, [nodes[place].cost for place in places], 8 * room)
    bits = _written(columns, steps, widths, 8 * room)
    for place, array, step, width in zip(places, arrays, steps, widths, strict=True):
        nodes[place] = Slot(step, _nibbles(width), array.shape, array.dtype.name)
    return Stream(jax.tree.unflatten(structure, nodes), bits)


def divided(
    columns: list[Array], costs: list[Array], budget: int
) -> tuple[list[Array], list[Array]]:
    """Find the smallest level whose bits fit the budget, and return all steps and widths."""
    tops = [jnp.abs(x).max(0) for x in columns]
    price = jnp.stack([jnp.asarray(cost, jnp.float32) for cost in costs])
    # If all costs are zero, all arrays have equal costs.
    price = jnp.where(price.max() > 0, price / price.max(), 1)
    # The best steps for a sum of costs c e^2 are proportional to 1 / sqrt(c).
    scales = jax.lax.rsqrt(jnp.maximum(price, 1e-12))

    def steps(level: Array) -> list[Array]:
        chosen = [
            # The widest code limits how small a step can be.
            jnp.maximum(level * scale, top.max() / (2 ** (_WIDEST - 1) - 1))
            for scale, top in zip(scales, tops, strict=True)
        ]
        return [jnp.where(step == 0, 1, step).astype(jnp.float32) for step in chosen]

    def widths(level: Array) -> list[Array]:
        most = [jnp.round(top / step) for top, step in zip(tops, steps(level), strict=True)]
        # The bits of the largest integer, and one for the sign.
        return [jnp.where(m > 0, jnp.frexp(m)[1] + 1, 0).astype(jnp.int32) for m in most]

    def needed(level: Array) -> Array:
        own = zip(columns, widths(level), strict=True)
        return jnp.asarray(sum(len(x) * width.sum() for x, width in own))

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        fits = needed(jnp.exp2(middle)) <= budget
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    # At the upper end of the interval, everything is rounded to zero.
    top = jnp.stack([t.max() / s for t, s in zip(tops, scales, strict=True)]).max()
    high = jnp.where(top > 0, jnp.log2(top), 0).astype(jnp.float32) + 2
    # From 2^-60 of the upper end on, every width is at its limit. 40 halvings are more than float32
    # distinguishes.
    _, high = jax.lax.fori_loop(0, 40, halve, (high - 60, high))
    return steps(jnp.exp2(high)), widths(jnp.exp2(high))


def _written(columns: list[Array], steps: list[Array], widths: list[Array], budget: int) -> Array:
    """Write the codes one after another, uint8 [budget / 8]."""
    code, width = [], []
    for x, step, own in zip(columns, steps, widths, strict=True):
        own = jnp.broadcast_to(own, x.shape).ravel()
        whole = jnp.round(jnp.nan_to_num(x / step)).ravel().astype(jnp.int32)
        # At this level a largest entry is about to need one more bit. It may do so here, because
        # this program can round it in another way than the one that computed the widths.
        most = (1 << jnp.maximum(own - 1, 0)) - 1
        whole = jnp.clip(whole, -most, most)
        # Codes start at one, as a column of zero bits holds only zeros.
        code.append(jnp.where(own > 0, whole + (1 << jnp.maximum(own - 1, 0)), 0))
        width.append(own)
    code, width = jnp.concatenate(code), jnp.concatenate(width)
    ends = jnp.cumsum(width)
    # For each bit of the stream, the code that it belongs to, and its place in the code.
    owner = jnp.repeat(jnp.arange(len(code)), width, total_repeat_length=budget)
    place = jnp.arange(budget) - (ends - width)[owner]
    bit = (code[owner] >> jnp.clip(place, 0, _WIDEST)) & (place < width[owner])
    return jnp.packbits(bit.astype(jnp.uint8))


def _read(slots: list[Slot], packed: Array) -> list[Array]:
    """Read arrays from the result of `_written`."""
    widths = []
    for slot in slots:
        shape = _column_shape(slot.shape)
        widths.append(jnp.broadcast_to(_unpacked(slot.widths, shape[1]), shape).ravel())
    width = jnp.concatenate(widths)
    starts = jnp.cumsum(width) - width
    bits = jnp.unpackbits(packed).astype(jnp.int32)

    def add(place: Array, code: Array) -> Array:
        # Places beyond the end belong to no code.
        bit = bits[jnp.minimum(starts + place, len(bits) - 1)]
        return code + jnp.where(place < width, bit << place, 0)

    code = jax.lax.fori_loop(0, _WIDEST, add, jnp.zeros_like(width))
    whole = jnp.where(width > 0, code - (1 << jnp.maximum(width - 1, 0)), 0)
    parts = jnp.split(whole, np.cumsum([own.size for own in widths])[:-1])
    return [
        (part * slot.step).astype(slot.dtype).reshape(slot.shape)
        for slot, part in zip(slots, parts, strict=True)
    ]


def _column_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    last = shape[-1] if len(shape) > 1 else 1
    return math.prod(shape) // last, last


def _nibbles(widths: Array) -> Array:
    pairs = jnp.pad(widths, (0, len(widths) % 2)).reshape(-1, 2)
    return (pairs[:, 0] * 16 + pairs[:, 1]).astype(jnp.uint8)


def _unpacked(packed: Array, count: int) -> Array:
    return jnp.stack([packed >> 4, packed & 15], 1).ravel()[:count].astype(jnp.int32)
