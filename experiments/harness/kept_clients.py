"""Keep trained clients in the folder of a run, so that further methods merge them untrained.

Each training has its own folder below `clients/`, named by its split, its seed and a digest of all
options that training depends on. It holds a checkpoint, whose checksums reveal damage.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import checkpoints, choices, commands, steps, tables
from experiments.harness.names import options_in, parts
from experiments.harness.tasks import OneRound
from fisherjax.training import Trained
from fisherjax.typing import Key, Params

FOLDER = "clients"


def trained(
    task: OneRound,
    unit: steps.Unit,
    params: Params,
    key: Key,
    progress: steps.Progress,
    optimizer: optax.GradientTransformation,
    method: str = "",
) -> tuple[Trained, float]:
    """Train the clients of a unit, or read them if they were kept; see `steps.train`.

    With `keep_clients` they are kept. `method` is one of those that need the optimiser. The
    seconds of clients that are read are those of their training.
    """
    federation = _clients(task, unit)
    train = partial(steps.train, task, federation, params, key, progress, optimizer)
    if not task.config.keep_clients:
        return train()
    about = _described(task, unit, "" if optimizer == task.optimizer else method)
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    split = "all-data" if unit[0] is None else f"split{unit[0]}"
    folder = task.config.out / FOLDER / f"{split}-seed{unit[1]}-{digest}"
    like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), _shapes(task, unit, optimizer))
    if found := _kept(folder, like, about):
        for _ in range(task.config.epochs):
            progress("the clients were kept")
        return found
    state, seconds = train()
    checkpoints.save(folder, 0, state, [{"training": about, "seconds": seconds}])
    return state, seconds


def _kept(folder: Path, like: Trained, about: dict[str, Any]) -> tuple[Trained, float] | None:
    """Read clients and their seconds; remove those of another training, and damaged ones."""
    try:
        found = checkpoints.restore(folder, like, print)
        if found is None:
            shutil.rmtree(folder, ignore_errors=True)  # damaged ones, which are of no use
            return None
        ((training, seconds),) = (map(row.get, ("training", "seconds")) for row in found.rows)
        if training == about:
            return found.state, float(seconds)
    except (ValueError, TypeError, KeyError, AttributeError):
        pass  # other leaves, or no record of a training
    print(f"{folder} holds clients of another training: they are trained again.")
    shutil.rmtree(folder)
    return None


def announce(out: Path, tasks: Iterable[tuple[OneRound, Iterable[steps.Unit]]]) -> str:
    """Say how large the kept clients of tasks and their units will be; "" if none are kept.

    Raises:
        ValueError: If the disk has less room.
    """
    sizes = [
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(_shapes(task, unit, optimizer)))
        for task, units in tasks
        if task.config.keep_clients
        for unit in units
        for optimizer in ([task.optimizer] if unit[0] is None else steps.by_training(task))
    ]
    needed, free = sum(sizes), shutil.disk_usage(out).free
    if needed > free:
        raise ValueError(
            f"--keep-clients needs up to {tables.size(needed)} in {out}, where {tables.size(free)} "
            "are free: leave it out, or choose another --out"
        )
    where = f"in {FOLDER}/: up to {tables.size(needed)} of {len(sizes)} trainings"
    return f"Trained clients are kept {where}." if sizes else ""


def _clients(task: OneRound, unit: steps.Unit) -> fj.clients.Federation:
    return task.central if unit[0] is None else task.federations[unit[0]]


def _shapes(task: OneRound, unit: steps.Unit, optimizer: optax.GradientTransformation) -> Trained:
    """Return the shapes and dtypes of what a training returns, without training."""

    def train(seed: Any, federation: fj.clients.Federation) -> Trained:
        params, key = steps.start(task, seed)
        how = {"optimizer": optimizer, **steps.training_options(task, federation)}
        return fj.training.train(task.model, params, federation, key=key, **how)

    return jax.eval_shape(train, np.uint32(0), _clients(task, unit))


def _described(task: OneRound, unit: steps.Unit, method: str) -> dict[str, Any]:
    """Return all that a training depends on, as JSON values."""
    config = task.config
    about = commands.contents(config.data) | commands.contents(config.training)
    del about["data_dir"], about["clients_per_chunk"]
    about |= {"epochs": config.epochs, "partition_seed": unit[0], "seed": unit[1]}
    if method:
        (base, *_), merging = parts(method), commands.contents(config.merging)
        about["method"] = {"name": base, "options": options_in(method)} | {
            name: value
            for name, value in merging.items()
            if name != "algorithms" and ("." not in name or name.startswith(f"{base}."))
        }
    return about | {"imports": list(choices.hashes(config.imports).values())}
