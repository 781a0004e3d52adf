"""The one interface of all algorithms, and what several of them share.

An algorithm is a few pure functions, made by a factory; all but two have defaults:

    init(params, num_clients) -> state                  the server's
    init_client(params) -> private                      a client's own, never sent
    broadcast(params, state, private) -> (start, extras)
    optimizer(base) -> transformation
    summarize(key, trained, examples, private) -> (update, private)
    reduce(updates, weights) -> sums                     or None
    aggregate(key, received, params, state, cohort) -> (params, state, info)

A round sends what `broadcast` gives, trains by `optimizer` of the user's one, and summarizes on
every client; the server reduces and aggregates. Where it needs only sums over clients, `reduce`
computes them from stacked updates and weights of any sum, in at least float32: sums of groups of
clients add up leaf by leaf, so uploads can be streamed, sharded and masked, and `aggregate` divides
by the total weight that is among them. Without `reduce` the server needs each update: `aggregate`
takes the pair (updates, weights) with weights that sum to one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import optax

from fisherjax import checks, configuration, quadratic, tree
from fisherjax.fisher import Operator
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Update:
    """What a client sends, or stacked what many did.

    Attributes:
        values: Named arrays and operators, such as {"params": W_i, "fisher": F_i}.
        kind: What they are; an algorithm refuses another's. `algorithm.kind` of whoever made it.

    Example:
        >>> jax.tree.map(lambda x: 2 * x, Update({"params": 1.0}, "params"))
        Update(values={'params': 2.0}, kind='params')
    """

    values: dict[str, Any]
    # Part of the structure, since a string cannot be a leaf under `vmap`.
    kind: str = field(metadata={"static": True})


def no_state(params: Params, num_clients: int) -> tuple[()]:
    """Keep nothing on the server between rounds."""
    del params, num_clients
    return ()


def nothing_private(params: Params) -> tuple[()]:
    """Keep nothing on the client between rounds."""
    del params
    return ()


def send_everything(params: Params, state: Any, private: Any) -> tuple[Params, tuple[()]]:
    """Let clients start from the global model."""
    del state, private
    return params, ()


def unchanged(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """Train by the user's optimiser as it is."""
    return base


class Algorithm(NamedTuple):
    """A method as pure functions; the module says when each is called.

    Attributes:
        summarize: On one client, after training.
        aggregate: On the server, with the sums or with (updates, weights), the global params before
            the round, the state, and the places of the clients that took part [K].
        reduce: `(stacked updates, weights [K]) -> sums`, or None if each update is needed.
        init: `(params, num_clients) -> state`; () for most.
        init_client: `params -> private`; () for most. Rounds keep it stacked.
        broadcast: `(params, state, private) -> (start, extras)`, what one client starts from, and
            what its optimiser is given.
        optimizer: Wraps the user's optimiser; it is given `start`, `extras` and `last_epoch` as
            extra arguments. Equal bases give the same object.
        kind: What the updates are, in words.
        model: The network that `summarize` runs, for checks of the data; None if it runs none.
    """

    summarize: Callable[[Key, Trained, Examples, Any], tuple[dict[str, Any], Any]]
    aggregate: Callable[[Key, Any, Params, Any, Array], tuple[Params, Any, Any]]
    reduce: Callable[[dict[str, Any], Array], Any] | None = None
    # The defaults keep nothing, send the global model and train as the user asks.
    init: Callable[[Params, int], Any] = no_state
    init_client: Callable[[Params], Any] = nothing_private
    broadcast: Callable[[Params, Any, Any], tuple[Params, Any]] = send_everything
    optimizer: Callable[[optax.GradientTransformation], Any] = unchanged
    kind: str = "unnamed"
    model: Model | None = None


def check_algorithm(value: Any) -> None:
    """Refuse what is no `Algorithm`."""
    checks.instance("algorithm", value, Algorithm, "an Algorithm such as algorithms.fedavg()")


