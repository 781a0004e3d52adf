"""Accuracies of merges by Fisher information of more and more examples of a client."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, trained_clients
from experiments.harness.progress import bar
from fisherjax.algorithms import Algorithm, Update
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Array

Kind = Literal["true", "curvature_propagation", "sampled", "empirical"]


@dataclasses.dataclass(frozen=True)
class Config(trained_clients.Clients):
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
    task, start, trained = trained_clients.clients(asked, asked.algorithms, console)
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
