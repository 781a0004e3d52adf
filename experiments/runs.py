"""One unit of an experiment, step by step: train every client once, merge in every way."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fisherjax as fj
from experiments.config import Config
from experiments.experiment import Experiment, validation
from experiments.methods import Method, trainings
from experiments.records import Row, Unit
from fisherjax.algorithms import Algorithm, Update
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Array, Key, Params

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


def epochs(config: Config, unit: Unit) -> int:
    """Count the epochs of a unit, in all of its trainings."""
    if unit[0] is None:
        return config.epochs
    later = len(config.algorithms) * config.then_rounds
    return (trainings(config.algorithms) + later) * config.epochs


def steps(config: Config, unit: Unit) -> int:
    """Count the steps of a unit, an epoch or an algorithm being one."""
    return epochs(config, unit) + (0 if unit[0] is None else len(config.algorithms))


def chunk(config: Config, federation: Federation) -> int | None:
    """Say how many clients are side by side, None for the library's choice."""
    if config.clients_per_chunk == "auto":
        return None
    return min(config.clients_per_chunk, federation.num_clients)


def training_options(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """Return how clients are trained, as options of `fj.training.train` but for the optimiser."""
    return {
        "epochs": experiment.config.epochs,
        "batch_size": experiment.config.batch_size,
        "clients_per_chunk": chunk(experiment.config, federation),
    }


def run(experiment: Experiment, unit: Unit, progress: Progress) -> list[Row]:
    """Compute one unit.

    Args:
        experiment: what `prepare` returned.
        unit: a partition seed and a seed: train the clients, merge them in every way, and go on
            for the rounds that were asked for. Without a partition seed: train on all the data.
        progress: told of each epoch and step.

    Returns:
        Its rows.

    Raises:
        Diverged: if a model is not finite; the message names the client.
    """
    partition_seed, seed = unit
    if partition_seed is None:
        return _central(experiment, seed, progress)
    rows, merged = train_and_merge(experiment, unit, progress)
    _, key = start(experiment, seed)
    for name, (params, seconds, upload) in merged.items():
        accuracy = experiment.accuracy(params, experiment.test)
        rows.append(_row(name, unit, accuracy, seconds=seconds, upload_bytes=upload))
        rows += _then_rounds(experiment, unit, name, params, key, progress)
    return rows


class Merged(NamedTuple):
    """What one algorithm gave.

    Attributes:
        params: the merged model.
        seconds: of the summaries and the merge, and of training if it trains its own clients.
        upload_bytes: of one client.
    """

    params: Params
    seconds: float
    upload_bytes: int


def train_and_merge(
    experiment: Experiment, unit: Unit, progress: Progress
) -> tuple[list[Row], dict[str, Merged]]:
    """Train the clients of a unit, once and again for algorithms that need it, and merge them.

    Args:
        experiment: what `prepare` returned.
        unit: a partition seed and a seed.
        progress: told of each epoch and step.

    Returns:
        The rows of the references, and what each algorithm gave.

    Raises:
        Diverged: if a model is not finite; the message names the client.
    """
    params, key = start(experiment, unit[1])
    rows, merged = [], {}
    federation = experiment.federations[unit[0]]
    for optimizer, methods in by_training(experiment).items():
        trained, training = _train(experiment, federation, params, key, progress, optimizer)
        stacked, weights = _finite(experiment.config, trained.params, federation.weights)
        as_they_are = optimizer == experiment.optimizer
        if as_they_are:
            rows = _references(experiment, unit, trained.params, stacked, weights, training)
        trained = trained._replace(params=stacked)
        for name, result in _merged(
            experiment, methods, unit, params, trained, weights, key, progress
        ).items():
            own_training = 0.0 if as_they_are else training
            merged[name] = result._replace(seconds=round(result.seconds + own_training, 4))
    return rows, {name: merged[name] for name in experiment.methods}


def by_training(
    experiment: Experiment,
) -> dict[optax.GradientTransformation, dict[str, Method]]:
    """Group methods by the optimiser that their clients train with; the plain one comes first."""
    groups = {experiment.optimizer: {}}
    for name, method in experiment.methods.items():
        optimizer = method.clients.optimizer(experiment.optimizer)
        groups.setdefault(optimizer, {})[name] = method
    return groups


def _references(
    experiment: Experiment, unit: Unit, local: Params, stacked: Params, weights: Array, time: float
) -> list[Row]:
    """Measure the clients' own models, and their ensemble."""
    accuracies = experiment.local_accuracies(local, experiment.test)
    ensemble = experiment.ensemble_accuracy(stacked, weights, experiment.test)
    rows = [_row("local", unit, own, client=i, seconds=time) for i, own in enumerate(accuracies)]
    return [*rows, _row("ensemble", unit, ensemble, upload_bytes=_upload(stacked))]


def _merged(
    experiment: Experiment,
    methods: dict[str, Method],
    unit: Unit,
    params: Params,
    trained: Trained,
    weights: Array,
    key: Key,
    progress: Progress,
) -> dict[str, Merged]:
    """Merge the same clients by several methods."""
    config, results = experiment.config, {}
    federation, images = experiment.federations[unit[0]], validation(experiment, unit[0])
    for sent in dict.fromkeys(method.sent for method in methods.values()):
        sharing = {n: m for n, m in methods.items() if m.sent == sent}
        clients = next(iter(sharing.values())).clients
        progress.step(f"{next(iter(sharing))}: summaries of the clients")
        updates, seconds = _timed(
            lambda clients=clients: fj.merging.summarize(
                clients, trained, federation, key=key, clients_per_chunk=chunk(config, federation)
            )
        )
        for number, (name, method) in enumerate(sharing.items()):
            if number > 0:
                progress.step(f"{name}: merge")
            server = method.server(images)
            merged, more = _timed(
                lambda server=server, updates=updates: _merge(
                    config, server, params, updates, weights
                )
            )
            results[name] = Merged(merged, seconds + more, _upload(updates))
    return results


def _then_rounds(
    experiment: Experiment, unit: Unit, name: str, params: Params, key: Key, progress: Progress
) -> list[Row]:
    """Go on with rounds of federated averaging, with the same minibatches for every algorithm."""
    rows = []
    federation = experiment.federations[unit[0]]
    for number in range(2, experiment.config.then_rounds + 2):
        round_key = jax.random.fold_in(jax.random.fold_in(key, _ROUNDS), number)
        models, seconds = _train(
            experiment, federation, params, round_key, progress, experiment.optimizer
        )
        stacked, weights = _finite(experiment.config, models.params, federation.weights)
        params = fj.tree.weighted_sum(stacked, weights)
        accuracy = experiment.accuracy(params, experiment.test)
        row = _row(name, unit, accuracy, seconds=seconds, upload_bytes=_upload(stacked))
        rows.append(row._replace(round=number))
    return rows


def _merge(
    config: Config, server: Algorithm, params: Params, updates: Update, weights: Array
) -> Params:
    options = {"on_nonfinite": config.on_nonfinite}
    try:
        return fj.merging.merge(server, params, updates, weights, **options)[0]
    except ValueError as error:
        raise Diverged(str(error)) from error


def _central(experiment: Experiment, seed: int, progress: Progress) -> list[Row]:
    params, key = start(experiment, seed)
    models, seconds = _train(
        experiment, experiment.central, params, key, progress, experiment.optimizer
    )
    accuracy = experiment.local_accuracies(models.params, experiment.test)[0]
    return [_row("central", (None, seed), accuracy, seconds=seconds)]


def _row(
    algorithm: str,
    unit: Unit,
    accuracy: Any,
    client: int | None = None,
    seconds: float | None = None,
    upload_bytes: int | None = None,
) -> Row:
    value = round(float(accuracy), 6)
    return Row(algorithm, *unit, 1, client, "test", "accuracy", value, seconds, upload_bytes)


def start(experiment: Experiment, seed: int) -> tuple[Params, Key]:
    """Draw the initial model; return it and the key of everything else."""
    init_key, key = jax.random.split(jax.random.key(seed))
    return experiment.init(init_key), key


def _train(
    experiment: Experiment,
    federation: Federation,
    params: Params,
    key: Key,
    progress: Progress,
    optimizer: optax.GradientTransformation,
) -> tuple[Trained, float]:
    config = experiment.config
    weights = np.asarray(federation.weights)

    def after_epoch(epoch: int, losses: Array) -> None:
        losses = np.asarray(losses)
        diverged = np.flatnonzero(~np.isfinite(losses))
        if diverged.size and config.on_nonfinite == "raise":
            clients = ", ".join(f"client {client}" for client in diverged)
            who = "the central model" if federation is experiment.central else clients
            raise Diverged(
                f"{who} diverged in epoch {epoch + 1}: the training loss is "
                f"{losses[diverged[0]]}. Lower --learning-rate (now {config.learning_rate:g}), or "
                "leave diverged clients out of the merge with --on-nonfinite drop."
            )
        progress.epoch(float(weights @ losses))

    return _timed(
        lambda: fj.training.train(
            experiment.model,
            params,
            federation,
            key=key,
            optimizer=optimizer,
            progress=after_epoch,
            **training_options(experiment, federation),
        )
    )


def _finite(config: Config, stacked: Params, weights: Array) -> tuple[Params, Array]:
    try:
        return fj.merging.check_updates(stacked, weights, config.on_nonfinite)
    except ValueError as error:
        raise Diverged(str(error)) from error


def _upload(stacked: Any) -> int:
    """Count the bytes of one client's update."""
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(stacked))


def _timed(compute: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(compute())
    return result, round(time.perf_counter() - start, 4)
