"""Changes of clients from the model that they started from, which several methods add up."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax.algorithms.base import Algorithm, Link, WeightedSum, averaging, weighted_sum
from fisherjax.training import Trained
from fisherjax.typing import Array, Key, Params


def start_of(trained: Trained, what: str) -> Params:
    """Return the model that a client started from; raise ValueError if it is unknown."""
    if trained.start is None:
        raise ValueError(
            f"{what} from the model that they started from, which is unknown. Pass the result of "
            "training.train, or training.Trained(stacked params, start); the command `fisher` "
            "reads it from --start."
        )
    return trained.start


def change_of(trained: Trained, what: str) -> Params:
    """Return W_i - W_0 of a client; raise ValueError if its start is unknown."""
    return jax.tree.map(jnp.subtract, trained.params, start_of(trained, what))


class CountedSum(NamedTuple):
    """A weighted sum over clients, its weight, and the number of clients with a weight.

    Attributes:
        total: sum_i w_i x_i, in at least float32.
        weight: sum_i w_i, a number.
        count: Number of clients with w_i > 0.
    """

    total: Any
    weight: Array
    count: Array


def adding_changes(
    merged: Callable[[Array, Array], Array], sent: str = "params", **changes: Any
) -> Algorithm[tuple[()]]:
    """Make an algorithm that adds a function of each leaf's mean change to the start.

    Args:
        merged: (sum_i p_i (W_i - W_0), number of clients with a weight) -> change of a merged leaf.
        sent: "params" if updates are {"params": W_i}, or "change" if {"change": W_i - W_0}.
        changes: Other fields of `Algorithm`.
    """

    def reduce(updates: dict[str, Any], weights: Array) -> CountedSum:
        present = (weights > 0).astype(weights.dtype)
        return CountedSum(*weighted_sum(updates[sent], weights), present.sum())

    def aggregate(
        key: Key, sums: CountedSum, params: Params, state: Any, cohort: Array
    ) -> tuple[Params, Any, tuple[()]]:
        del key, cohort

        def move(start: Array, mean: Array) -> Array:
            change = mean - start if sent == "params" else mean
            return start + merged(change, sums.count.astype(change.dtype))

        mean = WeightedSum(sums.total, sums.weight).mean()
        return jax.tree.map(move, params, mean), state, ()

    return averaging(reduce=reduce, aggregate=aggregate, link=Link(reads_start=True), **changes)
