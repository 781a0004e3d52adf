"""What a layer is: leaves of params that make one matrix V, and how `uses` are grouped into them.

A leaf, or a slice of a stack, is a layer by the form of its uses. A product's bias, and the shift
that follows a scale, belong to its layer. A leaf that is used either way round makes two.
"""

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from fisherjax._layers import operations, uses
from fisherjax._layers.operations import Use
from fisherjax.typing import AnyArray, Array


class Layer(NamedTuple):
    """Static description of a layer: how its leaves make the matrix V.

    Attributes:
        kernel: Name of the layer: that of the kernel leaf, with its place where that is a stack.
        bias: Name of the bias leaf, or of the shift that goes with a scale, or None.
        shape: Shape of the kernel, [inputs, outputs] or [height, width, channels, outputs].
        outputs: Axes of the kernel that are columns of V; the others are its rows, in their order.
        index: Place in a stack of layers, or ().
        form: "product", "table" or "scale".
        part_of: The leaf, where that is a stack or makes two layers; None is the kernel itself.
    """

    kernel: str
    bias: str | None
    shape: tuple[int, ...]
    outputs: tuple[int, ...] = (-1,)
    index: tuple[int, ...] = ()
    form: str = "product"
    part_of: str | None = None

    @property
    def is_dense(self) -> bool:
        """Whether the kernel leaf is the matrix of a dense layer, or its transpose."""
        is_matrix = self.form == "product" and len(self.shape) == 2 and len(self.outputs) == 1
        return is_matrix and self.part_of is None

    @property
    def is_transposed(self) -> bool:
        """Whether the outputs are the kernel's first axis, as in equinox and PyTorch."""
        return self.outputs == (0,)

    @property
    def leaf(self) -> str:
        """Name of the leaf that the kernel is, or is a slice of."""
        return self.kernel if self.part_of is None else self.part_of

    @property
    def columns(self) -> int:
        """How many columns V has without being written: the size of the outputs."""
        return math.prod(self.shape[axis] for axis in self.outputs)

    @property
    def rows(self) -> int:
        """How many rows of V are the kernel's."""
        return math.prod(self.shape) // self.columns


def matrix(layer: Layer, leaves: Mapping[str, AnyArray]) -> Array:
    """Write a layer's leaves as its matrix V [a, o], the bias as its last row.

    The rows of a convolution's kernel are in the order of its axes.
    """
    kernel, last = _slice(leaves[layer.leaf], layer), range(-len(layer.outputs), 0)
    # Axes of the outputs last: [kh, kw, cin, o] -> [kh * kw * cin, o].
    rows = jnp.moveaxis(kernel, layer.outputs, last).reshape(layer.rows, layer.columns)
    if layer.bias is None:
        return rows
    bias = _slice(leaves[layer.bias], layer).reshape(1, -1)
    return jnp.concatenate([rows, bias])


def unpack(layer: Layer, value: AnyArray) -> dict[str, Array]:
    """Split a layer's matrix V [a, o] into its leaves by name: the inverse of `matrix`.

    The leaves of a layer of a stack are its slices, and a bias is a vector [o].
    """
    axes, last = range(len(layer.shape)), range(-len(layer.outputs), 0)
    outputs = [axis % len(axes) for axis in layer.outputs]
    order = [*(axis for axis in axes if axis not in outputs), *outputs]
    kernel = (value[:-1] if layer.bias else value).reshape([layer.shape[axis] for axis in order])
    leaves = {layer.leaf: jnp.moveaxis(kernel, last, layer.outputs)}
    return leaves | ({layer.bias: value[-1]} if layer.bias else {})


def assemble(layers: tuple[Layer, ...], values: dict[str, Array]) -> dict[str, Array]:
    """Put the leaves of layers together from their matrices V by name, those of stacks too."""
    leaves, stacks = {}, {}
    for layer in layers:
        for name, leaf in unpack(layer, values[layer.kernel]).items():
            if layer.index:
                stacks.setdefault(name, {})[layer.index] = leaf
            else:
                leaves[name] = leaf
    in_order = {name: [places[i] for i in sorted(places)] for name, places in stacks.items()}
    return leaves | {name: jnp.stack(slices) for name, slices in in_order.items()}


