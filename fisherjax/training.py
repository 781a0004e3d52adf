"""Local training: every client runs its own optimiser on its own examples.

One compiled program trains all clients. Client i takes ceil(n_i / B) steps an epoch: its examples
are shuffled, the last short batch is kept and averaged over its own examples. Minibatches are
gathered from the one copy of the data. One-shot runs and rounds train by the same function,
`train_cohort`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fisherjax import _optimizers, clients, devices, leaves, local_update, parallel, tree
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape, jit
from fisherjax.clients import Federation
from fisherjax.devices import Memory, replicate
from fisherjax.local_update import Given, LocalTraining, State, client_epochs, first_state
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.typing import AnyArray, Array, Key, Model, Params

_HIDDEN = "privacy.dp_sgd tells it no loss, by which its steps would show the data."
# The losses of this many epochs, or of twice as many and so on, have room in the program.
_EPOCHS = 16


class Trained(NamedTuple):
    """What local training yields, and what an algorithm summarizes.

    Models that were trained elsewhere are `Trained(stacked params)`. `summarize` of one client sees
    the same without the client axis.

    Attributes:
        params: Stacked, leaves [M, ...]; of a network with a mask the trained ones only, see
            `leaves`.
        start: What these were trained from, one model or stacked; None if that is not known.
        steps: [M] optimiser steps taken.
        loss: [M, epochs] mean training loss in nats, measured while it ran; 0 without data.
        extras: Stacked, what an optimiser kept of its state, see `local_update.keeping`.
        statistics: Stacked, the leaves that training changed without a gradient; None if there are
            none.
        frozen: The leaves that it left alone, once for all clients; None if there are none.
    """

    params: Params
    start: Params = None
    steps: Array | None = None
    loss: Any = None
    extras: Any = ()
    statistics: Params = None
    frozen: Params = None

    @property
    def whole(self) -> Params:
        """All leaves of one client's network, as `summarize` needs them to run it."""
        return leaves.join(self.params, self.statistics, self.frozen)

    @property
    def models(self) -> Params:
        """All leaves of every client's network, [M, ...], the frozen ones M times."""
        number = jax.tree.leaves(self.params)[0].shape[0]
        copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), self.frozen)
        return leaves.join(self.params, self.statistics, copies)

    def __repr__(self) -> str:
        """Describe the models in one line: which fields there are, how much they hold."""
        held = [
            name for name, value in zip(self._fields, self, strict=True) if jax.tree.leaves(value)
        ]
        return tree.line("Trained", tuple(self), " and ".join(held))


class Cohort(NamedTuple):
    """Clients about to train, all arguments checked: what `train_cohort` runs.

    Attributes:
        local: What each of them does.
        layout: How many side by side, and on which devices.
        given: One for everybody, and a stacked one for each client, each field in one of them.
        federation: Their data.
        key: Folded by client and epoch.
        epochs: Passes over each client's data.
    """

    local: LocalTraining
    layout: Layout
    given: tuple[Given, Given]
    federation: Federation
    key: Key
    epochs: int

    def program(self, capacity: int, states: State | None, between: tuple[int, int]) -> tuple:
        """Give the arguments of `_run`, for the epochs between two."""
        arrays = self.given, self.federation, self.key, (*between, self.epochs)
        return self.local, self.layout, capacity, states, *arrays

    def to_the_end(self) -> tuple:
        """Give the arguments of `_run`, for all epochs of clients that start afresh."""
        # The losses of so many epochs have room: another number of epochs need not compile again.
        capacity = max(_EPOCHS, 1 << (int(self.epochs) - 1).bit_length())
        return self.program(capacity, None, (0, self.epochs))


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
    return _epoch_by_epoch(cohort, progress)


def untrained(params: Params, num_clients: int, model: Model | None = None) -> Trained:
    """Give every client the same model, for exchanges without training.

    With a model the leaves that its mask leaves out are there once.

    Example:
        >>> untrained(jnp.zeros(2), num_clients=3).params.shape
        (3, 2)
    """
    params = checks.arrays(params)
    checks.count("num_clients", num_clients)

    def stack(x: AnyArray) -> Array:
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