class WeightedSum(NamedTuple):
    """A sum over clients, and the weight that a mean divides it by.

    Attributes:
        total: sum_i w_i x_i, leaves at least float32.
        weight: sum_i w_i.
    """

    total: Any
    weight: Array

    def mean(self) -> Any:
        """Divide by the weight; zero where there is none."""
        safe = jax.numpy.where(self.weight > 0, self.weight, 1)
        return jax.tree.map(lambda x: x / safe.astype(x.dtype), self.total)


def weighted_sum(values: Any, weights: Array) -> WeightedSum:
    """Add up stacked values, sum_i w_i x_i."""
    return WeightedSum(tree.weighted_sum(values, weights), weights.sum())


def averaging(**changes: Any) -> Algorithm:
    """Make federated averaging, W = sum_i p_i W_i, with some of its functions changed.

    Args:
        **changes: Fields of `Algorithm`.

    Returns:
        The algorithm. Updates are {"params": W_i}.
    """

    def summarize(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        del key, examples
        return {"params": trained.params}, private

    def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
        # Not divided yet: sums of groups add up, their means do not.
        return weighted_sum(updates["params"], weights)

    def aggregate(
        key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array
    ) -> tuple[Params, Any, Any]:
        del key, params, cohort
        return sums.mean(), state, ()

    return Algorithm(summarize, aggregate, reduce, kind="params")._replace(**changes)


def fisher_summary(
    model: Model, fisher: Callable[..., Operator], kind: Callable[..., Array], batch_size: int
) -> Callable:
    """Make the `summarize` of methods whose clients send their params and their Fisher information.

    Args:
        model: The network and what its outputs mean.
        fisher: The structure, such as `fisher.kfac`.
        kind: What is squared, such as `fisher.true`.
        batch_size: Examples of a minibatch.

    Returns:
        `summarize`, of updates {"params": W_i, "fisher": F_i}.
    """
    # Here, before any client trains, and not in the first Fisher pass after it.
    checks.model(model)
    checks.function("fisher", fisher, "fisher.kfac")
    checks.function("kind", kind, "fisher.true")
    checks.count("batch_size", batch_size)

    def summarize(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        options = {"key": key, "kind": kind, "batch_size": batch_size}
        # At the client's own model, around which the server's quadratic expands its loss.
        curvature = fisher(model, trained.params, examples, **options)
        return {"params": trained.params, "fisher": curvature}, private

    return summarize


def fisher_kind(fisher: Callable[..., Operator], kind: Callable[..., Array]) -> str:
    """Say in words what `fisher_summary` sends."""
    return f"params, {configuration.name_of(kind)} {configuration.name_of(fisher)} Fisher"


def fisher_sums(updates: dict[str, Any], weights: Array) -> quadratic.Sums:
    """Add up what `fisher_summary` sends, where the operators add up: the `reduce` of methods.

    Args:
        updates: Stacked, {"params": W_i, "fisher": F_i}.
        weights: [K].

    Returns:
        sum_i w_i F_i, sum_i w_i F_i W_i, sum_i w_i W_i and sum_i w_i.
    """
    return quadratic.sums(updates["fisher"], updates["params"], weights)


def solve_sums(solve: Callable[[quadratic.Quadratic], Any], damping: float = 0.0) -> Callable:
    """Make the `aggregate` that solves the quadratic of `fisher_sums`.

    Args:
        solve: A solver.
        damping: In units of each block's mean eigenvalue.

    Returns:
        `aggregate`, which reports what the solver does.
    """

    def aggregate(
        key: Key, sums: quadratic.Sums, params: Params, state: Any, cohort: Array
    ) -> tuple[Params, Any, Any]:
        del key, params, cohort
        # The global model is not needed: the solver starts from the clients' mean.
        solution = solve(quadratic.from_sums(sums, damping))
        return solution.params, state, solution.info

    return aggregate
