"""One run: rounds of one algorithm from one seed, measured, saved, and continued if stopped."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import experiments.config
import fisherjax as fj
from experiments import checkpoints
from experiments.federated.config import Config, measured, rounds
from experiments.federated.task import Task
from experiments.methods import check_full, methods
from fisherjax.algorithms.fedopt import ServerState
from fisherjax.metrics import Performance
from fisherjax.typing import Model, Params

FRACTIONS = (0.0, 0.25, 0.5)
# optax.adam's epsilon is 1e-8; 1e-7 is that of the framework FedFish was run in.
_SERVERS = {
    "none": None,
    "sgd": optax.inject_hyperparams(optax.sgd)(learning_rate=1.0),
    "momentum": optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.9),
    "adam": optax.inject_hyperparams(optax.adam)(learning_rate=1.0, eps=1e-7),
    "yogi": optax.inject_hyperparams(optax.yogi)(learning_rate=1.0),
    "adagrad": optax.inject_hyperparams(optax.adagrad)(learning_rate=1.0),
}


class Unit(NamedTuple):
    """One run: what is computed as a whole."""

    algorithm: str
    local_epochs: int
    server_learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its files."""
        rate = f"{self.server_learning_rate:g}"
        return f"{self.algorithm}-{self.local_epochs}epochs-server{rate}-seed{self.seed}"


class Row(NamedTuple):
    """One number; a line of results.csv.

    Attributes:
        algorithm: how updates were merged.
        local_epochs: of a round.
        server_learning_rate: of the server's optimiser.
        seed: of the run.
        round: after so many rounds.
        split: `test` data, `validation` or `held_out` clients, the `cohort`, or `traffic`.
        fraction: of a held-out client's data that the model was fine-tuned on; else None.
        metric: accuracies are fractions, losses nats of a prediction, traffic bytes of a client.
        value: the number.
    """

    algorithm: str
    local_epochs: int
    server_learning_rate: float
    seed: int
    round: int
    split: str
    fraction: float | None
    metric: str
    value: float


class Watcher(NamedTuple):
    """How a run says how far it is.

    Attributes:
        round: `(round, latest test accuracy or None)`, after each round.
        warn: `(message)`.
    """

    round: Callable[[int, float | None], None]
    warn: Callable[[str], None]


def check(config: Config, task: Task) -> None:
    """Refuse algorithms that cannot run on this network, before anything is trained.

    Args:
        config: the experiment.
        task: what `prepare` returned.

    Raises:
        ValueError: if a full Fisher matrix would not fit, or a structure does not cover a layer;
            the message names it.
    """
    params = jax.eval_shape(task.init, jax.random.key(0))
    for algorithm in config.algorithm:
        asked = dataclasses.replace(_asked(config, algorithm), num_clients=config.cohort)
        check_full(asked, params)
        _method(config, task.model, algorithm, 1).traffic(params, task.train)


def run(config: Config, task: Task, unit: Unit, folder: Path, watcher: Watcher) -> list[Row]:
    """Run the rounds of a unit, from its newest checkpoint if there is one.

    Args:
        config: the experiment.
        task: what `prepare` returned.
        unit: which run.
        folder: of its checkpoints.
        watcher: told of each round.

    Returns:
        All its rows, those from before the checkpoint too. The final params are in the newest
        checkpoint and, if wanted, in models/.
    """
    method = _method(config, task.model, unit.algorithm, unit.local_epochs)
    init_key, key, personal_key = jax.random.split(jax.random.key(unit.seed), 3)
    state = method.init(task.init(init_key), task.train.num_clients)
    state = _at_rate(state, unit.server_learning_rate)
    last = rounds(config, unit.local_epochs)
    rows: list[Row] = []
    found = checkpoints.restore(folder, state, watcher.warn)
    if found is not None:
        state, rows = found.state, [Row(*row) for row in found.rows]
        watcher.round(found.number, None)
    saved, left = time.monotonic(), last - int(state.number)
    going = fj.rounds.run(method, state, task.train, key=key, rounds=left) if left else ()
    for reached, done in going:
        state, number = reached, int(reached.number)
        rows += _after_round(config, task, unit, number, state, done)
        watcher.round(number, _latest(rows, number))
        if number == last:
            rows += _at_the_end(config, task, unit, method, state, personal_key)
        if number == last or time.monotonic() - saved >= config.checkpoint_seconds:
            checkpoints.save(folder, number, state, rows)
            saved = time.monotonic()
    if config.keep_models:
        models = folder.parent.parent / "models"
        models.mkdir(exist_ok=True)
        fj.files.save_arrays(models / f"{unit.name}.safetensors", state.params)
    return rows


