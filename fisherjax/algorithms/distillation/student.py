"""Distil several models into one: a student that learns their vote, without labels."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fisherjax import clients, likelihoods, training
from fisherjax._core import batches, checks, output_checks
from fisherjax._core.compiler import jit
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params

_ADAM = optax.adam(1e-3)


class StudentReport(NamedTuple):
    """Report of the distillation.

    Attributes:
        before: Mean KL(vote || student) over the inputs, in nats, of the initial student.
        after: The same of the trained student.
    """

    before: Array
    after: Array


def distilled(
    voters: Model,
    stacked: Params,
    student: Model,
    start: Params,
    inputs: Array,
    *,
    key: Key,
    epochs: int = 100,
    optimizer: optax.GradientTransformation = _ADAM,
    batch_size: int = 64,
) -> tuple[Params, StudentReport]:
    """Train one model on the vote of several, by inputs without labels.

        minimise over W   mean_n KL(v(. | x_n) || p(. | x_n, W)),

    where v is the vote, scaled to sum to one over the C classes, by minibatches in a new order in
    each epoch, in one compiled loop.

    Args:
        voters: Model of the vote, such as `voting(model)`; its outputs [N, C] are taken as logits.
        stacked: Params of the vote, leaves [V, ...].
        student: Any network with C outputs, without "unknown"; it trains by its `apply_train` if it
            has one.
        start: Initial params of the student.
        inputs: Inputs [N, ...] of both networks. Do not evaluate the student on inputs of these:
            the paper uses the first half of the test images, without labels, and reports accuracy
            on the second.
        key: Key of the order of minibatches.
        epochs: Number of passes over the inputs.
        optimizer: An optax optimiser; the paper uses Adam with step size 0.001 (default).
        batch_size: Minibatch size.

    Returns:
        The student's params and `StudentReport`.

    Raises:
        ValueError: If the student's outputs differ in shape from the vote's, there are no inputs,
            or a number is out of range.

    Example:
        >>> import fisherjax as fj
        >>> student = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> voters = student._replace(apply=lambda stacked, x: x @ stacked.mean(0))
        >>> stacked, inputs = jnp.array([[[3.0, 1.0]], [[2.0, 0.0]]]), jnp.ones((5, 1))
        >>> start, key = jnp.zeros((1, 2)), jax.random.key(0)
        >>> params, info = distilled(voters, stacked, student, start, inputs, key=key, epochs=9)
        >>> bool(info.after < info.before)
        True

    Source: Diao, Li, He, Towards addressing label skews in one-shot federated learning, ICLR 2023,
        the variant of the same model size as FedAvg's.
    """
    checks.model(voters)
    checks.model(student)
    inputs = jax.tree.map(jnp.asarray, batches.as_inputs(inputs))
    checks.examples(Examples(inputs))
    length = min(checks.count("batch_size", batch_size), batches.num_rows(inputs))
    vote, outputs = (
        output_checks.outputs(voters, stacked, inputs),
        output_checks.outputs(student, start, inputs),
    )
    if vote.shape != outputs.shape:
        raise ValueError(
            f"The student's outputs have shape {outputs.shape}; expected that of the vote, "
            f"{vote.shape}: one for each class, and none for unknown."
        )
    target = jax.nn.softmax(_over_inputs(voters.apply, length, stacked, inputs))
    federation = clients.federation((inputs, target), [np.arange(len(target))])
    model = student._replace(likelihood=_SOFT)
    how = {"key": key, "optimizer": optimizer, "epochs": epochs, "batch_size": length}
    trained = training.train(model, start, federation, **how)
    params = jax.tree.map(lambda leaf: leaf[0], trained.models)
    losses = [
        _divergence(_over_inputs(student.apply, length, w, inputs), target).mean()
        for w in (start, params)
    ]
    return params, StudentReport(*losses)


@partial(jit, static_argnums=(0, 1), autotune=True)
def _over_inputs(apply: Apply, length: int, params: Params, inputs: Array) -> Array:
    """Run a network over all inputs [N, ...], `length` at a time, and return outputs [N, C]."""
    number = batches.num_rows(inputs)
    rows = jnp.pad(jnp.arange(number), (0, -number % length)).reshape(-1, length)
    outputs = jax.lax.map(lambda batch: apply(params, batches.take(inputs, batch)), rows)
    return outputs.reshape(-1, outputs.shape[-1])[:number]


def _divergence(z: Array, target: Array) -> Array:
    return optax.losses.kl_divergence(jax.nn.log_softmax(z), target)


# For targets that are probabilities [B, C]. They are made here and fit the outputs.
_SOFT = likelihoods.categorical._replace(
    negative_log_likelihood=_divergence, check=likelihoods.unknown.check, correct=None
)
