"""Each layer's inputs and output tangents: what diagonal, K-FAC and Gram matrices are sums of.

For a dense or convolution layer with pre-activations s_t = V^T [a_t; 1] at output locations t, the
gradient of any scalar with respect to V is sum_t a_t g_t^T, with g_t the tangent of s_t. So the
pairs (a, g) are all that a layer-wise Fisher needs. This is the only file that knows kfac-jax,
whose graph matcher finds the layers in the trace of an arbitrary `apply`. It is generous, so each
find is checked against the formula: where that does not hold the result is wrong without an error.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import compat, nn, tree
from fisherjax.typing import Apply, Array, Params

kfac_jax = compat.import_kfac_jax()

# Layers are looked for at a number of examples that no other axis has, so that the axis of the
# examples is never mistaken for one of positions or channels that happens to be as long.
_MANY = 10007
_CHANNELS_LAST = ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))  # dimension_numbers of NHWC, HWIO


class Layer(NamedTuple):
    """Static description of a dense or convolution layer.

    Attributes:
        kernel: Name of the kernel leaf; it also names the layer.
        bias: Name of the bias leaf, or None.
        shape: Shape of the kernel, [inputs, outputs] or [height, width, channels, outputs].
    """

    kernel: str
    bias: str | None
    shape: tuple[int, ...]

    @property
    def is_dense(self) -> bool:
        """Whether the layer is a matrix product rather than a convolution."""
        return len(self.shape) == 2


class Trace(NamedTuple):
    """One minibatch seen from inside the network.

    Attributes:
        outputs: z [B, ..., C].
        layers: The layers found, in the order of their first leaves in the pytree.
        activations: For each layer its inputs [B, T, a], with a trailing 1 where it has a bias.
        pullback: Cotangent of the outputs [B, ..., C] -> for each layer the tangents [B, T, o].
        uncovered: Leaves that belong to no layer, each with the reason.
    """

    outputs: Array
    layers: tuple[Layer, ...]
    activations: tuple[Array, ...]
    pullback: Callable[[Array], tuple[Array, ...]]
    uncovered: dict[str, str]


class LayersNotFoundError(ValueError):
    """The network could not be taken apart into layers."""


def trace(apply: Apply, params: Params, inputs: Array) -> Trace:
    """Run a network on a minibatch and expose its layers.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`; it may be jitted.
        params: Any pytree of floating arrays.
        inputs: [B, ...].

    Returns:
        The layers, their inputs, and the pullback to their outputs.

    Raises:
        LayersNotFoundError: If kfac-jax cannot read the network at all.
        ValueError: If the network mixes the examples of a batch.

    Example:
        >>> from fisherjax.fisher import layers
        >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
        >>> seen = layers.trace(lambda p, x: x @ p["kernel"] + p["bias"], params, jnp.ones((5, 3)))
        >>> [(layer.kernel, layer.bias) for layer in seen.layers], seen.activations[0].shape
        ([('kernel', 'bias')], (5, 1, 4))
    """
    many = jax.ShapeDtypeStruct((_MANY, *inputs.shape[1:]), inputs.dtype)
    try:
        _, extract = kfac_jax.layer_tags_vjp(_registered(apply), params_index=0)
        jaxpr = extract((params, many))
        value_and_vjp, _ = kfac_jax.layer_tags_vjp(_registered(apply), params_index=0)
        (loss,), vjp = value_and_vjp((params, inputs))
    except Exception as error:
        raise LayersNotFoundError(
            f"The layers of this network could not be found ({type(error).__name__}: {error}). "
            "Use fisher.diagonal, which then takes gradients of single examples, or write the "
            "network with plain dense and convolution layers."
        ) from error
    if _mixes_examples(jaxpr):
        raise ValueError(
            "The network computes something over all examples of a batch, like BatchNorm in "
            "training mode, but the Fisher information is a mean over single examples. Let apply "
            "use running statistics."
        )
    found, uncovered = _read_tags(jaxpr, tree.names(params), jax.tree.leaves(params))
    at_zero = vjp(((jnp.zeros_like(loss.mean),),))
    activations = tuple(
        _activations(layer, jaxpr.layer_tags[tag].params, at_zero[tag].primals.inputs[0])
        for tag, layer in found.items()
    )

    def pullback(cotangent: Array) -> tuple[Array, ...]:
        seen = vjp(((cotangent,),))
        return tuple(_locations(seen[tag].tangents.outputs[0]) for tag in found)

    return Trace(loss.mean, tuple(found.values()), activations, pullback, uncovered)


def matrix(layer: Layer, leaves: dict[str, Array]) -> Array:
    """Write a layer's leaves as its matrix V [a, o], the bias as its last row.

    Args:
        layer: The layer.
        leaves: Leaves by name, among them the layer's.

    Returns:
        V, rows in (height, width, channel) order for a convolution.
    """
    kernel = leaves[layer.kernel].reshape(-1, layer.shape[-1])
    return kernel if layer.bias is None else jnp.concatenate([kernel, leaves[layer.bias][None]])


def unpack(layer: Layer, value: Array) -> dict[str, Array]:
    """Split a layer's matrix V [a, o] into its leaves: the inverse of `matrix`.

    Args:
        layer: The layer.
        value: V.

    Returns:
        Kernel, and bias where there is one, by name.
    """
    if layer.bias is None:
        return {layer.kernel: value.reshape(layer.shape)}
    return {layer.kernel: value[:-1].reshape(layer.shape), layer.bias: value[-1]}


def _registered(apply: Apply) -> Callable[[Params, Array], Array]:
    """Make the function that kfac-jax traces: convolutions tagged, outputs registered."""

    def function(params: Params, inputs: Array) -> Array:
        untagged = {id(leaf) for leaf in jax.tree.leaves(params)}

        def tag(y: Array, lhs: Array, rhs: Array, **settings: Any) -> Array:
            # A kernel that was transformed on its way here is not a parameter: leave it untagged.
            # One that comes again is shared, which `_escapes` finds out.
            if id(rhs) not in untagged:
                return y
            untagged.remove(id(rhs))
            if not isinstance(settings["padding"], str):  # flax passes a list; JAX hashes settings
                settings["padding"] = tuple(map(tuple, settings["padding"]))
            return kfac_jax.register_conv2d(y, lhs, rhs, **settings)

        # The graph matcher does not look inside jitted functions: their bodies are traced inline.
        with jax.disable_jit(), nn.observe_convolutions(tag):
            outputs = apply(params, inputs)
        kfac_jax.register_normal_predictive_distribution(outputs)
        return outputs

    return function


def _read_tags(
    jaxpr: Any, names: tuple[str, ...], leaves: list[Array]
) -> tuple[dict[int, Layer], dict[str, str]]:
    """Sort the tags into layers, by position of the tag, and leaves that no layer covers."""
    uses = Counter(leaf for indices in jaxpr.layer_indices for leaf in indices)
    added = _added_biases(jaxpr)
    found, uncovered = {}, {}
    for position, (tag, indices) in enumerate(
        zip(jaxpr.layer_tags, jaxpr.layer_indices, strict=True)
    ):
        reason = _obstacle(jaxpr, tag)
        if any(uses[leaf] > 1 for leaf in indices):
            reason = "it is used by several layers (shared weights)"
        if reason is None:
            bias = indices[1] if len(indices) == 2 else added.get(position)
            found[position] = Layer(
                names[indices[0]], None if bias is None else names[bias], leaves[indices[0]].shape
            )
        else:
            uncovered.update({names[leaf]: reason for leaf in indices})
    for layer in found.values():
        uncovered.pop(layer.bias, None)
    uncovered = {name: _explain(jaxpr, names.index(name), why) for name, why in uncovered.items()}
    return found, uncovered


def _obstacle(jaxpr: Any, tag: Any) -> str | None:
    """Say why a tag is not a layer that K-FAC covers, None if it is, "" if the uses must tell."""
    settings, variant = tag.params, tag.params["meta"].variant
    if variant == "scale_and_shift":
        return "it scales or shifts an activation, as in BatchNorm, LayerNorm and GroupNorm"
    if variant not in ("dense", "repeated_dense", "conv2d"):
        return ""
    output, inputs, kernel, *biases = tag.invars
    axes = inputs.aval.ndim
    if variant == "conv2d":
        if set((*settings["lhs_dilation"], *settings["rhs_dilation"])) != {1}:
            return "it belongs to a dilated or transposed convolution"
        if settings["feature_group_count"] != 1 or settings.get("batch_group_count", 1) != 1:
            return "it belongs to a grouped convolution"
        layout = settings["dimension_numbers"]
        if axes != 4 or tuple(map(tuple, layout)) != _CHANNELS_LAST:
            return "it belongs to a convolution other than of [B, H, W, C] by [kh, kw, cin, cout]"
    elif kernel.aval.ndim != 2:
        return f"it is a dense kernel of {kernel.aval.ndim} axes; only [inputs, outputs] is covered"
    elif settings.get("dimension_numbers") != (((axes - 1,), (0,)), ((), ())):
        return "it is not multiplied along the last axis of the layer's inputs"
    if inputs.aval.shape[0] != _MANY:
        return "it belongs to a layer whose inputs do not have the examples as their first axis"
    if not all(_is_added_last(jaxpr, bias, output.aval.shape[-1]) for bias in biases):
        return "it belongs to a layer whose bias is not a vector [outputs] along the last axis"
    if any(_escapes(jaxpr, leaf, output) for leaf in (kernel, *biases)):
        return "it, or what the layer makes of it, is used elsewhere too (shared weights)"
    return None


def _mixes_examples(jaxpr: Any) -> bool:
    """Whether something that depends on the inputs has lost the axis of the examples on its way."""
    reached = {id(jaxpr.jaxpr.invars[-1])}
    for equation in jaxpr.jaxpr.eqns:
        if any(id(v) in reached for v in equation.invars):
            reached.update(map(id, equation.outvars))
            if any(getattr(v.aval, "size", 0) % _MANY for v in equation.outvars):
                return True
    return False


def _escapes(jaxpr: Any, variable: Any, output: Any) -> bool:
    """Whether a parameter reaches the end of the network in another way than through its layer."""
    reached = {id(variable)}
    for equation in jaxpr.jaxpr.eqns:
        if any(id(v) in reached for v in equation.invars):
            reached.update(id(v) for v in equation.outvars if v is not output)
    return any(id(v) in reached for v in jaxpr.jaxpr.outvars)


def _explain(jaxpr: Any, leaf: int, reason: str) -> str:
    """Find out from its uses why the matcher did not recognise a parameter."""
    if reason:
        return reason
    variable = jaxpr.jaxpr.invars[leaf]
    users = _consumers(jaxpr, variable)
    if not users:
        return "it is not used by the network"
    for user in users:
        if any("jaxpr" in name or name == "branches" for name in user.params):
            return f"it is used inside {user.primitive.name}, where layers are not looked for"
    if len(users) > 1:
        return f"it is used {len(users)} times (shared weights)"
    if users[0].params.get("feature_group_count", 1) != 1:
        return "it belongs to a grouped convolution"
    result = users[0].outvars[0].aval.dtype
    if users[0].primitive.name == "convert_element_type" and result != variable.aval.dtype:
        return (
            f"it is cast to {result} between the parameter and its use; "
            "give the parameter and the activations one dtype"
        )
    return "its use was not recognised as a dense or two-dimensional convolution layer"


def _added_biases(jaxpr: Any) -> dict[int, int]:
    """Find biases added to a tagged convolution, as {position of the tag: leaf of the bias}.

    The matcher pairs kernel and bias of a native convolution. One that was tagged by hand has its
    bias outside the tag: y + broadcast(b), with no other use of y and b.
    """
    biases = {}
    for position, tag in enumerate(jaxpr.layer_tags):
        output, users = tag.invars[0], _consumers(jaxpr, tag.invars[0])
        is_added = len(users) == 1 and users[0].primitive.name == "add"
        if tag.params["meta"].variant != "conv2d" or len(tag.invars) == 4 or not is_added:
            continue
        (other,) = [v for v in users[0].invars if v is not output] or [None]
        producer = next((e for e in jaxpr.jaxpr.eqns if other in e.outvars), None)
        if producer is None or producer.primitive.name not in ("reshape", "broadcast_in_dim"):
            continue
        bias = producer.invars[0]
        is_leaf = any(bias is v for v in jaxpr.jaxpr.invars[:-1])
        if is_leaf and _is_added_last(jaxpr, bias, output.aval.shape[-1]):
            biases[position] = jaxpr.jaxpr.invars.index(bias)
    return biases


def _is_added_last(jaxpr: Any, bias: Any, outputs: int) -> bool:
    """Whether a bias is a vector [outputs], added along the last axis and used nowhere else."""
    users = _consumers(jaxpr, bias)
    if bias.aval.shape != (outputs,) or len(users) != 1:
        return False
    (user,), shape = users, users[0].outvars[0].aval.shape
    if user.primitive.name == "broadcast_in_dim":
        return shape[-1] == outputs and user.params["broadcast_dimensions"] == (len(shape) - 1,)
    # A reshape to [1, ..., 1, outputs]; or the bias itself is added.
    return shape[-1] == outputs and (user.primitive.name == "add" or set(shape[:-1]) <= {1})


def _consumers(jaxpr: Any, variable: Any) -> list[Any]:
    return [e for e in jaxpr.jaxpr.eqns if any(v is variable for v in e.invars)]


def _activations(layer: Layer, settings: dict[str, Any], inputs: Array) -> Array:
    if not layer.is_dense:
        strides, padding = settings["window_strides"], settings["padding"]
        inputs = nn.patches(inputs, layer.shape[:2], strides, padding)
    inputs = _locations(inputs)
    if layer.bias is None:
        return inputs
    return jnp.concatenate([inputs, jnp.ones_like(inputs[..., :1])], axis=-1)


def _locations(values: Array) -> Array:
    """Bring [B, ..., features] to [B, T, features]."""
    return values.reshape(values.shape[0], -1, values.shape[-1])
