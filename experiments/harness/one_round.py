"""One unit of an experiment in one round: train every client once, merge in every way."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import checkpoints, votes
from experiments.harness.config import STUDENT, OneShot
from experiments.harness.methods import Method
from experiments.harness.records import Row
from experiments.harness.tasks import OneRound
from fisherjax.algorithms import Algorithm
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Array, Key, Params

Unit = tuple[int | None, int]
"""(partition seed, seed): what is computed, and written, as a whole. No split: all the data."""

SERVER = "server_seconds"
"""The metric of the rows that hold the seconds of the server's half alone, by algorithm."""
_SAVE_EVERY = 30  # seconds, while the server trains
_ROUNDS, _EXCHANGES, _VOTES = (
    2,
    3,
    4,
)  # the library folds keys with 0 to train and with 1 to summarize
# Compiled once for equal models, whichever task they belong to.
_ensemble_accuracy = jax.jit(fj.metrics.ensemble_accuracy, static_argnums=0)
Progress = Callable[[float | str], None]
"""Told the mean loss after each epoch of training, and before each other step what it is."""


class Merged(NamedTuple):
    """What one algorithm gave; seconds and bytes as in a row, of the seconds `server` a part."""

    params: Params
    seconds: float
    upload_bytes: int
    server: float = 0.0


def units(config: OneShot) -> list[Unit]:
    """List each seed on each split, and last the ceilings: an interrupted run has merged most."""
    splits = [(split, seed) for seed in config.seeds for split in config.partition_seeds]
    return splits + [(None, seed) for seed in config.seeds if config.central]


def finished(rows: Iterable[Row]) -> set[Unit]:
    """Return the units that rows belong to; files never hold a part of one."""
    return {(row.partition_seed, row.seed) for row in rows}


def length(task: OneRound, unit: Unit) -> tuple[int, int]:
    """Count the epochs of a unit, in all of its trainings, and its other steps."""
    if unit[0] is None:
        return task.config.epochs, 0
    config, merges = task.config, len(task.methods)
    later = merges * config.then_rounds * (config.then_epochs or config.epochs)
    exchanges = len(config.calibrate) + config.exchanges
    made = (method.server(None).stages for method in task.methods.values())
    others = sum(own.number for own in made if own is not None)
    others += 0 if task.voting is None else 1 + (STUDENT in task.voting.names)
    return config.epochs * len(by_training(task)) + later, merges * (1 + exchanges) + others


def training_options(task: OneRound, federation: Federation) -> dict[str, Any]:
    """Return how clients are trained, as options of `fj.training.train` but for the optimiser."""
    training = task.config.training
    side_by_side = training.clients_per_chunk
    return {
        "epochs": task.config.epochs,
        "batch_size": training.batch_size,
        "clients_per_chunk": side_by_side and min(side_by_side, federation.num_clients),
    }


def exchanges(config: OneShot) -> dict[str, tuple[str, ...]]:
    """List what follows every merge without training, by its last step."""
    plans: dict[str, tuple[str, ...]] = {other: (other,) for other in config.calibrate}
    if config.exchanges:
        # The steps start from a head that fits the squared error, whose gradient they follow.
        steps = ("natural_gradient",) * (config.exchanges - 1)
        plans["natural_gradient"] = ("analytic_head", *steps)
    return plans


def exchange_of(task: OneRound, step: str) -> Algorithm:
    """Make a step of `exchanges`."""
    return getattr(fj.algorithms, step)(task.model)


def run(task: OneRound, unit: Unit, progress: Progress = lambda _: None) -> list[Row]:
    """Compute one unit; a ValueError names a client whose model is not finite.

    With a split, train the clients, merge them in every way, and go on for the rounds that were
    asked for. Without, train on all the data.
    """
    if unit[0] is None:
        params, key = start(task, unit[1])
        models, seconds = _train(task, task.central, params, key, progress, task.optimizer)
        (accuracy,) = task.accuracy(models.params, task.test, stacked=True)
        return [row_of("central", unit, accuracy, seconds=seconds)]
    rows, merged = train_and_merge(task, unit, progress)
    rows += _voted(task, unit, progress)
    for name, model in merged.items():
        rows += [measure(task, unit, name, model), _server_row(unit, name, model)]
        rows += _then_rounds(task, unit, name, model, progress)
        rows += _exchanged(task, unit, name, model, progress)
    return rows