def train_cohort(cohort: Cohort) -> Trained:
    """Train clients to the end, as `train` does, without checks."""
    found, loss = in_order(_run(*cohort.to_the_end()), cohort.layout.mesh)
    # [M, capacity] to [M, epochs]: the room that is left over is cut off.
    return _trained(cohort, found, loss[:, : cohort.epochs])


def cohort_memory(cohort: Cohort) -> Memory:
    """Predict the bytes that `train_cohort` needs on each device, as `train_memory` does."""
    return devices.memory(_run, *cohort.to_the_end())


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


def _trained(cohort: Cohort, found: tuple[Params, Params, Any], loss: Array) -> Trained:
    common, own = cohort.given
    params, statistics, kept = found
    sizes = local_update.sizes(cohort.local, cohort.federation)
    batches = clients.num_batches(sizes, cohort.local.batch_size)
    start, steps = common.start if own.start is None else own.start, loss.shape[1] * batches
    return Trained(params, start, steps, loss, kept, statistics, common.frozen)


def _first_state(local: LocalTraining, given: Given) -> State:
    return first_state(local, given.start, given.statistics)


def _epoch_by_epoch(cohort: Cohort, progress: Callable[[int, Array], None]) -> Trained:
    """Train all clients for an epoch before the next, so that something can be shown after each."""
    mesh = cohort.layout.mesh
    states = _first_states(cohort.local, cohort.federation.num_clients, cohort.given[0])
    # Where results are put: the first epoch must not compile another program than the second.
    states = in_order(Spread(states), mesh)
    losses = []
    for epoch in range(cohort.epochs):
        # The number of the epoch is traced: every epoch runs the same program.
        found = _run(*cohort.program(1, states, (epoch, epoch + 1)))
        states, loss = in_order(found, mesh)
        losses.append(loss)
        progress(epoch, loss[:, 0])
    # Each [M, 1], as there was room for one epoch; together [M, epochs].
    loss = jnp.concatenate(losses, axis=1)
    params = jax.vmap(local_update.trained)(states)
    return _trained(cohort, (params, states.statistics, local_update.kept(states)), loss)


@partial(jit, static_argnums=(0, 1))
def _first_states(local: LocalTraining, num_clients: int, given: Given) -> State:
    return jax.vmap(lambda _: _first_state(local, given))(jnp.arange(num_clients))


# The states are donated: between epochs those of all clients are not held twice.
@partial(jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _run(
    local: LocalTraining,
    layout: Layout,
    capacity: int,
    states: State | None,
    given: tuple[Given, Given],
    federation: Federation,
    key: Key,
    epochs: tuple[Array, Array, Array],
) -> Spread:
    """Train each client from epoch `first` to before `last` of `all`.

    Without states it starts afresh, and gives its trained leaves, its statistics and what the
    optimiser kept; otherwise the states. The losses have room for `capacity` epochs.
    """

    def one(own: Any, common: Given, federation: Federation, key: Key, epochs: Any) -> Any:
        # One client's slice: its place, its state if it goes on, and what is its own.
        place, state, mine = own
        first, last, total = epochs
        own_given = Given(*(c if o is None else o for c, o in zip(common, mine, strict=True)))
        epoch = client_epochs(local, federation, place, key, own_given, total)

        def body(number: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, loss = epoch(number, carry[0])
            return state, carry[1].at[number - first].set(loss)

        begin = _first_state(local, own_given) if state is None else state
        losses = jnp.zeros(capacity, jnp.result_type(float))
        # A loop of traced length: another number of epochs need not compile again.
        end, losses = jax.lax.fori_loop(first, last, body, (begin, losses))
        # At the end the optimiser's state is dropped: only those of a chunk are ever in memory.
        found = local_update.trained(end), end.statistics, local_update.kept(end)
        return found if state is None else end, losses

    return parallel.spread_clients(
        one,
        (jnp.arange(federation.num_clients), states, given[1]),
        given[0],
        federation,
        key,
        jax.tree.map(jnp.asarray, epochs),
        sizes=federation.sizes,
        **layout._asdict(),
    )
