"""Federated rounds: broadcast, train a cohort, summarize, aggregate, again.

A round is one compiled program, made of the pieces that one-shot runs call one by one:
`training.train_cohort`, `merging.summarize_cohort` and the algorithm's `aggregate`. `run` is a
generator, so that research code can stop, log or branch: a `State` is plain data, and going on from
an old one repeats what followed it. Letters: M clients, K of them in a cohort.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import clients, devices, leaves, merging, parallel, training, tree
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape, jit
from fisherjax._upload_checks import Diverged
from fisherjax.algorithms.base import Algorithm, Report, check_algorithm, check_same_shapes
from fisherjax.clients import Federation
from fisherjax.leaves import Leaves
from fisherjax.local_update import Given, LocalTraining
from fisherjax.parallel import Layout, Spread, in_order
from fisherjax.training import Trained
from fisherjax.typing import Array, Key, Model, Params


class State(NamedTuple):
    """What goes from round to round.

    Attributes:
        number: Of the next round, from 0.
        params: The global model.
        algorithm: What the server keeps, for instance SCAFFOLD's control.
        local: What each client keeps, stacked [M, ...].
        statistics: Of running statistics those that each client keeps, by name, stacked [M, ...].
    """

    number: Array
    params: Params
    algorithm: Any
    local: Any
    statistics: dict[str, Array] = {}  # noqa: RUF012


class Round(NamedTuple, Generic[Report]):
    """What happened in one round.

    Attributes:
        number: From 0; a Python integer in what `run` yields.
        cohort: [K] places of the clients that took part.
        start: The model that was sent to them.
        trained: What they trained, stacked [K, ...].
        loss: Mean training loss in nats in the last local epoch, of those not left out.
        left_out: Clients whose updates were not finite, each with its first such leaf:
            `left_out.by_client(cohort)` has their names.
        info: What the algorithm reports.
    """

    number: int | Array
    cohort: Array
    start: Params
    trained: Trained
    loss: Array
    left_out: Diverged
    info: Report

    @property
    def diverged(self) -> Array:
        """Whether each client of the cohort was left out, [K]."""
        return ~self.left_out.present


class Traffic(NamedTuple):
    """Bytes of one client in one round: what the server sends it, and its update."""

    down: int
    up: int


class Federated(NamedTuple, Generic[Report]):
    """A federated experiment: what a round is compiled for. Made, and checked, by `federated`."""

    model: Model
    algorithm: Algorithm[Report]
    cohort: int
    optimizer: optax.GradientTransformation
    epochs: int
    batch_size: int
    clients_per_chunk: int

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
            sent = _clients(self, layout, state, federation, devices.replicate(key, mesh))
            return _merged(self, state, in_order(Spread(sent), mesh))
        # A new state is on one device; one that a round gave is on the mesh already.
        if mesh is not None and devices.mesh_of(state.params) is None:
            state = devices.replicate(state, mesh)
        return _round(self, layout, state, federation, devices.replicate(key, mesh))

    def models(self, state: State, num_clients: int) -> Params:
        """Give the own model of each of M clients, what it would start from now, [M, ...].

        That is the global one M times, but for `algorithms.keep_local` and methods that keep a
        model for each client.
        """
        places = jnp.arange(checks.count("num_clients", num_clients))
        parts = leaves.named(state.params, tuple(state.statistics), ())
        parts = parts._replace(trained=leaves.trained(self.model, state.params))
        both = _given(self.algorithm, state, parts, (state.local, state.statistics), places)
        own = [o if c is None else _copies(c, num_clients) for c, o in zip(*both, strict=True)]
        return leaves.join(own[0], own[2], _copies(state.params, num_clients))

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
            return _message(self.algorithm, state, own.trained, jnp.arange(1))[0], statistics

        def update(state: State, federation: Federation) -> Any:
            # What is sent is as large after one epoch of one client as after many of a cohort.
            one = self._replace(cohort=1, epochs=1)
            return _clients(one, Layout(1), state, federation, jax.random.key(0)).update

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


class _Sent(NamedTuple):
    """What a cohort's half of a round yields: [K, ...].

    `before` and `kept` are pairs: what each client keeps of the algorithm, and of its statistics.
    """

    key: Key
    cohort: Array
    sizes: Array
    before: tuple[Any, dict[str, Array]]
    trained: Trained
    update: Any
    kept: tuple[Any, dict[str, Array]]


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
    key, cohort, chosen, before, given = _begun(experiment, state, federation, key)
    length = min(experiment.batch_size, federation.indices.shape[1])
    local = LocalTraining(experiment.model, algorithm.optimizer(experiment.optimizer), length)
    ready = training.Cohort(local, layout, given, chosen, key, experiment.epochs)
    trained = training.train_cohort(ready)
    update, kept = merging.summarize_cohort(algorithm, layout, trained, before[0], chosen, key)
    found = tree.by_name(trained.statistics)
    own = {name: found[name] for name in state.statistics}
    return _Sent(key, cohort, chosen.sizes, before, trained, update, (kept, own))


@partial(jit, static_argnums=0)
def _begun(experiment: Federated, state: State, federation: Federation, key: Key) -> tuple:
    """Draw a cohort; give the round's key, its clients, what they kept, and what they receive."""
    # By the number in the state: a run that goes on from an old state draws what it drew then.
    key = jax.random.fold_in(key, state.number)
    cohort = _draw_cohort(key, federation.num_clients, experiment.cohort)
    # [M, ...] to [K, ...].
    before = jax.tree.map(lambda x: x[cohort], (state.local, state.statistics))
    length = min(experiment.batch_size, federation.indices.shape[1])
    parts = leaves.split(experiment.model, state.params, federation.inputs, length)
    given = _given(experiment.algorithm, state, parts, before, cohort)
    return key, cohort, clients.select(federation, cohort), before, given


