"""Continue after a merge: rounds of federated averaging, and exchanges without training."""

from collections.abc import Iterator

from experiments.harness import records, steps, tasks
from experiments.harness.config import OneShot

_ROUNDS, _EXCHANGES = 2, 3  # the library folds keys with 0 to train and with 1 to summarize


def exchanges(config: OneShot) -> dict[str, tuple[str, ...]]:
    """Return the exchanges that follow every merge, as steps by the name of the last."""
    plans: dict[str, tuple[str, ...]] = {other: (other,) for other in config.calibrate}
    if config.exchanges:
        # Natural gradients start from a head that fits the squared error, whose gradient they take.
        moves = ("natural_gradient",) * (config.exchanges - 1)
        plans["natural_gradient"] = ("analytic_head", *moves)
    return plans


def rounds(
    task: tasks.OneRound, unit: steps.Unit, name: str, model: steps.Merged, progress: steps.Progress
) -> Iterator[records.Row]:
    """Run rounds of federated averaging, with the same minibatches after every algorithm."""
    params, federation = model.params, task.federations[unit[0]]
    key = steps.fold_in(steps.start(task, unit[1])[1], _ROUNDS)
    epochs = task.config.then_epochs or task.config.epochs
    for number in range(2, task.config.then_rounds + 2):
        round_key = steps.fold_in(key, number)
        given = federation, params, round_key, progress, task.optimizer
        trained, seconds = steps.train(task, *given, epochs=epochs)
        sound, weights = steps.finite(task, trained, federation)
        params = steps.average(sound, weights)
        merged = steps.Merged(params, seconds, steps.upload_bytes(steps.changed(sound)))
        yield steps.measure(task, unit, name, merged)._replace(round=number)


def exchanged(
    task: tasks.OneRound, unit: steps.Unit, name: str, model: steps.Merged, progress: steps.Progress
) -> Iterator[records.Row]:
    """Run each chosen exchange without training after a merge; yield the rows of each round.

    Seconds and bytes of a row are those of all rounds until then.
    """
    federation = task.federations[unit[0]]
    key = steps.fold_in(steps.start(task, unit[1])[1], _EXCHANGES)
    for last, plan in exchanges(task.config).items():
        current = model
        for number, step in enumerate(plan, start=2):
            progress(f"{name}+{last}: exchange without training")
            given = task, federation, step, current.params, steps.fold_in(key, number)
            found = steps.exchange(*given)
            seconds = round(current.seconds + found.seconds, 4)
            current = steps.Merged(found.params, seconds, current.upload_bytes + found.upload_bytes)
            yield steps.measure(task, unit, f"{name}+{last}", current)._replace(round=number)
