"""Compute each layer's pairs of inputs and output gradients, of which layer-wise Fishers are sums.

For a dense or convolution layer with pre-activations s_t = V^T [a_t; 1] at output locations t, the
gradient of any scalar with respect to V is sum_t a_t g_t^T, with g_t the gradient with respect to
s_t, called the *tangent* as in kfac-jax. So a diagonal, K-FAC factors and Gram matrices need the
pairs (a, g) only. A table whose rows are looked up or added is such a layer with
a_t = one-hot(row). For an elementwise scale and shift, the gradients of one example are small
enough to be computed as they are.

The work is divided between this library and kfac-jax. This library reads the network: `equations`
traces it, `uses` finds where trained leaves are used, `layer` groups the uses into layers, and the
inputs a_t are values in these equations. kfac-jax computes the tangents: each layer is registered
by `register_dense`, the outputs by `register_normal_predictive_distribution`, and `layer_tags_vjp`
runs the network once forward and pulls cotangents of the outputs back to the registered layers.
The layer matching, estimators and moving averages of kfac-jax are not used: `fisher.kfac` sums over
columns, examples and locations itself, because these sums are weighted, masked and mapped over
clients.
"""

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import compat
from fisherjax._core.batches import num_rows
from fisherjax._layers import arrangement, equations
from fisherjax._layers.equations import Flat, Loop
from fisherjax._layers.feeders import Feeders, feeders, output_part
from fisherjax._layers.layer import Layer, Part
from fisherjax._layers.operations import Use
from fisherjax._layers.reading import network_of
from fisherjax._layers.views import Place, Source
from fisherjax.typing import Apply, Array, Inputs, Params


class Trace(NamedTuple):
    """The layers of a network, with their inputs and output gradients on one minibatch.

    Attributes:
        outputs: z [B, ..., C].
        layers: Layers in the order of their first use.
        activations: For each layer its inputs [B, T, a], with a trailing 1 if it has a bias; for a
            table the row numbers [B, T]; for a scale an array [B, 0, a]; with groups [B, T, n, a].
        pullback: Cotangent of the outputs [B, ..., C] -> for each layer the tangents [B, T, o]; for
            a scale, and the shift that follows it, the gradients [B, 1 or 2, o]; with groups
            [B, T, n, o].
        uncovered: Names of leaves that belong to no layer, each with the reason.
        feeders: For each layer the names of the layers whose outputs it takes; None if each layer
            takes the outputs of the one before it.
        last: Number of the layer that computes the outputs, or the reason why none does.
        locations: For each layer and use, the sizes of the axes that T runs over.
        stacks: Names of the layers that stand for all blocks of a loop, as the first of them, whose
            activations and tangents have a leading axis of blocks.
        blocks: The layers of all blocks, in the order of their first use, which `feeders` is about;
            () if there are no stacks.
    """

    outputs: Array
    layers: tuple[Layer, ...]
    activations: tuple[Array, ...]
    pullback: Callable[[Array], tuple[Array, ...]]
    uncovered: dict[str, str]
    feeders: Feeders | None = None
    last: int | str = ""
    locations: tuple[tuple[tuple[int, ...], ...], ...] = ()
    stacks: frozenset[str] = frozenset()
    blocks: tuple[Layer, ...] = ()


def trace(apply: Apply, params: Params, inputs: Inputs) -> Trace:
    """Run a network, which may be jitted, on a minibatch [B, ...] and return its layers.

    Raises:
        LayersNotFoundError: If the network cannot be read.
        ValueError: If the network mixes the examples of a batch.

    Example:
        >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
        >>> traced = trace(lambda p, x: x @ p["kernel"] + p["bias"], params, jnp.ones((5, 3)))
        >>> [(layer.kernel, layer.bias) for layer in traced.layers], traced.activations[0].shape
        ([('kernel', 'bias')], (5, 1, 4))
    """
    if num_rows(inputs) == 1:
        return first_example(trace(apply, params, twice(inputs)))
    return trace_network(*network_of(apply, params, inputs), params, inputs)


def trace_network(
    network: Flat, found: list[Part], uncovered: dict[str, str], params: Params, inputs: Inputs
) -> Trace:
    """Run a network that has been read, as `trace` does."""
    outputs, read, tangents_of = _run_tagged(network, found, jax.tree.leaves((params, inputs)))
    batch = outputs.shape[0]
    activations = tuple(arrangement.activations(part, network, read, batch) for part in found)

    def pullback(cotangent: Array) -> tuple[Array, ...]:
        tangents = tangents_of(cotangent)
        return tuple(arrangement.layer_tangents(part, tangents, read, batch) for part in found)

    layers, sources = tuple(part.layer for part in found), feeders(network, found)
    last = output_part(network, found, uncovered)
    places = tuple(
        tuple(location_sizes(network, use, batch) for use in part.uses) for part in found
    )
    return Trace(outputs, layers, activations, pullback, uncovered, sources, last, places)