@partial(jit, static_argnums=0)
def _merged(experiment: Federated, state: State, sent: _Sent) -> tuple[State, Round]:
    """Play the server's half of a round, and put what clients keep in its places."""
    algorithm, cohort, trained = experiment.algorithm, sent.cohort, sent.trained
    half = merging.server_half(
        algorithm,
        state.params,
        sent.update,
        sent.sizes,
        state=state.algorithm,
        cohort=cohort,
        key=sent.key,
        on_nonfinite="drop",
        others=dict(zip(("algorithm", "statistics"), sent.kept, strict=True)),
    )
    # Selected before it is summed: a diverged client's loss may be NaN, which no weight silences.
    losses = jnp.where(half.weights > 0, trained.loss[:, -1], 0)
    own, statistics = sent.kept
    if algorithm.link.mix is not None and sent.update.statistics:
        shares = algorithm.link.mix(half.values, half.weights)
        sound = tree.keep(half.diverged.present, sent.update.statistics)
        mixed = jax.vmap(lambda row: tree.weighted_sum(sound, row))(shares)
        mixed = jax.tree.map(lambda new, old: new.astype(old.dtype), mixed, sound)
        statistics = statistics | mixed
    # Who diverged keeps what it kept, and so do those who sat the round out.
    kept = tree.keep(half.diverged.present, (own, statistics), sent.before)
    everyone = state.local, state.statistics
    # [K, ...] back to its places in [M, ...].
    everyone = jax.tree.map(lambda old, new: old.at[cohort].set(new), everyone, kept)
    after = State(state.number + 1, half.params, half.state, *everyone)
    # Nobody left, or a solve that overflowed: the model stays.
    goes_on = (half.weights.sum() > 0) & tree.finite_leaves(half.params).all()
    # Back to the state's dtypes, as sums are wider: the next round need not compile again.
    after = jax.tree.map(
        lambda new, old: jnp.where(goes_on, new, old).astype(old.dtype), after, state
    )
    # The number goes on even so: otherwise the next round would draw and fail alike.
    after = after._replace(number=state.number + 1)
    loss = (half.weights * losses).sum()
    happened = Round(state.number, cohort, state.params, trained, loss, half.diverged, half.info)
    return after, happened


def _message(
    algorithm: Algorithm, state: State, trained: Params, cohort: Array
) -> tuple[Any, int | None]:
    """Give what the server sends, and the axis of the clients: None if all are sent the same."""
    send = partial(algorithm.link.broadcast, trained, state.algorithm)
    return (jax.vmap(send)(cohort), 0) if algorithm.link.personal else (send(None), None)


def _given(
    algorithm: Algorithm,
    state: State,
    parts: Leaves,
    before: tuple[Any, dict[str, Array]],
    cohort: Array,
) -> tuple[Given, Given]:
    """Give what clients begin with: what is common to all, and stacked [K, ...] what is not."""
    local, kept = before
    message, axis = _message(algorithm, state, parts.trained, cohort)
    receive, several = algorithm.link.receive, not (axis is None and not jax.tree.leaves(local))
    # Each starts from something else: both are stacked [K, ...].
    if several:
        receive = jax.vmap(receive, in_axes=(axis, 0))
    begin = receive(message, local)
    common, own = (None, None) if several else begin, begin if several else (None, None)
    shared, mine = parts.statistics, None
    if kept:
        # Of each kept statistic a client's own, of others everybody's.
        mine = leaves.filled(_copies(parts.statistics, len(cohort)), kept)
        shared = None
    return Given(*common, shared, parts.frozen), Given(*own, mine, None)


def _copies(params: Params, number: int) -> Params:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), params)


def _draw_cohort(key: Key, num_clients: int, cohort: int) -> Array:
    """Draw clients without replacement, in ascending order."""
    if cohort == num_clients:
        return jnp.arange(num_clients)
    drawn = jax.random.permutation(jax.random.fold_in(key, clients.COHORT), num_clients)
    return jnp.sort(drawn[:cohort])


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
