"""One unit of an experiment in one round: train every client once, merge in every way."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fisherjax as fj
from experiments.harness.config import OneShot
from experiments.harness.methods import Method, optimizers
from experiments.harness.records import Row
from experiments.harness.tasks import OneRound
from fisherjax.algorithms import Algorithm, Update
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Array, Key, Params

Unit = tuple[int | None, int]
"""(partition seed, seed): what is computed, and written, as a whole. No split: all the data."""

_ROUNDS = 2  # the library folds keys with 0 to train and with 1 to summarize


class Diverged(ValueError):
    """A client's model or Fisher information is not finite, and nobody asked to leave it out."""


class Progress(NamedTuple):
    """How a unit says how far it is.

    Attributes:
        epoch: `(mean loss)`, after each epoch of training.
        step: `(what)`, before each other step.
    """

    epoch: Callable[[float], None]
    step: Callable[[str], None]


class Merged(NamedTuple):
    """What one algorithm gave.

    Attributes:
        params: The merged model.
        seconds: Of the summaries and the merge, and of training if it trains its own clients.
        upload_bytes: Of one client.
    """

    params: Params
    seconds: float
    upload_bytes: int


def units(config: OneShot) -> list[Unit]:
    """List what has to be computed: each seed on each split, then each seed on all the data.

    The ceilings, if wanted, come last: an interrupted run has merged what it could.
    """
    splits = [(split, seed) for seed in config.seeds for split in config.partition_seeds]
    return splits + [(None, seed) for seed in config.seeds if config.central]


def finished(rows: Iterable[Row]) -> set[Unit]:
    """Return the units that rows belong to; files never hold a part of one."""
    return {(row.partition_seed, row.seed) for row in rows}


def epochs(config: OneShot, unit: Unit) -> int:
    """Count the epochs of a unit, in all of its trainings."""
    if unit[0] is None:
        return config.epochs
    names = config.merging.algorithms
    return (len(optimizers(names)) + len(names) * config.then_rounds) * config.epochs


def steps(config: OneShot, unit: Unit) -> int:
    """Count the steps of a unit, an epoch or an algorithm being one."""
    return epochs(config, unit) + (0 if unit[0] is None else len(config.merging.algorithms))


def training_options(task: OneRound, federation: Federation) -> dict[str, Any]:
    """Return how clients are trained, as options of `fj.training.train` but for the optimiser."""
    training = task.config.training
    side_by_side = training.clients_per_chunk
    return {
        "epochs": task.config.epochs,
        "batch_size": training.batch_size,
        "clients_per_chunk": side_by_side and min(side_by_side, federation.num_clients),
    }


def run(task: OneRound, unit: Unit, progress: Progress) -> list[Row]:
    """Compute one unit.

    Args:
        task: What is learned, and how.
        unit: With a split, train the clients, merge them in every way, and go on for the rounds
            that were asked for. Without, train on all the data.
        progress: Told of each epoch and step.

    Returns:
        Its rows.

    Raises:
        Diverged: If a model is not finite; the message names the client.
    """
    if unit[0] is None:
        return _central(task, unit, progress)
    rows, merged = train_and_merge(task, unit, progress)
    for name, (params, seconds, upload) in merged.items():
        accuracy = task.accuracy(params, task.test)
        rows.append(row_of(name, unit, accuracy, seconds=seconds, upload_bytes=upload))
        rows += _then_rounds(task, unit, name, params, progress)
    return rows


def train_and_merge(
    task: OneRound, unit: Unit, progress: Progress
) -> tuple[list[Row], dict[str, Merged]]:
    """Train the clients of a unit, once and again for algorithms that change how, and merge them.

    Returns:
        The rows of the references, and what each algorithm gave.

    Raises:
        Diverged: If a model is not finite; the message names the client.
    """
    params, key = start(task, unit[1])
    rows, merged = [], {}
    federation = task.federations[unit[0]]
    for optimizer, methods in by_training(task).items():
        trained, training = _train(task, federation, params, key, progress, optimizer)
        stacked, weights = _finite(task.config, trained.params, federation.weights)
        as_they_are = optimizer == task.optimizer
        if as_they_are:
            rows = references(task, unit, trained.params, stacked, weights, training)
        trained = trained._replace(params=stacked)
        results = merge(task, methods, unit, params, trained, weights, progress)
        for name, own in results.items():
            seconds = own.seconds if as_they_are else round(own.seconds + training, 4)
            merged[name] = own._replace(seconds=seconds)
    return rows, {name: merged[name] for name in task.methods}


def by_training(task: OneRound) -> dict[optax.GradientTransformation, dict[str, Method]]:
    """Group methods by the optimiser that their clients train with; the plain one comes first."""
    groups: dict[optax.GradientTransformation, dict[str, Method]] = {task.optimizer: {}}
    for name, method in task.methods.items():
        groups.setdefault(method.clients.optimizer(task.optimizer), {})[name] = method
    return groups


def start(task: OneRound, seed: int) -> tuple[Params, Key]:
    """Draw the initial model; return it and the key of everything else."""
    init_key, key = jax.random.split(jax.random.key(seed))
    return task.init(init_key), key


