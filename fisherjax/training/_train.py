"""Local training from one common start: every client runs its own optimiser on its own examples.

One compiled program trains all clients. Client i takes ceil(n_i / B) steps an epoch: its examples
are shuffled, and the last short minibatch is averaged over its own examples. Minibatches are
gathered from the one copy of the data. One-shot runs and rounds train by the same function,
`train_cohort`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fisherjax import _optimizers, clients, leaves, local_update, parallel
from fisherjax._core import checks, output_checks, secrecy
from fisherjax._stacked import copies, shapes_of_one
from fisherjax.clients import Federation
from fisherjax.devices import Memory, replicate
from fisherjax.local_update import ClientInputs, LocalTraining
from fisherjax.parallel import Layout
from fisherjax.training._cohort import (
    Cohort,
    Trained,
    cohort_memory,
    epoch_by_epoch,
    epoch_memory,
    train_cohort,
)
from fisherjax.typing import AnyArray, Array, Key, Model, Params

_HIDDEN = "privacy.dp_sgd passes it no loss, as steps that depend on the loss reveal the data."


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
    without examples keeps the start. The program is compiled once for the same function objects and
    shapes, whatever the number of epochs.

    Args:
        model: Model whose negative log-likelihood is minimised, through `apply_train` if it has
            one. Leaves that its mask excludes are not trained.
        params: Common start W, floating leaves.
        federation: Data of the clients.
        key: Random key, folded by client and epoch; results do not depend on the chunk.
        optimizer: Optimiser of the clients, any of optax that moves params, also one that uses the
            loss, `value_fn` or `grad_fn`; its state starts afresh on every client. An algorithm
            that changes the clients' training wraps it: `algorithm.optimizer(optax.sgd(0.1))`.
        epochs: Number of passes over each client's data, at least 1.
        batch_size: Number of examples in a minibatch, B, at least 1.
        extras: Additional input of such a wrapped optimiser, stacked (SCAFFOLD's correction).
        clients_per_chunk: Number of clients that train side by side on a device, which takes more
            memory; None chooses, and is 1 on a CPU.
        progress: Function that is called with the number of the epoch, from 0, and its losses [M].
            All clients then finish an epoch before the next, and memory holds all their optimiser
            states instead of those of one chunk.

    Returns:
        The stacked params, the number of steps, the loss of every epoch in nats, and what the
        optimiser kept.

    Raises:
        TypeError: If params are not floating, or an argument has the wrong type.
        ValueError: If the targets do not fit the outputs, the mask does not fit params, the
            optimiser cannot update them, or a number is not positive.

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
    how = optimizer, epochs, batch_size
    cohort = _checked_cohort(model, params, federation, key, how, extras, clients_per_chunk)
    if progress is None:
        return train_cohort(cohort)
    checks.function("progress", progress, "progress(epoch, losses)")
    return epoch_by_epoch(cohort, progress)


def untrained(params: Params, num_clients: int, model: Model | None = None) -> Trained:
    """Return M clients that all have the same model, for exchanges without training.

    If a `model` is given, leaves that its mask excludes are frozen, and held once.

    Example:
        >>> untrained(jnp.zeros(2), num_clients=3).params.shape
        (3, 2)
    """
    params = checks.arrays(params)
    checks.count("num_clients", num_clients)

    def repeat(x: AnyArray) -> AnyArray:
        # On the host: an array that is bound to one device could not join clients on others. And
        # NumPy's copies need no memory, and no program for their shape.
        return np.broadcast_to(np.asarray(x), (num_clients, *np.shape(x)))

    own, frozen = (params, None) if model is None else leaves.split_trained(model, params)
    if checks.is_traced(own):
        return Trained(copies(own, num_clients), frozen=frozen)
    return Trained(jax.tree.map(repeat, own), frozen=frozen)


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
    """Predict the bytes that `train` needs on each device, including the data and all models.

    Arguments and errors are those of `train`, but nothing is trained. `progress` is not called; any
    value but None predicts training epoch by epoch.

    Example:
        >>> import numpy as np, fisherjax as fj
        >>> federation = fj.clients.federation((np.eye(4), np.zeros(4, int)), [[0, 1, 2], [3]])
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> how = {"optimizer": optax.sgd(0.1), "epochs": 2, "batch_size": 2}
        >>> need = train_memory(model, np.ones((4, 2)), federation, key=jax.random.key(0), **how)
        >>> need.resident > federation.inputs.nbytes
        True
    """
    how = optimizer, epochs, batch_size
    cohort = _checked_cohort(model, params, federation, key, how, extras, clients_per_chunk)
    return cohort_memory(cohort) if progress is None else epoch_memory(cohort)


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
    """Check the arguments of `train`, and return the local training that they define.

    Here `extras` are one client's, or their shapes.
    """
    checks.model(model)
    clients.check(federation)
    checks.floating(params)
    output_checks.gradients_stay_apart(params, federation)
    checks.mask(model, params)
    checks.optimizer("optimizer", optimizer)
    # Training by dp_sgd draws noise from the key.
    (secrecy.secret_key if local_update.hides_the_loss(model) else checks.key)(key)
    checks.count("epochs", epochs)
    batch_size = checks.count("batch_size", batch_size)
    output_checks.outputs(model, params, federation.inputs, federation.targets)
    # No client has more rows. The rest of a longer minibatch would be padding.
    batch_size = min(batch_size, federation.indices.shape[1])
    output_checks.train_outputs(model, params, federation.inputs, batch_size)
    without = _HIDDEN if local_update.hides_the_loss(model) else ""
    trained = leaves.trained(model, params)
    _optimizers.check("optimizer", optimizer, trained, without, extras)
    return LocalTraining(model, optimizer, batch_size)


def _checked_cohort(
    model: Model,
    params: Params,
    federation: Federation,
    key: Key,
    how: tuple[optax.GradientTransformation, int, int],
    extras: Any,
    clients_per_chunk: int | None,
) -> Cohort:
    """Check the arguments of `train`; `how` has the optimiser, the epochs and the batch size."""
    params = checks.arrays(params)
    if jax.tree.leaves(extras):
        clients.check(federation)
        checks.stacked(extras, federation.num_clients, "extras")
    local = check(model, params, federation, key, *how, shapes_of_one(extras))
    layout = Layout(parallel.chunk_size(clients_per_chunk, federation.num_clients), federation.mesh)
    # jit needs all arrays on the same devices, and the clients may be spread over a mesh.
    params, key = replicate((jax.tree.map(jnp.asarray, params), key), layout.mesh)
    start, statistics, frozen = leaves.split(model, params, federation.inputs, local.batch_size)
    given = ClientInputs(start, None, statistics, frozen), ClientInputs(None, extras, None, None)
    return Cohort(local, layout, given, federation, key, how[1])
