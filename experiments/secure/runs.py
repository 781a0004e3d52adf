"""Merges of K-FAC clients by sums alone: from sketches, from mean factors, under masks."""

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, steps, trained_clients
from fisherjax.fisher import KroneckerSum
from fisherjax.quadratic import Sums, from_sums

OPEN, SKETCHED, MASKED, MEAN = "open", "sketched", "masked", "mean factors"


@dataclasses.dataclass(frozen=True)
class Config(trained_clients.Clients):
    """Which clients, and how many terms; the seed is of the sketches too."""

    terms: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Of the sketches."""
    dampings: tuple[float, ...] = (1.0, 10.0)
    """In units of each block's mean eigenvalue."""
    out: commands.Folder = Path("runs/secure")
    """Folder for the results."""


class Point(NamedTuple):
    """A merge; `sent` is the size of one client's upload over that of its model."""

    way: str
    terms: int
    damping: float
    accuracy: float
    difference: float
    sent: float


def measured(asked: Config, console: Console) -> Iterator[Point]:
    """Merge the same clients in every way."""
    task, start, trained = trained_clients.clients(asked, ("fedfisher_kfac",), console)
    (federation,) = task.federations.values()
    weights, solver = federation.weights, fj.solvers.conjugate_gradients(1e-6, 500)
    # Of what federated averaging sends.
    size = _numbers(steps.changed(trained)) // federation.num_clients
    method = fj.algorithms.fedfisher(task.model)
    with console.status("Fisher information"):
        key = jax.random.key(asked.seed)
        sent = fj.merging.summarize(method, trained, federation, key=key)

    def point(way: str, terms: int, damping: float, merged: Any, against: Any, sent: Any) -> Point:
        gap = jax.tree.map(jnp.subtract, merged, against)
        distance = math.sqrt(fj.tree.inner(gap, gap) / fj.tree.inner(against, against))
        accuracy = float(task.accuracy(merged, task.test))
        found = Point(way, terms, damping, accuracy, distance, _numbers(sent) / size)
        console.print(*found)
        return found

    for damping in asked.dampings:
        how = {"damping": damping, "solver": solver}
        method = fj.algorithms.fedfisher(task.model, **how)
        against, *_ = fj.merging.merge(method, start, sent, weights)
        one = jax.tree.map(lambda x: x[0], sent.values)
        yield point(OPEN, 0, damping, against, against, one)
        for terms in asked.terms:
            method = fj.algorithms.fedfisher_sketched(task.model, terms=terms, **how)
            merged, *_ = fj.merging.merge(method, start, sent, weights)
            own = fj.secure_aggregation.contributions(method, start, sent, weights)
            yield point(SKETCHED, terms, damping, merged, against, own[0])
        fisher = fj.tree.weighted_sum(sent.values["fisher"], weights)
        operator = KroneckerSum(jax.tree.map(lambda x: x[None], fisher))
        # The other sums do not depend on the number of terms.
        sums = method.reduce(sent.values, weights)
        totals = Sums(operator, sums.product, sums.mean, sums.weight)
        solved = solver(from_sums(totals, damping)).params
        # What is not trained is the same in all ways.
        merged = fj.leaves.join(solved, fj.leaves.split_trained(task.model, against)[1])
        yield point(MEAN, 1, damping, merged, against, (fisher, sums.product, sums.mean))
        # Twice the largest of anybody stands for what clients agree on before.
        bound = jax.tree.map(lambda *x: 2 * max(float(jnp.abs(y).max()) for y in x) or 1.0, *own)
        for bits in (32, 64):
            secure = {"bound": bound, "threshold": len(own) // 2 + 1, "entropy": os.urandom}
            merged, *_ = fj.secure_aggregation.secure_merge(
                method, start, sent, weights, **secure, bits=bits
            )
            way = f"{MASKED}, {bits} bits"
            yield point(way, terms, damping, merged, against, [own[0]] * (bits // 32))


def _numbers(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
