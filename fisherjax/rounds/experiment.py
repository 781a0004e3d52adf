"""Federated experiments: rounds that follow one another."""

from collections.abc import Iterator
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import clients, devices, leaves, parallel, training, tree
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape
from fisherjax.algorithms.base import Algorithm, check_algorithm, check_same_shapes
from fisherjax.clients import Federation
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.rounds._one_round import (
    Experiment,
    Round,
    State,
    broadcast,
    client_inputs,
    copies,
    finish_round,
    train_and_summarize,
    whole_round,
)
from fisherjax.typing import Array, Key, Model, Params


class Traffic(NamedTuple):
    """Bytes of one client in one round: what the server sends it, and its update."""

    down: int
    up: int


class Federated(Experiment):
    """A federated experiment: what a round is compiled for. Made, and checked, by `federated`."""

    def init(self, params: Params, clients: int | Federation) -> State:
        """Make the state before the first round, for M clients, or for those of a federation.

        Where clients keep running statistics of their own, as under `fedbn`, it has to be told the
        federation, from the shape of whose inputs it learns which leaves these are.
        """
        params = jax.tree.map(jnp.asarray, checks.arrays(params))
        num_clients = clients.num_clients if isinstance(clients, Federation) else clients
        trained = leaves.trained(self.model, params)
        kept = self._kept(params, clients.inputs if isinstance(clients, Federation) else None)
        own = self.algorithm.link.init_client(trained), kept
        own = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *x.shape)), own)
        server = self.algorithm.link.init(trained, num_clients)
        state = State(jnp.asarray(0, jnp.int32), params, server, *own)
        # Weakly typed scalars become strong, as they are after a round: one program for all.
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), state)

    def check(self, state: State, federation: Federation, key: Key) -> None:
        """Refuse a state, data or a key that do not fit, with a ValueError or TypeError."""
        checks.instance("state", state, State, "init(params, M)")
        clients.check(federation)
        checks.floating(state.params)
        _check_fits(state, eval_shape(partial(self.init, clients=federation), state.params))
        how = self.algorithm.optimizer(self.optimizer), self.epochs, self.batch_size
        _, extras = eval_shape(self._received, state)
        training.check(self.model, state.params, federation, key, *how, extras)
        if self.cohort > federation.num_clients:
            raise ValueError(
                f"cohort is {self.cohort}, but the federation has {federation.num_clients} "
                "clients; expected at most all of them."
            )
        if not tree.finite_leaves(state.params).all():
            raise ValueError(
                "state.params are not finite: the model has diverged. Start from a state before "
                "that, with smaller learning rates."
            )

    def _received(self, state: State) -> tuple[Params, Any]:
        """Give what the first client starts from, and what its optimiser is given."""
        place = jnp.asarray(0) if self.algorithm.link.personal else None
        trained = leaves.trained(self.model, state.params)
        message = self.algorithm.link.broadcast(trained, state.algorithm, place)
        return self.algorithm.link.receive(message, jax.tree.map(lambda x: x[0], state.local))

    def _kept(self, params: Params, inputs: Array | None) -> dict[str, Array]:
        """Give the statistics that each client keeps, by name."""
        link = self.algorithm.link
        others = leaves.apart(self.model, params)[1]
        keeps = [*tree.by_name(others)] if link.mix else link.keeps(others)
        if self.model.apply_train is None or not keeps:
            return {}
        if inputs is None:
            raise ValueError(
                f"Clients keep running statistics of their own, some of {sorted(keeps)}; expected "
                "init(params, federation), not a number of clients, to know which."
            )
        # No longer than the whole data set: as many rows as a minibatch has.
        length = min(self.batch_size, inputs.shape[0])
        statistics = tree.by_name(leaves.split(self.model, params, inputs, length).statistics)
        return {name: x for name, x in statistics.items() if name in keeps}

    def round(self, state: State, federation: Federation, key: Key) -> tuple[State, Round]:
        """Play one round; compiled once for equal experiments and shapes."""
        mesh = federation.mesh
        layout = Layout(self.clients_per_chunk, mesh)
        if devices.share_memory(mesh):
            # In pieces: what clients send comes to one device, where the server's half runs once.
            sent = train_and_summarize(
                self, layout, state, federation, devices.replicate(key, mesh)
            )
            return finish_round(self, state, in_order(Spread(sent), mesh))
        # A new state is on one device; one that a round gave is on the mesh already.
        if mesh is not None and devices.mesh_of(state.params) is None:
            state = devices.replicate(state, mesh)
        return whole_round(self, layout, state, federation, devices.replicate(key, mesh))

    def models(self, state: State, num_clients: int) -> Params:
        """Give the own model of each of M clients, what it would start from now, [M, ...].

        That is the global one M times, but for `algorithms.keep_local` and methods that keep a
        model for each client.
        """
        places = jnp.arange(checks.count("num_clients", num_clients))
        parts = leaves.named(state.params, tuple(state.statistics), ())
        parts = parts._replace(trained=leaves.trained(self.model, state.params))
        both = client_inputs(self.algorithm, state, parts, (state.local, state.statistics), places)
        own = [o if c is None else copies(c, num_clients) for c, o in zip(*both, strict=True)]
        return leaves.join(own[0], own[2], copies(state.params, num_clients))

    def traffic(self, params: Params, federation: Federation) -> Traffic:
        """Count what one client receives and sends; nothing is computed."""
        params = checks.arrays(params)
        checks.outputs(self.model, params, federation.inputs, federation.targets)
        state = eval_shape(partial(self.init, clients=federation), params)

        def sent(state: State) -> Any:
            length = min(self.batch_size, federation.indices.shape[1])
            own = leaves.split(self.model, state.params, federation.inputs, length)
            shared = tree.by_name(own.statistics).items()
            kept = self.algorithm.link.keeps(own.statistics)
            statistics = [x for name, x in shared if name not in kept]
            return broadcast(self.algorithm, state, own.trained, jnp.arange(1))[0], statistics

        def update(state: State, federation: Federation) -> Any:
            # What is sent is as large after one epoch of one client as after many of a cohort.
            one = self._replace(cohort=1, epochs=1)
            return train_and_summarize(one, Layout(1), state, federation, jax.random.key(0)).update

        up = eval_shape(update, state, federation)
        return Traffic(*map(_bytes, (eval_shape(sent, state), up)))


