"""How good a model is: on a test set, alone and in an ensemble, and on the data of the clients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.clients import Federation
from fisherjax.likelihoods import Likelihood
from fisherjax.local import count_steps
from fisherjax.mapping import chunk_size, map_clients
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


class Performance(NamedTuple):
    """How good models are on the data of clients.

    Attributes:
        loss: [M] mean negative log-likelihood of an example in nats; 0 without examples.
        accuracy: [M] share of targets that are the largest output, a fraction; NaN where targets
            are not class labels.
        sizes: [M] examples that this is measured on.
    """

    loss: Array
    accuracy: Array
    sizes: Array

    def mean(self) -> "Performance":
        """Average over the clients that have examples, each counting the same."""
        counted = self.sizes > 0
        number = jnp.maximum(counted.sum(-1), 1)
        loss, accuracy = (
            jnp.where(counted, x, 0).sum(-1) / number for x in (self.loss, self.accuracy)
        )
        return Performance(loss, accuracy, self.sizes.sum(-1))


def performance(
    apply: Apply,
    likelihood: Likelihood,
    params: Params,
    federation: Federation,
    *,
    clients: Array | None = None,
    stacked: bool = False,
    batch_size: int = 100,
) -> Performance:
    """Measure loss and accuracy on every client's examples.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        likelihood: Whose negative log-likelihood is the loss.
        params: One model, or with `stacked` one for each client, leaves [M, ...].
        federation: The clients' data.
        clients: [M] which ones; all if None.
        stacked: Whether each client has its own model.
        batch_size: Examples of a minibatch; changes memory and time only. Clients are small, and a
            last minibatch costs as much as a full one.

    Returns:
        Numbers [M], in the order of `clients`.

    Raises:
        ValueError: If batch_size is not a positive integer, or there are not as many models as
            clients.

    Example:
        >>> import fisherjax as fj
        >>> data = jnp.eye(2), jnp.array([0, 0])
        >>> federation = fj.clients.federation(data, [[0], [1]])
        >>> found = performance(lambda w, x: x * w, fj.likelihoods.categorical, 1.0, federation)
        >>> print(found.accuracy, found.mean().accuracy)
        [1. 0.] 0.5
    """
    batch_size = _batch_size(batch_size, federation.inputs)
    clients = jnp.arange(federation.num_clients) if clients is None else jnp.asarray(clients)
    params = jax.tree.map(jnp.asarray, params)
    if stacked and any(leaf.shape[:1] != clients.shape for leaf in jax.tree.leaves(params)):
        shapes = jax.tree.map(jnp.shape, params)
        raise ValueError(
            f"The stacked params have shapes {shapes}; expected a leading axis of the "
            f"{len(clients)} clients."
        )
    length = min(batch_size, federation.indices.shape[1])
    return _performance(apply, likelihood, length, stacked, params, federation, clients)


class Barrier(NamedTuple):
    """How much worse the global model is on clients' data than their own models.

    Attributes:
        loss: mean_i [L_i(W) - L_i(W_i)], in nats.
        accuracy: mean_i [accuracy_i(W_i) - accuracy_i(W)], a fraction.
    """

    loss: Array
    accuracy: Array


def client_server_barrier(
    apply: Apply,
    likelihood: Likelihood,
    params: Params,
    models: Params,
    federation: Federation,
    *,
    clients: Array | None = None,
    batch_size: int = 100,
) -> Barrier:
    """Compute the client-server barrier, mean_i [L_i(W) - L_i(W_i)] on the clients' own data.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        likelihood: Whose negative log-likelihood is the loss.
        params: W, the global model after aggregation.
        models: W_i stacked, leaves [M, ...]; of a round `done.models.params`.
        federation: The clients' data.
        clients: [M] which ones the models are of, for instance `done.cohort`; all if None. Those
            without examples or with a model that is not finite do not count.
        batch_size: Examples of a minibatch.

    Returns:
        The barrier in loss and in accuracy: lower is better, and zero where all models are equal.

    Raises:
        ValueError: As `performance`.

    Example:
        >>> import fisherjax as fj
        >>> federation = fj.clients.federation((jnp.eye(2), jnp.array([0, 0])), [[0], [1]])
        >>> options = lambda w, x: x * w, fj.likelihoods.categorical
        >>> print(client_server_barrier(*options, 1.0, jnp.array([1.0, -1.0]), federation).accuracy)
        0.5

    Source: Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function space aggregation for
        federated learning at scale, TMLR 2024. In accuracy it has the sign of the loss: they plot
        the difference the other way round.
    """
    options = {"clients": clients, "batch_size": batch_size}
    merged = performance(apply, likelihood, params, federation, **options)
    own = performance(apply, likelihood, models, federation, stacked=True, **options)
    sizes = jnp.where(jnp.isfinite(own.loss), own.sizes, 0)
    mean = Performance(merged.loss - own.loss, own.accuracy - merged.accuracy, sizes).mean()
    return Barrier(mean.loss, mean.accuracy)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _performance(
    apply: Apply,
    likelihood: Likelihood,
    batch_size: int,
    stacked: bool,
    params: Params,
    federation: Federation,
    clients: Array,
) -> Performance:
    def one(
        own: tuple[Array, Params | None], common: Params | None, federation: Federation
    ) -> Performance:
        client, params = own[0], own[1] if stacked else common
        rows, size = federation.indices[client], federation.sizes[client]

        def body(step: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
            place = step * batch_size + jnp.arange(batch_size)
            batch = rows[place % rows.shape[0]]
            outputs, targets = apply(params, federation.inputs[batch]), federation.targets[batch]
            losses = likelihood.negative_log_likelihood(outputs, targets)
            both = losses, _shares(outputs, targets)
            return tuple(
                total + jnp.where(place < size, x, 0).sum().astype(total.dtype)
                for total, x in zip(totals, both, strict=True)
            )

        zero = jnp.zeros((), jnp.result_type(float))
        totals = jax.lax.fori_loop(0, count_steps(size, batch_size), body, (zero, zero))
        loss, accuracy = (total / jnp.maximum(size, 1) for total in totals)
        return Performance(loss, accuracy, size)

    return map_clients(
        one,
        (clients, params if stacked else None),
        None if stacked else params,
        federation,
        sizes=federation.sizes[clients],
        clients_per_chunk=chunk_size(None, clients.shape[0]),
        mesh=federation.mesh,
    )


def _shares(outputs: Array, targets: Array) -> Array:
    """Say which share of an example's targets is right, [B]; NaN where they are not labels."""
    if not jnp.issubdtype(targets.dtype, jnp.integer) or targets.shape != outputs.shape[:-1]:
        return jnp.full(outputs.shape[0], jnp.nan)
    hits = outputs.argmax(-1) == targets
    return hits.reshape(hits.shape[0], -1).mean(1)


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
