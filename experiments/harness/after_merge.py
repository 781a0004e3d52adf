"""What follows a merge: rounds of federated averaging from it, exchanges without training."""

from collections.abc import Iterator

import jax

import fisherjax as fj
from experiments.harness import records, steps, tasks
from experiments.harness.config import OneShot
from experiments.harness.steps import Merged, Progress, Unit
from fisherjax.algorithms import Algorithm

_ROUNDS, _EXCHANGES = 2, 3  # the library folds keys with 0 to train and with 1 to summarize


def exchanges(config: OneShot) -> dict[str, tuple[str, ...]]:
    """List what follows every merge without training, by its last step."""
    plans: dict[str, tuple[str, ...]] = {other: (other,) for other in config.calibrate}
    if config.exchanges:
        # They start from a head that fits the squared error, whose gradient they follow.
        moves = ("natural_gradient",) * (config.exchanges - 1)
        plans["natural_gradient"] = ("analytic_head", *moves)
    return plans


def exchange_of(task: tasks.OneRound, step: str) -> Algorithm | tuple[Algorithm, ...]:
    """Make a step of `exchanges`."""
    return fj.algorithms.make(step, task.model)


def rounds(
    task: tasks.OneRound, unit: Unit, name: str, model: Merged, progress: Progress
) -> Iterator[records.Row]:
    """Go on with rounds of federated averaging, with the same minibatches for every algorithm."""
    params, federation = model.params, task.federations[unit[0]]
    key, epochs = (
        jax.random.fold_in(steps.start(task, unit[1])[1], _ROUNDS),
        task.config.then_epochs,
    )
    for number in range(2, task.config.then_rounds + 2):
        round_key = jax.random.fold_in(key, number)
        given = federation, params, round_key, progress, task.optimizer
        trained, seconds = steps.train(task, *given, epochs=epochs or task.config.epochs)
        sound, weights = steps.finite(task, trained, federation)
        params = steps.average(sound, weights)
        merged = Merged(params, seconds, steps.upload_bytes(steps.changed(sound)))
        yield steps.measure(task, unit, name, merged)._replace(round=number)


def exchanged(
    task: tasks.OneRound, unit: Unit, name: str, model: Merged, progress: Progress
) -> Iterator[records.Row]:
    """Exchange on without training, in each way that was asked for; rows by round.

    Seconds and bytes are of all rounds up to a row's.
    """
    federation = task.federations[unit[0]]
    chunk = steps.training_options(task, federation)["clients_per_chunk"]
    key = jax.random.fold_in(steps.start(task, unit[1])[1], _EXCHANGES)
    for last, plan in exchanges(task.config).items():
        now = model
        for number, step in enumerate(plan, start=2):
            progress(f"{name}+{last}: exchange without training")
            method = exchange_of(task, step)
            how = {"key": jax.random.fold_in(key, number), "clients_per_chunk": chunk}
            played = fj.merging.messages(method, now.params, federation, **how)
            messages, seconds = steps.timed(list, played)
            upload = now.upload_bytes + sum(
                steps.upload_bytes(message.sent) for message in messages
            )
            now = Merged(messages[-1].params, round(now.seconds + seconds, 4), upload)
            yield steps.measure(task, unit, f"{name}+{last}", now)._replace(round=number)