def _voted(task: OneRound, unit: Unit, progress: Progress) -> list[Row]:
    """Let clients vote where that was asked for; they train once more, networks of their own."""
    if task.voting is None:
        return []
    federation = task.federations[unit[0]]
    options = training_options(task, federation)
    key = jax.random.fold_in(start(task, unit[1])[1], _VOTES)
    found = votes.run(task.voting, federation, task.test, key=key, progress=progress, **options)
    rows = []
    for name, own in found.items():
        model = Merged((), round(own.seconds, 4), own.upload_bytes, own.server)
        more = {"seconds": model.seconds, "upload_bytes": model.upload_bytes}
        rows += [row_of(name, unit, own.accuracy, **more), _server_row(unit, name, model)]
    return rows


def train_and_merge(
    task: OneRound, unit: Unit, progress: Progress = lambda _: None
) -> tuple[list[Row], dict[str, Merged]]:
    """Train the clients of a unit, once and again for algorithms that change how, and merge them.

    The rows are those of the references.
    """
    params, key = start(task, unit[1])
    rows, merged = [], {}
    federation = task.federations[unit[0]]
    for optimizer, methods in by_training(task).items():
        trained, training = _train(task, federation, params, key, progress, optimizer)
        stacked, weights = _finite(task, trained, federation)
        if optimizer == task.optimizer:
            rows = references(task, unit, trained.params, stacked, weights, training)
            training = 0
        trained = trained._replace(params=stacked)
        for name, own in merge(task, methods, unit, params, trained, weights, progress).items():
            merged[name] = own._replace(seconds=round(own.seconds + training, 4))
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
    task: OneRound, unit: Unit, local: Params, kept: Params, weights: Array, seconds: float | None
) -> list[Row]:
    """Measure the clients' own models, and the ensemble of those that are kept."""
    accuracies = task.accuracy(local, task.test, stacked=True)
    ensemble = _ensemble_accuracy(task.model, kept, weights, task.test)
    rows = [
        row_of("local", unit, own, client=i, seconds=seconds) for i, own in enumerate(accuracies)
    ]
    return [*rows, row_of("ensemble", unit, ensemble, upload_bytes=_upload(kept))]


def merge(
    task: OneRound,
    methods: dict[str, Method],
    unit: Unit,
    params: Params,
    trained: Trained,
    weights: Array,
    progress: Progress = lambda _: None,
) -> dict[str, Merged]:
    """Merge the same clients by several methods; those that send the same are summarized once."""
    federation, images = task.federations[unit[0]], task.validation(unit[0])
    chunk = training_options(task, federation)["clients_per_chunk"]
    how = {"key": start(task, unit[1])[1], "clients_per_chunk": chunk}
    drop, results = task.config.on_nonfinite, {}
    for sent in dict.fromkeys(method.sent for method in methods.values()):
        updates = None
        for name, method in methods.items():
            if method.sent != sent:
                continue
            if updates is None:
                progress(f"{name}: summaries of the clients")
                clients = method.clients, trained, federation
                updates, seconds = _timed(fj.merging.summarize, *clients, **how)
            else:
                progress(f"{name}: merge")
            server = _followed(task, method.server(images), unit, name, progress)
            given = server, params, updates, weights
            own = {"key": how["key"], "on_nonfinite": drop}
            (merged, *_), more = _timed(fj.merging.merge, *given, **own)
            results[name] = Merged(merged, seconds + more, _upload(updates), more)
    return results


def _followed(
    task: OneRound, server: Algorithm, unit: Unit, name: str, progress: Progress
) -> Algorithm:
    """Let a merge in stages tell of each, and go on where a killed run saved the last."""
    if server.stages is None:
        return server
    folder, number, saved = _saved(task, unit, name), server.stages.number, time.monotonic()

    def after(done: int, work: Any) -> None:
        nonlocal saved
        jax.block_until_ready(work)
        progress(f"{name}: {done} of {number} epochs")
        if folder is not None and time.monotonic() - saved > _SAVE_EVERY:
            checkpoints.save(folder, done, work, [])
            saved = time.monotonic()

    def resume(work: Any) -> tuple[int, Any] | None:
        found = None if folder is None else checkpoints.restore(folder, work, progress)
        return found and (found.number, found.state)

    return fj.algorithms.in_stages(server, after, resume)


