"""Compute the Kronecker factors of layers from their inputs and output gradients."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax._layers import locations
from fisherjax._layers.layer import Layer
from fisherjax._layers.locations import Counted
from fisherjax._layers.loops import of_layers
from fisherjax._layers.pairs import Trace
from fisherjax.fisher._columns import Columns, sum_over_columns, weight
from fisherjax.fisher.operators import widen
from fisherjax.typing import Array


class Sharing(NamedTuple):
    """How the locations that share a layer's weights are combined.

    Both functions get values [B, T, f], which are zero at locations that do not count, and the mask
    [B, T] of those that count, or None if all count. They return [B, T, f] or [B, 1, f].

    Attributes:
        inputs: Function of a layer's inputs.
        tangents: Function of a layer's output gradients.
    """

    inputs: Callable[[Array, Array | None], Array]
    tangents: Callable[[Array, Array | None], Array]


def _unchanged(values: Array, counts: Array | None = None) -> Array:
    del counts
    return values


def _mean(values: Array, counts: Array | None = None) -> Array:
    if counts is None:
        return values.mean(1, keepdims=True)
    wide = jnp.promote_types(values.dtype, jnp.float32)
    total = values.sum(1, keepdims=True, dtype=wide)
    return (total / locations.number(counts)).astype(values.dtype)


def _sum(values: Array, counts: Array | None = None) -> Array:
    del counts
    return values.sum(1, keepdims=True)


# With `expand` each location counts like an example; with `reduce` all locations of an example
# together count like one.
expand = Sharing(_unchanged, _unchanged)
reduce = Sharing(_mean, _sum)


def layer_factors(
    sharing: Sharing, traced: Trace, counts: Counted, columns: Columns, w: Array
) -> tuple[dict[str, dict[str, Array]], dict[str, Array]]:
    """Return the factors of layers, and the blocks of scales, of one minibatch."""
    kernels = [layer.kernel for layer in traced.layers]

    def output_factors(column: Array) -> dict[str, Array]:
        def of_layer(number: int, g: Array) -> Array:
            return _output_factor(sharing, traced.layers[number], g, counts[number])

        found = of_layers(traced, of_layer, traced.pullback(column[0]))
        return dict(zip(kernels, found, strict=True))

    # The inputs do not depend on the column, so their moments are computed once.
    inputs = input_moments(traced, w, sharing, counts)
    outputs = sum_over_columns(output_factors, weight(columns, w), at_once=1)
    factors = {name: {"input": a, "output": outputs[name]} for name, a in inputs.items()}
    return factors, {name: block for name, block in outputs.items() if name not in inputs}


def _output_factor(sharing: Sharing, layer: Layer, g: Array, counts: Array | None) -> Array:
    if layer.form == "scale":
        # g has the gradients of a scale and its shift for each example: [B, r, o] -> [r, r, o].
        return jnp.einsum("bro,bso->rso", widen(g), widen(g), precision="highest")
    g = locations.mask_values(g, counts)
    g = sharing.tangents(g, counts) if layer.form == "product" else g
    # G is a mean over locations, since A is a sum: kron(A, G) then has the exact block's scale.
    if g.shape[1] == 1:
        return second_moment(g)
    if counts is None or g.shape[1] != counts.shape[1]:
        return second_moment(g) / g.shape[1]
    # The number of locations that count differs from example to example.
    return second_moment(widen(g) / jnp.sqrt(locations.number(counts)))


def input_moments(
    traced: Trace, w: Array, sharing: Sharing = expand, counts: Counted | None = None
) -> dict[str, Array]:
    """Sum w_n sum_t a_nt a_nt^T over a minibatch, for each layer by the name of its kernel.

    For a table, whose inputs are one-hot, this matrix is diagonal. Its diagonal [a], how often
    each row was used, is returned.
    """
    counts = (None,) * len(traced.layers) if counts is None else counts

    def of_layer(number: int, a: Array) -> Array | None:
        return _input_moment(sharing, traced.layers[number], a, w, counts[number])

    found = of_layers(traced, of_layer, traced.activations)
    pairs = zip(traced.layers, found, strict=True)
    return {layer.kernel: moment for layer, moment in pairs if moment is not None}


def _input_moment(
    sharing: Sharing, layer: Layer, a: Array, w: Array, counts: Array | None
) -> Array | None:
    if layer.form == "scale":
        return None
    if layer.form == "table":
        wide = jnp.promote_types(w.dtype, jnp.float32)
        used = jnp.broadcast_to(w[:, None].astype(wide), a.shape)
        used = used if counts is None else jnp.where(counts, used, 0)
        return jnp.zeros(layer.rows, wide).at[a].add(used, mode="drop")
    a = sharing.inputs(locations.mask_values(a, counts), counts)
    # Each side of the product carries the root of the weight.
    return second_moment(a * jnp.sqrt(w)[:, None, None].astype(a.dtype))


def second_moment(values: Array) -> Array:
    """Sum v_nt v_nt^T over examples and locations: [B, T, f] -> [f, f], in at least float32."""
    # Without this barrier XLA computes the values twice, once for each side of the product.
    flat = jax.lax.optimization_barrier(values.reshape(-1, values.shape[-1]))
    wide = jnp.promote_types(values.dtype, jnp.float32)
    over_rows = ((0,), (0,)), ((), ())
    return jax.lax.dot_general(
        flat, flat, over_rows, precision="highest", preferred_element_type=wide
    )
