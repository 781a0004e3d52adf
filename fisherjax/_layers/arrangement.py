"""Arrange the inputs and output gradients of a layer's uses as arrays [B, T, features].

A use reads its inputs, and gets the gradient with respect to its result, in whatever layout the
network has. Here their axes are put in order: examples, locations, features in the order of the
layer's matrix V. The uses of a layer are concatenated along the locations.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import nn
from fisherjax._core import compat
from fisherjax._layers import operations
from fisherjax._layers.equations import EvaluateEquation, Flat, Loop
from fisherjax._layers.layer import Layer, Part
from fisherjax._layers.operations import Use
from fisherjax._layers.views import Place, Source
from fisherjax.typing import Array


def at_layers(
    every: dict[Place, Use], inputs: dict[Source, Array], register: Callable[[Place, Array], Array]
) -> EvaluateEquation:
    """Return a function that evaluates an equation, and registers the results of uses.

    Args:
        every: All uses by the place of the value whose gradient they need.
        inputs: A dict that gets the values that uses read, by place.
        register: Function of a place and its value, which returns the value to go on with.
    """
    wanted = {use.inputs for use in every.values() if isinstance(use.inputs, tuple)}

    def evaluate(number: int, one: Any, operands: list[Array]) -> list[Array]:
        shape, is_scale = one.outvars[0].aval.shape, one.primitive.name == "mul"
        for i, x in enumerate(operands):
            # Sums and elementwise products broadcast their operands to the result's shape.
            if (number, i) in wanted:
                inputs[number, i] = jnp.broadcast_to(x, shape) if is_scale else x
            if (number, i) in every:
                operands[i] = register((number, i), jnp.broadcast_to(x, shape))
        use = every.get((number, None))
        is_convolution = use is not None and use.form == operations.CONVOLUTION
        results = (convolve if is_convolution else compat.evaluate)(one, operands)
        return results if use is None else [register((number, None), results[0]), *results[1:]]

    return evaluate


def inputs_of_use(use: Use, equation: Any, value: Array) -> Array:
    """Return the inputs of a product or convolution as [B, T, rows of the layer's matrix].

    The rows of one group come after the other.
    """
    if use.form == operations.CONVOLUTION:
        return _patches(use, equation, value)
    return _arrange(value, use.input_axes)


def activations(part: Part, network: Flat | Loop, read: dict[Source, Array], batch: int) -> Array:
    """Return a layer's inputs [B, T, a] from the values that its uses read, by place.

    Those of a layer with groups are [B, T, groups, a].
    """
    layer = part.layer
    if layer.form == "scale":
        return jnp.zeros((batch, 0, math.prod(layer.shape)))
    if layer.form == "table":
        rows = [_rows(use, layer, network, read, batch) for use in part.uses]
        return jnp.concatenate(rows, axis=1)
    equations = network.equations
    values = [inputs_of_use(u, equations[u.tangent[0]], read[u.inputs]) for u in part.uses]
    inputs = _split_groups(_beside(values, batch), layer)
    if layer.bias is None:
        return inputs
    return jnp.concatenate([inputs, jnp.ones((*inputs.shape[:-1], 1), inputs.dtype)], axis=-1)


def layer_tangents(part: Part, tangents: dict[Place, Array], read: dict, batch: int) -> Array:
    """Return a layer's output gradients [B, T, o] from those of its uses, by place.

    Those of a layer with groups are [B, T, groups, o].
    For a scale, and the shift that follows it, return the gradients [B, 1 or 2, o] of the leaves.
    """
    if part.layer.form == "product":
        values = [_arrange(tangents[u.tangent], u.tangent_axes) for u in part.uses]
        return _split_groups(_beside(values, batch), part.layer)
    if part.layer.form == "table":
        return jnp.concatenate([_sum_positions(tangents, use) for use in part.uses], axis=1)
    sums = [sum(_sum_positions(tangents, use) * _factor(use, read) for use in part.uses)]
    if part.shifts:
        sums.append(sum(_sum_positions(tangents, use) for use in part.shifts))
    # [B, rows, o] -> [B, 1, size] each: the entries of the leaf in their order.
    flat = [x.reshape(x.shape[0], 1, -1) for x in map(jnp.asarray, sums)]
    return jnp.concatenate(flat, axis=1)


def _sum_positions(tangents: dict[Place, Array], use: Use) -> Array:
    """Sum tangents over the positions that share an entry of the leaf, [B, rows, o]."""
    value = _arrange(tangents[use.tangent], use.tangent_axes)
    return value if use.form == operations.LOOKUP else value.sum(2)


def _factor(use: Use, read: dict[Source, Array]) -> Array | int:
    return 1 if use.inputs is None else _arrange(read[use.inputs], use.input_axes)


def _rows(
    use: Use, layer: Layer, network: Flat | Loop, read: dict[Source, Array], batch: int
) -> Array:
    """Return the numbers of the table's rows that a use reads, [B, T]."""
    if not isinstance(use.inputs, tuple):
        rows = use.inputs or range(layer.rows)
        return jnp.broadcast_to(jnp.array(rows), (batch, len(rows)))
    gather = network.equations[use.inputs[0]].params
    place = gather["dimension_numbers"].start_index_map.index(0)
    rows = read[use.inputs][..., place].astype(jnp.int32)
    # A number outside of the table reads its nearest row, or none, which `layer.rows` stands for.
    if gather["mode"] == jax.lax.GatherScatterMode.CLIP:
        rows = jnp.clip(rows, 0, layer.rows - 1)
    else:
        rows = jnp.where(rows < 0, layer.rows, rows)
    if use.form == operations.LOOKUP:
        return _arrange(rows, use.input_axes)
    return jnp.broadcast_to(rows.ravel(), (batch, rows.size))


def _arrange(value: Array, groups: operations.Groups) -> Array:
    """Transpose a value and merge its axes, one group of axes into each axis of the result."""
    sizes = [math.prod(value.shape[a] for a in group) for group in groups]
    return value.transpose(sum(groups, ())).reshape(sizes)


def _beside(values: list[Array], batch: int) -> Array:
    """Concatenate values along the locations, those of all images of an example together."""
    return jnp.concatenate([x.reshape(batch, -1, x.shape[-1]) for x in values], axis=1)


def _split_groups(value: Array, layer: Layer) -> Array:
    """Reshape [B, T, groups * features] to [B, T, groups, features] if a layer has groups."""
    return value.reshape(*value.shape[:2], *layer.stack, -1) if layer.groups else value


def _patches(use: Use, equation: Any, images: Array) -> Array:
    """Return the part of an image that a kernel covers at each output location, [B, T, rows]."""
    how, kernel = equation.params, equation.invars[1].aval.shape
    layout = how["dimension_numbers"]
    # Channels last: [B, H, W, C], for any number of spatial axes.
    images = images.transpose(layout.lhs_spec[0], *layout.lhs_spec[2:], layout.lhs_spec[1])
    window = tuple(kernel[a] for a in layout.rhs_spec[2:])
    settings = window, how["window_strides"], how["padding"]
    if _is_plain(how):
        cut = nn.patches(images, *settings)
    else:
        places = tuple(range(1, images.ndim - 1))
        last = images.ndim - 1
        spec = (0, last, *places)
        cut = jax.lax.conv_general_dilated_patches(
            images,
            *settings,
            how["lhs_dilation"],
            how["rhs_dilation"],
            jax.lax.ConvDimensionNumbers(spec, (last, last - 1, *range(len(places))), spec),
        )
        # lax's patches have the channels before the places in the window.
        cut = cut.reshape(*cut.shape[:-1], images.shape[-1], math.prod(window)).swapaxes(-1, -2)
    groups = how["feature_group_count"]
    # [B, T, *window, groups, channels of a group] -> [B, T, groups, axes of the kernel].
    cut = cut.reshape(images.shape[0], -1, *window, groups, images.shape[-1] // groups)
    order = sorted(range(len(use.input_axes)), key=lambda axis: use.input_axes[axis])
    place = len(window) + 2
    axes = (axis + 2 + (axis == len(window)) for axis in order)
    return cut.transpose(0, 1, place, *axes).reshape(*cut.shape[:2], -1)


def convolve(equation: Any, operands: list[Array]) -> list[Array]:
    """Evaluate a convolution, if possible by `nn`, which is faster in compiled loops."""
    how, (images, kernel) = equation.params, operands
    if not _is_plain(how):
        return compat.evaluate(equation, operands)
    layout = how["dimension_numbers"]
    images = images.transpose(layout.lhs_spec[0], *layout.lhs_spec[2:], layout.lhs_spec[1])
    kernel = kernel.transpose(*layout.rhs_spec[2:], layout.rhs_spec[1], layout.rhs_spec[0])
    y = nn.conv_general_dilated(
        images,
        kernel,
        how["window_strides"],
        how["padding"],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=how["feature_group_count"],
        precision=how["precision"],
        preferred_element_type=how["preferred_element_type"],
    )
    batch, channel, *places = layout.out_spec
    # {axis of the result: axis of y}
    order = {batch: 0, channel: 3} | {place: i for i, place in enumerate(places, 1)}
    return [y.transpose(*(order[a] for a in range(4)))]


def _is_plain(how: dict[str, Any]) -> bool:
    """Return whether a convolution has two spatial axes and no dilation, as `nn` expects."""
    return len(how["window_strides"]) == 2 and {*how["lhs_dilation"], *how["rhs_dilation"]} == {1}
