"""Train clients of one round or read them from a file, for studies of merges."""

import dataclasses
from pathlib import Path
from typing import Annotated, Self

import jax
import tyro
from rich.console import Console

import fisherjax as fj
from experiments.harness import (
    choices,
    commands,
    config,
    kept_clients,
    limits,
    progress,
    reference,
    steps,
    tasks,
)


@dataclasses.dataclass(frozen=True)
class Clients(commands.Imports):
    """The clients that are merged."""

    data: config.Group[config.Data] = dataclasses.field(default=config.Data())
    training: config.Group[config.Training] = dataclasses.field(default=config.Training())
    epochs: int = 30
    """Passes of every client over its own data."""
    partition_seed: int = 0
    """Seed of the split."""
    seed: int = 0
    """Seed of the initial model and of training."""
    reference: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of trained clients, see `experiments.reference_clients`; without it they are trained."""

    keep_clients: bool = False
    """Keep trained clients in the folder, so that a run that goes on there need not train."""

    @classmethod
    def usual(cls, dataset: str | None = None) -> Self:
        """Return the default configuration of a data set, with the clients of one_shot."""
        usual = config.one_shot(dataset)
        return cls(usual.data, usual.training, usual.epochs, usual.partition_seeds[0])


def clients(
    asked: Clients, algorithms: tuple[str, ...], console: Console
) -> tuple[tasks.OneRound, fj.clients.Federation, fj.typing.Params, fj.training.Trained]:
    """Train clients, or read them; return the task, their data, the initial model and them."""
    merging = config.Merging(algorithms)
    how = {"partition_seeds": (asked.partition_seed,), "seeds": (asked.seed,), "central": False}
    how |= {name: getattr(asked, name) for name in ("keep_clients", "imports", "out")}
    whole = config.OneShot(asked.data, asked.training, merging, asked.epochs, **how)
    limits.check_one_shot(whole)
    if asked.reference is not None:
        found = reference.load(asked.reference)
        data = choices.load(asked.data.dataset, asked.data.data_dir)
        task = tasks.split_up(tasks.shared(whole, *data), {0: found.partition})
        first = jax.tree.map(lambda leaf: leaf[0], found.params)
        return task, task.federations[0], first, fj.training.Trained(found.params)
    task, unit = tasks.one_round(whole), (asked.partition_seed, asked.seed)
    if kept := kept_clients.announce(whole.out, [(task._replace(methods={}), [unit])]):
        console.print(kept)
    params, key = steps.start(task, asked.seed)
    with progress.bar(console) as shown:
        watched = shown.add_task("training", total=asked.epochs, speed="")
        given = task, unit, params, key, lambda _: shown.advance(watched), task.optimizer
        trained, _ = kept_clients.trained(*given)
    return task, task.federations[unit[0]], params, trained
