"""Each layer's inputs and output tangents: what diagonal, K-FAC and Gram matrices are sums of.

For a dense or convolution layer with pre-activations s_t = V^T [a_t; 1] at output locations t, the
gradient of any scalar with respect to V is sum_t a_t g_t^T, with g_t the tangent of s_t. So the
pairs (a, g) are all that a layer-wise Fisher needs. A table whose rows are looked up or added is
such a layer with a_t = one-hot(row), and of an elementwise scale and shift the gradients of an
example are small enough to be formed.

Who does what: this library reads the network. `inline` writes out its equations, `uses` finds where
trained leaves are used in them, `layers` groups the uses into layers, and the inputs a_t are what
stands in these equations. kfac-jax computes the tangents: every layer is registered with it by
`register_dense`, the outputs by `register_normal_predictive_distribution`, and `layer_tags_vjp`
runs the network once forwards and pulls cotangents of the outputs back to the registered places.
Its own matching of layers, its estimators and its moving averages are not used: sums over columns,
examples and locations are those of `kfac`, as they have to be weighted, masked and mapped over
clients.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from fisherjax import nn, tree
from fisherjax._core import compat
from fisherjax._layers import equations as inline
from fisherjax._layers import operations, uses
from fisherjax._layers.feeders import Feeders, feeders, output_part
from fisherjax._layers.layer import Layer, Part, grouped
from fisherjax._layers.operations import Use
from fisherjax._layers.views import MANY, Place, Source
from fisherjax.typing import Apply, Array, ArrayOrShape, Params


class Trace(NamedTuple):
    """One minibatch seen from inside the network.

    Attributes:
        outputs: z [B, ..., C].
        layers: The layers found, in the order in which the network uses them first.
        activations: For each layer its inputs [B, T, a], with a trailing 1 where it has a bias. Of
            a table the rows [B, T]; of a scale the zeros [B, 0, a].
        pullback: Cotangent of the outputs [B, ..., C] -> for each layer the tangents [B, T, o]. Of
            a scale, and shift, the gradients [B, 1 or 2, o].
        uncovered: Leaves that belong to no layer, each with the reason.
        feeders: Whose outputs each layer takes; None where always those of the one before.
        last: What makes the outputs: the place of a layer, or in words why none does.
        locations: For each layer the axes that its T runs over, use by use: their sizes.
    """

    outputs: Array
    layers: tuple[Layer, ...]
    activations: tuple[Array, ...]
    pullback: Callable[[Array], tuple[Array, ...]]
    uncovered: dict[str, str]
    feeders: Feeders | None = None
    last: int | str = ""
    locations: tuple[tuple[tuple[int, ...], ...], ...] = ()


class LayersNotFoundError(ValueError):
    """The network could not be taken apart into layers."""


def trace(apply: Apply, params: Params, inputs: Array) -> Trace:
    """Run a network, which may be jitted, on a minibatch [B, ...] and expose its layers.

    Raises:
        LayersNotFoundError: If the network cannot be read at all.
        ValueError: If the network mixes the examples of a batch.

    Example:
        >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
        >>> seen = trace(lambda p, x: x @ p["kernel"] + p["bias"], params, jnp.ones((5, 3)))
        >>> [(layer.kernel, layer.bias) for layer in seen.layers], seen.activations[0].shape
        ([('kernel', 'bias')], (5, 1, 4))
    """
    if inputs.shape[0] == 1:
        return _first(trace(apply, params, jnp.concatenate([inputs, inputs])))
    network, found, uncovered = network_of(apply, params, inputs)
    outputs, inputs_of, tangents_of = _tagged(network, found, jax.tree.leaves((params, inputs)))
    activations = tuple(_activations(part, network, inputs_of, outputs.shape[0]) for part in found)

    def pullback(cotangent: Array) -> tuple[Array, ...]:
        tangents = tangents_of(cotangent)
        return tuple(_tangents(part, tangents, inputs_of) for part in found)

    layers, sources = tuple(part.layer for part in found), feeders(network, found)
    last = output_part(network, found, uncovered)
    places = tuple(tuple(_sizes(network, use) for use in part.uses) for part in found)
    return Trace(outputs, layers, activations, pullback, uncovered, sources, last, places)


def network_of(
    apply: Apply, params: Params, inputs: ArrayOrShape
) -> tuple[inline.Flat, list[Part], dict[str, str]]:
    """Read a network at a minibatch, of which shapes suffice: equations, layers, what is none."""
    reading, names = _read(apply, params, inputs)
    # Traced again, at the examples given, to be run.
    network = inline.flat(apply, params, inputs)
    if [equation.primitive.name for equation in network.equations] != names:
        raise LayersNotFoundError(
            f"The network does something else for {inputs.shape[0]} examples than for {MANY}. Let "
            "apply treat every example alike, however many there are."
        )
    return network, *grouped(reading, tree.names(params), jax.tree.leaves(params))


def _sizes(network: inline.Flat, use: Use) -> tuple[int, ...]:
    shape = network.equations[use.tangent[0]].outvars[0].aval.shape
    return tuple(shape[axis] for axis in use.tangent_axes[1])


def inputs_of_use(use: Use, equation: Any, value: Array) -> Array:
    """Arrange what a product or convolution reads as [B, T, inputs in the leaf's order]."""
    if use.form == operations.CONVOLUTION:
        return _patches(use, equation, value)
    return _arranged(value, use.input_axes)


def output_layer(seen: Trace) -> int:
    """Return the place of the dense layer whose product, with its bias, is the output.

    Raises:
        ValueError: If anything but a change of shape or dtype follows the last dense layer, or if
            its kernel is used elsewhere too.
    """
    if isinstance(seen.last, str):
        _refuse_output(seen.last, seen.outputs.shape)
    return seen.last


def check_output_layer(apply: Apply, params: Params, inputs: ArrayOrShape) -> Layer:
    """Return the layer of `output_layer`, and refuse what it refuses, from shapes alone."""
    params = jax.tree.map(tree.shape_of, params)
    network, found, uncovered = network_of(apply, params, tree.shape_of(inputs, 2))
    last = output_part(network, found, uncovered)
    if isinstance(last, str):
        _refuse_output(last, network.output.aval.shape)
    return found[last].layer


def _refuse_output(reason: str, shape: tuple[int, ...]) -> NoReturn:
    raise ValueError(
        "The last layer of this network is no dense layer with an output vector for each target "
        f"and leaves of its own (outputs have shape {tuple(shape[1:])}): {reason}. The outputs "
        "must be those of a dense layer, as they are, for it to be solved for: leave a link such "
        "as softmax to the likelihood, normalise the targets in place of de-normalising the "
        "outputs, or use a method that solves for no layer (not analytic_head, ccvr or "
        "natural_gradient)."
    )


def check_examples(apply: Apply, params: Params, inputs: ArrayOrShape) -> None:
    """Refuse a network that mixes the examples of a batch, as far as it can be read."""
    with contextlib.suppress(LayersNotFoundError):
        _read(apply, params, inputs)


def _read(apply: Apply, params: Params, inputs: ArrayOrShape) -> tuple[uses.Reading, list[str]]:
    # Its own failure is none of the network's.
    compat.import_kfac_jax()
    many = tree.shape_of(inputs, MANY)
    try:
        network = inline.flat(apply, params, many)
        reading = uses.read(network)
    except Exception as error:
        # What apply raises for the inputs themselves is raised as it is.
        jax.eval_shape(apply, params, inputs)
        raise LayersNotFoundError(
            f"The layers of this network could not be found ({type(error).__name__}: {error}). "
            "Use fisher.diagonal, which then takes gradients of single examples, or write the "
            "network with plain dense and convolution layers."
        ) from error
    if reading.mixes_examples:
        raise ValueError(
            "The network computes something over all examples of a batch, like BatchNorm in "
            "training mode, but the Fisher information is a mean over single examples. Let apply "
            "use running statistics."
        )
    return reading, [equation.primitive.name for equation in network.equations]


def _first(seen: Trace) -> Trace:
    """Take the first example of two: of one alone, axes are dropped that others need."""

    def pullback(cotangent: Array) -> tuple[Array, ...]:
        both = seen.pullback(jnp.concatenate([cotangent, jnp.zeros_like(cotangent)]))
        return tuple(g[:1] for g in both)

    first = tuple(a[:1] for a in seen.activations)
    return seen._replace(outputs=seen.outputs[:1], activations=first, pullback=pullback)


def _tagged(
    network: inline.Flat, parts: list[Part], arguments: list[Array]
) -> tuple[Array, dict[Source, Array], Callable[[Array], dict[Place, Array]]]:
    """Run a network; give outputs, what each use reads, and cotangent -> tangents of each use."""
    kfac_jax = compat.import_kfac_jax()
    every = {use.tangent: use for part in parts for use in (*part.uses, *part.shifts)}
    wanted = {use.inputs for use in every.values() if isinstance(use.inputs, tuple)}
    tags = {place: tag for tag, place in enumerate(every)}

    def tagged(markers: list[Array], arguments: list[Array]) -> None:
        seen = {}

        def register(place: Place, value: Array) -> Array:
            if place not in tags:
                return value
            # A marker stands for the parameter: that may be a slice of a leaf, or used twice.
            marker = markers[tags[place]]
            return kfac_jax.register_dense(value, seen.get(every[place].inputs, marker), marker)

        def equation(number: int, one: Any, operands: list[Array]) -> list[Array]:
            shape, is_scale = one.outvars[0].aval.shape, one.primitive.name == "mul"
            for i, x in enumerate(operands):
                # Sums and elementwise products repeat operands, numbers too, to the result's shape.
                if (number, i) in wanted:
                    seen[number, i] = jnp.broadcast_to(x, shape) if is_scale else x
                if (number, i) in tags:
                    operands[i] = register((number, i), jnp.broadcast_to(x, shape))
            is_layer = (number, None) in tags and every[number, None].form == operations.CONVOLUTION
            results = [_convolved(one, *operands)] if is_layer else compat.evaluate(one, operands)
            return [register((number, None), results[0]), *results[1:]]

        outputs = inline.evaluate(network, arguments, equation)
        # As the mean of a Gaussian, whatever they are: the pullback of any loss starts from them.
        kfac_jax.register_normal_predictive_distribution(outputs)

    run, _ = kfac_jax.layer_tags_vjp(tagged, params_index=0, auto_register_tags=False)
    (loss,), vjp = run(([jnp.zeros(())] * len(tags), arguments))
    # What uses read comes with any cotangent; what else zeros give is not used, and dropped.
    at_zero = vjp(((jnp.zeros_like(loss.mean),),))
    read = {every[place].inputs: at_zero[tag].primals.inputs[0] for place, tag in tags.items()}

    def tangents(cotangent: Array) -> dict[Place, Array]:
        seen = vjp(((cotangent,),))
        return {place: seen[tag].tangents.outputs[0] for place, tag in tags.items()}

    return loss.mean, read, tangents


def _activations(part: Part, network: inline.Flat, read: dict[Source, Array], batch: int) -> Array:
    layer = part.layer
    if layer.form == "scale":
        return jnp.zeros((batch, 0, math.prod(layer.shape)))
    if layer.form == "table":
        rows = [_rows(use, layer, network, read, batch) for use in part.uses]
        return jnp.concatenate(rows, axis=1)
    equations = network.equations
    values = [inputs_of_use(u, equations[u.tangent[0]], read[u.inputs]) for u in part.uses]
    inputs = jnp.concatenate(values, axis=1)
    if layer.bias is None:
        return inputs
    return jnp.concatenate([inputs, jnp.ones_like(inputs[..., :1])], axis=-1)


def _tangents(part: Part, tangents: dict[Place, Array], read: dict) -> Array:
    if part.layer.form == "product":
        return jnp.concatenate(
            [_arranged(tangents[u.tangent], u.tangent_axes) for u in part.uses], axis=1
        )
    if part.layer.form == "table":
        return jnp.concatenate([_summed(tangents, use) for use in part.uses], axis=1)
    sums = [sum(_summed(tangents, use) * _factor(use, read) for use in part.uses)]
    if part.shifts:
        sums.append(sum(_summed(tangents, use) for use in part.shifts))
    # [B, rows, o] -> [B, 1, size] each: the entries of the leaf in their order.
    flat = [x.reshape(x.shape[0], 1, -1) for x in map(jnp.asarray, sums)]
    return jnp.concatenate(flat, axis=1)


def _summed(tangents: dict[Place, Array], use: Use) -> Array:
    """Sum tangents over the positions that share an entry of the leaf, [B, rows, o]."""
    value = _arranged(tangents[use.tangent], use.tangent_axes)
    return value if use.form == operations.LOOKUP else value.sum(2)


def _factor(use: Use, read: dict[Source, Array]) -> Array | int:
    return 1 if use.inputs is None else _arranged(read[use.inputs], use.input_axes)


def _rows(
    use: Use, layer: Layer, network: inline.Flat, read: dict[Source, Array], batch: int
) -> Array:
    """Give the rows of a table that a use reads, [B, T]."""
    if not isinstance(use.inputs, tuple):
        rows = use.inputs or range(layer.rows)
        return jnp.broadcast_to(jnp.array(rows), (batch, len(rows)))
    gather = network.equations[use.inputs[0]].params["dimension_numbers"]
    rows = read[use.inputs][..., gather.start_index_map.index(0)]
    if use.form == operations.LOOKUP:
        return _arranged(rows, use.input_axes)
    return jnp.broadcast_to(rows.ravel(), (batch, rows.size))


def _arranged(value: Array, groups: operations.Groups) -> Array:
    """Transpose and merge axes, one group into each axis of the result."""
    sizes = [math.prod(value.shape[a] for a in group) for group in groups]
    return value.transpose(sum(groups, ())).reshape(sizes)


def _patches(use: Use, equation: Any, images: Array) -> Array:
    """Cut out what a kernel sees at each output location, [B, T, inputs in the leaf's order]."""
    how, kernel = equation.params, equation.invars[1].aval.shape
    layout = how["dimension_numbers"]
    # Channels last: [B, H, W, C], for whatever number of spatial axes.
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
        # Channels come first here.
        cut = cut.reshape(*cut.shape[:-1], images.shape[-1], math.prod(window)).swapaxes(-1, -2)
    cut = cut.reshape(images.shape[0], -1, *window, images.shape[-1])
    order = sorted(range(len(use.input_axes)), key=lambda axis: use.input_axes[axis])
    return cut.transpose(0, 1, *(axis + 2 for axis in order)).reshape(*cut.shape[:2], -1)


def _convolved(equation: Any, images: Array, kernel: Array) -> Array:
    """Evaluate a convolution, as patches times a matrix where that is possible."""
    how = equation.params
    if not _is_plain(how):
        return compat.evaluate(equation, [images, kernel])[0]
    layout = how["dimension_numbers"]
    images = images.transpose(layout.lhs_spec[0], *layout.lhs_spec[2:], layout.lhs_spec[1])
    kernel = kernel.transpose(*layout.rhs_spec[2:], layout.rhs_spec[1], layout.rhs_spec[0])
    y = nn.conv_general_dilated(
        images,
        kernel,
        how["window_strides"],
        how["padding"],
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=how["precision"],
        preferred_element_type=how["preferred_element_type"],
    )
    batch, channel, *places = layout.out_spec
    # Where each axis of the result comes from.
    order = {batch: 0, channel: 3} | {place: i for i, place in enumerate(places, 1)}
    return y.transpose(*(order[a] for a in range(4)))


def _is_plain(how: dict[str, Any]) -> bool:
    return len(how["window_strides"]) == 2 and {*how["lhs_dilation"], *how["rhs_dilation"]} == {1}
