"""Federated rounds: broadcast, train a cohort, summarize, aggregate, again.

A round is one compiled program, made of the pieces that one-shot runs call one by one:
`training.train_cohort`, `merging.summarize_cohort` and the algorithm's `aggregate`. `run` is a
generator, so that research code can stop, log or branch: a `State` is plain data, and going on from
an old one repeats what followed it. Letters: M clients, K of them in a cohort.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import checks, clients, devices, merging, parallel, training, tree
from fisherjax.algorithms.base import Algorithm, check_algorithm, check_same_shapes
from fisherjax.clients import Federation
from fisherjax.compiler import eval_shape, jit
from fisherjax.local_update import LocalTraining
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.training import Trained
from fisherjax.typing import Array, Key, Model, Params


class State(NamedTuple):
    """What goes from round to round.

    Attributes:
        number: Of the next round, from 0.
        params: The global model.
        algorithm: What the server keeps, for instance SCAFFOLD's control.
        private: What each client keeps, stacked [M, ...].
    """

    number: Array
    params: Params
    algorithm: Any
    private: Any


class Round(NamedTuple):
    """What happened in one round.

    Attributes:
        number: From 0; a Python integer in what `run` yields.
        cohort: [K] places of the clients that took part.
        start: The model that was sent to them.
        trained: What they trained, stacked [K, ...].
        loss: Mean training loss in nats in the last local epoch, of those not left out.
        diverged: [K] True for a client whose update was not finite and was left out.
        info: What the algorithm reports.
    """

    number: int | Array
    cohort: Array
    start: Params
    trained: Trained
    loss: Array
    diverged: Array
    info: Any


class Traffic(NamedTuple):
    """Bytes of one client in one round: what the server sends it, and its update."""

    down: int
    up: int


class Federated(NamedTuple):
    """A federated experiment: what a round is compiled for. Made, and checked, by `federated`."""

    model: Model
    algorithm: Algorithm
    cohort: int
    optimizer: optax.GradientTransformation
    epochs: int
    batch_size: int
    clients_per_chunk: int

    def init(self, params: Params, num_clients: int) -> State:
        """Make the state before the first round, for M clients."""
        params = jax.tree.map(jnp.asarray, checks.arrays(params))
        own = self.algorithm.link.init_client(params)
        private = jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *x.shape)), own)
        kept = self.algorithm.link.init(params, num_clients)
        state = State(jnp.asarray(0, jnp.int32), params, kept, private)
        # Weakly typed scalars become strong, as they are after a round: one program for all.
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.result_type(x)), state)

    def check(self, state: State, federation: Federation, key: Key) -> None:
        """Refuse a state, data or a key that do not fit, with a ValueError or TypeError."""
        checks.instance("state", state, State, "init(params, M)")
        clients.check(federation)
        checks.floating(state.params)
        init = partial(self.init, num_clients=federation.num_clients)
        _check_fits(state, eval_shape(init, state.params))
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
        message = self.algorithm.link.broadcast(state.params, state.algorithm, place)
        return self.algorithm.link.receive(message, jax.tree.map(lambda x: x[0], state.private))

    def round(self, state: State, federation: Federation, key: Key) -> tuple[State, Round]:
        """Play one round; compiled once for equal experiments and shapes."""
        mesh = federation.mesh
        layout = Layout(self.clients_per_chunk, mesh)
        if devices.share_memory(mesh):
            # In pieces: what clients send comes to one device, where the server's half runs once.
            sent = _clients(self, layout, state, federation, devices.replicate(key, mesh))
            return _merged(self, state, in_order(Spread(sent), mesh))
        # A new state is on one device; one that a round gave is on the mesh already.
        if mesh is not None and devices.mesh_of(state.params) is None:
            state = devices.replicate(state, mesh)
        return _round(self, layout, state, federation, devices.replicate(key, mesh))

    def models(self, state: State, num_clients: int) -> Params:
        """Give the own model of each of M clients, what it would start from now, [M, ...].

        That is the global one M times, but for `algorithms.keep_private` and methods that keep a
        model for each client.
        """
        places = jnp.arange(checks.count("num_clients", num_clients))
        (common, own), _ = _given(self.algorithm, state, state.private, places)
        if own is not None:
            return own
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_clients, *x.shape)), common)

    def traffic(self, params: Params, federation: Federation) -> Traffic:
        """Count what one client receives and sends; nothing is computed."""
        params = checks.arrays(params)
        checks.outputs(self.model, params, federation.inputs, federation.targets)
        state = eval_shape(partial(self.init, num_clients=federation.num_clients), params)

        def sent(state: State) -> Any:
            return _message(self.algorithm, state, jnp.arange(1))[0]

        def update(state: State, federation: Federation) -> Any:
            # What is sent is as large after one epoch of one client as after many of a cohort.
            one = self._replace(cohort=1, epochs=1)
            return _clients(one, Layout(1), state, federation, jax.random.key(0)).updates

        up = eval_shape(update, state, federation)
        return Traffic(*map(_bytes, (eval_shape(sent, state), up)))


def federated(
    model: Model,
    algorithm: Algorithm,
    *,
    cohort: int,
    optimizer: optax.GradientTransformation,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None = None,
) -> Federated:
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
    experiment: Federated, state: State, federation: Federation, *, key: Key, rounds: int
) -> Iterator[tuple[State, Round]]:
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


class _Sent(NamedTuple):
    """What a cohort's half of a round yields: [K, ...], `private` is what each kept before."""

    key: Key
    cohort: Array
    sizes: Array
    private: Any
    trained: Trained
    updates: Any
    kept: Any


