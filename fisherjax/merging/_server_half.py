"""The server's half of a round: one function for merges, rounds, streams, sums and files.

    decode, screen, weigh, merge what is trained, average statistics, cast, check

What nobody trains is told apart here by what the update says of it: statistics become their
weighted mean, whatever the method, and frozen leaves stay as they are, bit for bit.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import clients, leaves, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._upload_checks import Diverged, check_left, screen, suspect
from fisherjax.algorithms.base import (
    Algorithm,
    Update,
    WeightedSum,
    as_sent,
    keeps_shapes,
    weighted_sum,
)
from fisherjax.clients import shares
from fisherjax.leaves import Leaves, join
from fisherjax.solvers import Info, Status
from fisherjax.typing import Array, Key, Params


class Merged(NamedTuple):
    """What the server's half gives.

    Attributes:
        params: The model, all its leaves.
        state: What the algorithm keeps.
        info: What it reports.
        weights: [K] the clients' shares, zero for those that were left out.
        diverged: Who was left out, and for which leaf.
        values: Of the updates, decoded, with zeros for clients that were left out.
    """

    params: Params
    state: Any
    info: Any
    weights: Array
    diverged: Diverged
    values: Any


class Added(NamedTuple):
    """What adds up of a network that has leaves which are not trained.

    Attributes:
        sums: What the algorithm's `reduce` gives.
        statistics: The weighted sum of the statistics, by name.
    """

    sums: Any
    statistics: WeightedSum


def server_half(
    algorithm: Algorithm,
    params: Params,
    update: Update,
    weights: Array,
    *,
    state: Any,
    cohort: Array,
    key: Key,
    on_nonfinite: str,
    others: Any = None,
) -> Merged:
    """Play the server's half of a round for stacked updates [K, ...] and weights of any sum.

    Under tracing nothing is refused by value, and nothing warned of.
    """
    own = told_apart(params, update)
    given = screened(algorithm, own, update, weights, on_nonfinite, others)
    values, statistics = given.values
    check_left(given.weights)
    # The same object says that nobody was left out: shares keep their bits.
    weights = weights if given.weights is weights else shares(given.weights)
    received: Any = (values, weights)
    # Add up if the method can.
    if algorithm.reduce is not None:
        received = _reduced(algorithm.reduce, values, weights)
    mean = _mean(statistics, weights) if statistics else {}
    merged = finished(algorithm, received, mean, own, state, cohort, key, (values, weights))
    return Merged(*merged, weights, given.diverged, values)


def told_apart(params: Params, update: Update, before: int = 0) -> Leaves:
    """Tell the leaves of params apart by what the update of some clients says of them.

    `before` is how many clients came before these.

    Raises:
        ValueError: If a name is that of no leaf, or running variances of several clients would be
            averaged.
    """
    if before + max((len(x) for x in update.statistics.values()), default=0) > 1:
        leaves.check_moments(tuple(update.statistics))
    return leaves.named(params, tuple(update.statistics), update.frozen)


def screened(
    algorithm: Algorithm,
    own: Leaves,
    update: Update,
    weights: Array,
    on_nonfinite: str,
    others: Any = None,
    first: int = 0,
) -> Any:
    """Decode an update and screen it: `updates.Screened` of the pair (values, statistics)."""
    values, packed = update.values, ()
    if algorithm.decode is not as_sent:
        values, packed = _decode(algorithm.decode, values, own.trained), values
        # Codes are looked at too where they are not known: decoding may hide what is not finite.
        packed = packed if checks.is_traced(packed) else ()
    every = values | {"statistics": update.statistics} if update.statistics else values
    others = {"kept": others, "sent": packed}
    found = screen(every, weights, on_nonfinite, first=first, others=others)
    values = {name: found.values[name] for name in values}
    return found._replace(values=(values, found.values.get("statistics", {})))


def added(
    reduce: Callable[[Any, Array], Any], values: Any, statistics: dict, weights: Array
) -> Any:
    """Add up stacked updates: what `reduce` gives, or `Added` where there are statistics."""
    sums = _reduced(reduce, values, weights)
    return Added(sums, _sum(statistics, weights)) if statistics else sums


def finished(
    algorithm: Algorithm,
    received: Any,
    statistics: dict[str, Array],
    own: Leaves,
    state: Any,
    cohort: Array,
    key: Key,
    blame: tuple[Any, Array] | None = None,
) -> tuple[Params, Any, Any]:
    """Merge what is trained, put it together with the statistics' means and what is frozen, check.

    `blame` are values and weights, to name a client by. Refuses a model that does not fit or is not
    finite, and warns of blocks that were not solved.
    """
    key = jax.random.fold_in(key, clients.AGGREGATE)
    trained = own.trained
    state = algorithm.link.init(trained, len(cohort)) if state is None else state
    given = join(*own) if algorithm.link.whole else trained
    merged, state, info = algorithm.aggregate(key, received, given, state, cohort)
    if not keeps_shapes(algorithm):
        _check_finite(merged, *(blame or ()))
        return merged, state, info
    _check_shapes(merged, given)
    averaged = leaves.filled(own.statistics, statistics)
    # Frozen leaves leave as they came, whatever a method that runs the network made of them. By
    # name, as what `files.load_update` read is no tree of the network's structure.
    whole = join(leaves.filled(trained, tree.by_name(merged)), averaged, own.frozen)
    # Sums and solutions are in at least float32: rounded to the model's dtype once, here.
    whole = jax.tree.map(
        lambda leaf, start: jnp.asarray(leaf, jnp.result_type(start)), whole, join(*own)
    )
    _check_finite(whole, *(blame or ()))
    _warn(info)
    return whole, state, info


@partial(jit, static_argnums=0)
def _decode(decode: Callable[[Any, Params], Any], values: Any, params: Params) -> Any:
    return decode(values, params)


# Compiled once for an algorithm: factories give the same function for equal arguments.
@partial(jit, static_argnums=0)
def _reduced(reduce: Callable[[Any, Array], Any], values: Any, weights: Array) -> Any:
    """Add up stacked updates."""
    return reduce(values, weights)


@jit
def _sum(statistics: dict[str, Array], weights: Array) -> WeightedSum:
    return weighted_sum(statistics, weights)


def _mean(statistics: dict[str, Array], weights: Array) -> dict[str, Array]:
    return _sum(statistics, weights).mean()


def server_key(algorithm: Algorithm, key: Key | None) -> Key:
    """Give a key where none is needed; refuse none where noise is drawn."""
    if key is None and algorithm.link.draws:
        raise ValueError(
            "key is None, but this algorithm adds noise that nobody may know; expected a secret "
            "key, another one for each merge."
        )
    key = jax.random.key(0) if key is None else key
    checks.key(key)
    return key


_finite_leaves = jit(tree.finite_leaves)


def _check_finite(merged: Params, values: Any = None, weights: Array | None = None) -> None:
    """Refuse a merged model that is not finite; name the leaf, and who is to blame if at hand."""
    if checks.is_traced(merged):
        return
    finite = np.asarray(_finite_leaves(merged))
    if not finite.all():
        leaf, blame = tree.names(merged)[finite.argmin()], suspect(values, weights)
        raise ValueError(f"Leaf '{leaf}' of the merged model is not finite. {blame}")


def _warn(info: Any) -> None:
    """Say which blocks a solver left unsolved."""
    if not isinstance(info, Info) or checks.is_traced(info):
        return
    status = tree.by_name(jax.tree.map(int, info.status))
    for ending, meaning in _UNSOLVED.items():
        names = [name for name, status in status.items() if status == ending]
        if names:
            warnings.warn(f"Blocks {names}: {meaning}", stacklevel=5)


_UNSOLVED = {
    Status.NO_CURVATURE: (
        "no client has any curvature, and they keep the weighted mean. Models that are certain of "
        "all their examples have none, nor have leaves under fallback=fisher.zero."
    ),
    Status.BROKE_DOWN: (
        "the solver met a direction without curvature before it converged; more damping makes the "
        "system definite."
    ),
    Status.OUT_OF_ITERATIONS: (
        "the solver took all its steps and its residual, which the returned info has, is above the "
        "tolerance; allow more iterations or more damping."
    ),
}


def _check_shapes(merged: Params, params: Params) -> None:
    if tree.shapes(merged) != tree.shapes(params):
        raise ValueError(
            f"The merged model has leaves of shapes {tree.shapes(merged)}, but params has "
            f"{tree.shapes(params)}. Pass the params of the network that the clients trained."
        )
