"""Each layer's inputs and output tangents: what diagonal, K-FAC and Gram matrices are sums of.

For a dense or convolution layer with pre-activations s_t = V^T [a_t; 1] at output locations t, the
gradient of any scalar with respect to V is sum_t a_t g_t^T, with g_t the tangent of s_t. So the
pairs (a, g) are all that a layer-wise Fisher needs. kfac-jax finds the layers in the trace of an
arbitrary `apply`; only this file and `tags`, which checks what it found, know it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import compat, nn, tree
from fisherjax.fisher import tags
from fisherjax.typing import Apply, Array, Params


class Layer(NamedTuple):
    """Static description of a dense or convolution layer.

    Attributes:
        kernel: Name of the kernel leaf, and of the layer.
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
    """Run a network, which may be jitted, on a minibatch [B, ...] and expose its layers.

    Raises:
        LayersNotFoundError: If kfac-jax cannot read the network at all.
        ValueError: If the network mixes the examples of a batch.

    Example:
        >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
        >>> seen = trace(lambda p, x: x @ p["kernel"] + p["bias"], params, jnp.ones((5, 3)))
        >>> [(layer.kernel, layer.bias) for layer in seen.layers], seen.activations[0].shape
        ([('kernel', 'bias')], (5, 1, 4))
    """
    kfac_jax = compat.import_kfac_jax()
    many = jax.ShapeDtypeStruct((tags.MANY, *inputs.shape[1:]), inputs.dtype)
    try:
        # Traced twice: at many examples to be read, at the examples given to be run.
        _, extract = kfac_jax.layer_tags_vjp(partial(_registered, apply), params_index=0)
        jaxpr = extract((params, many))
        value_and_vjp, _ = kfac_jax.layer_tags_vjp(partial(_registered, apply), params_index=0)
        (loss,), vjp = value_and_vjp((params, inputs))
    except Exception as error:
        raise LayersNotFoundError(
            f"The layers of this network could not be found ({type(error).__name__}: {error}). "
            "Use fisher.diagonal, which then takes gradients of single examples, or write the "
            "network with plain dense and convolution layers."
        ) from error
    if tags.mixes_examples(jaxpr):
        raise ValueError(
            "The network computes something over all examples of a batch, like BatchNorm in "
            "training mode, but the Fisher information is a mean over single examples. Let apply "
            "use running statistics."
        )
    names, leaves = tree.names(params), jax.tree.leaves(params)
    found, uncovered = tags.read(jaxpr, names)
    layers = tuple(
        Layer(names[kernel], None if bias is None else names[bias], leaves[kernel].shape)
        for kernel, bias in found.values()
    )
    # The inputs of layers come with any cotangent; what else zeros give is not used, and dropped.
    at_zero = vjp(((jnp.zeros_like(loss.mean),),))
    activations = tuple(
        _activations(layer, jaxpr.layer_tags[tag].params, at_zero[tag].primals.inputs[0])
        for tag, layer in zip(found, layers, strict=True)
    )

    def pullback(cotangent: Array) -> tuple[Array, ...]:
        seen = vjp(((cotangent,),))
        return tuple(_locations(seen[tag].tangents.outputs[0]) for tag in found)

    return Trace(loss.mean, layers, activations, pullback, uncovered)


def matrix(layer: Layer, leaves: dict[str, Array]) -> Array:
    """Write a layer's leaves as its matrix V [a, o], the bias as its last row.

    The rows of a convolution's kernel are in (height, width, channel) order.
    """
    # [kh, kw, cin, o] -> [kh * kw * cin, o].
    kernel = leaves[layer.kernel].reshape(-1, layer.shape[-1])
    return kernel if layer.bias is None else jnp.concatenate([kernel, leaves[layer.bias][None]])


def unpack(layer: Layer, value: Array) -> dict[str, Array]:
    """Split a layer's matrix V [a, o] into its leaves by name: the inverse of `matrix`."""
    if layer.bias is None:
        return {layer.kernel: value.reshape(layer.shape)}
    return {layer.kernel: value[:-1].reshape(layer.shape), layer.bias: value[-1]}


def _registered(apply: Apply, params: Params, inputs: Array) -> Array:
    """Run the network for kfac-jax to trace: convolutions tagged, outputs registered."""
    kfac_jax = compat.import_kfac_jax()
    untagged = {id(leaf) for leaf in jax.tree.leaves(params)}

    def tag(y: Array, lhs: Array, rhs: Array, **settings: Any) -> Array:
        # A kernel that was transformed on its way here is not a parameter: leave it untagged.
        # One that comes again is shared, which `tags` finds out.
        if id(rhs) not in untagged:
            return y
        untagged.remove(id(rhs))
        return kfac_jax.register_conv2d(y, lhs, rhs, **settings)

    # The graph matcher does not look inside jitted functions: their bodies are traced inline.
    with jax.disable_jit(), nn.observe_convolutions(tag):
        outputs = apply(params, inputs)
    # As the mean of a Gaussian, whatever they are: the pullback of any loss starts from them.
    kfac_jax.register_normal_predictive_distribution(outputs)
    return outputs


def _activations(layer: Layer, settings: dict[str, Any], inputs: Array) -> Array:
    if not layer.is_dense:
        how = settings["window_strides"], settings["padding"]
        inputs = nn.patches(inputs, layer.shape[:2], *how)
    inputs = _locations(inputs)
    if layer.bias is None:
        return inputs
    return jnp.concatenate([inputs, jnp.ones_like(inputs[..., :1])], axis=-1)


def _locations(values: Array) -> Array:
    """Bring [B, ..., features] to [B, T, features]."""
    return values.reshape(values.shape[0], -1, values.shape[-1])
