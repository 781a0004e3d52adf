"""One round, in compiled pieces.

* `start_round` draws a cohort and computes what its clients receive.
* `client_half` trains clients from what they received and computes their updates.
* `train_and_summarize` is both of them.
* `finish_round` merges the updates on the server and stores what the clients keep.

`whole_round` runs all of them as one program. Letters: M clients, K of them in a cohort.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import clients, leaves, merging, metrics, training, tree
from fisherjax._core.compiler import jit
from fisherjax._finite_uploads import Diverged
from fisherjax.algorithms.base import Algorithm, Report, Update
from fisherjax.clients import Federation
from fisherjax.leaves import Leaves
from fisherjax.local_update import ClientInputs, LocalTraining
from fisherjax.parallel import Layout
from fisherjax.rounds._cohorts import draw_cohort
from fisherjax.rounds._messages import broadcast, client_inputs, received
from fisherjax.training import Trained
from fisherjax.typing import AnyArray, Array, Key, Model, Params


class State(NamedTuple):
    """State between two rounds.

    Attributes:
        number: Number of the next round, from 0.
        params: Global model.
        algorithm: What the server keeps between rounds, for instance SCAFFOLD's control variate.
        local: What each client keeps for the algorithm, leaves [M, ...].
        statistics: Running statistics that each client keeps, arrays [M, ...] by name.
    """

    number: Array
    params: Params
    algorithm: Any
    local: Any
    statistics: dict[str, Array] = {}  # noqa: RUF012


class Round(NamedTuple, Generic[Report]):
    """Record of one round.

    Attributes:
        number: Number of the round, from 0; a Python integer in what `run` yields.
        cohort: [K] places of the participating clients in the federation.
        start: Global model at the beginning of the round.
        trained: Models that the clients trained, leaves [K, ...].
        loss: Mean training loss in nats in the last local epoch, over clients that were not left
            out; NaN if no client with examples is left.
        left_out: Clients that were left out because their updates are not finite, and the first
            such leaf of each; `left_out.by_client(cohort)` names them.
        info: What the algorithm's `aggregate` reports.
        worse: [K], whether a client was left out because training raised the loss of its own
            examples; False for all unless the experiment has `must_improve`.
    """

    number: int | Array
    cohort: Array
    start: Params
    trained: Trained
    loss: Array
    left_out: Diverged
    info: Report
    worse: Array

    @property
    def diverged(self) -> AnyArray:
        """Whether each client's update is not finite, so that it was left out, [K]."""
        return ~self.left_out.present


class Experiment(NamedTuple, Generic[Report]):
    """Arguments of `federated`, on which the program of a round depends."""

    model: Model
    algorithm: Algorithm[Report]
    cohort: int
    optimizer: optax.GradientTransformation
    epochs: int
    batch_size: int
    clients_per_chunk: int
    availability: Callable[[Array], Array] | None = None
    must_improve: bool = False


class CohortResult(NamedTuple):
    """What `train_and_summarize` passes to `finish_round`, leaves [K, ...] but for the key.

    `before` and `kept` are pairs: what each client keeps for the algorithm, and its statistics.
    """

    key: Key
    cohort: Array
    sizes: Array
    worse: Array
    before: tuple[Any, dict[str, Array]]
    trained: Trained
    update: Any
    kept: tuple[Any, dict[str, Array]]


@partial(jit, static_argnums=(0, 1), autotune=True)
def whole_round(
    experiment: Experiment, layout: Layout, state: State, federation: Federation, key: Key
) -> tuple[State, Round]:
    """Run one round: train, summarize, merge."""
    result = train_and_summarize(experiment, layout, state, federation, key)
    return finish_round(experiment, state, result)


def train_and_summarize(
    experiment: Experiment, layout: Layout, state: State, federation: Federation, key: Key
) -> CohortResult:
    """Draw a cohort, train it and summarize it."""
    key, cohort, chosen, before, given = start_round(experiment, state, federation, key)
    trained, update, kept = client_half(experiment, layout, given, before, chosen, key)
    worse = find_worse(experiment, given, trained, chosen)
    return CohortResult(key, cohort, chosen.sizes, worse, before, trained, update, kept)


def find_worse(
    experiment: Experiment,
    given: tuple[ClientInputs, ClientInputs],
    trained: Trained,
    chosen: Federation,
) -> Array:
    """Find the clients whose own examples have a higher loss after training, [K]."""
    if not experiment.must_improve:
        return jnp.zeros(chosen.num_clients, bool)
    models = received(given, chosen.num_clients), trained.models
    how: Any = {"stacked": True, "batch_size": experiment.batch_size}
    start, end = (metrics.performance(experiment.model, x, chosen, **how).loss for x in models)
    # A loss that is not finite is no improvement either.
    return ~(end <= start)


