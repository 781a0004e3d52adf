"""Train the clients of a unit of an experiment in one round, and make the rows of results."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import hosts
from experiments.harness.methods import Method
from experiments.harness.records import Row
from experiments.harness.tasks import OneRound
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Array, Key, Params

Unit = tuple[int | None, int]
"""(partition seed, seed), computed and written as a whole; None means all data at one client."""

SERVER = "server_seconds"
"""The metric of the rows that hold the seconds of the server alone, by algorithm."""
Progress = Callable[[Any], None]
"""Called with the mean loss after each epoch, and with a description before other steps."""


class Merged(NamedTuple):
    """The merged model of an algorithm, with seconds in all and of the server, and upload bytes."""

    params: Params
    seconds: float
    upload_bytes: int
    server: float = 0.0


def start(task: OneRound, seed: int) -> tuple[Params, Key]:
    """Draw the initial model; return it and the key of all other random numbers."""
    return _start(task.init, seed if isinstance(seed, jax.Array) else np.uint32(seed))


@partial(jax.jit, static_argnums=0)
def _start(init: Callable[[Key], Params], seed: Array) -> tuple[Params, Key]:
    init_key, key = jax.random.split(jax.random.key(seed))
    return init(init_key), key


fold_in = jax.jit(jax.random.fold_in)
"""`jax.random.fold_in` as one program."""


def training_options(task: OneRound, federation: Federation) -> dict[str, Any]:
    """Return the options of `fj.training.train`, without the optimiser."""
    training = task.config.training
    side_by_side = training.clients_per_chunk
    return {
        "epochs": task.config.epochs,
        "batch_size": training.batch_size,
        "clients_per_chunk": side_by_side and min(side_by_side, federation.num_clients),
    }


def by_training(task: OneRound) -> dict[optax.GradientTransformation, dict[str, Method]]:
    """Group methods by the optimiser of their clients; the unchanged optimiser comes first."""
    groups: dict[optax.GradientTransformation, dict[str, Method]] = {task.optimizer: {}}
    for name, method in task.methods.items():
        groups.setdefault(method.clients.optimizer(task.optimizer), {})[name] = method
    if not task.references and not groups[task.optimizer]:
        del groups[task.optimizer]
    return groups


def measure(task: OneRound, unit: Unit, name: str, model: Merged) -> Row:
    """Return the row of a merged model's accuracy."""
    accuracy = task.accuracy(model.params, task.test)
    return row_of(name, unit, accuracy, seconds=model.seconds, upload_bytes=model.upload_bytes)


def server_row(unit: Unit, name: str, seconds: float) -> Row:
    """Return the row of the server's seconds."""
    split, seed = unit
    return Row(name, seed, 1, "server", SERVER, round(seconds, 4), partition_seed=split)


def row_of(algorithm: str, unit: Unit, accuracy: Any, **more: Any) -> Row:
    """Return the row of an accuracy on the test data, after one round."""
    (split, seed), value = unit, round(float(accuracy), 6)
    return Row(algorithm, seed, 1, "test", "accuracy", value, partition_seed=split, **more)


def train(
    task: OneRound,
    federation: Federation,
    params: Params,
    key: Key,
    progress: Progress,
    optimizer: optax.GradientTransformation,
    **changes: int,
) -> tuple[Trained, float]:
    """Train all clients, and return them with the seconds that it took.

    `progress` is called with the mean loss of each epoch.
    """
    how = {"key": key, "optimizer": optimizer}
    how |= training_options(task, federation) | changes
    weights = np.asarray(federation.weights)

    def after_epoch(epoch: int, losses: Array) -> None:
        losses = np.asarray(hosts.gathered(losses))
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

    return timed(fj.training.train, task.model, params, federation, progress=after_epoch, **how)


def finite(task: OneRound, trained: Trained, federation: Federation) -> tuple[Trained, Array]:
    """Return the clients that are merged, and weights [M]; raise or drop those that diverged."""
    how = task.config.on_nonfinite
    sound, weights = fj.merging.check_updates(changed(trained), federation.weights, how)
    return trained._replace(**sound), weights


def changed(trained: Trained) -> dict[str, Params]:
    """Return the leaves that training changed and clients send, stacked."""
    return {"params": trained.params, "statistics": trained.statistics}


def average(trained: Trained, weights: Array) -> Params:
    """Average clients' models; leaves that are not trained stay the same, bit for bit."""
    return trained._replace(**fj.tree.weighted_sum(changed(trained), weights)).whole


def exchange(task: OneRound, federation: Federation, step: str, params: Params, key: Key) -> Merged:
    """Run an exchange without training from a model; return the model behind it, and its cost."""
    method = fj.algorithms.make(step, task.model)
    chunk = training_options(task, federation)["clients_per_chunk"]
    how = {"key": key, "clients_per_chunk": chunk}
    sent = fj.merging.messages(method, params, federation, **how)
    messages, seconds = timed(list, sent)
    size = sum(upload_bytes(message.sent) for message in messages)
    return Merged(messages[-1].params, seconds, size)


def upload_bytes(stacked: Any) -> int:
    """Return the size in bytes of one client's upload."""
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(stacked))


def timed(compute: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    """Compute a result to the end, readable everywhere; return it and the seconds that it took."""
    start = time.perf_counter()
    result = jax.block_until_ready(hosts.gathered(compute(*arguments, **options)))
    return result, round(time.perf_counter() - start, 4)