@partial(jit, static_argnums=(0, 1))
def _round(
    experiment: Federated, layout: Layout, state: State, federation: Federation, key: Key
) -> tuple[State, Round]:
    """Play one round: train, summarize, merge."""
    return _merged(experiment, state, _clients(experiment, layout, state, federation, key))


def _clients(
    experiment: Federated, layout: Layout, state: State, federation: Federation, key: Key
) -> _Sent:
    """Train and summarize a cohort."""
    algorithm = experiment.algorithm
    key, cohort, chosen, private, given = _begun(experiment, state, federation, key)
    length = min(experiment.batch_size, federation.indices.shape[1])
    local = LocalTraining(experiment.model, algorithm.optimizer(experiment.optimizer), length)
    ready = training.Cohort(local, layout, *given, chosen, key, experiment.epochs)
    trained = training.train_cohort(ready)
    sent = merging.summarize_cohort(algorithm, layout, trained, private, chosen, key)
    return _Sent(key, cohort, chosen.sizes, private, trained, *sent)


@partial(jit, static_argnums=0)
def _begun(experiment: Federated, state: State, federation: Federation, key: Key) -> tuple:
    """Draw a cohort; give the round's key, its clients, what they kept, and what they receive."""
    # By the number in the state: a run that goes on from an old state draws what it drew then.
    key = jax.random.fold_in(key, state.number)
    cohort = _draw_cohort(key, federation.num_clients, experiment.cohort)
    # [M, ...] to [K, ...].
    private = jax.tree.map(lambda x: x[cohort], state.private)
    given = _given(experiment.algorithm, state, private, cohort)
    return key, cohort, clients.select(federation, cohort), private, given


@partial(jit, static_argnums=0)
def _merged(experiment: Federated, state: State, sent: _Sent) -> tuple[State, Round]:
    """Play the server's half of a round."""
    algorithm, cohort, trained = experiment.algorithm, sent.cohort, sent.trained
    # [leaves, K] to [K]: one leaf that is not finite is enough to leave a client out.
    finite = tree.finite((sent.updates, sent.kept)).all(0)
    sizes = jnp.where(finite, sent.sizes, 0)
    # All zero, not NaN, where nobody is left.
    weights = sizes / jnp.maximum(sizes.sum(), 1)
    # Selected before it is summed: a diverged client's loss may be NaN, which no weight silences.
    loss = (weights * jnp.where(sizes > 0, trained.loss[:, -1], 0)).sum()

    # For the same reason the updates of those who diverged become zeros.
    values = algorithm.decode(tree.keep(finite, sent.updates.values), state.params)
    received = (values, weights)
    received = received if algorithm.reduce is None else algorithm.reduce(*received)
    server_key = jax.random.fold_in(sent.key, clients.AGGREGATE)
    server = (server_key, received, state.params, state.algorithm, cohort)
    merged, kept_by_server, info = algorithm.aggregate(*server)
    # Who diverged keeps what it kept, and so do those who sat the round out.
    kept = tree.keep(finite, sent.kept, sent.private)
    # [K, ...] back to its places in [M, ...].
    everyone = jax.tree.map(lambda old, new: old.at[cohort].set(new), state.private, kept)
    after = State(state.number + 1, merged, kept_by_server, everyone)
    # Nobody left, or a solve that overflowed: the model stays.
    goes_on = (sizes.sum() > 0) & tree.finite_leaves(merged).all()
    # Back to the state's dtypes, as sums are wider: the next round need not compile again.
    after = jax.tree.map(
        lambda new, old: jnp.where(goes_on, new, old).astype(old.dtype), after, state
    )
    # The number goes on even so: otherwise the next round would draw and fail alike.
    after = after._replace(number=state.number + 1)
    return after, Round(state.number, cohort, state.params, trained, loss, ~finite, info)


def _message(algorithm: Algorithm, state: State, cohort: Array) -> tuple[Any, int | None]:
    """Give what the server sends, and the axis of the clients: None if all are sent the same."""
    send = partial(algorithm.link.broadcast, state.params, state.algorithm)
    return (jax.vmap(send)(cohort), 0) if algorithm.link.personal else (send(None), None)


def _given(algorithm: Algorithm, state: State, private: Any, cohort: Array) -> tuple[tuple, Any]:
    """Give what clients start from, common or stacked, and what their optimisers are given."""
    message, axis = _message(algorithm, state, cohort)
    if axis is None and not jax.tree.leaves(private):  # the same for everybody
        start, extras = algorithm.link.receive(message, private)
        return (start, None), (extras, None)
    # Each starts from something else: both are stacked [K, ...].
    start, extras = jax.vmap(algorithm.link.receive, in_axes=(axis, 0))(message, private)
    return (None, start), (None, extras)


def _draw_cohort(key: Key, num_clients: int, cohort: int) -> Array:
    """Draw clients without replacement, in ascending order."""
    if cohort == num_clients:
        return jnp.arange(num_clients)
    drawn = jax.random.permutation(jax.random.fold_in(key, clients.COHORT), num_clients)
    return jnp.sort(drawn[:cohort])


def _bytes(shapes: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def _check_fits(state: State, expected: State) -> None:
    for field in ("algorithm", "private"):
        given, wanted = (_described(getattr(x, field)) for x in (state, expected))
        if given != wanted:
            raise ValueError(
                f"state.{field} has leaves {given}; expected {wanted} for these params. Start with "
                "init(params, M) of this experiment, or go on with a state that it yielded."
            )


def _described(values: Any) -> dict[str, str]:
    described = [f"{x.dtype}{list(jnp.shape(x))}" for x in jax.tree.leaves(values)]
    return dict(zip(tree.names(values), described, strict=True))
