"""Compute one unit of an experiment in one round: train every client, merge by every method."""

import shutil
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax

import fisherjax as fj
from experiments.harness import (
    after_merge,
    checkpoints,
    kept_clients,
    names,
    records,
    steps,
    tables,
    votes,
)
from experiments.harness.config import OneShot
from experiments.harness.methods import Method
from experiments.harness.steps import Merged, Progress, Unit
from experiments.harness.tasks import OneRound

_SAVE_EVERY = 30  # seconds between checkpoints while the server trains
REFERENCES = "references"
"""What stands for the rows of references among the names of methods."""
_VOTES = 4  # folded into the key; `after_merge` uses 2 and 3
# Compiled once for equal models of all tasks.
_ensemble_accuracy = jax.jit(fj.metrics.ensemble_accuracy, static_argnums=0)


def units(config: OneShot) -> list[Unit]:
    """List each seed on each split, and last the ceilings, which are the least needed."""
    splits = [(split, seed) for seed in config.seeds for split in config.partition_seeds]
    return splits + [(None, seed) for seed in config.seeds if config.central]


def missing(config: OneShot, rows: Sequence[records.Row]) -> dict[Unit, tuple[str, ...]]:
    """Return what is left to compute of each unit: methods, and the references before them.

    A method is whole when all of its rounds and exchanges are there. The reference of the units
    without a split is the central model, of the others the clients' models and their ensemble.
    """
    found = tables.gathered((row.unit, row) for row in rows if row.metric == "accuracy")
    left = {}
    for unit in units(config):
        there = {(row.algorithm, row.round, row.client) for row in found.get(unit, [])}
        wanted = _expected(config, unit)
        if names_ := tuple(name for name, parts in wanted.items() if not parts <= there):
            left[unit] = names_
    return left


def _expected(config: OneShot, unit: Unit) -> dict[str, set[tuple[str, int, int | None]]]:
    """Return the algorithm, round and client of each accuracy, by method."""
    if unit[0] is None:
        return {REFERENCES: {("central", 1, None)}}
    local = {("local", 1, client) for client in range(config.data.num_clients)}
    wanted = {REFERENCES: {("ensemble", 1, None), *local}}
    plans = after_merge.exchanges(config).items()
    for name in config.merging.algorithms:
        wanted[name] = {(name, 1, None)}
        if not names.is_vote(name):
            wanted[name] |= {(name, 2 + number, None) for number in range(config.then_rounds)}
            wanted[name] |= {
                (f"{name}+{last}", 2 + number, None)
                for last, plan in plans
                for number in range(len(plan))
            }
    return wanted


def only(task: OneRound, wanted: Collection[str]) -> OneRound:
    """Return a task that computes some methods, and the references if they are among the names."""
    voting = task.voting
    if voting is not None:
        chosen = tuple(name for name in voting.names if name in wanted)
        voting = voting._replace(names=chosen) if chosen else None
    own = {name: method for name, method in task.methods.items() if name in wanted}
    return task._replace(methods=own, voting=voting, references=REFERENCES in wanted)


def replaced(rows: Sequence[records.Row], new: Sequence[records.Row]) -> list[records.Row]:
    """Return rows with new ones in place of those that the new ones measure again."""

    def what(row: records.Row) -> tuple:
        return row._replace(value=0.0, seconds=None, upload_bytes=None)

    again = set(map(what, new))
    return [*(row for row in rows if what(row) not in again), *new]


def length(task: OneRound, unit: Unit) -> tuple[int, int]:
    """Return the number of epochs of a unit, in all of its trainings, and of its other steps."""
    if unit[0] is None:
        return task.config.epochs, 0
    config, merges = task.config, len(task.methods)
    rounds = merges * config.then_rounds * (config.then_epochs or config.epochs)
    exchanges = len(config.calibrate) + config.exchanges
    made = (method.server(None).aggregate for method in task.methods.values())
    others = sum(own.number for own in made if isinstance(own, fj.algorithms.Stages))
    others += 0 if task.voting is None else 1 + (names.STUDENT in task.voting.names)
    return config.epochs * len(steps.by_training(task)) + rounds, merges * (1 + exchanges) + others


def run(task: OneRound, unit: Unit, progress: Progress = lambda _: None) -> list[records.Row]:
    """Compute one unit; return its rows.

    With a split, train the clients, merge them by every method, and run the rounds that follow.
    Without a split, train on all the data. A ValueError names a client whose model is not finite.
    """
    if unit[0] is None:
        params, key = steps.start(task, unit[1])
        given = task, unit, params, key, progress, task.optimizer
        found, seconds = kept_clients.trained(*given)
        accuracy = task.accuracy(found.models, task.test, stacked=True)[0]
        return [steps.row_of("central", unit, accuracy, seconds=seconds)]
    rows, merged = train_and_merge(task, unit, progress)
    rows += _voted(task, unit, progress)
    for name, model in merged.items():
        rows += [steps.measure(task, unit, name, model), steps.server_row(unit, name, model.server)]
        rows += after_merge.rounds(task, unit, name, model, progress)
        rows += after_merge.exchanged(task, unit, name, model, progress)
    return rows


