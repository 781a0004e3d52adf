"""Loss and accuracy on the data of every client, and the client-server barrier."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import _padding, clients
from fisherjax._core import checks, output_checks
from fisherjax._core.compiler import jit
from fisherjax._device_division import Division, divide
from fisherjax._stacked import shapes_of_one
from fisherjax.clients import Federation, minibatches, view, weights_of
from fisherjax.metrics._targets import check_batch_size, correct, counted, for_inference
from fisherjax.parallel import Layout, Spread, chunk_size, in_order, spread_clients
from fisherjax.typing import Array, Model, Params


class Performance(NamedTuple):
    """Loss and accuracy of models on the data of clients.

    Attributes:
        loss: [M] mean negative log-likelihood of an example in nats; 0 without examples.
        accuracy: [M] fraction of correct predictions, as in `accuracy`; NaN if predictions
            are not correct or wrong, such as real numbers.
        sizes: [M] number of examples that are averaged: those with a position that counts.
    """

    loss: Array
    accuracy: Array
    sizes: Array

    def mean(self) -> "Performance":
        """Average over the clients that have examples, with equal weights."""
        counted = self.sizes > 0
        number = jnp.maximum(counted.sum(-1), 1)
        # Clients without examples may hold NaN.
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
    """Compute loss and accuracy on every client's examples, [M]; NaN where outputs are NaN.

    Args:
        model: Network, whose negative log-likelihood is the loss.
        params: Params of one model, or with `stacked` of one model per client, leaves [M, ...].
        federation: Data of the clients; for those of a cohort use `clients.select`.
        stacked: Whether each client has its own model (default False).
        batch_size: Number of examples in a minibatch (default 100). A short last minibatch costs
            as much as a full one.

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
    batch_size = check_batch_size(batch_size, federation.inputs)
    params = jax.tree.map(jnp.asarray, checks.arrays(params))
    if stacked:
        checks.stacked(params, federation.num_clients)
    one = shapes_of_one(params) if stacked else params
    output_checks.outputs(for_inference(model), one, federation.inputs, federation.targets)
    layout = Layout(chunk_size(None, federation.num_clients), federation.mesh)
    given = params, federation, divide(federation.sizes, *layout)
    found = _performance(for_inference(model), layout, batch_size, stacked, *given)
    return in_order(found, layout.mesh)


class Barrier(NamedTuple):
    """Means over clients of the differences between the global model W and their own models W_i.

    Attributes:
        loss: Mean of L_i(W) - L_i(W_i) in nats.
        accuracy: Mean of accuracy_i(W_i) - accuracy_i(W).
    """

    loss: Array
    accuracy: Array


def client_server_barrier(
    model: Model, params: Params, models: Params, federation: Federation, *, batch_size: int = 100
) -> Barrier:
    """Compute the client-server barrier, mean_i [L_i(W) - L_i(W_i)] on the clients' own data.

    Lower is better; the barrier is zero if all models are equal. Clients without examples, or whose
    loss is not finite under their own model, are left out.

    Args:
        model: Network, whose negative log-likelihood is the loss.
        params: Global model after aggregation, W.
        models: Models of the clients W_i, leaves [M, ...]; those of a round are
            `done.trained.models`.
        federation: Data of these clients; of a round `clients.select(federation, done.cohort)`.
        batch_size: Number of examples in a minibatch (default 100).

    Example:
        >>> import fisherjax as fj
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.array([0, 0])), [[0], [1]])
        >>> model = fj.Model(lambda w, x: x * w, fj.likelihoods.categorical)
        >>> own = jnp.array([1.0, -1.0])
        >>> print(client_server_barrier(model, jnp.array(1.0), own, federation).accuracy)
        0.5

    Source: Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function space aggregation for
        federated learning at scale, TMLR 2024. The sign of the accuracy is chosen here so that
        lower is better, too; the paper plots the negative.
    """
    merged = performance(model, params, federation, batch_size=batch_size)
    own = performance(model, models, federation, stacked=True, batch_size=batch_size)
    # There is nothing to compare with if the client's own model diverged.
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
    division: Division | None,
) -> Spread:
    def one(
        own: tuple[Array, Params | None], common: Params | None, federation: Federation
    ) -> Performance:
        # A common model is an argument of its own: stacked, it would take M times the memory.
        place, params = own[0], own[1] if stacked else common
        examples = _padding.drop_uncounted(model, view(federation, place))
        number, batch = minibatches(examples, batch_size)

        def body(step: Array, totals: tuple[Array, ...]) -> tuple[Array, ...]:
            inputs, targets, weights = batch(step)
            outputs = model.apply(params, inputs)
            likelihood = _padding.likelihood(model, inputs, outputs.shape)
            losses = likelihood.negative_log_likelihood(outputs, targets)
            measured = losses, *_fractions(model, inputs, outputs, targets)
            return tuple(
                # Padded rows have weight zero. The state of a loop must keep its dtypes.
                total + jnp.where(weights > 0, x, 0).sum().astype(total.dtype)
                for total, x in zip(totals, measured, strict=True)
            )

        # Sums have at least float32, even if the network computes in bfloat16.
        zero, size = jnp.zeros((), jnp.result_type(float)), federation.sizes[place]
        zeros = (zero,) * (2 if model.positions is None else 3)
        loss, right, *targets = jax.lax.fori_loop(0, number, body, zeros)
        if targets:
            size = jnp.count_nonzero(weights_of(examples)).astype(size.dtype)
        # Without examples the result is 0, not 0 / 0.
        number = jnp.maximum(targets[0] if targets else size, 1)
        return Performance(loss / jnp.maximum(size, 1), right / number, size)

    return spread_clients(
        one,
        (jnp.arange(federation.num_clients), params if stacked else None),
        None if stacked else params,
        federation,
        sizes=federation.sizes,
        division=division,
        **layout._asdict(),
    )


def _fractions(model: Model, inputs: Array, outputs: Array, targets: Array) -> tuple[Array, ...]:
    """Compute the fraction of an example's correct predictions, [B]; NaN if none is correct or not.

    For a model with `positions`, return the numbers of correct and of counted targets instead.
    """
    if model.likelihood.correct is None:
        unknown = jnp.full(outputs.shape[0], jnp.nan)
        return (unknown,) if model.positions is None else (unknown, jnp.ones_like(unknown))
    hits = correct(model, outputs, targets)
    # [B, ...] to [B]: an example may be a sequence of several targets.
    flat = hits.reshape(hits.shape[0], -1)
    if model.positions is None:
        return (flat.mean(1),)
    counts = counted(model, inputs, outputs, targets, hits).reshape(flat.shape)
    return jnp.where(counts, flat, 0).sum(1), counts.sum(1)
