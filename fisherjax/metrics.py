"""How good a model is: on a test set, alone and in an ensemble, and on the data of the clients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import _sequences, clients, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.clients import Federation, minibatches, view, weights_of
from fisherjax.likelihoods import bernoulli, categorical, gaussian
from fisherjax.parallel import Layout, Spread, chunk_size, in_order, spread_clients
from fisherjax.typing import AnyArray, Array, Examples, Model, Params


def logits(
    model: Model, params: Params, inputs: AnyArray, *, stacked: bool = False, batch_size: int = 500
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
    params, model, inputs = checks.arrays(params), _bare(model), jnp.asarray(inputs)
    checks.outputs(model, _shapes(params) if stacked else params, inputs)
    run = _map_logits if stacked else _logits
    return run(model, _batch_size(batch_size, inputs), params, inputs)


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


class Performance(NamedTuple):
    """How good models are on the data of clients.

    Attributes:
        loss: [M] mean negative log-likelihood of an example in nats; 0 without examples.
        accuracy: [M] fraction of right labels, as `accuracy` has it; NaN if targets are no labels.
        sizes: [M] examples that this is measured on: those of which any position counts.
    """

    loss: Array
    accuracy: Array
    sizes: Array

    def mean(self) -> "Performance":
        """Average over the clients that have examples, each counting the same."""
        counted = self.sizes > 0
        number = jnp.maximum(counted.sum(-1), 1)
        # Selected before the sum: who does not count may hold NaN.
        loss, accuracy = (
            jnp.where(counted, x, 0).sum(-1) / number for x in (self.loss, self.accuracy)
        )
        return Performance(loss, accuracy, self.sizes.sum(-1))


def performance(
    model: Model,
    params: Params,
    federation: Federation,
    *,
    stacked: bool = False,
    batch_size: int = 100,
) -> Performance:
    """Measure loss and accuracy on every client's examples, [M]; NaN where outputs are NaN.

    Args:
        model: Its negative log-likelihood is the loss.
        params: One model, or with `stacked` one for each client, leaves [M, ...].
        federation: The clients' data; those of a cohort by `clients.select`.
        stacked: Whether each client has its own model.
        batch_size: Examples of a minibatch; a last short one costs as much as a full one.

    Raises:
        ValueError: If models, targets or batch_size do not fit.

    Example:
        >>> import fisherjax as fj
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.array([0, 0])), [[0], [1]])
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> found = performance(model, jnp.array(1.0), federation)
        >>> print(found.accuracy, found.mean().accuracy)
        [1. 0.] 0.5
    """
    checks.model(model)
    clients.check(federation)
    batch_size = _batch_size(batch_size, federation.inputs)
    params = jax.tree.map(jnp.asarray, checks.arrays(params))
    if stacked:
        checks.stacked(params, federation.num_clients)
    one = _shapes(params) if stacked else params
    checks.outputs(_bare(model), one, federation.inputs, federation.targets)
    layout = Layout(chunk_size(None, federation.num_clients), federation.mesh)
    found = _performance(_bare(model), layout, batch_size, stacked, params, federation)
    return in_order(found, layout.mesh)


class Barrier(NamedTuple):
    """Means over clients of L_i(W) - L_i(W_i), in nats, and of accuracy_i(W_i) - accuracy_i(W)."""

    loss: Array
    accuracy: Array


def client_server_barrier(
    model: Model, params: Params, models: Params, federation: Federation, *, batch_size: int = 100
) -> Barrier:
    """Compute the client-server barrier, mean_i [L_i(W) - L_i(W_i)] on the clients' own data.

    Lower is better, and zero where all models are equal. Clients without examples or with a model
    that is not finite do not count.

    Args:
        model: Its negative log-likelihood is the loss.
        params: W, the global model after aggregation.
        models: W_i stacked, leaves [M, ...]; of a round `done.trained.models`.
        federation: The data of these clients; of a round `select(federation, done.cohort)`.
        batch_size: Examples of a minibatch.

    Example:
        >>> import fisherjax as fj
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.array([0, 0])), [[0], [1]])
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> own = jnp.array([1.0, -1.0])
        >>> print(client_server_barrier(model, jnp.array(1.0), own, federation).accuracy)
        0.5

    Source: Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function space aggregation for
        federated learning at scale, TMLR 2024. In accuracy it has the sign of the loss: they plot
        the difference the other way round.
    """
    merged = performance(model, params, federation, batch_size=batch_size)
    own = performance(model, models, federation, stacked=True, batch_size=batch_size)
    # A client whose own model diverged has nothing to compare with: as if it had no examples.
    sizes = jnp.where(jnp.isfinite(own.loss), own.sizes, 0)
    mean = Performance(merged.loss - own.loss, own.accuracy - merged.accuracy, sizes).mean()
    return Barrier(mean.loss, mean.accuracy)


@partial(jit, static_argnums=(0, 1, 2, 3))
def _performance(
    model: Model,
    layout: Layout,
    batch_size: int,
    stacked: bool,
    params: Params,
    federation: Federation,
) -> Spread:
    def one(
        own: tuple[Array, Params | None], common: Params | None, federation: Federation
    ) -> Performance:
        # A common model comes in once and is not stacked: M copies would be in memory.
        place, params = own[0], own[1] if stacked else common
        examples = _sequences.weighed(model, view(federation, place))
        number, batch = minibatches(examples, batch_size)

        def body(step: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            inputs, targets, weights = batch(step)
            outputs = model.apply(params, inputs)
            likelihood = _sequences.likelihood(model, inputs, outputs.shape)
            losses = likelihood.negative_log_likelihood(outputs, targets)
            measured = losses, *_shares(model, inputs, outputs, targets)
            return tuple(
                # The rows that fill up do not count; a loop's state keeps its dtypes.
                total + jnp.where(weights > 0, x, 0).sum().astype(total.dtype)
                for total, x in zip(totals, measured, strict=True)
            )

        # Sums of at least float32, even where the network computes in bfloat16.
        zero, size = jnp.zeros((), jnp.result_type(float)), federation.sizes[place]
        zeros = (zero,) * (2 if model.positions is None else 3)
        loss, right, *targets = jax.lax.fori_loop(0, number, body, zeros)
        if targets:
            size = jnp.count_nonzero(weights_of(examples)).astype(size.dtype)
        # 0, not 0 / 0, without examples.
        number = jnp.maximum(targets[0] if targets else size, 1)
        return Performance(loss / jnp.maximum(size, 1), right / number, size)

    return spread_clients(
        one,
        (jnp.arange(federation.num_clients), params if stacked else None),
        None if stacked else params,
        federation,
        sizes=federation.sizes,
        **layout._asdict(),
    )


def _shares(model: Model, inputs: Array, outputs: Array, targets: Array) -> tuple[Array, ...]:
    """Compute which share of an example's targets is right, [B]; NaN where they are not labels.

    Where the model has `positions` it is how many are right, and of how many that count.
    """
    are_classes = jnp.issubdtype(targets.dtype, jnp.integer)
    expected = outputs.shape if _is_of_bits(model) else outputs.shape[:-1]
    if targets.shape != expected or not (are_classes or _is_of_bits(model)):
        unknown = jnp.full(outputs.shape[0], jnp.nan)
        return (unknown,) if model.positions is None else (unknown, jnp.ones_like(unknown))
    hits = _hits(model, outputs, targets)
    # [B, ...] to [B]: an example may be a sequence of several targets.
    flat = hits.reshape(hits.shape[0], -1)
    if model.positions is None:
        return (flat.mean(1),)
    counts = _counts(model, inputs, outputs, targets, hits).reshape(flat.shape)
    return jnp.where(counts, flat, 0).sum(1), counts.sum(1)


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


def _in_use(examples: Examples) -> tuple[AnyArray, AnyArray | None, AnyArray | None]:
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
        meaning = "bit for each output" if _is_of_bits(model) else "class label for each output"
        raise ValueError(f"targets are None; accuracy needs one {meaning}.")
    # Checked, because a shape that merely broadcasts would compare every output with every target.
    targets = jnp.asarray(targets)
    known = checks.labels(model, outputs.shape, targets)
    (bernoulli if _is_of_bits(model) else categorical).check(outputs.shape, known)
    hits = _hits(model, outputs, targets)
    if model.positions is not None:
        return _share_of_counted(model, outputs, targets, hits, examples)
    if weights is None:
        return hits.mean()
    # An example may have several targets, all of its weight.
    weights = weights.reshape(-1, *(1,) * (hits.ndim - 1)) * jnp.ones_like(hits)
    # Selected, because the hit of a row that does not count may be NaN.
    return jnp.where(weights > 0, hits * weights, 0).sum() / weights.sum()


def _share_of_counted(
    model: Model, outputs: Array, targets: Array, hits: Array, examples: Examples
) -> Array:
    """Average over the targets that count, each with the weight of its example."""
    weights = weights_of(_sequences.weighed(model, examples))
    counts = _counts(model, examples.inputs, outputs, targets, hits)
    weights = jnp.where(counts, weights.reshape(-1, *(1,) * (hits.ndim - 1)), 0)
    return jnp.where(weights > 0, hits * weights, 0).sum() / weights.sum()


def _counts(model: Model, inputs: AnyArray, outputs: Array, targets: Array, hits: Array) -> Array:
    """Evaluate which targets count, of the shape of `hits`."""
    counts = _sequences.targets_counted(model, inputs, outputs.shape, targets)
    if counts is None:
        return jnp.ones(hits.shape, bool)
    # Of bits every output has a target.
    every = counts.reshape(*counts.shape, *(1,) * (hits.ndim - counts.ndim))
    return jnp.broadcast_to(every, hits.shape)


def _hits(model: Model, outputs: Array, targets: Array) -> Array:
    """Say where targets are right; NaN where an output is, of classes where any output is."""
    if _is_of_bits(model):
        right, broken = (outputs > 0) == (targets > 0.5), jnp.isnan(outputs)
    else:
        # The argmax of NaN is 0.
        right, broken = outputs.argmax(-1) == targets, jnp.isnan(outputs).any(-1)
    return jnp.where(broken, jnp.nan, right.astype(jnp.result_type(float)))


def _is_of_bits(model: Model) -> bool:
    # By what the outputs mean: the loss may be the user's own.
    return model.likelihood.factor is bernoulli.factor


def _shapes(stacked: Params) -> Params:
    """Give the shapes of one of the models."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def _bare(model: Model) -> Model:
    """Leave out how a model trains: those that differ in it share a program."""
    return model._replace(apply_train=None, mask=None)


def _batch_size(batch_size: int, inputs: AnyArray) -> int:
    batch_size = checks.count("batch_size", batch_size)
    if len(inputs) == 0:
        raise ValueError("There are no inputs; expected at least one example.")
    return min(batch_size, len(inputs))