def references(
    task: OneRound, unit: Unit, local: Params, stacked: Params, weights: Array, seconds: float
) -> list[Row]:
    """Measure the clients' own models, and their ensemble."""
    accuracies = task.accuracies(local, task.test)
    ensemble = task.ensemble_accuracy(stacked, weights, task.test)
    rows = [
        row_of("local", unit, own, client=i, seconds=seconds) for i, own in enumerate(accuracies)
    ]
    return [*rows, row_of("ensemble", unit, ensemble, upload_bytes=_upload(stacked))]


def merge(
    task: OneRound,
    methods: dict[str, Method],
    unit: Unit,
    params: Params,
    trained: Trained,
    weights: Array,
    progress: Progress,
) -> dict[str, Merged]:
    """Merge the same clients by several methods; those that send the same are summarized once."""
    federation, images = task.federations[unit[0]], task.validation(unit[0])
    chunk = training_options(task, federation)["clients_per_chunk"]
    _, key = start(task, unit[1])
    results = {}

    def summarize(clients: Algorithm) -> Update:
        return fj.merging.summarize(clients, trained, federation, key=key, clients_per_chunk=chunk)

    def merged(server: Algorithm, updates: Update) -> Params:
        on_nonfinite = task.config.on_nonfinite
        try:
            return fj.merging.merge(server, params, updates, weights, on_nonfinite=on_nonfinite)[0]
        except ValueError as error:
            raise Diverged(str(error)) from error

    for sent in dict.fromkeys(method.sent for method in methods.values()):
        sharing = {name: method for name, method in methods.items() if method.sent == sent}
        first = next(iter(sharing))
        progress.step(f"{first}: summaries of the clients")
        updates, seconds = _timed(summarize, sharing[first].clients)
        for name, method in sharing.items():
            if name != first:
                progress.step(f"{name}: merge")
            params_of, more = _timed(merged, method.server(images), updates)
            results[name] = Merged(params_of, seconds + more, _upload(updates))
    return results


def _then_rounds(
    task: OneRound, unit: Unit, name: str, params: Params, progress: Progress
) -> list[Row]:
    """Go on with rounds of federated averaging, with the same minibatches for every algorithm."""
    rows = []
    federation = task.federations[unit[0]]
    _, key = start(task, unit[1])
    for number in range(2, task.config.then_rounds + 2):
        round_key = jax.random.fold_in(jax.random.fold_in(key, _ROUNDS), number)
        models, seconds = _train(task, federation, params, round_key, progress, task.optimizer)
        stacked, weights = _finite(task.config, models.params, federation.weights)
        params = fj.tree.weighted_sum(stacked, weights)
        accuracy = task.accuracy(params, task.test)
        row = row_of(name, unit, accuracy, seconds=seconds, upload_bytes=_upload(stacked))
        rows.append(row._replace(round=number))
    return rows


def _central(task: OneRound, unit: Unit, progress: Progress) -> list[Row]:
    params, key = start(task, unit[1])
    models, seconds = _train(task, task.central, params, key, progress, task.optimizer)
    accuracy = task.accuracies(models.params, task.test)[0]
    return [row_of("central", unit, accuracy, seconds=seconds)]


def row_of(algorithm: str, unit: Unit, accuracy: Any, **more: Any) -> Row:
    """Make the row of an accuracy on the test data, after one round."""
    value = round(float(accuracy), 6)
    split, seed = unit
    return Row(algorithm, seed, 1, "test", "accuracy", value, partition_seed=split, **more)


def _train(
    task: OneRound,
    federation: Federation,
    params: Params,
    key: Key,
    progress: Progress,
    optimizer: optax.GradientTransformation,
) -> tuple[Trained, float]:
    weights = np.asarray(federation.weights)

    def after_epoch(epoch: int, losses: Array) -> None:
        losses = np.asarray(losses)
        diverged = np.flatnonzero(~np.isfinite(losses))
        if diverged.size and task.config.on_nonfinite == "raise":
            clients = ", ".join(f"client {client}" for client in diverged)
            who = "the central model" if federation is task.central else clients
            raise Diverged(
                f"{who} diverged in epoch {epoch + 1}: the training loss is "
                f"{losses[diverged[0]]}. Lower --learning-rate (now "
                f"{task.config.training.learning_rate:g}), or leave diverged clients out of the "
                "merge with --on-nonfinite drop."
            )
        progress.epoch(float(weights @ losses))

    def train() -> Trained:
        return fj.training.train(
            task.model,
            params,
            federation,
            key=key,
            optimizer=optimizer,
            progress=after_epoch,
            **training_options(task, federation),
        )

    return _timed(train)


def _finite(config: OneShot, stacked: Params, weights: Array) -> tuple[Params, Array]:
    try:
        return fj.merging.check_updates(stacked, weights, config.on_nonfinite)
    except ValueError as error:
        raise Diverged(str(error)) from error


def _upload(stacked: Any) -> int:
    """Count the bytes of one client's update."""
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(stacked))


def _timed(compute: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    result = jax.block_until_ready(compute(*arguments))
    return result, round(time.perf_counter() - begun, 4)