class Part(NamedTuple):
    """A layer, where it is used, and where the shift that goes with a scale is."""

    layer: Layer
    uses: list[Use]
    shifts: list[Use]


def grouped(
    reading: uses.Reading, names: tuple[str, ...], leaves: list[Array]
) -> tuple[list[Part], dict[str, str]]:
    """Group the uses of leaves, or slices of them, into layers."""
    obstacles, held = dict(reading.obstacles), {}
    for use in reading.uses:
        if use.leaf not in obstacles:
            held.setdefault((use.leaf, use.index), {}).setdefault(_way(use), []).append(use)
    # A table may be looked up and multiplied by, as an embedding that is the head too.
    for (leaf, _), ways in held.items():
        if len(ways) > 1 and (leaves[leaf].ndim != 2 or "scale" in {form for form, _ in ways}):
            obstacles.setdefault(leaf, "it is used in several ways (shared weights)")
    held = {key: ways for key, ways in held.items() if key[0] not in obstacles}
    partners = _partners(reading, held, leaves)
    taken, parts = set(partners.values()), []
    for key in sorted(held.keys() - taken):
        leaf, index = key
        partner = partners.get(key)
        bias = None if partner is None else names[partner[0]]
        place = f"[{', '.join(map(str, index))}]" if index else ""
        for number, ((form, outputs), own) in enumerate(held[key].items()):
            name = names[leaf] + place + "^T" * number
            shape, whole = leaves[leaf].shape[len(index) :], names[leaf]
            part_of = None if name == whole else whole
            layer = Layer(name, bias, shape, outputs, index, form, part_of)
            shifts = _every(held[partner]) if form == "scale" and partner else []
            parts.append(Part(layer, own, shifts))
    # In the forward order: by the equation of the first use.
    parts.sort(key=lambda part: min(use.tangent[0] for use in (*part.uses, *part.shifts)))
    return parts, {names[leaf]: reason for leaf, reason in sorted(obstacles.items())}


def _way(use: Use) -> tuple[str, tuple[int, ...]]:
    alike = {
        operations.CONVOLUTION: "product",
        operations.LOOKUP: "table",
        operations.SHIFT: "table",
    }
    return alike.get(use.form, use.form), use.outputs


def _partners(reading: uses.Reading, held: dict, leaves: list[Array]) -> dict:
    """Find the bias of each product and the shift of each scale, as {key: key}."""
    partners: dict = {}
    free = {key: shifts for key, ways in held.items() if (shifts := _shifts(ways))}

    def size(key: tuple) -> int:
        return math.prod(leaves[key[0]].shape[len(key[1]) :])

    for key, ways in held.items():
        [own, *others] = ways.values()
        if others or own[0].form not in (operations.PRODUCT, operations.CONVOLUTION):
            continue
        numbers = [reading.uses.index(use) for use in own]
        for other, shifts in free.items():
            if other[1] == key[1] and [use.after for use in shifts] == numbers:
                partners[key] = other
    for other in partners.values():
        free.pop(other, None)
    for key, ways in held.items():
        [own, *_] = ways.values()
        if own[0].form != operations.SCALE:
            continue
        # Any leaf of the same size would do: the block of two is exact for whatever pair.
        later = [
            other
            for other, shifts in free.items()
            if other[1] == key[1]
            and size(other) == size(key)
            and shifts[0].tangent[0] > own[0].tangent[0]
        ]
        if later:
            partners[key] = min(later, key=lambda other: free[other][0].tangent[0])
            del free[partners[key]]
    return partners


def _every(ways: dict) -> list[Use]:
    return list(itertools.chain(*ways.values()))


def _shifts(ways: dict) -> list[Use]:
    """Give the uses of a leaf that is only added, all of it."""
    every = _every(ways)
    return every if all(u.form == operations.SHIFT and u.inputs is None for u in every) else []


def _slice(leaf: AnyArray, layer: Layer) -> AnyArray:
    return leaf[layer.index] if layer.index else leaf
