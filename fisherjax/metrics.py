"""How good a model is: accuracy of one model, of many, and of their ensemble."""

from functools import partial

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.typing import Apply, Array, Params


def logits(apply: Apply, params: Params, inputs: Array, *, batch_size: int = 500) -> Array:
    """Run a network over a data set, a minibatch at a time.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        params: One model.
        inputs: [N, ...].
        batch_size: Examples of a minibatch.

    Returns:
        Outputs [N, ..., C].

    Example:
        >>> logits(lambda w, x: x * w, jnp.array(2.0), jnp.ones((3, 1)), batch_size=2).shape
        (3, 1)
    """
    return _logits(apply, min(batch_size, inputs.shape[0]), params, jnp.asarray(inputs))


def accuracy(
    apply: Apply, params: Params, inputs: Array, targets: Array, *, batch_size: int = 500
) -> Array:
    """Compute top-1 accuracy, mean_n 1{argmax z_n = y_n}.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        params: One model.
        inputs: [N, ...].
        targets: [N, ...] class labels.
        batch_size: Examples of a minibatch.

    Returns:
        A fraction between 0 and 1.

    Example:
        >>> apply = lambda w, x: x * w
        >>> print(accuracy(apply, jnp.array(1.0), jnp.eye(2), jnp.array([0, 0])))
        0.5
    """
    return _share_right(logits(apply, params, inputs, batch_size=batch_size), targets)


def local_accuracies(
    apply: Apply, stacked: Params, inputs: Array, targets: Array, *, batch_size: int = 500
) -> Array:
    """Compute the accuracy of each of M stacked models.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        stacked: Leaves [M, ...].
        inputs: [N, ...].
        targets: [N, ...] class labels.
        batch_size: Examples of a minibatch.

    Returns:
        Fractions [M].
    """
    inputs = jnp.asarray(inputs)
    return jax.lax.map(
        lambda params: accuracy(apply, params, inputs, targets, batch_size=batch_size), stacked
    )


def ensemble_accuracy(
    apply: Apply,
    stacked: Params,
    weights: Array,
    inputs: Array,
    targets: Array,
    *,
    batch_size: int = 500,
) -> Array:
    """Compute the accuracy of the logit ensemble, argmax sum_i p_i z_i: M models, not one.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        stacked: Leaves [M, ...].
        weights: p_i [M].
        inputs: [N, ...].
        targets: [N, ...] class labels.
        batch_size: Examples of a minibatch.

    Returns:
        A fraction between 0 and 1.
    """

    inputs = jnp.asarray(inputs)
    outputs = jax.lax.map(
        lambda params: logits(apply, params, inputs, batch_size=batch_size), stacked
    )
    return _share_right(tree.weighted_sum(outputs, weights), targets)


@partial(jax.jit, static_argnums=(0, 1))
def _logits(apply: Apply, batch_size: int, params: Params, inputs: Array) -> Array:
    rows = jnp.pad(jnp.arange(inputs.shape[0]), (0, -inputs.shape[0] % batch_size))
    outputs = jax.lax.map(lambda r: apply(params, inputs[r]), rows.reshape(-1, batch_size))
    return outputs.reshape(-1, *outputs.shape[2:])[: inputs.shape[0]]


def _share_right(outputs: Array, targets: Array) -> Array:
    return jnp.mean(outputs.argmax(-1) == jnp.asarray(targets))
