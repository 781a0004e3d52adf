"""How good a model is on a test set."""

from functools import partial

import jax
import jax.numpy as jnp

from fisherjax import _sequences, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.likelihoods import bernoulli, categorical, gaussian
from fisherjax.metrics._targets import (
    check_batch_size,
    correct,
    counted,
    for_inference,
    is_bernoulli,
    shapes_of_one,
)
from fisherjax.typing import Array, Examples, Model, Params


def logits(
    model: Model, params: Params, inputs: Array, *, stacked: bool = False, batch_size: int = 500
) -> Array:
    """Run a network over inputs [N, ...], `batch_size` at a time: outputs [N, ..., C].

    With `stacked` the leaves of params are [M, ...], M models, and outputs are [M, N, ..., C].

    Raises:
        ValueError: If there are no inputs, or batch_size is not a positive integer.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> logits(model, jnp.array(2.0), jnp.ones((3, 1)), batch_size=2).shape
        (3, 1)
    """
    checks.model(model)
    params, model, inputs = checks.arrays(params), for_inference(model), jnp.asarray(inputs)
    checks.outputs(model, shapes_of_one(params) if stacked else params, inputs)
    run = _map_logits if stacked else _logits
    return run(model, check_batch_size(batch_size, inputs), params, inputs)


def accuracy(
    model: Model,
    params: Params,
    examples: Examples,
    *,
    stacked: bool = False,
    batch_size: int = 500,
) -> Array:
    """Compute the share of right labels of one model or of each of M.

    Of classes it is top-1 accuracy, mean_n 1{argmax z_n = y_n}. Of independent bits, the Bernoulli
    likelihood, every bit counts: mean_nc 1{(z_nc > 0) = (y_nc > 1/2)}. Of sequences every position
    counts that the model's `positions` let count, unless its label is -100.

    Args:
        model: The network.
        params: One model, or with `stacked` M models, leaves [M, ...].
        examples: Their targets are class labels, or bits; rows count by their weights.
        stacked: Whether there are M models.
        batch_size: Examples of a minibatch.

    Returns:
        A fraction, or M of them; NaN for a model whose outputs are NaN.

    Raises:
        ValueError: If the targets are not one class label for each output vector, or one bit for
            each output, or if the model's outputs are means of a Gaussian.
        TypeError: If class labels are not integers.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> print(accuracy(model, jnp.array(1.0), fj.Examples(jnp.eye(2), jnp.array([0, 0]))))
        0.5
    """
    inputs, targets, weights = _in_use(examples)
    outputs = logits(model, params, inputs, stacked=stacked, batch_size=batch_size)
    rows = Examples(inputs, targets, None, weights)
    if not stacked:
        return _share_right(model, outputs, rows)
    return jnp.stack([_share_right(model, own, rows) for own in outputs])


def ensemble_accuracy(
    model: Model, stacked: Params, weights: Array, examples: Examples, *, batch_size: int = 500
) -> Array:
    """Compute the accuracy of the logit ensemble, sum_i p_i z_i in place of z: M models, not one.

    The weights are p_i [M]; the other arguments are those of `accuracy`.

    Raises:
        ValueError: As `accuracy`, or if the weights are not one number for each model.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> examples, weights = fj.Examples(jnp.eye(2), jnp.array([0, 1])), jnp.array([0.7, 0.3])
        >>> print(ensemble_accuracy(model, jnp.array([1.0, -1.0]), weights, examples))
        1.0
    """
    inputs, targets, counts = _in_use(examples)
    outputs = logits(model, stacked, inputs, stacked=True, batch_size=batch_size)
    if jnp.shape(weights) != outputs.shape[:1]:
        raise ValueError(
            f"weights has shape {jnp.shape(weights)}; expected ({outputs.shape[0]},), one for each "
            "model."
        )
    # Logits are averaged over the models, [M, N, ..., C] to [N, ..., C], before anyone decides.
    mean = tree.weighted_sum(outputs, jnp.asarray(weights))
    return _share_right(model, mean, Examples(inputs, targets, None, counts))


@partial(jit, static_argnums=(0, 1))
def _logits(model: Model, batch_size: int, params: Params, inputs: Array) -> Array:
    # Row numbers are padded, never inputs. Padding runs row 0 again, and is cut off at the end.
    rows = jnp.pad(jnp.arange(inputs.shape[0]), (0, -inputs.shape[0] % batch_size))
    outputs = jax.lax.map(lambda r: model.apply(params, inputs[r]), rows.reshape(-1, batch_size))
    # [minibatches, B, ..., C] to [N, ..., C].
    return outputs.reshape(-1, *outputs.shape[2:])[: inputs.shape[0]]


@partial(jit, static_argnums=(0, 1))
def _map_logits(model: Model, batch_size: int, stacked: Params, inputs: Array) -> Array:
    # In turn, so that the activations of one model only are in memory.
    return jax.lax.map(lambda params: _logits(model, batch_size, params, inputs), stacked)


def _in_use(examples: Examples) -> tuple[Array, Array, Array | None]:
    """Give the rows that are in use, and their weights where they differ."""
    checks.examples(examples)
    inputs, targets, indices, weights = examples
    if indices is None:
        return inputs, targets, weights
    return inputs[indices], None if targets is None else targets[indices], weights


def _share_right(model: Model, outputs: Array, examples: Examples) -> Array:
    _, targets, _, weights = examples
    if model.likelihood.factor is gaussian.factor:
        raise ValueError(
            "The outputs of this model are means of a Gaussian, which are right or wrong by a "
            "distance; expected classes or bits. Use metrics.performance(...).loss, half the sum "
            "of an example's squared errors, or metrics.logits and a measure of your own."
        )
    if targets is None:
        meaning = "bit for each output" if is_bernoulli(model) else "class label for each output"
        raise ValueError(f"targets are None; accuracy needs one {meaning}.")
    # Checked, because a shape that merely broadcasts would compare every output with every target.
    targets = jnp.asarray(targets)
    known = checks.labels(model, outputs.shape, targets)
    (bernoulli if is_bernoulli(model) else categorical).check(outputs.shape, known)
    hits = correct(model, outputs, targets)
    if model.positions is not None:
        return _share_of_counted(model, outputs, hits, examples)
    if weights is None:
        return hits.mean()
    # An example may have several targets, all of its weight.
    weights = weights.reshape(-1, *(1,) * (hits.ndim - 1)) * jnp.ones_like(hits)
    # Selected, because the hit of a row that does not count may be NaN.
    return jnp.where(weights > 0, hits * weights, 0).sum() / weights.sum()


def _share_of_counted(model: Model, outputs: Array, hits: Array, examples: Examples) -> Array:
    """Average over the targets that count, each with the weight of its example."""
    weights = _sequences.weighed(model, examples).weights
    counts = counted(model, examples.inputs, outputs, examples.targets, hits)
    weights = jnp.where(counts, weights.reshape(-1, *(1,) * (hits.ndim - 1)), 0)
    return jnp.where(weights > 0, hits * weights, 0).sum() / weights.sum()