def _voted(task: OneRound, unit: Unit, progress: Progress) -> list[records.Row]:
    """Compute FedOV's vote if it was chosen; its clients train separate networks."""
    if task.voting is None:
        return []
    federation = task.federations[unit[0]]
    options = steps.training_options(task, federation)
    key = jax.random.fold_in(steps.start(task, unit[1])[1], _VOTES)
    found = votes.run(task.voting, federation, task.test, key=key, progress=progress, **options)
    rows = []
    for name, one in found.items():
        more = {"seconds": round(one.seconds, 4), "upload_bytes": one.upload_bytes}
        rows.append(steps.row_of(name, unit, one.accuracy, **more))
        rows.append(steps.server_row(unit, name, one.server))
    return rows


def train_and_merge(
    task: OneRound, unit: Unit, progress: Progress = lambda _: None
) -> tuple[list[records.Row], dict[str, Merged]]:
    """Train the clients of a unit, again for algorithms that change the training, and merge them.

    Return the rows of the references, and the merged models by algorithm.
    """
    params, key = steps.start(task, unit[1])
    rows, merged = [], {}
    federation = task.federations[unit[0]]
    for optimizer, methods in steps.by_training(task).items():
        given = task, unit, params, key, progress, optimizer
        trained, training = kept_clients.trained(*given, next(iter(methods), ""))
        sound, weights = steps.finite(task, trained, federation)
        if optimizer == task.optimizer:
            if task.references:
                rows = references(task, unit, trained, sound, weights, training)
            training = 0
        for name, own in merge(task, methods, unit, params, sound, weights, progress).items():
            merged[name] = own._replace(seconds=round(own.seconds + training, 4))
    return rows, {name: merged[name] for name in task.methods}


def references(
    task: OneRound,
    unit: Unit,
    local: fj.training.Trained,
    kept: fj.training.Trained,
    weights: fj.typing.Array,
    seconds: float | None,
) -> list[records.Row]:
    """Return the rows of the clients' own models and of the ensemble of those that are kept."""
    accuracies = task.accuracy(local.models, task.test, stacked=True)
    ensemble = _ensemble_accuracy(task.model, kept.models, weights, task.test)
    size = steps.upload_bytes(steps.changed(kept))
    rows = [
        steps.row_of("local", unit, own, client=i, seconds=seconds)
        for i, own in enumerate(accuracies)
    ]
    return [*rows, steps.row_of("ensemble", unit, ensemble, upload_bytes=size)]


def merge(
    task: OneRound,
    methods: dict[str, Method],
    unit: Unit,
    params: fj.typing.Params,
    trained: fj.training.Trained,
    weights: fj.typing.Array,
    progress: Progress = lambda _: None,
) -> dict[str, Merged]:
    """Merge the same clients by several methods; methods with equal uploads share a summary."""
    federation, images = task.federations[unit[0]], task.validation(unit[0])
    chunk = steps.training_options(task, federation)["clients_per_chunk"]
    how = {"key": steps.start(task, unit[1])[1], "clients_per_chunk": chunk}
    drop, results = task.config.on_nonfinite, {}
    for sent in dict.fromkeys(method.sent for method in methods.values()):
        updates = None
        for name, method in methods.items():
            if method.sent != sent:
                continue
            if updates is None:
                progress(f"{name}: summaries of the clients")
                clients = method.clients, trained, federation
                updates, seconds = steps.timed(fj.merging.summarize, *clients, **how)
            else:
                progress(f"{name}: merge")
            server = _with_progress(task, method.server(images), unit, name, progress)
            given = server, params, updates, weights
            own = {"key": how["key"], "on_nonfinite": drop}
            (merged, *_), more = steps.timed(fj.merging.merge, *given, **own)
            results[name] = Merged(merged, seconds + more, steps.upload_bytes(updates), more)
    return results


def _with_progress(
    task: OneRound, server: fj.algorithms.Algorithm, unit: Unit, name: str, progress: Progress
) -> fj.algorithms.Algorithm:
    """Add progress and checkpoints to a merge in stages, so that a killed run continues."""
    stages = server.aggregate
    if not isinstance(stages, fj.algorithms.Stages):
        return server
    number, saved = stages.number, time.monotonic()
    # The checkpoints stay until the unit is written.
    folder = task.config.out and task.config.out / "stages" / f"{name}-{unit[0]}-{unit[1]}"

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


def clear(task: OneRound) -> None:
    """Remove the checkpoints of merges in stages, after the rows of their unit are written."""
    if task.config.out:
        shutil.rmtree(task.config.out / "stages", ignore_errors=True)
