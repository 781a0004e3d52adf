"""Group the uses of parameters into layers: leaves of params that make one weight matrix V.

The form of its uses makes a leaf, or a slice of a stacked leaf, a layer. The bias of a product and
the shift that follows a scale belong to the same layer. A leaf that is used as it is and transposed
makes two layers.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax.numpy as jnp

from fisherjax._layers import operations, uses
from fisherjax._layers.operations import Use
from fisherjax.typing import AnyArray, Array


class Layer(NamedTuple):
    """Static description of a layer and of its matrix V.

    Attributes:
        kernel: Name of the layer: the name of its kernel leaf, with an index if that is a stack.
        bias: Name of the bias leaf, or of the shift that follows a scale, or None.
        shape: Shape of the kernel, such as [inputs, outputs] or [height, width, channels, outputs];
            that of a grouped convolution has [groups, outputs of a group] in place of the outputs.
        outputs: Axes of `shape` that are columns of V; the others are its rows, in their order.
        index: Index in a stack of layers; () if the leaf is no stack.
        form: "product" (dense and convolution layers), "table" (rows that are looked up or added)
            or "scale" (an elementwise product, of a normalisation for instance).
        part_of: Name of the leaf if that is a stack or makes two layers; None if it is `kernel`.
        groups: Axes of `shape` along which the kernel has a matrix for each group of inputs, as in
            a grouped convolution. V is then [groups, a, o], and so are all arrays of the layer.
    """

    kernel: str
    bias: str | None
    shape: tuple[int, ...]
    outputs: tuple[int, ...] = (-1,)
    index: tuple[int, ...] = ()
    form: str = "product"
    part_of: str | None = None
    groups: tuple[int, ...] = ()

    @property
    def is_dense(self) -> bool:
        """Return whether the kernel leaf is the matrix of a dense layer, or its transpose."""
        is_matrix = self.form == "product" and len(self.shape) == 2 and len(self.outputs) == 1
        return is_matrix and self.part_of is None

    @property
    def is_transposed(self) -> bool:
        """Return whether the outputs are the kernel's first axis, as in equinox and PyTorch."""
        return self.outputs == (0,)

    @property
    def leaf(self) -> str:
        """Return the name of the leaf that the kernel is, or is a slice of."""
        return self.kernel if self.part_of is None else self.part_of

    @property
    def columns(self) -> int:
        """Return the number of columns of V, the size of the layer's output, or of a group's."""
        return math.prod(self.shape[axis] for axis in self.outputs)

    @property
    def rows(self) -> int:
        """Return the number of rows of V without the bias, the size of an input or a group's."""
        return math.prod(self.shape) // (self.columns * math.prod(self.stack))

    @property
    def stack(self) -> tuple[int, ...]:
        """Return the leading axes of V, () for one matrix and (number of groups,) for groups."""
        sizes = [self.shape[axis] for axis in self.groups]
        return (math.prod(sizes),) if sizes else ()


def matrix(layer: Layer, leaves: Mapping[str, AnyArray]) -> Array:
    """Return a layer's matrix V [a, o] of its leaves by name, with the bias as the last row.

    The rows of a convolution are in the order of the kernel's axes. With groups V is [n, a, o].
    """
    kernel = _slice(leaves[layer.leaf], layer).reshape(layer.shape)
    # [kh, kw, cin, n, o] -> [n, kh * kw * cin, o].
    rows = jnp.transpose(kernel, _order(layer)).reshape(*layer.stack, layer.rows, layer.columns)
    if layer.bias is None:
        return rows
    bias = _slice(leaves[layer.bias], layer).reshape(*layer.stack, 1, layer.columns)
    return jnp.concatenate([rows, bias], axis=-2)


def unpack(layer: Layer, value: AnyArray) -> dict[str, Array]:
    """Return the leaves of a layer's matrix V [a, o] by name: the inverse of `matrix`.

    For a layer in a stack they are the slices of the leaves. A bias is a vector [o].
    """
    order = _order(layer)
    kernel = value[..., :-1, :] if layer.bias else value
    kernel = kernel.reshape([layer.shape[axis] for axis in order])
    back = sorted(range(len(order)), key=order.__getitem__)
    leaves = {layer.leaf: jnp.transpose(kernel, back)}
    return leaves | ({layer.bias: jnp.ravel(value[..., -1, :])} if layer.bias else {})


def _order(layer: Layer) -> list[int]:
    """Return the axes of the kernel's shape in the order groups, rows, outputs."""
    axes = range(len(layer.shape))
    outputs = [axis % len(axes) for axis in layer.outputs]
    rows = [axis for axis in axes if axis not in (*layer.groups, *outputs)]
    return [*layer.groups, *rows, *outputs]


def count_layers(layers: Iterable[Layer]) -> str:
    """Return the number of layers of each form in words: "2 dense and 1 convolution layers"."""
    # A kernel with three axes may be of attention or of a one-dimensional convolution.
    kinds = ("dense", "three-axis", "convolution")
    forms = Counter(
        kinds[min(max(len(layer.shape), 2), 4) - 2] if layer.form == "product" else layer.form
        for layer in layers
    )
    *before, last = [f"{number:,} {form}" for form, number in forms.items()] or ["no"]
    return f"{', '.join(before)} and {last} layers" if before else f"{last} layers"