def federated(
    model: Model,
    algorithm: Algorithm[Report],
    *,
    cohort: int,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None = None,
) -> Federated[Report]:
    """Make rounds of any algorithm.

    A round draws K clients without replacement, trains each for some epochs from what the algorithm
    broadcasts, and aggregates what they send. A client whose update is not finite is left out and
    keeps what it kept; where nobody is left, or the merged model is not finite, the round changes
    nothing but the number.

    Args:
        model: What clients train.
        algorithm: How they train and how updates are merged.
        cohort: K, from 1 to M.
        optimizer: Of the clients, any of optax; starts afresh in every round.
        epochs: Of local training in a round, at least 1.
        batch_size: Of the clients' minibatches.
        clients_per_chunk: Side by side on a device, up to K; None chooses, 1 on a CPU.

    Returns:
        The experiment, plain data: equal ones share a program.

    Raises:
        TypeError: If an argument has the wrong kind.
        ValueError: If a number is out of range.

    Example:
        >>> import jax, optax, numpy as np, fisherjax as fj
        >>> data = np.eye(4, dtype=np.float32), np.array([0, 0, 1, 1])
        >>> federation = fj.clients.federation(data, [[0, 2], [1, 3]])
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> how = {"cohort": 1, "optimizer": optax.sgd(1.0), "epochs": 2, "batch_size": 2}
        >>> experiment = federated(model, fj.algorithms.fedavg(), **how)
        >>> state = experiment.init(np.zeros((4, 2), np.float32), federation.num_clients)
        >>> for state, done in run(experiment, state, federation, key=jax.random.key(0), rounds=2):
        ...     print(done.number, done.cohort.shape, done.loss < 0.7)
        0 (1,) True
        1 (1,) True

    Source: McMahan et al., AISTATS 2017, algorithm 1, for any way to train and to merge.
    """
    checks.model(model)
    check_algorithm(algorithm)
    check_same_shapes(algorithm)
    for name, value in (("cohort", cohort), ("epochs", epochs), ("batch_size", batch_size)):
        checks.count(name, value)
    checks.optimizer("optimizer", optimizer)
    chunk = parallel.chunk_size(clients_per_chunk, cohort)
    return Federated(model, algorithm, cohort, optimizer, epochs, batch_size, chunk)


def run(
    experiment: Federated[Report], state: State, federation: Federation, *, key: Key, rounds: int
) -> Iterator[tuple[State, Round[Report]]]:
    """Run rounds one after another, and yield after each.

    Cohorts and minibatches depend on the key, the round's number and the client only: two
    algorithms with the same key see the same ones, and a run that goes on from an old state is the
    run that was not interrupted, bit for bit.

    Args:
        experiment: What `federated` made.
        state: `experiment.init(params, M)`, or one that was yielded.
        federation: The clients' data.
        key: Of everything random, folded by round, purpose and client.
        rounds: How many, at least 1.

    Yields:
        The state after each round, and what happened in it; reading an array waits for it.

    Raises:
        TypeError: If an argument has the wrong kind.
        ValueError: If the state, its params or the data do not fit; before the first round.

    Example: see `federated`.
    """
    checks.count("rounds", rounds)
    checks.instance("experiment", experiment, Federated, "rounds.federated(...)")
    experiment.check(state, federation, key)

    # The body of a generator waits for the first round: what is checked above is checked at once.
    def going(state: State) -> Iterator[tuple[State, Round]]:
        # Counted here: to read it off a state would wait for the round.
        first = int(state.number)
        for number in range(first, first + rounds):
            state, done = experiment.round(state, federation, key)
            yield state, done._replace(number=number)

    return going(state)


def _bytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _check_fits(state: State, expected: State) -> None:
    for field in ("algorithm", "local", "statistics"):
        given, wanted = (_described(getattr(x, field)) for x in (state, expected))
        if given != wanted:
            raise ValueError(
                f"state.{field} has leaves {given}; expected {wanted} for these params. Start with "
                "init(params, M) of this experiment, or go on with a state that it yielded."
            )


def _described(values: Any) -> dict[str, str]:
    described = [f"{x.dtype}{list(jnp.shape(x))}" for x in jax.tree.leaves(values)]
    return dict(zip(tree.names(values), described, strict=True))
