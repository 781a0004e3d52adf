"""Correct predictions, and which targets count."""

from typing import Any

import jax.numpy as jnp

from fisherjax import _padding
from fisherjax._core import checks
from fisherjax._core.batches import num_rows
from fisherjax.typing import AnyArray, Array, Model


def correct(model: Model, outputs: Array, targets: Array) -> Array:
    """Return 1 where a prediction is correct and 0 elsewhere; NaN where outputs are NaN."""
    judge: Any = model.likelihood.correct  # callers check that there is one
    right, is_nan = judge(outputs, targets), jnp.isnan(outputs)
    # NaN is checked separately, because argmax treats it as the largest output.
    is_nan = is_nan if right.shape == is_nan.shape else is_nan.any(-1)
    return jnp.where(is_nan, jnp.nan, right.astype(jnp.result_type(float)))


def counted(model: Model, inputs: AnyArray, outputs: Array, targets: Array, hits: Array) -> Array:
    """Return which targets count, booleans of the shape of `hits`, the result of `correct`."""
    counts = _padding.counted_targets(model, inputs, outputs.shape, targets)
    if counts is None:
        return jnp.ones(hits.shape, bool)
    # Of a Bernoulli likelihood every output has a target.
    every = counts.reshape(*counts.shape, *(1,) * (hits.ndim - counts.ndim))
    return jnp.broadcast_to(every, hits.shape)


def for_inference(model: Model) -> Model:
    """Remove how a model trains, so that models that differ only in that share a program."""
    return model._replace(apply_train=None, mask=None)


def check_batch_size(batch_size: int, inputs: AnyArray) -> int:
    """Check a batch size, and limit it to the number of inputs."""
    batch_size = checks.count("batch_size", batch_size)
    if (number := num_rows(inputs)) == 0:
        raise ValueError("There are no inputs; expected at least one example.")
    return min(batch_size, number)
