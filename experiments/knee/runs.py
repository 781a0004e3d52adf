"""Accuracies of merges by Fisher information of more and more examples of a client."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, config, limits, reference, steps, tasks
from experiments.harness.config import Data, Group, Merging, OneShot, Training
from experiments.harness.progress import bar
from fisherjax.algorithms import Algorithm, Update
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Array, Params

Kind = Literal["true", "curvature_propagation", "sampled", "empirical"]


@dataclasses.dataclass(frozen=True)
class Clients:
    """Which clients are merged."""

    data: Group[Data] = dataclasses.field(default=Data())
    training: Group[Training] = dataclasses.field(default=Training())
    epochs: int = 30
    """Passes of every client over its own data."""
    partition_seed: int = 0
    """Of the split."""
    seed: int = 0
    """Of the initial model and of training."""
    reference: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File of trained clients, see `experiments.reference_clients`; otherwise they are trained."""

    @classmethod
    def usual(cls, dataset: str | None = None) -> Self:
        """Return what is run if nothing else is asked: clients as those of one_shot."""
        usual = config.one_shot(dataset)
        return cls(usual.data, usual.training, usual.epochs, usual.partition_seeds[0])


@dataclasses.dataclass(frozen=True)
class Config(Clients):
    """Which clients, how they are merged, and of how many of their examples."""

    algorithms: tuple[str, ...] = ("fedfisher_kfac", "fedfisher_diag", "fedlpa", "regmean")
    """Methods that take a number of examples."""
    kinds: tuple[Kind, ...] = ("true", "curvature_propagation", "sampled", "empirical")
    """Of Fisher information."""
    counts: tuple[int, ...] = (125, 250, 500, 1000, 2000, 4000, 0)
    """Examples of a client, at most; 0 is all that it has, which is measured once."""
    draws: int = 5
    """Of the examples."""
    out: commands.Folder = Path("runs/knee")
    """Folder for the results; an unfinished run there continues."""


Unit = tuple[str, str, int]
"""Algorithm, kind and draw."""


class Point(NamedTuple):
    """One accuracy on the test data, a fraction; a line of results.csv. Of 0 examples: of all."""

    algorithm: str
    kind: str
    examples: int
    draw: int
    accuracy: float

    @property
    def unit(self) -> Unit:
        """What is measured as a whole."""
        return self.algorithm, self.kind, self.draw


def units(asked: Config) -> list[Unit]:
    """List what is computed, and written, as a whole."""
    return [
        (name, kind, draw)
        for name in asked.algorithms
        for kind in (asked.kinds if "kind" in fj.algorithms.options(name) else ("-",))
        for draw in range(asked.draws)
    ]


def measured(asked: Config, console: Console, missing: Sequence[Unit]) -> Iterator[list[Point]]:
    """Train the clients, or read them, and merge them in the ways that are missing."""
    task, start, trained = clients(asked, asked.algorithms, console)
    (federation,) = task.federations.values()
    with bar(console) as shown:
        watched = shown.add_task("", total=len(missing), speed="")
        for name, kind, draw in missing:
            shown.update(watched, description=f"{name}, {kind}, draw {draw}")
            chosen = {} if kind == "-" else {"kind": getattr(fj.fisher, kind)}
            method = fj.algorithms.make(name, task.model, max_examples=None, **chosen)
            # The first draw goes on to all examples, if those are asked for.
            counts = sorted(n for n in asked.counts if n)
            counts += [0] if 0 in asked.counts and draw == 0 else []
            found = []
            for count, sent in growing(method, trained, federation, counts, draw):
                # Weights are of all that a client has, however many its Fisher is of.
                merged, *_ = fj.merging.merge(method, start, sent, federation.weights)
                accuracy = round(float(task.accuracy(merged, task.test)), 6)
                found.append(Point(name, kind, count, draw, accuracy))
            shown.advance(watched)
            yield found


def growing(
    method: Algorithm, trained: Trained, federation: Federation, counts: Sequence[int], draw: int
) -> Iterator[tuple[int, Update]]:
    """Summarize more and more of the same permutation of every client's examples; 0 is all.

    Updates are means over examples: those of the examples that are new are averaged in.
    """
    sizes, rows = np.asarray(federation.sizes), np.array(federation.indices)
    random = np.random.default_rng(draw)
    for own, size in zip(rows, sizes, strict=True):
        own[:size] = random.permutation(own[:size])
    sent, seen = None, np.zeros_like(sizes)
    for number, count in enumerate(counts):
        upto = np.minimum(sizes, count or sizes.max())
        # Of the same shapes, so that nothing compiles again.
        fresh = np.stack([np.roll(own, -begin) for own, begin in zip(rows, seen, strict=True)])
        own = fj.devices.replicate((jnp.asarray(fresh), jnp.asarray(upto - seen)), federation.mesh)
        some = federation._replace(indices=own[0], sizes=own[1])
        key = jax.random.fold_in(jax.random.key(draw), number)
        new = fj.merging.summarize(method, trained, some, key=key)
        # A client without examples has nothing new.
        share = jnp.asarray((upto - seen) / np.maximum(upto, 1))
        sent = new if sent is None else jax.tree.map(partial(_mixed, share), sent, new)
        seen = upto
        yield count, sent


def _mixed(share: Array, old: Array, new: Array) -> Array:
    return old + share.reshape(-1, *(1,) * (old.ndim - 1)) * (new - old)


def clients(
    asked: Clients, algorithms: tuple[str, ...], console: Console
) -> tuple[tasks.OneRound, Params, Trained]:
    """Train clients, or read them."""
    merging = Merging(algorithms)
    how = {"partition_seeds": (asked.partition_seed,), "seeds": (asked.seed,), "central": False}
    whole = OneShot(asked.data, asked.training, merging, asked.epochs, **how)
    limits.check_one_shot(whole)
    if asked.reference is not None:
        found = reference.load(asked.reference)
        data = fj.datasets.load(asked.data.dataset, asked.data.data_dir)
        task = tasks.split_up(tasks.shared(whole, *data), {0: found.partition})
        first = jax.tree.map(lambda leaf: leaf[0], found.params)
        return task, first, Trained(found.params)
    task = tasks.one_round(whole)
    params, key = steps.start(task, asked.seed)
    (federation,) = task.federations.values()
    options = steps.training_options(task, federation)
    with bar(console) as shown:
        watched = shown.add_task("training", total=asked.epochs, speed="")
        options["progress"] = lambda *_: shown.advance(watched)
        how = {"key": key, "optimizer": task.optimizer, **options}
        return task, params, fj.training.train(task.model, params, federation, **how)