def assemble(layers: tuple[Layer, ...], values: dict[str, Array]) -> dict[str, Array]:
    """Return the leaves of all layers by name, also of stacks, from their matrices V by kernel."""
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
    """A layer, the uses of its kernel, and the uses of the shift that follows a scale."""

    layer: Layer
    uses: list[Use]
    shifts: list[Use]


def group(
    reading: uses.Reading, names: tuple[str, ...], leaves: list[Array]
) -> tuple[list[Part], dict[str, str]]:
    """Group the uses of leaves, or of slices of them, into layers.

    Returns:
        The layers in forward order, and for each leaf that belongs to none the reason, by name.
    """
    # {(leaf, index): {(form, output axes): uses}}
    obstacles, held = dict(reading.obstacles), {}
    for use in reading.uses:
        if use.leaf not in obstacles:
            held.setdefault((use.leaf, use.index), {}).setdefault(_way(use), []).append(use)
    # Only a matrix may have uses of two kinds, such as an embedding that is also the head.
    for (leaf, _), ways in held.items():
        if len(ways) > 1 and (leaves[leaf].ndim != 2 or "scale" in {form for form, *_ in ways}):
            obstacles.setdefault(leaf, "it is used in several ways (shared weights)")
    held = {key: ways for key, ways in held.items() if key[0] not in obstacles}
    partners = _partners(reading, held, leaves)
    taken, parts = set(partners.values()), []
    for key in sorted(held.keys() - taken):
        leaf, index = key
        partner = partners.get(key)
        bias = None if partner is None else names[partner[0]]
        place = f"[{', '.join(map(str, index))}]" if index else ""
        for number, ((form, outputs, groups), found) in enumerate(held[key].items()):
            name = names[leaf] + place + "^T" * number
            shape, whole = leaves[leaf].shape[len(index) :], names[leaf]
            part_of = None if name == whole else whole
            shape = found[0].shape or shape
            layer = Layer(name, bias, shape, outputs, index, form, part_of, groups)
            shifts = _all_uses(held[partner]) if form == "scale" and partner else []
            parts.append(Part(layer, found, shifts))
    kernels = [part.layer.kernel for part in parts]
    if len(set(kernels)) < len(kernels):
        twice = next(name for name in kernels if kernels.count(name) > 1)
        raise ValueError(
            f"Two layers are called '{twice}': it is the name of a leaf, and of a part of another "
            "one. Rename that leaf."
        )
    # Forward order is the order of the first uses.
    parts.sort(key=lambda part: min(use.tangent[0] for use in (*part.uses, *part.shifts)))
    return parts, {names[leaf]: reason for leaf, reason in sorted(obstacles.items())}


def _way(use: Use) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return the form of a layer with this use, and the axes of its outputs and groups."""
    forms = {
        operations.CONVOLUTION: "product",
        operations.LOOKUP: "table",
        operations.SHIFT: "table",
    }
    return forms.get(use.form, use.form), use.outputs, use.groups


def _partners(reading: uses.Reading, held: dict, leaves: list[Array]) -> dict:
    """Find the bias of each product and the shift of each scale, as {key: key}."""
    partners: dict = {}
    free = {key: shifts for key, ways in held.items() if (shifts := _shifts(ways))}

    def size(key: tuple) -> int:
        return math.prod(leaves[key[0]].shape[len(key[1]) :])

    for key, ways in held.items():
        [found, *others] = ways.values()
        if others or found[0].form not in (operations.PRODUCT, operations.CONVOLUTION):
            continue
        if found[0].groups > found[0].outputs:
            continue  # the entries of such a bias are not in the order groups, outputs
        numbers = [reading.uses.index(use) for use in found]
        for other, shifts in free.items():
            if other[1] == key[1] and [use.after for use in shifts] == numbers:
                partners[key] = other
    for other in partners.values():
        free.pop(other, None)
    for key, ways in held.items():
        [found, *_] = ways.values()
        if found[0].form != operations.SCALE:
            continue
        # The block of a scale and a shift is exact for any pair of leaves of the same size, so the
        # next such shift is taken, whether or not it belongs to the same normalisation.
        candidates = [
            other
            for other, shifts in free.items()
            if other[1] == key[1]
            and size(other) == size(key)
            and shifts[0].tangent[0] > found[0].tangent[0]
        ]
        if candidates:
            partners[key] = min(candidates, key=lambda other: free[other][0].tangent[0])
            del free[partners[key]]
    return partners


def _all_uses(ways: dict) -> list[Use]:
    return list(itertools.chain(*ways.values()))


def _shifts(ways: dict) -> list[Use]:
    """Return the uses of a leaf if it is only added, and as a whole; else an empty list."""
    every = _all_uses(ways)
    return every if all(u.form == operations.SHIFT and u.inputs is None for u in every) else []


def _slice(leaf: AnyArray, layer: Layer) -> AnyArray:
    return leaf[layer.index] if layer.index else leaf
