"""The compiled program that trains a cohort, and its result."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import clients, devices, leaves, local_update, parallel, tree
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape, jit
from fisherjax._device_division import Division, divide
from fisherjax._stacked import copies
from fisherjax.clients import Federation
from fisherjax.devices import Memory
from fisherjax.local_update import ClientInputs, LocalTraining, State, client_epochs, first_state
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.typing import Array, Key, Params, Scalar

# A program has room for the losses of this many epochs, or of 2, 4, 8 ... times as many.
_EPOCHS = 16


class Trained(NamedTuple):
    """Result of local training, and what an algorithm's `summarize` receives.

    `Trained(stacked params)` stands for models that were trained elsewhere. `summarize` receives
    one client's part, without the client axis.

    Attributes:
        params: Trained models, leaves [M, ...]; of a model with a mask only the leaves that it
            trains, see `leaves`.
        start: Model that training started from, one for all clients or stacked; None if unknown.
        steps: [M] number of optimiser steps.
        loss: [M, epochs] mean training loss in nats, measured during each epoch; 0 for a client
            without examples.
        extras: What the optimiser kept of its state, stacked, see `local_update.keep_state`.
        statistics: Leaves that training changed without a gradient, stacked; None if there are
            none.
        frozen: Leaves that training did not change, once for all clients; None if there are none.
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
        """All leaves of one client's network, with which `summarize` can run it."""
        return leaves.join(self.params, self.statistics, self.frozen)

    @property
    def models(self) -> Params:
        """All leaves of every client's network, [M, ...]; frozen leaves are repeated M times."""
        frozen = copies(self.frozen, jax.tree.leaves(self.params)[0].shape[0])
        return leaves.join(self.params, self.statistics, frozen)

    def __repr__(self) -> str:
        """Describe the models in one line: the fields that are present, and their size."""
        held = [
            name for name, value in zip(self._fields, self, strict=True) if jax.tree.leaves(value)
        ]
        return tree.describe("Trained", tuple(self), " and ".join(held))


class Cohort(NamedTuple):
    """Clients that are ready to train, with checked arguments: the input of `train_cohort`.

    Attributes:
        local: Local training of each client.
        layout: Number of clients side by side, and their devices.
        given: What all clients start with, and what each starts with, stacked; each field is None
            in one of them.
        federation: Data of the clients.
        key: Random key, folded by client and epoch.
        epochs: Number of passes over each client's data.
    """

    local: LocalTraining
    layout: Layout
    given: tuple[ClientInputs, ClientInputs]
    federation: Federation
    key: Key
    epochs: int

    def arguments(self, capacity: int, states: State | None, between: tuple[int, int]) -> tuple:
        """Return the arguments of `_run` for epochs `between[0]` to before `between[1]`."""
        division = divide(self.federation.sizes, *self.layout)
        arrays = self.given, (self.federation, division), self.key, (*between, self.epochs)
        return self.local, self.layout, capacity, states, *arrays

    def arguments_of_all_epochs(self) -> tuple:
        """Return the arguments of `_run` for all epochs of clients that start afresh."""
        # With room for the losses of more epochs, another number of epochs need not compile again.
        capacity = max(_EPOCHS, 1 << (int(self.epochs) - 1).bit_length())
        return self.arguments(capacity, None, (0, self.epochs))


def train_cohort(cohort: Cohort) -> Trained:
    """Train clients for all epochs, as `train` does, without checks."""
    found, loss = in_order(_run(*cohort.arguments_of_all_epochs()), cohort.layout.mesh)
    # [M, capacity] to [M, epochs].
    return _result(cohort, found, loss[:, : cohort.epochs])


def cohort_memory(cohort: Cohort) -> Memory:
    """Predict the bytes that `train_cohort` needs on each device, as `train_memory` does."""
    return devices.memory(_run, *cohort.arguments_of_all_epochs())


def epoch_memory(cohort: Cohort) -> Memory:
    """Predict the bytes that `epoch_by_epoch` needs on each device."""
    states = eval_shape(partial(_first_state, cohort.local), cohort.given[0])
    states = devices.stacked_shapes(states, cohort.federation.num_clients, cohort.layout.mesh)
    return devices.memory(_run, *cohort.arguments(1, states, (0, cohort.epochs)))


def _result(cohort: Cohort, found: tuple[Params, Params, Any], loss: Array) -> Trained:
    common, own = cohort.given
    params, statistics, kept = found
    start = common.start if own.start is None else own.start
    steps = _steps(cohort.local, cohort.federation, loss.shape[1])
    return Trained(params, start, steps, loss, kept, statistics, common.frozen)