def location_sizes(network: Flat | Loop, use: Use, batch: int) -> tuple[int, ...]:
    """Return the sizes of the axes that the locations of a use run over."""
    shape = network.equations[use.tangent[0]].outvars[0].aval.shape
    [example], positions, *_ = use.tangent_axes
    # Images of one example may share the axis of the examples.
    images = shape[example] // batch
    return (images,) * (images > 1) + tuple(shape[axis] for axis in positions)


def output_layer(traced: Trace) -> int:
    """Return the number of the dense layer whose product, with its bias, is the output.

    Raises:
        ValueError: If anything but a change of shape or dtype follows the last dense layer, or if
            its kernel is also used elsewhere.
    """
    if isinstance(traced.last, str):
        _refuse_output(traced.last, traced.outputs.shape)
    return traced.last


def check_output_layer(apply: Apply, params: Params, inputs: Inputs) -> Layer:
    """Return the layer that `output_layer` finds, and raise its errors, from shapes only."""
    params = jax.tree.map(tree.shape_of, params)
    network, found, uncovered = network_of(apply, params, tree.shape_of(inputs, 2))
    last = output_part(network, found, uncovered)
    if isinstance(last, str):
        _refuse_output(last, network.output.aval.shape)
    return found[last].layer


def _refuse_output(reason: str, shape: tuple[int, ...]) -> NoReturn:
    raise ValueError(
        "The last layer of this network is not a dense layer that can be solved for: the outputs, "
        f"of shape {tuple(shape[1:])} for each example, must be those of a dense layer that is "
        f"used once, and unchanged, but {reason}. Leave a link function such as softmax to the "
        "likelihood, normalise the targets instead of de-normalising the outputs, or use a method "
        "that solves for no layer (not analytic_head, ccvr or natural_gradient)."
    )


def uses_by_place(parts: list[Part]) -> dict[Place, Use]:
    """Return all uses by the place of the value whose gradient they need."""
    return {use.tangent: use for part in parts for use in (*part.uses, *part.shifts)}


def twice(inputs: Inputs) -> Inputs:
    """Return one example as a minibatch of two."""
    return jax.tree.map(lambda x: jnp.concatenate([x, x]), inputs)


def first_example(traced: Trace) -> Trace:
    """Return the trace of the first of two examples.

    A network is not traced on one example, because JAX then drops axes of size one that the reading
    at `MANY` examples has.
    """

    def pullback(cotangent: Array) -> tuple[Array, ...]:
        both = traced.pullback(jnp.concatenate([cotangent, jnp.zeros_like(cotangent)]))
        return cut(both)

    def cut(values: tuple[Array, ...]) -> tuple[Array, ...]:
        pairs = zip(traced.layers, values, strict=True)
        return tuple(x[:, :1] if layer.kernel in traced.stacks else x[:1] for layer, x in pairs)

    first = cut(traced.activations)
    return traced._replace(outputs=traced.outputs[:1], activations=first, pullback=pullback)


def _run_tagged(
    network: Flat, parts: list[Part], arguments: list[Array]
) -> tuple[Array, dict[Source, Array], Callable[[Array], dict[Place, Array]]]:
    """Run a network with its layers registered with kfac-jax.

    Returns:
        The outputs, the values that uses read, and a function from a cotangent of the outputs to
        the tangents of uses; values and tangents are by place.
    """
    kfac_jax = compat.import_kfac_jax()
    every = uses_by_place(parts)
    tags = {place: tag for tag, place in enumerate(every)}

    def tagged(markers: list[Array], arguments: list[Array]) -> None:
        inputs: dict[Source, Array] = {}

        def register(place: Place, value: Array) -> Array:
            # kfac-jax wants the parameter of each layer once, but a leaf may be used twice, or in
            # slices, so a scalar takes its place.
            marker = markers[tags[place]]
            return kfac_jax.register_dense(value, inputs.get(every[place].inputs, marker), marker)

        evaluate = arrangement.at_layers(every, inputs, register)
        (outputs,) = equations.evaluate(network, arguments, evaluate, [network.output])
        # kfac-jax pulls cotangents of this "mean" back, so any likelihood may be registered.
        kfac_jax.register_normal_predictive_distribution(outputs)

    run, _ = kfac_jax.layer_tags_vjp(tagged, params_index=0, auto_register_tags=False)
    (loss,), vjp = run(([jnp.zeros(())] * len(tags), arguments))
    read = {}

    def collect(cotangent: Array) -> None:
        registered = vjp(((cotangent,),))
        read.update((every[x].inputs, registered[tag].primals.inputs[0]) for x, tag in tags.items())

    # The values that uses read come with the tangents of any cotangent, but do not depend on it. So
    # the backward pass that brings them is traced only, and is no part of the program.
    jax.eval_shape(collect, loss.mean)

    def tangents(cotangent: Array) -> dict[Place, Array]:
        registered = vjp(((cotangent,),))
        return {place: registered[tag].tangents.outputs[0] for place, tag in tags.items()}

    return loss.mean, read, tangents
