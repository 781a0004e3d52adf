"""Which targets are right."""

import jax
import jax.numpy as jnp

from fisherjax import _sequences
from fisherjax._core import checks
from fisherjax.likelihoods import bernoulli
from fisherjax.typing import Array, Model, Params


def counted(model: Model, inputs: Array, outputs: Array, targets: Array, hits: Array) -> Array:
    """Evaluate which targets count, of the shape of `hits`."""
    counts = _sequences.targets_counted(model, inputs, outputs.shape, targets)
    if counts is None:
        return jnp.ones(hits.shape, bool)
    # Of bits every output has a target.
    every = counts.reshape(*counts.shape, *(1,) * (hits.ndim - counts.ndim))
    return jnp.broadcast_to(every, hits.shape)


def correct(model: Model, outputs: Array, targets: Array) -> Array:
    """Say where targets are right; NaN where an output is, of classes where any output is."""
    if is_bernoulli(model):
        right, broken = (outputs > 0) == (targets > 0.5), jnp.isnan(outputs)
    else:
        # The argmax of NaN is 0.
        right, broken = outputs.argmax(-1) == targets, jnp.isnan(outputs).any(-1)
    return jnp.where(broken, jnp.nan, right.astype(jnp.result_type(float)))


def is_bernoulli(model: Model) -> bool:
    # By what the outputs mean: the loss may be the user's own.
    return model.likelihood.factor is bernoulli.factor


def shapes_of_one(stacked: Params) -> Params:
    """Give the shapes of one of the models."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def for_inference(model: Model) -> Model:
    """Leave out how a model trains: those that differ in it share a program."""
    return model._replace(apply_train=None, mask=None)


def check_batch_size(batch_size: int, inputs: Array) -> int:
    batch_size = checks.count("batch_size", batch_size)
    if len(inputs) == 0:
        raise ValueError("There are no inputs; expected at least one example.")
    return min(batch_size, len(inputs))
