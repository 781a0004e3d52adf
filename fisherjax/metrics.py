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

    Raises:
        ValueError: If there are no inputs, or batch_size is not a positive integer.

    Example:
        >>> logits(lambda w, x: x * w, jnp.array(2.0), jnp.ones((3, 1)), batch_size=2).shape
        (3, 1)
    """
    return _logits(apply, _batch_size(batch_size, inputs), params, jnp.asarray(inputs))


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

    Raises:
        ValueError: If the targets are not one class label for each output vector.

    Example:
        >>> apply = lambda w, x: x * w
        >>> print(accuracy(apply, jnp.array(1.0), jnp.eye(2), jnp.array([0, 0])))
        0.5
    """
    outputs = logits(apply, params, inputs, batch_size=batch_size)
    return _hits(outputs, targets).mean()


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

    Raises:
        ValueError: If the targets are not one class label for each output vector.

    Example:
        >>> apply = lambda w, x: x * w
        >>> print(local_accuracies(apply, jnp.array([1.0, -1.0]), jnp.eye(2), jnp.array([0, 0])))
        [0.5 0.5]
    """
    outputs = _every_logits(apply, _batch_size(batch_size, inputs), stacked, jnp.asarray(inputs))
    return jnp.stack([_hits(own, targets).mean() for own in outputs])


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

    Raises:
        ValueError: If the targets are not one class label for each output vector, or the weights
            not one number for each model.

    Example:
        >>> apply, models = lambda w, x: x * w, jnp.array([1.0, -1.0])
        >>> x, y = jnp.eye(2), jnp.array([0, 1])
        >>> print(ensemble_accuracy(apply, models, jnp.array([0.7, 0.3]), x, y))
        1.0
    """
    outputs = _every_logits(apply, _batch_size(batch_size, inputs), stacked, jnp.asarray(inputs))
    if jnp.shape(weights) != outputs.shape[:1]:
        raise ValueError(
            f"weights has shape {jnp.shape(weights)}; expected ({outputs.shape[0]},), one for each "
            "model."
        )
    return _hits(tree.weighted_sum(outputs, jnp.asarray(weights)), targets).mean()


@partial(jax.jit, static_argnums=(0, 1))
def _logits(apply: Apply, batch_size: int, params: Params, inputs: Array) -> Array:
    rows = jnp.pad(jnp.arange(inputs.shape[0]), (0, -inputs.shape[0] % batch_size))
    outputs = jax.lax.map(lambda r: apply(params, inputs[r]), rows.reshape(-1, batch_size))
    return outputs.reshape(-1, *outputs.shape[2:])[: inputs.shape[0]]


@partial(jax.jit, static_argnums=(0, 1))
def _every_logits(apply: Apply, batch_size: int, stacked: Params, inputs: Array) -> Array:
    return jax.lax.map(lambda params: _logits(apply, batch_size, params, inputs), stacked)


def _hits(outputs: Array, targets: Array) -> Array:
    # A shape that merely broadcasts would compare every output with every target.
    if jnp.shape(targets) != outputs.shape[:-1]:
        raise ValueError(
            f"targets have shape {jnp.shape(targets)} and the outputs {outputs.shape}; expected "
            f"one class label for each output vector, {outputs.shape[:-1]}."
        )
    return outputs.argmax(-1) == jnp.asarray(targets)


def _batch_size(batch_size: int, inputs: Array) -> int:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}; expected an integer of at least 1.")
    if len(inputs) == 0:
        raise ValueError("There are no inputs: accuracy needs at least one example.")
    return min(batch_size, len(inputs))
