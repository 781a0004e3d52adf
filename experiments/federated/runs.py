"""Run one unit of an experiment in rounds, with measurements and checkpoints."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import checkpoints, records, tables
from experiments.harness.config import Federated
from experiments.harness.methods import check_full, methods
from experiments.harness.tasks import Rounds
from fisherjax.metrics import Performance
from fisherjax.rounds import Round, State
from fisherjax.typing import Key

CHECKPOINTS = "checkpoints"
Measures = dict[tuple[str, str, float | None], Any]
"""Numbers by split, metric and fraction."""
FRACTIONS = (0.0, 0.25, 0.5)
# optax.adam's epsilon is 1e-8; the framework of FedFish's experiments has 1e-7.
_SERVERS = {
    "none": None,
    "sgd": optax.inject_hyperparams(optax.sgd)(learning_rate=1.0),
    "momentum": optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.9),
    "adam": optax.inject_hyperparams(optax.adam)(learning_rate=1.0, eps=1e-7),
    "yogi": optax.inject_hyperparams(optax.yogi)(learning_rate=1.0),
    "adagrad": optax.inject_hyperparams(optax.adagrad)(learning_rate=1.0),
}


class Unit(NamedTuple):
    """One run, which is computed and written as a whole."""

    algorithm: str
    local_epochs: int
    server_learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """The name of its files."""
        rate = f"{self.server_learning_rate:g}"
        return f"{self.algorithm}-{self.local_epochs}epochs-server{rate}-seed{self.seed}"


def number(config: Federated, local_epochs: int) -> int:
    """Return the number of rounds of an experiment with a number of local epochs a round."""
    return config.rounds if config.total_epochs is None else config.total_epochs // local_epochs


def measured(config: Federated, local_epochs: int, round_: int) -> bool:
    """Return whether a round crosses a multiple of `eval_every` local epochs, or is the last."""
    crossed = round_ * local_epochs % config.eval_every < local_epochs
    return crossed or round_ == number(config, local_epochs)


def finished(config: Federated, rows: Iterable[records.Row]) -> set[Unit]:
    """Return the units that have all rows: the loss of each round, and traffic in the end."""
    found = tables.gathered((Unit(*row.unit), row) for row in rows)
    done = set()
    for unit, own in found.items():
        last = number(config, unit.local_epochs)
        there = {(row.split, row.metric, row.round) for row in own}
        tested = [n for n in range(1, last + 1) if measured(config, unit.local_epochs, n)]
        wanted = {("cohort", "loss", n) for n in range(1, last + 1)}
        wanted |= {("test", "accuracy", n) for n in tested} | {("traffic", "up", last)}
        if wanted <= there:
            done.add(unit)
    return done


def following(config: Federated, rows: Sequence[records.Row]) -> Unit | None:
    """Return the unit that is computed next; None if all are finished.

    The first seed has a unit for each server learning rate, the others the chosen one alone.
    """
    done, rates = finished(config, rows), config.server_learning_rate
    where = [(a, epochs) for epochs in config.local_epochs for a in config.merging.algorithms]
    units = [Unit(*own, rate, config.seeds[0]) for own in where for rate in rates]
    if done.issuperset(units):
        chosen = select(config, rows)
        units = [Unit(*own, chosen[own], seed) for seed in config.seeds[1:] for own in where]
    return next((unit for unit in units if unit not in done), None)


def select(config: Federated, rows: Iterable[records.Row]) -> dict[tuple[str, int], float]:
    """Choose server learning rates by algorithm and local epochs, the first of equals.

    The criterion is accuracy on the validation clients with the first seed, after the last round.
    """
    best: dict[tuple[str, int], records.Row] = {}
    for row in rows:
        where = row.algorithm, row.local_epochs
        counts = (row.split, row.metric, row.seed) == ("validation", "accuracy", config.seeds[0])
        counts &= row.round == number(config, row.local_epochs)
        value = tables.rank(row.value)
        if counts and (where not in best or value > tables.rank(best[where].value)):
            best[where] = row
    return {where: row.server_learning_rate for where, row in best.items()}


def prepare(task: Rounds) -> dict[tuple[str, int], fj.rounds.Federated]:
    """Make the rounds of each algorithm and number of local epochs, which all units share.

    Models that would not fit into memory, and layers that no structure covers, are refused here.
    """
    config, params = task.config, jax.eval_shape(task.init, jax.random.key(0))
    check_full(config.merging.algorithms, params, config.cohort)
    training, server = config.training, _SERVERS[config.server_optimizer]
    how = {"cohort": config.cohort, "optimizer": task.optimizer, "batch_size": training.batch_size}
    how["clients_per_chunk"] = training.clients_per_chunk
    made = {}
    for name, method in methods(config.merging, task.model, training.batch_size).items():
        algorithm = method.server(None)
        if server is not None:
            algorithm = fj.algorithms.with_server_optimizer(algorithm, server)
        for epochs in config.local_epochs:
            own = fj.rounds.federated(task.model, algorithm, epochs=epochs, **how)
            own.traffic(params, task.train)
            made[name, epochs] = own
    return made


def run(
    task: Rounds,
    method: fj.rounds.Federated,
    unit: Unit,
    show: Callable[[int, float | None], None],
    warn: Callable[[str], None],
) -> list[records.Row]:
    """Run the rounds of a unit, from its newest checkpoint if there is one; return all rows.

    `method` is what `prepare` made for the unit. After each round, `show` is called with its number
    and the test accuracy, or None if that was not measured. The final params are in the newest
    checkpoint and, with `keep_models`, in models/.
    """
    config, last = task.config, number(task.config, unit.local_epochs)
    folder = config.out / CHECKPOINTS / unit.name
    init_key, key, personal_key = jax.random.split(jax.random.key(unit.seed), 3)
    state = method.init(task.init(init_key), task.train)
    state = _at_rate(state, unit.server_learning_rate)
    rows: list[records.Row] = []
    found = checkpoints.restore(folder, state, warn)
    if found is not None:
        state, rows = found.state, [records.Row(*row) for row in found.rows]
        if found.number < last:  # the last round of a folder that goes on had more measurements
            rows = [row for row in rows if _during(config, row)]
        show(found.number, None)
    saved, left = time.monotonic(), last - int(state.number)
    going = fj.rounds.run(method, state, task.train, key=key, rounds=left) if left else ()
    for state, done in going:
        count = int(state.number)
        if left_out := done.left_out.by_client(done.cohort):
            names = "; ".join(f"client {k} for leaf '{leaf}'" for k, leaf in left_out.items())
            warn(f"{unit.name}, round {count}: left out, as updates not finite: {names}.")
        measures = _after_round(task, unit, state, done)
        if count == last:
            measures |= _at_the_end(task, method, state, personal_key)
        for (split, metric, fraction), value in measures.items():
            where = {"split": split, "metric": metric, "fraction": fraction}
            value = round(float(np.asarray(value)), 6)
            rows.append(records.Row(**unit._asdict(), round=count, value=value, **where))
        show(count, measures.get(("test", "accuracy", None)))
        if count == last or time.monotonic() - saved >= config.checkpoint_seconds:
            checkpoints.save(folder, count, state, rows)
            saved = time.monotonic()
    if config.keep_models:
        path = config.out / "models" / f"{unit.name}.safetensors"
        with records.naming(path):
            path.parent.mkdir(exist_ok=True)
            fj.files.save_arrays(path, state.params)
    return rows


def _during(config: Federated, row: records.Row) -> bool:
    """Return whether a row is one that `_after_round` measures, if it is not the last round."""
    always = row.split == "cohort" and row.metric in ("loss", "diverged")
    tested = row.split in ("cohort", "test") and measured(config, row.local_epochs or 1, row.round)
    return always or tested


def _at_rate(state: State, rate: float) -> State:
    """Set the server's learning rate; it is an array, so that all rates share one program."""
    server = state.algorithm
    if not isinstance(server, fj.algorithms.wrappers.server_optimizer.ServerState):
        return state
    rate = jnp.full_like(optax.tree_utils.tree_get(server, "learning_rate"), rate)
    return state._replace(algorithm=optax.tree_utils.tree_set(server, learning_rate=rate))


