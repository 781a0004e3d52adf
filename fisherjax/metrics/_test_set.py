"""Outputs and accuracy of one model, of several, and of their ensemble on a test set."""

from functools import partial

import jax
import jax.numpy as jnp

from fisherjax import _padding, tree
from fisherjax._core import checks, output_checks
from fisherjax._core.batches import as_inputs, num_rows, take
from fisherjax._core.compiler import jit
from fisherjax._stacked import shapes_of_one
from fisherjax.clients import weights_of
from fisherjax.metrics._targets import check_batch_size, correct, counted, for_inference
from fisherjax.typing import AnyArray, Array, Examples, Inputs, Model, Params


def logits(
    model: Model, params: Params, inputs: Inputs, *, stacked: bool = False, batch_size: int = 500
) -> Array:
    """Compute the outputs [N, ..., C] of a network for inputs [N, ...], `batch_size` at a time.

    With `stacked` the leaves of params are [M, ...], those of M models, and the outputs
    [M, N, ..., C].

    Raises:
        ValueError: If there are no inputs, or batch_size is not a positive integer.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> logits(model, jnp.array(2.0), jnp.ones((3, 1)), batch_size=2).shape
        (3, 1)
    """
    checks.model(model)
    params, model = checks.arrays(params), for_inference(model)
    inputs = jax.tree.map(jnp.asarray, as_inputs(inputs))
    output_checks.outputs(model, shapes_of_one(params) if stacked else params, inputs)
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
    """Compute the fraction of correct predictions of one model, or of each of M models.

    * Classes: top-1 accuracy, mean_n 1{argmax z_n = y_n}.
    * Independent bits, the Bernoulli likelihood: mean_nc 1{(z_nc > 0) = (y_nc > 1/2)}.
    * A loss of your own: by the function `correct` of `likelihoods.custom`.
    * Sequences: the mean over all positions that count by the model's `positions` and whose label
      is not -100.

    Args:
        model: Network and likelihood.
        params: Params of one model, or with `stacked` of M models, leaves [M, ...].
        examples: Test set, whose targets are class labels or bits; weights weigh its rows.
        stacked: Whether params are those of M models (default False).
        batch_size: Number of examples that are evaluated together (default 500).

    Returns:
        The fraction, [] or [M]; NaN for a model whose outputs are NaN.

    Raises:
        ValueError: If the targets are not one class label for each output vector, or one bit for
            each output, or if the model's likelihood has no `correct`, such as a Gaussian.
        TypeError: If class labels are not integers.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> print(accuracy(model, jnp.array(1.0), fj.Examples(jnp.eye(2), jnp.array([0, 0]))))
        0.5
    """
    inputs, targets, weights = _used_rows(examples)
    outputs = logits(model, params, inputs, stacked=stacked, batch_size=batch_size)
    rows = Examples(inputs, targets, None, weights)
    if not stacked:
        return _accuracy(model, outputs, rows)
    return jnp.stack([_accuracy(model, own, rows) for own in outputs])


def ensemble_accuracy(
    model: Model, stacked: Params, weights: Array, examples: Examples, *, batch_size: int = 500
) -> Array:
    """Compute the accuracy of the logit ensemble of M models, whose outputs are sum_i p_i z_i.

    The weights are p_i [M]; the other arguments are those of `accuracy`.

    Raises:
        ValueError: As `accuracy`, or if weights does not have one number for each model.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> examples, weights = fj.Examples(jnp.eye(2), jnp.array([0, 1])), jnp.array([0.7, 0.3])
        >>> print(ensemble_accuracy(model, jnp.array([1.0, -1.0]), weights, examples))
        1.0
    """
    inputs, targets, counts = _used_rows(examples)
    outputs = logits(model, stacked, inputs, stacked=True, batch_size=batch_size)
    if jnp.shape(weights) != outputs.shape[:1]:
        raise ValueError(
            f"weights has shape {jnp.shape(weights)}; expected ({outputs.shape[0]},), one for each "
            "model."
        )
    # [M, N, ..., C] to [N, ..., C].
    mean = tree.weighted_sum(outputs, jnp.asarray(weights))
    return _accuracy(model, mean, Examples(inputs, targets, None, counts))


@partial(jit, static_argnums=(0, 1))
def _logits(model: Model, batch_size: int, params: Params, inputs: Inputs) -> Array:
    # Row numbers are padded instead of inputs: the padding evaluates row 0, and is cut off again.
    number = num_rows(inputs)
    rows = jnp.pad(jnp.arange(number), (0, -number % batch_size)).reshape(-1, batch_size)
    outputs = jax.lax.map(lambda r: model.apply(params, take(inputs, r)), rows)
    # [minibatches, B, ..., C] to [N, ..., C].
    return outputs.reshape(-1, *outputs.shape[2:])[:number]


@partial(jit, static_argnums=(0, 1))
def _map_logits(model: Model, batch_size: int, stacked: Params, inputs: Inputs) -> Array:
    # One model after another, so that memory holds the activations of only one.
    return jax.lax.map(lambda params: _logits(model, batch_size, params, inputs), stacked)


def _used_rows(examples: Examples) -> tuple[AnyArray, AnyArray | None, AnyArray | None]:
    """Return the inputs and targets that `indices` select, and the weights if there are any."""
    checks.examples(examples)
    inputs, targets, indices, weights = examples
    if indices is None:
        return inputs, targets, weights
    return take(inputs, indices), None if targets is None else targets[indices], weights


def _accuracy(model: Model, outputs: Array, examples: Examples) -> Array:
    """Compute the accuracy of outputs, an average over targets with the weights of examples."""
    if model.likelihood.correct is None:
        raise ValueError(
            "The outputs of this model are means of a Gaussian, or those of a loss of your own, "
            "which have no accuracy; expected classes, bits, or likelihoods.custom(loss, "
            "correct=...). Use metrics.performance(...).loss, which for a Gaussian is half the sum "
            "of an example's squared errors, or compute another measure of metrics.logits."
        )
    if (targets := examples.targets) is None:
        raise ValueError(
            "targets are None; accuracy needs one class label, or one bit for each output."
        )
    # A shape that can be broadcast would compare every output with every target.
    targets = jnp.asarray(targets)
    known = output_checks.replace_ignored(model, outputs.shape, targets)
    model.likelihood.check(outputs.shape, known)
    hits = correct(model, outputs, targets)
    if model.positions is None and examples.weights is None:
        return hits.mean()
    weights = weights_of(_padding.drop_uncounted(model, examples))
    counts = counted(model, examples.inputs, outputs, targets, hits)
    # Every target of an example has the weight of the example.
    weights = jnp.where(counts, weights.reshape(-1, *(1,) * (hits.ndim - 1)), 0)
    # The outputs of rows with weight zero may be NaN.
    return jnp.where(weights > 0, hits * weights, 0).sum() / weights.sum()
