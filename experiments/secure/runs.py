"""Merge K-FAC clients from sums alone: from sketches, from mean factors, under masks."""

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

OPEN, SKETCHED, MASKED, MEAN = "open", "sketched", "masked", "mean factors"


@dataclasses.dataclass(frozen=True)
class Config(trained_clients.Clients):
    """Clients, and the terms of the sketches, which are drawn from the same seed."""

    terms: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Numbers of terms of the sketches."""
    dampings: tuple[float, ...] = (1.0, 10.0)
    """Dampings, in units of the mean eigenvalue of each block."""
    out: commands.Folder = Path("runs/secure")
    """Folder for the results."""


class Measurement(NamedTuple):
    """One merge; a line of results.csv.

    `difference` is the relative distance from the open merge, `sent` the size of one client's
    upload over the size of its model.
    """

    way: str
    terms: int
    damping: float
    accuracy: float
    difference: float
    sent: float


def measured(asked: Config, console: Console) -> Iterator[Measurement]:
    """Merge the same clients in every way."""
    task, federation, start, trained = trained_clients.clients(asked, ("fedfisher_kfac",), console)
    weights, solver = federation.weights, fj.solvers.conjugate_gradients(1e-6, 500)
    # The size of a model is that of an upload of federated averaging.
    size = _numbers(steps.changed(trained)) // federation.num_clients
    method = fj.algorithms.fedfisher(task.model)
    with console.status("Fisher information"):
        key = jax.random.key(asked.seed)
        sent = fj.merging.summarize(method, trained, federation, key=key)

    def measure(
        way: str, terms: int, damping: float, merged: Any, against: Any, sent: Any
    ) -> Measurement:
        gap = jax.tree.map(jnp.subtract, merged, against)
        distance = math.sqrt(fj.tree.inner(gap, gap) / fj.tree.inner(against, against))
        accuracy = float(task.accuracy(merged, task.test))
        found = Measurement(way, terms, damping, accuracy, distance, _numbers(sent) / size)
        console.print(*found)
        return found

    for damping in asked.dampings:
        how = {"damping": damping, "solver": solver}
        method = fj.algorithms.fedfisher(task.model, **how)
        against, *_ = fj.merging.merge(method, start, sent, weights)
        one = jax.tree.map(lambda x: x[0], sent.values)
        yield measure(OPEN, 0, damping, against, against, one)
        for terms in asked.terms:
            method = fj.algorithms.fedfisher_sketched(task.model, terms=terms, **how)
            merged, *_ = fj.merging.merge(method, start, sent, weights)
            own = fj.secure_aggregation.contributions(method, start, sent, weights)
            yield measure(SKETCHED, terms, damping, merged, against, own[0])
        fisher = fj.tree.weighted_sum(sent.values["fisher"], weights)
        operator = fj.fisher.KroneckerSum(jax.tree.map(lambda x: x[None], fisher))
        # The other sums do not depend on the number of terms.
        sums = method.reduce(sent.values, weights)
        totals = fj.quadratic.Sums(operator, sums.product, sums.mean, sums.weight)
        solved = solver(fj.quadratic.from_sums(totals, damping)).params
        # Leaves that are not trained are the same in every merge.
        merged = fj.leaves.join(solved, fj.leaves.split_trained(task.model, against)[1])
        yield measure(MEAN, 1, damping, merged, against, (fisher, sums.product, sums.mean))
        # Twice the largest number of any client stands for a bound that clients agree on before.
        bound = jax.tree.map(lambda *x: 2 * max(float(jnp.abs(y).max()) for y in x) or 1.0, *own)
        for bits in (32, 64):
            secure = {"bound": bound, "entropy": os.urandom}
            merged, *_ = fj.secure_aggregation.secure_merge(
                method, start, sent, weights, **secure, bits=bits
            )
            way = f"{MASKED}, {bits} bits"
            yield measure(way, terms, damping, merged, against, [own[0]] * (bits // 32))


def _numbers(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