def _steps(local: LocalTraining, federation: Federation, epochs: int) -> Any:
    if local.model.positions is None and checks.is_in_host_memory(federation.sizes):
        # A few integers: NumPy compiles no program for them.
        sizes: Any = np.asarray(federation.sizes)
        return epochs * clients.num_batches(sizes, local.batch_size)
    return _steps_on_device(local, federation, epochs)


@partial(jit, static_argnums=0)
def _steps_on_device(local: LocalTraining, federation: Federation, epochs: Scalar) -> Array:
    return epochs * clients.num_batches(local_update.sizes(local, federation), local.batch_size)


def _first_state(local: LocalTraining, given: ClientInputs) -> State:
    return first_state(local, given.start, given.statistics)


def epoch_by_epoch(cohort: Cohort, progress: Callable[[int, Array], None]) -> Trained:
    """Train all clients for an epoch before the next, and call `progress` after each epoch."""
    mesh = cohort.layout.mesh
    states = _first_states(cohort.local, cohort.federation.num_clients, cohort.given[0])
    # Placed as the results are, so that the first epoch runs the program of the second.
    states = in_order(Spread(states), mesh)
    losses = []
    for epoch in range(cohort.epochs):
        # The number of the epoch is traced: every epoch runs the same program.
        found = _run(*cohort.arguments(1, states, (epoch, epoch + 1)))
        states, loss = in_order(found, mesh)
        losses.append(loss)
        progress(epoch, loss)
    # Most optimisers change nothing at the end: what follows then compiles no program.
    params = _final_params(states) if local_update.ends_elsewhere(states) else states.params
    on_host = all(map(checks.is_in_host_memory, losses))
    loss = jax.device_put(np.stack(losses, axis=1)) if on_host else _stack(losses)
    return _result(cohort, (params, states.statistics, local_update.kept_state(states)), loss)


@jit
def _final_params(states: State) -> Params:
    return jax.vmap(local_update.trained_params)(states)


@jit
def _stack(losses: list[Array]) -> Array:
    return jnp.stack(losses, axis=1)


@partial(jit, static_argnums=(0, 1))
def _first_states(local: LocalTraining, num_clients: int, given: ClientInputs) -> State:
    return jax.vmap(lambda _: _first_state(local, given))(jnp.arange(num_clients))


# States are donated, so that memory holds those of all clients once between epochs.
@partial(jit, static_argnums=(0, 1, 2), donate_argnums=3, autotune=True)
def _run(
    local: LocalTraining,
    layout: Layout,
    capacity: int,
    states: State | None,
    given: tuple[ClientInputs, ClientInputs],
    divided: tuple[Federation, Division | None],
    key: Key,
    epochs: tuple[Array, Array, Array],
) -> Spread:
    """Train each client over the epochs (first, last, total): from `first` to before `last`.

    Returns:
        Without states, clients start afresh; the results are their trained leaves, statistics and
        what the optimiser kept, and the losses [M, capacity]. With states, they are the new states
        and the loss [M] of the one epoch.
    """
    federation, division = divided

    def one(own: Any, common: ClientInputs, federation: Federation, key: Key, epochs: Any) -> Any:
        # One client's slice: its place, its state if it continues, and its own inputs.
        place, state, mine = own
        first, last, total = epochs
        own_given = ClientInputs(
            *(c if o is None else o for c, o in zip(common, mine, strict=True))
        )
        epoch = client_epochs(local, federation, place, key, own_given, total)

        def body(number: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, loss = epoch(number, carry[0])
            return state, carry[1].at[number - first].set(loss)

        begin = _first_state(local, own_given) if state is None else state
        losses = jnp.zeros(capacity, jnp.result_type(float))
        # The length is traced, so that another number of epochs need not compile again.
        end, losses = jax.lax.fori_loop(first, last, body, (begin, losses))
        # Dropping the optimiser's state keeps only the states of one chunk in memory.
        found = local_update.trained_params(end), end.statistics, local_update.kept_state(end)
        return (found, losses) if state is None else (end, losses[0])

    return parallel.spread_clients(
        one,
        (jnp.arange(federation.num_clients), states, given[1]),
        given[0],
        federation,
        key,
        jax.tree.map(jnp.asarray, epochs),
        sizes=federation.sizes,
        division=division,
        **layout._asdict(),
    )
