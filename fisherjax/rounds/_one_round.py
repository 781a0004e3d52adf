"""The pieces of one round."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import clients, leaves, merging, training, tree
from fisherjax._core.compiler import jit
from fisherjax._upload_checks import Diverged
from fisherjax.algorithms.base import Algorithm
from fisherjax.clients import Federation
from fisherjax.leaves import Leaves
from fisherjax.local_update import Given, LocalTraining
from fisherjax.parallel import Layout
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


class Round(NamedTuple):
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
    info: Any

    @property
    def diverged(self) -> Array:
        """Whether each client of the cohort was left out, [K]."""
        return ~self.left_out.present


class Experiment(NamedTuple):
    """What the program of a round is compiled for."""

    model: Model
    algorithm: Algorithm
    cohort: int
    optimizer: optax.GradientTransformation
    epochs: int
    batch_size: int
    clients_per_chunk: int


class Uploads(NamedTuple):
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
def whole_round(
    experiment: Experiment, layout: Layout, state: State, federation: Federation, key: Key
) -> tuple[State, Round]:
    """Play one round: train, summarize, merge."""
    return finish_round(
        experiment, state, train_and_summarize(experiment, layout, state, federation, key)
    )


def train_and_summarize(
    experiment: Experiment, layout: Layout, state: State, federation: Federation, key: Key
) -> Uploads:
    """Train and summarize a cohort."""
    algorithm = experiment.algorithm
    key, cohort, chosen, before, given = start_round(experiment, state, federation, key)
    length = min(experiment.batch_size, federation.indices.shape[1])
    local = LocalTraining(experiment.model, algorithm.optimizer(experiment.optimizer), length)
    ready = training.Cohort(local, layout, given, chosen, key, experiment.epochs)
    trained = training.train_cohort(ready)
    update, kept = merging.summarize_cohort(algorithm, layout, trained, before[0], chosen, key)
    found = tree.by_name(trained.statistics)
    own = {name: found[name] for name in state.statistics}
    return Uploads(key, cohort, chosen.sizes, before, trained, update, (kept, own))


@partial(jit, static_argnums=0)
def start_round(experiment: Experiment, state: State, federation: Federation, key: Key) -> tuple:
    """Draw a cohort; give the round's key, its clients, what they kept, and what they receive."""
    # By the number in the state: a run that goes on from an old state draws what it drew then.
    key = jax.random.fold_in(key, state.number)
    cohort = _draw_cohort(key, federation.num_clients, experiment.cohort)
    # [M, ...] to [K, ...].
    before = jax.tree.map(lambda x: x[cohort], (state.local, state.statistics))
    length = min(experiment.batch_size, federation.indices.shape[1])
    parts = leaves.split(experiment.model, state.params, federation.inputs, length)
    given = client_inputs(experiment.algorithm, state, parts, before, cohort)
    return key, cohort, clients.select(federation, cohort), before, given


@partial(jit, static_argnums=0)
def finish_round(experiment: Experiment, state: State, sent: Uploads) -> tuple[State, Round]:
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


def broadcast(
    algorithm: Algorithm, state: State, trained: Params, cohort: Array
) -> tuple[Any, int | None]:
    """Give what the server sends, and the axis of the clients: None if all are sent the same."""
    send = partial(algorithm.link.broadcast, trained, state.algorithm)
    return (jax.vmap(send)(cohort), 0) if algorithm.link.personal else (send(None), None)


def client_inputs(
    algorithm: Algorithm,
    state: State,
    parts: Leaves,
    before: tuple[Any, dict[str, Array]],
    cohort: Array,
) -> tuple[Given, Given]:
    """Give what clients begin with: what is common to all, and stacked [K, ...] what is not."""
    local, kept = before
    message, axis = broadcast(algorithm, state, parts.trained, cohort)
    receive, several = algorithm.link.receive, not (axis is None and not jax.tree.leaves(local))
    # Each starts from something else: both are stacked [K, ...].
    if several:
        receive = jax.vmap(receive, in_axes=(axis, 0))
    begin = receive(message, local)
    common, own = (None, None) if several else begin, begin if several else (None, None)
    shared, mine = parts.statistics, None
    if kept:
        # Of each kept statistic a client's own, of others everybody's.
        mine = leaves.filled(copies(parts.statistics, len(cohort)), kept)
        shared = None
    return Given(*common, shared, parts.frozen), Given(*own, mine, None)


def copies(params: Params, number: int) -> Params:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), params)


def _draw_cohort(key: Key, num_clients: int, cohort: int) -> Array:
    """Draw clients without replacement, in ascending order."""
    if cohort == num_clients:
        return jnp.arange(num_clients)
    drawn = jax.random.permutation(jax.random.fold_in(key, clients.COHORT), num_clients)
    return jnp.sort(drawn[:cohort])
