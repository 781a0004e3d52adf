"""The program that trains a cohort."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import clients, devices, leaves, local_update, parallel, tree
from fisherjax._core.compiler import jit
from fisherjax.clients import Federation
from fisherjax.devices import Memory
from fisherjax.local_update import Given, LocalTraining, State, client_epochs, first_state
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.typing import Array, Key, Params

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
    start: Params | None = None
    steps: Array | None = None
    loss: Array | None = None
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


def train_cohort(cohort: Cohort) -> Trained:
    """Train clients to the end, as `train` does, without checks."""
    found, loss = in_order(_run(*cohort.to_the_end()), cohort.layout.mesh)
    # [M, capacity] to [M, epochs]: the room that is left over is cut off.
    return _trained(cohort, found, loss[:, : cohort.epochs])


def cohort_memory(cohort: Cohort) -> Memory:
    """Predict the bytes that `train_cohort` needs on each device, as `train_memory` does."""
    return devices.memory(_run, *cohort.to_the_end())


def _trained(cohort: Cohort, found: tuple[Params, Params, Any], loss: Array) -> Trained:
    common, own = cohort.given
    params, statistics, kept = found
    sizes = local_update.sizes(cohort.local, cohort.federation)
    batches = clients.num_batches(sizes, cohort.local.batch_size)
    start, steps = common.start if own.start is None else own.start, loss.shape[1] * batches
    return Trained(params, start, steps, loss, kept, statistics, common.frozen)


def _first_state(local: LocalTraining, given: Given) -> State:
    return first_state(local, given.start, given.statistics)


def epoch_by_epoch(cohort: Cohort, progress: Callable[[int, Array], None]) -> Trained:
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
