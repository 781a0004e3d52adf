"""Local training from one start."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fisherjax import _optimizers, clients, devices, leaves, local_update, parallel
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape
from fisherjax.clients import Federation
from fisherjax.devices import Memory, replicate
from fisherjax.local_update import Given, LocalTraining
from fisherjax.parallel import Layout
from fisherjax.training._cohort import (
    Cohort,
    Trained,
    _first_state,
    _run,
    cohort_memory,
    epoch_by_epoch,
    train_cohort,
)
from fisherjax.typing import Array, Key, Model, Params

_HIDDEN = "privacy.dp_sgd tells it no loss, by which its steps would show the data."


def train(
    model: Model,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    extras: Any = (),
    clients_per_chunk: int | None = None,
    progress: Callable[[int, Array], None] | None = None,
) -> Trained:
    """Train every client on its own examples, from a common start W.

        W_i <- W_i - step of the gradient of mean_{n in b} -log p(y_n | x_n, W_i)

    for the minibatches b of a fresh permutation of client i's examples in every epoch. A client
    without examples keeps the start. Compiled once for the same function objects and shapes,
    whatever the number of epochs.

    Args:
        model: Its negative log-likelihood is minimised, through `apply_train` if it has one; leaves
            that its mask leaves out are not trained.
        params: The common start, floating leaves.
        federation: The clients' data.
        key: Folded by client and epoch; the chunk does not matter.
        optimizer: Any of optax that moves params, one that asks for the loss, `value_fn` or
            `grad_fn` too; its state starts afresh on every client. An algorithm that changes how
            clients train wraps it: `algorithm.optimizer(optax.sgd(0.1))`.
        epochs: Passes over each client's data, at least 1.
        batch_size: B, at least 1.
        extras: Stacked, what such a wrapped optimiser is given besides (SCAFFOLD's correction).
        clients_per_chunk: Side by side, at the price of memory; None chooses, 1 on a CPU.
        progress: Called with the epoch, from 0, and its losses [M]. All clients then train for an
            epoch before the next, and all their optimiser states are kept, not only a chunk's.

    Returns:
        The stacked params, the steps, the loss of every epoch in nats, and what the optimiser kept.

    Raises:
        TypeError: If params are not floating, or an argument has the wrong kind.
        ValueError: If the targets do not fit the outputs, the mask does not fit params, the
            optimiser cannot take steps of them, or a number is not positive.

    Example:
        >>> import numpy as np, fisherjax as fj
        >>> federation = fj.clients.federation((np.eye(4), np.zeros(4, int)), [[0, 1, 2], [3]])
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> how = {"optimizer": optax.sgd(0.1), "epochs": 2, "batch_size": 2}
        >>> trained = train(model, np.zeros((4, 2)), federation, key=jax.random.key(0), **how)
        >>> trained.params.shape, trained.steps.tolist()
        ((2, 4, 2), [4, 2])

    Source: McMahan et al., Communication-efficient learning of deep networks from decentralized
        data, AISTATS 2017, ClientUpdate.
    """
    params = checks.arrays(params)
    own = _of_one(extras, federation)
    local = check(model, params, federation, key, optimizer, epochs, batch_size, own)
    cohort = _from_one_start(local, params, extras, federation, key, epochs, clients_per_chunk)
    if progress is None:
        return train_cohort(cohort)
    checks.function("progress", progress, "progress(epoch, losses)")
    return epoch_by_epoch(cohort, progress)


def untrained(params: Params, num_clients: int, model: Model | None = None) -> Trained:
    """Give every client the same model, for exchanges without training.

    With a model the leaves that its mask leaves out are there once.

    Example:
        >>> untrained(jnp.zeros(2), num_clients=3).params.shape
        (3, 2)
    """
    params = checks.arrays(params)
    checks.count("num_clients", num_clients)

    def stack(x: Array) -> Array:
        # By the host, so that it is bound to no device: the clients may be on others.
        x = x if checks.is_traced(x) else np.asarray(x)
        return jnp.asarray(jnp.broadcast_to(x, (num_clients, *jnp.shape(x))))

    if model is None:
        return Trained(jax.tree.map(stack, params))
    own, frozen = leaves.apart(model, params)
    return Trained(jax.tree.map(stack, own), frozen=frozen)


def train_memory(
    model: Model,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    extras: Any = (),
    clients_per_chunk: int | None = None,
    progress: Any = None,
) -> Memory:
    """Predict the bytes that `train` needs on each device, the data and all models among them.

    The arguments, and what is refused, are those of `train`; nothing is run. Of `progress` it
    counts only whether it is None.

    Example:
        >>> import numpy as np, fisherjax as fj
        >>> federation = fj.clients.federation((np.eye(4), np.zeros(4, int)), [[0, 1, 2], [3]])
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> how = {"optimizer": optax.sgd(0.1), "epochs": 2, "batch_size": 2}
        >>> need = train_memory(model, np.ones((4, 2)), federation, key=jax.random.key(0), **how)
        >>> need.resident > federation.inputs.nbytes
        True
    """
    params = checks.arrays(params)
    own = _of_one(extras, federation)
    local = check(model, params, federation, key, optimizer, epochs, batch_size, own)
    cohort = _from_one_start(local, params, extras, federation, key, epochs, clients_per_chunk)
    if progress is None:
        return cohort_memory(cohort)
    states = eval_shape(partial(_first_state, local), cohort.given[0])
    states = devices.stacked_shapes(states, federation.num_clients, federation.mesh)
    return devices.memory(_run, *cohort.program(1, states, (0, epochs)))


def check(
    model: Model,
    params: Params,
    federation: Federation,
    key: Key,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    extras: Any = (),
) -> LocalTraining:
    """Check what clients train with, and put it together; extras are one client's, or shapes."""
    checks.model(model)
    clients.check(federation)
    checks.floating(params)
    checks.mask(model, params)
    checks.optimizer("optimizer", optimizer)
    checks.key(key)
    checks.count("epochs", epochs)
    batch_size = checks.count("batch_size", batch_size)
    checks.outputs(model, params, federation.inputs, federation.targets)
    # No client has more rows than that: the rest of a longer minibatch would be padding.
    batch_size = min(batch_size, federation.indices.shape[1])
    checks.train_outputs(model, params, federation.inputs, batch_size)
    without = _HIDDEN if local_update.hides_the_loss(model) else ""
    trained = leaves.trained(model, params)
    _optimizers.check("optimizer", optimizer, trained, without, extras)
    return LocalTraining(model, optimizer, batch_size)


def _of_one(extras: Any, federation: Federation) -> Any:
    """Give the shapes of what one client's optimiser is given."""
    if jax.tree.leaves(extras):
        clients.check(federation)
        checks.stacked(extras, federation.num_clients, "extras")
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), extras)


def _from_one_start(
    local: LocalTraining,
    params: Params,
    extras: Any,
    federation: Federation,
    key: Key,
    epochs: int,
    clients_per_chunk: int | None,
) -> Cohort:
    layout = Layout(parallel.chunk_size(clients_per_chunk, federation.num_clients), federation.mesh)
    # The clients may be spread over a mesh: what jit takes together must lie on the same devices.
    params, key = replicate((jax.tree.map(jnp.asarray, params), key), layout.mesh)
    start, statistics, frozen = leaves.split(
        local.model, params, federation.inputs, local.batch_size
    )
    given = Given(start, None, statistics, frozen), Given(None, extras, None, None)
    return Cohort(local, layout, given, federation, key, epochs)