def _saved(task: OneRound, unit: Unit, name: str) -> Path | None:
    """Say where a merge in stages is saved until its unit is written."""
    return task.config.out and task.config.out / "stages" / f"{name}-{unit[0]}-{unit[1]}"


def clear(task: OneRound) -> None:
    """Remove what was saved of merges in stages: the rows of their unit are written."""
    if task.config.out:
        shutil.rmtree(task.config.out / "stages", ignore_errors=True)


def _then_rounds(
    task: OneRound, unit: Unit, name: str, model: Merged, progress: Progress
) -> Iterator[Row]:
    """Go on with rounds of federated averaging, with the same minibatches for every algorithm."""
    params, federation = model.params, task.federations[unit[0]]
    key, epochs = jax.random.fold_in(start(task, unit[1])[1], _ROUNDS), task.config.then_epochs
    for number in range(2, task.config.then_rounds + 2):
        round_key = jax.random.fold_in(key, number)
        given = federation, params, round_key, progress, task.optimizer
        trained, seconds = _train(task, *given, epochs=epochs or task.config.epochs)
        stacked, weights = _finite(task, trained, federation)
        params = fj.tree.weighted_sum(stacked, weights)
        row = measure(task, unit, name, Merged(params, seconds, _upload(stacked)))
        yield row._replace(round=number)


def _exchanged(
    task: OneRound, unit: Unit, name: str, model: Merged, progress: Progress
) -> Iterator[Row]:
    """Exchange on without training, in each way that was asked for; rows by round.

    Seconds and bytes are of all rounds up to a row's.
    """
    federation = task.federations[unit[0]]
    chunk = training_options(task, federation)["clients_per_chunk"]
    key = jax.random.fold_in(start(task, unit[1])[1], _EXCHANGES)
    for last, plan in exchanges(task.config).items():
        now = model
        for number, step in enumerate(plan, start=2):
            progress(f"{name}+{last}: exchange without training")
            method = exchange_of(task, step)
            how = {"key": jax.random.fold_in(key, number), "clients_per_chunk": chunk}
            played = fj.merging.messages(method, now.params, federation, **how)
            messages, seconds = _timed(list, played)
            upload = now.upload_bytes + sum(_upload(message.sent) for message in messages)
            now = Merged(messages[-1].params, round(now.seconds + seconds, 4), upload)
            yield measure(task, unit, f"{name}+{last}", now)._replace(round=number)


def measure(task: OneRound, unit: Unit, name: str, model: Merged) -> Row:
    """Make the row of a merged model."""
    accuracy = task.accuracy(model.params, task.test)
    return row_of(name, unit, accuracy, seconds=model.seconds, upload_bytes=model.upload_bytes)


def _server_row(unit: Unit, name: str, model: Merged) -> Row:
    split, seed = unit
    return Row(name, seed, 1, "server", SERVER, round(model.server, 4), partition_seed=split)


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
    **changes: int,
) -> tuple[Trained, float]:
    weights = np.asarray(federation.weights)

    def after_epoch(epoch: int, losses: Array) -> None:
        losses = np.asarray(losses)
        diverged = np.flatnonzero(~np.isfinite(losses))
        if diverged.size and task.config.on_nonfinite == "raise":
            clients = ", ".join(f"client {client}" for client in diverged)
            who = "the central model" if federation is task.central else clients
            raise ValueError(
                f"{who} diverged in epoch {epoch + 1}: the training loss is "
                f"{losses[diverged[0]]}. Lower --learning-rate (now "
                f"{task.config.training.learning_rate:g}), or leave diverged clients out of the "
                "merge with --on-nonfinite drop."
            )
        progress(float(weights @ losses))

    how = {"key": key, "optimizer": optimizer, "progress": after_epoch}
    how |= training_options(task, federation) | changes
    return _timed(fj.training.train, task.model, params, federation, **how)


def _finite(task: OneRound, trained: Trained, federation: Federation) -> tuple[Params, Array]:
    how = task.config.on_nonfinite
    return fj.merging.check_updates(trained.params, federation.weights, how)


def _upload(stacked: Any) -> int:
    """Count the bytes of one client's update."""
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(stacked))


def _timed(compute: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    result = jax.block_until_ready(compute(*arguments, **options))
    return result, round(time.perf_counter() - begun, 4)