def client_half(
    experiment: Experiment,
    layout: Layout,
    given: tuple[ClientInputs, ClientInputs],
    before: tuple[Any, dict[str, Array]],
    chosen: Federation,
    key: Key,
) -> tuple[Trained, Update, tuple[Any, dict[str, Array]]]:
    """Train clients from what they received, and compute their updates.

    Args:
        experiment: How clients train and what they send.
        layout: Number of clients side by side, and their devices.
        given: Result of `client_inputs`.
        before: What each client kept from earlier rounds, [K, ...].
        chosen: Data of these clients.
        key: Key of the round.

    Returns:
        The trained clients, their stacked updates, and what each client keeps.
    """
    algorithm = experiment.algorithm
    length = min(experiment.batch_size, chosen.indices.shape[1])
    local = LocalTraining(experiment.model, algorithm.optimizer(experiment.optimizer), length)
    trained = training.train_cohort(
        training.Cohort(local, layout, given, chosen, key, experiment.epochs)
    )
    update, kept = merging.summarize_cohort(algorithm, layout, trained, before[0], chosen, key)
    found = tree.by_name(trained.statistics)
    return trained, update, (kept, {name: found[name] for name in before[1]})


@partial(jit, static_argnums=0)
def start_round(experiment: Experiment, state: State, federation: Federation, key: Key) -> tuple:
    """Draw a cohort and compute what its clients receive.

    Returns:
        The round's key, the places of the cohort [K], its federation, what its clients kept from
        earlier rounds [K, ...], and the two `ClientInputs` of `client_inputs`.
    """
    # Folded by the number in the state: a run continued from an old state repeats its rounds.
    key = jax.random.fold_in(key, state.number)
    chances = experiment.availability
    chances = None if chances is None else jnp.asarray(chances(state.number))
    cohort = draw_cohort(key, federation.num_clients, experiment.cohort, chances)
    chosen = clients.select(federation, cohort)
    if chances is not None:
        # Where too few are available, others fill the cohort, and take no part.
        chosen = chosen._replace(sizes=jnp.where(chances[cohort] > 0, chosen.sizes, 0))
    # [M, ...] to [K, ...].
    before = jax.tree.map(lambda x: x[cohort], (state.local, state.statistics))
    parts = parts_of(experiment, state.params, federation)
    message = broadcast(experiment.algorithm, state.algorithm, parts.trained, cohort)
    given = client_inputs(experiment.algorithm, *message, parts, before)
    return key, cohort, chosen, before, given


@partial(jit, static_argnums=0, autotune=True)
def finish_round(experiment: Experiment, state: State, result: CohortResult) -> tuple[State, Round]:
    """Run the server's half of a round, and store what the clients keep."""
    algorithm, cohort, trained = experiment.algorithm, result.cohort, result.trained
    half = merging.server_half(
        algorithm,
        state.params,
        result.update,
        jnp.where(result.worse, 0, result.sizes),
        state=state.algorithm,
        cohort=cohort,
        key=result.key,
        on_nonfinite="drop",
        others=dict(zip(("algorithm", "statistics"), result.kept, strict=True)),
    )
    # The loss of a diverged client may be NaN, and NaN times weight zero is NaN.
    losses = jnp.where(half.weights > 0, trained.loss[:, -1], 0)
    local, statistics = result.kept
    if algorithm.link.mix is not None and result.update.statistics:
        shares = algorithm.link.mix(half.values, half.weights)
        sound = tree.where(half.diverged.present, result.update.statistics)
        mixed = jax.vmap(lambda row: tree.weighted_sum(sound, row))(shares)
        mixed = jax.tree.map(lambda new, old: new.astype(old.dtype), mixed, sound)
        statistics = statistics | mixed
    # A client that is left out keeps what it had before the round, as those outside the cohort do.
    taken = half.diverged.present & ~result.worse
    kept = tree.where(taken, (local, statistics), result.before)
    # [K, ...] back to its places in [M, ...].
    everyone = jax.tree.map(
        lambda old, new: old.at[cohort].set(new), (state.local, state.statistics), kept
    )
    after = State(state.number + 1, half.params, half.state, *everyone)
    # The state stays the same if no client is left or the merged model is not finite.
    succeeded = (half.weights.sum() > 0) & tree.finite_leaves(half.params).all()
    # Sums are wider than the state. In its dtypes the next round need not be compiled again.
    after = jax.tree.map(
        lambda new, old: jnp.where(succeeded, new, old).astype(old.dtype), after, state
    )
    # A failed round is counted too: the next one must draw another cohort.
    after = after._replace(number=state.number + 1)
    loss = jnp.where(half.weights.sum() > 0, (half.weights * losses).sum(), jnp.nan)
    left_out, worse = half.diverged, result.worse & half.diverged.present
    done = Round(state.number, cohort, state.params, trained, loss, left_out, half.info, worse)
    return after, done


def parts_of(experiment: Experiment, params: Params, federation: Federation) -> Leaves:
    """Split params into trained leaves, statistics and frozen leaves."""
    length = min(experiment.batch_size, federation.indices.shape[1])
    return leaves.split(experiment.model, params, federation.inputs, length)
