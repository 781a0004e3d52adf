"""Measure accuracies of merges by the Fisher information of more and more examples a client."""

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
from experiments.harness import commands, studies, trained_clients
from fisherjax.algorithms import Algorithm, Update
from fisherjax.clients import Federation
from fisherjax.training import Trained

Kind = Literal["true", "curvature_propagation", "sampled", "empirical"]


@dataclasses.dataclass(frozen=True)
class Config(trained_clients.Clients):
    """Clients, methods that merge them, and numbers of examples for the Fisher information."""

    algorithms: tuple[str, ...] = ("fedfisher_kfac", "fedfisher_diag", "fedlpa", "regmean")
    """Methods whose Fisher information is computed from a number of examples."""
    kinds: tuple[Kind, ...] = ("true", "curvature_propagation", "sampled", "empirical")
    """Kinds of Fisher information."""
    counts: tuple[int, ...] = (125, 250, 500, 1000, 2000, 4000, 0)
    """Largest numbers of examples a client; 0 takes all, which is measured once."""
    draws: int = 5
    """Number of random draws of the examples."""
    out: commands.Folder = Path("runs/knee")
    """Folder for the results; an unfinished run there continues."""


Unit = tuple[str, str, int]
"""Algorithm, kind of Fisher information and draw."""


class Measurement(NamedTuple):
    """One accuracy on the test data, a fraction; 0 examples stand for all. See `studies`."""

    algorithm: str
    kind: str
    examples: int
    draw: int
    accuracy: float

    @property
    def unit(self) -> Unit:
        """The unit that the measurement belongs to."""
        return self.algorithm, self.kind, self.draw


def units(asked: Config) -> dict[Unit, int]:
    """Return the units, each computed and written as a whole, and their numbers of measurements."""
    return {
        (name, kind, draw): len(_counts(asked, draw))
        for name in asked.algorithms
        for kind in (asked.kinds if "kind" in fj.algorithms.options(name) else ("-",))
        for draw in range(asked.draws)
    }


def _counts(asked: Config, draw: int) -> list[int]:
    """Return the numbers of examples; the first draw goes on to all, if those are asked for."""
    counts = sorted(n for n in asked.counts if n)
    return counts + ([0] if 0 in asked.counts and draw == 0 else [])


def measured(
    asked: Config, console: Console, missing: Sequence[Unit]
) -> Iterator[list[Measurement]]:
    """Train the clients, or read them, and merge them in the ways that are missing."""
    task, federation, start, trained = trained_clients.clients(asked, asked.algorithms, console)
    for name, kind, draw in studies.each(console, missing, "{0[0]}, {0[1]}, draw {0[2]}".format):
        chosen = {} if kind == "-" else {"kind": getattr(fj.fisher, kind)}
        method = fj.algorithms.make(name, task.model, max_examples=None, **chosen)
        found = []
        for count, sent in growing(method, trained, federation, _counts(asked, draw), draw):
            # The weights count all examples of a client, also where its Fisher takes fewer.
            merged, *_ = fj.merging.merge(method, start, sent, federation.weights)
            accuracy = round(float(task.accuracy(merged, task.test)), 6)
            found.append(Measurement(name, kind, count, draw, accuracy))
        yield found


def growing(
    method: Algorithm, trained: Trained, federation: Federation, counts: Sequence[int], draw: int
) -> Iterator[tuple[int, Update]]:
    """Summarize growing parts of one permutation of every client's examples; count 0 is all.

    Updates are means over examples, so each step averages the update of the new examples in.
    """
    sizes, rows = np.asarray(federation.sizes), np.array(federation.indices)
    random = np.random.default_rng(draw)
    for examples, size in zip(rows, sizes, strict=True):
        examples[:size] = random.permutation(examples[:size])
    sent, seen = None, np.zeros_like(sizes)
    for number, count in enumerate(counts):
        upto = np.minimum(sizes, count or sizes.max())
        # The shapes stay the same, so that nothing compiles again.
        fresh = np.stack([np.roll(row, -begin) for row, begin in zip(rows, seen, strict=True)])
        arrays = jnp.asarray(fresh), jnp.asarray(upto - seen)
        indices, numbers = fj.devices.replicate(arrays, federation.mesh)
        some = federation._replace(indices=indices, sizes=numbers)
        key = jax.random.fold_in(jax.random.key(draw), number)
        new = fj.merging.summarize(method, trained, some, key=key)
        # A client without examples has no new ones; its share is 0.
        share = jnp.asarray((upto - seen) / np.maximum(upto, 1))
        sent = new if sent is None else jax.tree.map(partial(_mixed, share), sent, new)
        seen = upto
        yield count, sent


def _mixed(share: fj.typing.Array, old: fj.typing.Array, new: fj.typing.Array) -> fj.typing.Array:
    """Return the mean of old and new leaves [M, ...], with a share [M] of the new ones."""
    return old + share.reshape(-1, *(1,) * (old.ndim - 1)) * (new - old)
