"""One unit of an experiment, step by step: train every client once, merge in every way."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

import fisherjax as fj
from experiments.config import Config
from experiments.experiment import Experiment, validation
from experiments.records import Row, Unit
from fisherjax.clients import Federation, LocalModels
from fisherjax.typing import Array, Key, Params


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


def steps(config: Config, unit: Unit) -> int:
    """Count the steps of a unit, an epoch or an algorithm being one."""
    return config.epochs + (0 if unit[0] is None else len(config.algorithms))


def chunk(config: Config, federation: Federation) -> int | None:
    """Say how many clients are side by side, None for the library's choice."""
    if config.clients_per_chunk == "auto":
        return None
    return min(config.clients_per_chunk, federation.num_clients)


def training_options(experiment: Experiment, federation: Federation) -> dict[str, Any]:
    """Return how clients are trained, as options of `fj.training.train`."""
    return {
        "optimizer": experiment.optimizer,
        "epochs": experiment.config.epochs,
        "batch_size": experiment.config.batch_size,
        "clients_per_chunk": chunk(experiment.config, federation),
        "augment": experiment.augment,
    }


def run(experiment: Experiment, unit: Unit, progress: Progress) -> list[Row]:
    """Compute one unit.

    Args:
        experiment: what `prepare` returned.
        unit: a partition seed and a seed: train the clients, merge them in every way. Without a
            partition seed: train on all the data.
        progress: told of each epoch and step.

    Returns:
        Its rows.

    Raises:
        Diverged: if a model is not finite; the message names the client.
    """
    partition_seed, seed = unit
    if partition_seed is None:
        return _central(experiment, seed, progress)
    federation = experiment.federations[partition_seed]
    params, key = start(experiment, seed)
    models, seconds = _train(experiment, federation, params, key, progress)
    stacked, weights = _finite(experiment.config, models.params, federation.weights)

    local = experiment.local_accuracies(models.params, *experiment.test)
    ensemble = experiment.ensemble_accuracy(stacked, weights, *experiment.test)
    rows = [_row("local", unit, value, client=i, seconds=seconds) for i, value in enumerate(local)]
    rows.append(_row("ensemble", unit, ensemble, upload_bytes=_upload(stacked)))
    for name, merged, seconds, upload in _merged(
        experiment, unit, params, stacked, weights, key, progress
    ):
        value = experiment.accuracy(merged, *experiment.test)
        rows.append(_row(name, unit, value, seconds=seconds, upload_bytes=upload))
    return rows


def _merged(
    experiment: Experiment,
    unit: Unit,
    params: Params,
    stacked: Params,
    weights: Array,
    key: Key,
    progress: Progress,
) -> list[tuple[str, Params, float, int]]:
    """Merge by every method: its name, the merged model, seconds and upload."""
    results = {}
    images = validation(experiment, unit[0])
    for clients in {method.clients: None for method in experiment.methods.values()}:
        sharing = {n: m for n, m in experiment.methods.items() if m.clients == clients}
        progress.step(f"{next(iter(sharing))}: summaries of the clients")
        updates, seconds = _timed(
            lambda clients=clients: fj.clients.summarize(
                clients,
                stacked,
                experiment.federations[unit[0]],
                key=key,
                global_params=params,
                clients_per_chunk=chunk(experiment.config, experiment.federations[unit[0]]),
            )
        )
        for number, (name, method) in enumerate(sharing.items()):
            if number > 0:
                progress.step(f"{name}: merge")
            server = method.server(*images)
            (merged, _), more = _timed(
                lambda server=server, updates=updates: _merge(server, params, updates, weights)
            )
            results[name] = (name, merged, round(seconds + more, 4), _upload(updates))
    return [results[name] for name in experiment.methods]


def _merge(
    server: fj.aggregation.Aggregator, params: Params, updates: Any, weights: Array
) -> tuple[Params, Any]:
    try:
        return fj.aggregation.merge(server, params, updates, weights)
    except ValueError as error:
        raise Diverged(str(error)) from error


def _central(experiment: Experiment, seed: int, progress: Progress) -> list[Row]:
    params, key = start(experiment, seed)
    models, seconds = _train(experiment, experiment.central, params, key, progress)
    accuracy = experiment.local_accuracies(models.params, *experiment.test)[0]
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
    experiment: Experiment, federation: Federation, params: Params, key: Key, progress: Progress
) -> tuple[LocalModels, float]:
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
            experiment.apply,
            fj.likelihoods.categorical,
            params,
            federation,
            key=key,
            progress=after_epoch,
            **training_options(experiment, federation),
        )
    )


def _finite(config: Config, stacked: Params, weights: Array) -> tuple[Params, Array]:
    try:
        return fj.aggregation.check_updates(stacked, weights, config.on_nonfinite)
    except ValueError as error:
        raise Diverged(str(error)) from error


def _upload(stacked: Any) -> int:
    """Count the bytes of one client's update."""
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(stacked))


def _timed(compute: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = jax.block_until_ready(compute())
    return result, round(time.perf_counter() - start, 4)