def select(config: Config, rows: Iterable[Row]) -> dict[tuple[str, int], float]:
    """Choose each algorithm's server learning rate by accuracy on the validation clients.

    Args:
        config: the experiment.
        rows: of the first seed, with all rates.

    Returns:
        By algorithm and local epochs; of equals the first.
    """
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        where = row.algorithm, row.local_epochs
        counts = (row.split, row.metric, row.seed) == ("validation", "accuracy", config.seeds[0])
        counts &= row.round == rounds(config, row.local_epochs)
        if counts and (where not in best or row.value > best[where].value):
            best[where] = row
    return {where: row.server_learning_rate for where, row in best.items()}


@functools.cache
def _method(config: Config, model: Model, name: str, epochs: int) -> fj.rounds.Federated:
    """Make an algorithm's rounds, the same object for all runs, so that nothing compiles twice."""
    algorithm = methods(_asked(config, name), model)[name].clients
    server = _SERVERS[config.server_optimizer]
    if server is not None:
        algorithm = fj.algorithms.with_server_optimizer(algorithm, server)
    return fj.rounds.federated(
        model,
        algorithm,
        cohort=config.cohort,
        optimizer=_local_optimizer(config),
        epochs=epochs,
        batch_size=config.batch_size,
        clients_per_chunk=config.clients_per_chunk,
    )


@functools.cache
def _local_optimizer(config: Config) -> optax.GradientTransformation:
    return optax.sgd(config.learning_rate, config.momentum or None)


def _asked(config: Config, algorithm: str) -> experiments.config.Config:
    """Say what is merged as a one-shot experiment says it."""
    return experiments.config.Config(
        algorithms=(algorithm,),
        num_clients=config.num_clients,
        batch_size=config.batch_size,
        mu=config.mu,
        damping=config.damping if algorithm == "fedfisher_kfac" else "default",
    )


def _at_rate(state: fj.rounds.State, rate: float) -> fj.rounds.State:
    """Set the server's learning rate, which is data: another one compiles nothing."""
    server = state.algorithm
    if not isinstance(server, ServerState):
        return state
    rates = server.optimizer.hyperparams
    new = rates | {"learning_rate": jnp.full_like(rates["learning_rate"], rate)}
    optimizer = server.optimizer._replace(hyperparams=new)
    return state._replace(algorithm=server._replace(optimizer=optimizer))


def _after_round(
    config: Config,
    task: Task,
    unit: Unit,
    number: int,
    state: fj.rounds.State,
    done: fj.rounds.Round,
) -> list[Row]:
    rows = [
        _row(unit, number, "cohort", "loss", done.loss / task.positions),
        _row(unit, number, "cohort", "diverged", done.diverged.sum()),
    ]
    if not measured(config, unit.local_epochs, number):
        return rows
    rows += _performance(task, unit, number, "test", _measure(task, state.params, task.test))
    if config.barrier:
        cohort = fj.clients.select(task.train, done.cohort)
        barrier = fj.metrics.client_server_barrier(
            task.model, state.params, done.trained.params, cohort
        )
        rows.append(_row(unit, number, "cohort", "barrier_loss", barrier.loss / task.positions))
        rows.append(_row(unit, number, "cohort", "barrier_accuracy", barrier.accuracy))
    return rows


def _at_the_end(
    config: Config,
    task: Task,
    unit: Unit,
    method: fj.rounds.Federated,
    state: fj.rounds.State,
    key: jax.Array,
) -> list[Row]:
    number = int(state.number)
    rows = []
    for split, federation in (("validation", task.validation), ("clients", task.train)):
        found = _measure(task, state.params, federation)
        rows += _performance(task, unit, number, split, found)
    personal = fj.personalization.personalize(
        task.model,
        state.params,
        task.held_out,
        key=key,
        fractions=FRACTIONS,
        optimizer=_local_optimizer(config),
        epochs=config.personal_epochs,
        batch_size=config.batch_size,
    )
    for fraction, found in zip(FRACTIONS, personal, strict=True):
        own = _performance(task, unit, number, "held_out", found)
        rows += [row._replace(fraction=fraction) for row in own]
    traffic = method.traffic(state.params, task.train)
    return rows + [
        _row(unit, number, "traffic", metric, value) for metric, value in traffic._asdict().items()
    ]


def _measure(task: Task, params: Params, federation: fj.clients.Federation) -> Performance:
    return fj.metrics.performance(task.model, params, federation)


def _performance(task: Task, unit: Unit, number: int, split: str, found: Performance) -> list[Row]:
    mean = found.mean()
    return [
        _row(unit, number, split, "accuracy", mean.accuracy),
        _row(unit, number, split, "loss", mean.loss / task.positions),
    ]


def _row(unit: Unit, number: int, split: str, metric: str, value: Any) -> Row:
    return Row(*unit, number, split, None, metric, round(float(np.asarray(value)), 6))


def _latest(rows: list[Row], number: int) -> float | None:
    measured = (row for row in reversed(rows) if row.round == number)
    return next((r.value for r in measured if (r.split, r.metric) == ("test", "accuracy")), None)
