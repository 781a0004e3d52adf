"""Sums over the inputs of the last layer, from which methods compute this layer again."""

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import _padding, leaves, likelihoods, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._layers import locations
from fisherjax._layers.layer import Layer
from fisherjax._layers.pairs import check_output_layer, output_layer, trace
from fisherjax.algorithms.base import Algorithm, WeightedSum, check_pass, weighted_sum
from fisherjax.clients import draw, weights_of
from fisherjax.fisher import _passes
from fisherjax.fisher._factors import second_moment
from fisherjax.training import Trained
from fisherjax.typing import AnyArray, Array, Examples, Key, Model, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class HeadSums:
    """A client's sums for the layer that makes the outputs, as means over its examples.

    Attributes:
        inputs: A = E[a a^T], [a, a], with a the layer's inputs.
        products: B = E[a y^T], [a, C], with y the targets.
        targets: E[y], [C]; for classes, their shares.
        squares: E|y|^2.
        negative: E|min(a, 0)|^2, zero behind a ReLU.
        count: Number of target vectors, one for each example or position of a sequence.
        layer: The layer, static.
    """

    inputs: Array
    products: Array
    targets: Array
    squares: Array
    negative: Array
    count: Array
    layer: Layer = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        """Describe the sums in one line, with the name of their layer."""
        return tree.describe(
            "HeadSums", self, f"of {str(getattr(self.layer, 'kernel', self.layer))[:60]}"
        )


def head_summary(
    model: Model, aggregate: Callable, batch_size: int, max_examples: int | None
) -> Algorithm:
    """Make the algorithm whose clients send {"head": HeadSums}, from its `aggregate`."""
    checks.model(model)
    likelihoods.check_regression(model.likelihood)
    check_pass(batch_size, max_examples)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        examples = draw(key, examples, max_examples)
        return {"head": head_sums(model, batch_size, trained.whole, examples)}, local

    def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
        total, weight = weighted_sum(updates["head"], weights)
        # Each example counts once, whatever the weight of its client.
        count = tree.weighted_sum(updates["head"].count, (weights > 0).astype(weights.dtype))
        return WeightedSum(dataclasses.replace(total, count=count), weight)

    return Algorithm(summarize, aggregate, reduce, kind="sums of the last layer", model=model)


def head_mean(sums: WeightedSum) -> HeadSums:
    """Return the sums divided by the weight, except the count."""
    return dataclasses.replace(sums.mean(), count=sums.total.count)


@partial(jit, static_argnums=(0, 1))
def head_sums(model: Model, batch_size: int, params: Params, examples: Examples) -> HeadSums:
    """Compute a client's sums for its last layer, by minibatches."""
    apply, trained = leaves.bind_untrained(model, params)

    def batch_sums(x: Array, y: Array, w: Array, key: None) -> HeadSums:
        del key
        seen = trace(apply, trained, x)
        if isinstance(seen.last, str):
            check_head(model, params, x)
        place = output_layer(seen)
        a, z = seen.activations[place], seen.outputs
        counts = _padding.counted_targets(model, x, z.shape, y)
        y = likelihoods.regression_targets(model.likelihood, y, z.shape[-1])
        y = y.reshape(*a.shape[:2], -1).astype(a.dtype)
        if counts is not None:
            counts = counts.reshape(a.shape[:2])
            a, y = (locations.mask_values(v, counts) for v in (a, y))
        number = a.shape[1] * w.sum() if counts is None else jnp.vdot(w, counts.sum(1))
        # Each side of a product is multiplied by the root of the weight.
        root = jnp.sqrt(w)[:, None, None].astype(a.dtype)
        both, size = second_moment(root * jnp.concatenate([a, y], axis=-1)), a.shape[-1]
        squares = jnp.trace(both[size:, size:])
        below = jnp.square(root * jnp.minimum(a, 0)).sum()
        moments = both[:size, :size], both[:size, size:], jnp.einsum("n,ntc->c", w, y), squares
        # Means are over examples, each of which may have several positions.
        return HeadSums(*moments, below, number, seen.layers[place])

    examples = _padding.drop_uncounted(model, examples)
    means = _passes.weighted_mean(batch_sums, examples, key=None, batch_size=batch_size)
    weights = weights_of(examples)
    return dataclasses.replace(means, count=means.count * (weights > 0).sum())


def check_head(model: Model, params: Params, inputs: AnyArray, *, frozen: bool = False) -> None:
    """Raise unless a dense layer makes the outputs and is trained, by shapes alone.

    Args:
        model: The network.
        params: All leaves of the network, or their shapes.
        inputs: Inputs of the network.
        frozen: Whether the model's mask may freeze leaves of that layer.

    Raises:
        ValueError: If `_layers.pairs.output_layer` raises; if the mask freezes leaves of that
            layer, which the message names.
    """
    try:
        check_output_layer(*leaves.bind_untrained(model, params), inputs)
    except ValueError as error:
        left_out = _frozen_head(model, params, inputs)
        if not left_out:
            raise
        if frozen:
            return
        raise ValueError(
            f"The model's mask leaves out {left_out}, of the dense layer that makes the outputs, "
            "which this method solves for or compares clients by; expected a mask that trains "
            "that layer. Train it, or use a method that needs no such layer (not analytic_head or "
            "ccvr, and weighted_fedavg with fisher= only)."
        ) from error


def _frozen_head(model: Model, params: Params, inputs: AnyArray) -> list[str]:
    """Return the names of the leaves of the output layer that the mask freezes."""
    # The network as if it had no mask, which may be one that cannot be read.
    with contextlib.suppress(ValueError):
        layer = check_output_layer(model.apply, params, inputs)
        others = tree.names(leaves.split_trained(model, params)[1])
        return [name for name in (layer.leaf, layer.bias) if name in others]
    return []