def _after_round(task: Rounds, unit: Unit, state: State, done: Round) -> Measures:
    found = {
        ("cohort", "loss", None): done.loss / task.positions,
        ("cohort", "diverged", None): done.diverged.sum(),
    }
    if not measured(task.config, unit.local_epochs, int(state.number)):
        return found
    found |= _means(task, "test", fj.metrics.performance(task.model, state.params, task.test))
    if task.config.barrier:
        cohort = fj.clients.select(task.train, done.cohort)
        models = state.params, done.trained.models
        barrier = fj.metrics.client_server_barrier(task.model, *models, cohort)
        found["cohort", "barrier_loss", None] = barrier.loss / task.positions
        found["cohort", "barrier_accuracy", None] = barrier.accuracy
    return found


def _at_the_end(task: Rounds, method: fj.rounds.Federated, state: State, key: Key) -> Measures:
    found: Measures = {}
    for split, clients in (("validation", task.validation), ("clients", task.train)):
        found |= _means(task, split, fj.metrics.performance(task.model, state.params, clients))
    config, how = task.config, {"key": key, "fractions": FRACTIONS, "optimizer": task.optimizer}
    how |= {"epochs": config.personal_epochs, "batch_size": config.training.batch_size}
    personal = fj.personalization.personalize(task.model, state.params, task.held_out, **how)
    for fraction, own in zip(FRACTIONS, personal, strict=True):
        found |= _means(task, "held_out", own, fraction)
    traffic = method.traffic(state.params, task.train)
    return found | {("traffic", way, None): count for way, count in traffic._asdict().items()}


def _means(task: Rounds, split: str, found: Performance, fraction: float | None = None) -> Measures:
    mean = found.mean()
    loss = mean.loss / task.positions
    return {(split, "accuracy", fraction): mean.accuracy, (split, "loss", fraction): loss}
