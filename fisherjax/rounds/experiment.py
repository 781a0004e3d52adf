"""Federated experiments: an algorithm, a cohort size and local training, run round after round.

One-shot runs call the pieces of a round one by one: `training.train`, `merging.summarize` and
`merging.merge`. A round is their composition as one compiled program. `run` is a generator, so
research code can stop, log or branch. A `State` is plain data, and a run that continues from an old
state repeats the rounds that followed it. Letters: M clients, K of them in a cohort.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import clients, compression, devices, leaves, parallel, training, tree
from fisherjax._core import batches, checks, output_checks, secrecy
from fisherjax._core.compiler import eval_shape
from fisherjax._finite_uploads import finite_leaves
from fisherjax._stacked import copies
from fisherjax.algorithms.base import Algorithm, Report, check_algorithm, check_same_shapes
from fisherjax.clients import Federation
from fisherjax.local_update import hides_the_loss
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.rounds._cohorts import check_availability, check_chances
from fisherjax.rounds._messages import broadcast, client_inputs, download, received
from fisherjax.rounds._one_round import (
    Experiment,
    Round,
    State,
    finish_round,
    parts_of,
    train_and_summarize,
    whole_round,
)
from fisherjax.typing import Array, Key, Model, Params


class Traffic(NamedTuple):
    """Bytes of one client in one round.

    Attributes:
        down: Bytes that the server sends to the client.
        up: Bytes of the client's update.
    """

    down: int
    up: int


class Federated(Experiment[Report]):
    """A federated experiment, as `federated` makes and checks it."""

    def init(self, params: Params, clients: int | Federation) -> State:
        """Return the state before the first round, for M clients or for those of a federation.

        Pass the federation where clients keep running statistics, as with `algorithms.fedbn`:
        the shape of its inputs is needed to find the leaves that hold them.
        """
        params = jax.tree.map(jnp.asarray, checks.arrays(params))
        num_clients = clients.num_clients if isinstance(clients, Federation) else clients
        trained = leaves.trained(self.model, params)
        inputs = clients.inputs if isinstance(clients, Federation) else None
        kept = self.algorithm.link.init_client(trained), self._kept_statistics(params, inputs)
        server = self.algorithm.link.init(trained, num_clients)
        state = State(jnp.asarray(0, jnp.int32), params, server, *copies(kept, num_clients))
        # Weakly typed scalars become strong, as they are after a round: one program for all.
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), state)

    def check(self, state: State, federation: Federation, key: Key) -> None:
        """Check that a state, data and a key fit; raise ValueError or TypeError otherwise."""
        checks.instance("state", state, State, "init(params, M)")
        clients.check(federation)
        checks.floating(state.params)
        _check_state(state, eval_shape(partial(self.init, clients=federation), state.params))
        how = self.algorithm.optimizer(self.optimizer), self.epochs, self.batch_size
        _, extras = eval_shape(self._first_client_start, state)
        training.check(self.model, state.params, federation, key, *how, extras)
        if self.algorithm.link.draws:
            secrecy.secret_key(key)
        if self.cohort > federation.num_clients:
            raise ValueError(
                f"cohort is {self.cohort}, but the federation has {federation.num_clients} "
                "clients; expected at most all of them."
            )
        check_availability(self.availability, state.number, federation.num_clients, self.cohort)
        if not finite_leaves(state.params).all():
            raise ValueError(
                "state.params are not finite: the model has diverged. Continue from an earlier "
                "state, with smaller learning rates."
            )

    def _first_client_start(self, state: State) -> tuple[Params, Any]:
        """Return what the first client starts from, and what its optimiser receives."""
        place = jnp.asarray(0) if self.algorithm.link.personal else None
        trained = leaves.trained(self.model, state.params)
        message = self.algorithm.link.broadcast(trained, state.algorithm, place)
        return self.algorithm.link.receive(message, jax.tree.map(lambda x: x[0], state.local))

    def _kept_statistics(self, params: Params, inputs: Array | None) -> dict[str, Array]:
        """Return the initial statistics that each client keeps, by name."""
        link = self.algorithm.link
        others = leaves.split_trained(self.model, params)[1]
        keeps = [*tree.by_name(others)] if link.mix else link.keeps(others)
        if self.model.apply_train is None or not keeps:
            return {}
        if inputs is None:
            raise ValueError(
                f"Clients keep running statistics, some of {sorted(keeps)}; expected init(params, "
                "federation) instead of a number of clients, to find out which."
            )
        # At most as long as the data set: minibatches have no more rows.
        length = min(self.batch_size, batches.num_rows(inputs))
        statistics = tree.by_name(leaves.split(self.model, params, inputs, length).statistics)
        return {name: x for name, x in statistics.items() if name in keeps}

    def round(self, state: State, federation: Federation, key: Key) -> tuple[State, Round[Report]]:
        """Run one round; compiled once for equal experiments and shapes."""
        mesh = federation.mesh
        layout = Layout(self.clients_per_chunk, mesh)
        if devices.share_memory(mesh):
            # Devices of one memory gather the updates on one of them, and merge them there, once.
            key = devices.replicate(key, mesh)
            result = train_and_summarize(self, layout, state, federation, key)
            return finish_round(self, state, in_order(Spread(result), mesh))
        # A new state is on one device; a state that a round returned is on the mesh already.
        if mesh is not None and devices.mesh_of(state.params) is None:
            state = devices.replicate(state, mesh)
        return whole_round(self, layout, state, federation, devices.replicate(key, mesh))

    def models(self, state: State, num_clients: int) -> Params:
        """Return the model that each of M clients would start from now, leaves [M, ...].

        These are copies of the global model, except for methods that keep a model for each client,
        and for `algorithms.keep_local`.
        """
        places = jnp.arange(checks.count("num_clients", num_clients))
        parts = leaves.split_by_name(state.params, tuple(state.statistics), ())
        parts = parts._replace(trained=leaves.trained(self.model, state.params))
        kept = state.local, state.statistics
        message = broadcast(self.algorithm, state.algorithm, parts.trained, places)
        given = client_inputs(self.algorithm, *message, parts, kept)
        return received((given[0]._replace(frozen=state.params), given[1]), num_clients)

    def traffic(self, params: Params, federation: Federation) -> Traffic:
        """Count the bytes that one client receives and sends in a round, from shapes alone."""
        params = checks.arrays(params)
        output_checks.outputs(self.model, params, federation.inputs, federation.targets)
        state = eval_shape(partial(self.init, clients=federation), params)

        def received(state: State) -> dict[str, Any]:
            parts = parts_of(self, state.params, federation)
            return download(self.algorithm, parts, state.algorithm, 0)

        # The size depends neither on the number of epochs nor on that of clients.
        round_of_one = partial(train_and_summarize, self._replace(cohort=1, epochs=1), Layout(1))
        sent = eval_shape(round_of_one, state, federation, jax.random.key(0)).update
        return Traffic(compression.size(eval_shape(received, state)), compression.size(sent))


def federated(
    model: Model,
    algorithm: Algorithm[Report],
    *,
    cohort: int,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None = None,
    availability: Callable[[Array], Array] | None = None,
    must_improve: bool = False,
) -> Federated[Report]:
    """Make a federated experiment of any algorithm.

    A round draws K clients without replacement, trains each from what the algorithm broadcasts,
    and aggregates their updates. A client whose update is not finite is left out, and what it kept
    before the round stays. If no client is left or the merged model is not finite, the round
    changes only the number of the state.

    Args:
        model: Model that the clients train.
        algorithm: Method that defines the clients' training and the server's merge.
        cohort: Number of clients in a round, K, from 1 to M.
        optimizer: Optimiser of the clients, any of optax; its state starts afresh in every round.
        epochs: Number of local epochs in a round, at least 1.
        batch_size: Number of examples in a minibatch.
        clients_per_chunk: Number of clients that train side by side on a device, up to K; None
            chooses, and is 1 on a CPU.
        availability: Function from the number of a round to the clients' chances [M], zero or more,
            in proportion to which the cohort is drawn; None draws all alike. A client with the
            chance zero never takes part. Weights in the merge are not changed by it.
        must_improve: Whether to leave out a client whose trained model has a higher loss on the
            client's own examples than the model that it received, at the cost of two passes over
            them. A client whose training failed harms merges by curvature more than a mean.

    Returns:
        The experiment, as plain data: equal experiments share a program.

    Raises:
        TypeError: If an argument has the wrong type.
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

    Source: McMahan et al., AISTATS 2017, algorithm 1, with any local training and any merge.
    """
    checks.model(model)
    check_algorithm(algorithm)
    check_same_shapes(algorithm)
    for name, value in (("cohort", cohort), ("epochs", epochs), ("batch_size", batch_size)):
        checks.count(name, value)
    checks.optimizer("optimizer", optimizer)
    if availability is not None:
        checks.function("availability", availability, "lambda number: chances")
    checks.instance("must_improve", must_improve, bool, "True or False")
    if must_improve and hides_the_loss(model):
        raise ValueError(
            "must_improve compares losses of the clients' examples, which the model's private "
            "training does not protect; expected must_improve=False."
        )
    chunk = parallel.chunk_size(clients_per_chunk, cohort)
    how = optimizer, epochs, batch_size, chunk, availability, must_improve
    return Federated(model, algorithm, cohort, *how)


def run(
    experiment: Federated[Report], state: State, federation: Federation, *, key: Key, rounds: int
) -> Iterator[tuple[State, Round[Report]]]:
    """Run rounds one after another, and yield the result of each.

    Cohorts and minibatches depend only on the key, the number of the round and the client. Two
    algorithms with the same key therefore see the same ones, and a run that continues from an old
    state equals the uninterrupted run bit for bit.

    Args:
        experiment: Result of `federated`.
        state: `experiment.init(params, M)`, or a state that `run` yielded.
        federation: Data of the clients.
        key: Random key, folded by round, purpose and client.
        rounds: Number of rounds, at least 1.

    Yields:
        The state after each round, and the record of the round. Reading an array of them waits for
        the computation.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the state, its params or the data do not fit. Arguments are checked by the
            call itself, before the first round.

    Example: see `federated`.
    """
    checks.count("rounds", rounds)
    checks.instance("experiment", experiment, Federated, "rounds.federated(...)")
    experiment.check(state, federation, key)
    check_chances(experiment.availability, state.number, rounds)

    # A generator of its own: the body of a generator runs, and so checks, at the first `next` only.
    def generate(state: State) -> Iterator[tuple[State, Round[Report]]]:
        # Numbers are counted here, as reading one from a state would wait for its round.
        first = int(state.number)
        for number in range(first, first + rounds):
            state, done = experiment.round(state, federation, key)
            yield state, done._replace(number=number)

    return generate(state)


def _check_state(state: State, expected: State) -> None:
    for field in ("algorithm", "local", "statistics"):
        given, wanted = (_described(getattr(x, field)) for x in (state, expected))
        if given != wanted:
            raise ValueError(
                f"state.{field} has leaves {given}; expected {wanted} for these params. Start with "
                "init(params, M) of this experiment, or continue from a state that it yielded."
            )


def _described(values: Any) -> dict[str, str]:
    described = [f"{x.dtype}{list(jnp.shape(x))}" for x in jax.tree.leaves(values)]
    return dict(zip(tree.names(values), described, strict=True))
