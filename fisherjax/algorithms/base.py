"""The one interface of all algorithms, and what several of them share.

An algorithm is a few pure functions, made by a factory; all but `summarize` and `aggregate` have
defaults. A round sends what `link.broadcast` gives; every client makes its start of it by
`link.receive`, trains by `optimizer` of the user's one, and summarizes; the server reduces and
aggregates. Where it needs only sums over clients, `reduce` computes them from stacked updates and
weights of any sum, in at least float32: sums of groups of clients add up leaf by leaf, so uploads
can be streamed, sharded and masked, and `aggregate` divides by the total weight that is among them.
Without `reduce` it needs each update, and takes the pair (updates, weights) with weights that sum
to one.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import optax

from fisherjax import tree
from fisherjax._core import checks
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params

# Examples of a client at the knee of accuracy for the true Fisher, see docs/merging.md.
ENOUGH = 2000


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Update:
    """What a client sends, or stacked what many did.

    Attributes:
        values: Named arrays and operators, such as {"params": W_i, "fisher": F_i}, of trained
            leaves.
        kind: What they are; an algorithm refuses another's. `algorithm.kind` of whoever made it.
        statistics: Leaves that training changed without a gradient, by name: the server averages
            them.
        frozen: Names of leaves that are not sent: the server leaves them as they are.

    Example:
        >>> twice = jax.tree.map(lambda x: 2 * x, Update({"params": jax.numpy.ones(3)}, "params"))
        >>> print(twice, twice.values["params"])
        Update(params, kind params, 1 leaf, 3 numbers, float32) [2. 2. 2.]
    """

    values: dict[str, Any]
    # Part of the structure, since a string cannot be a leaf under `vmap`.
    kind: str = field(metadata={"static": True})
    statistics: dict[str, Array] = field(default_factory=dict)
    frozen: tuple[str, ...] = field(default=(), metadata={"static": True})

    def __repr__(self) -> str:
        """Describe the update in one line: what it holds, its kind, how much that is."""
        parts = " and ".join(map(str, self.values)) if isinstance(self.values, dict) else "?"
        return tree.line("Update", self, parts[:80], f"kind {self.kind}"[:40])


def nothing(*_: Any) -> tuple[()]:
    """Keep nothing between rounds, on the server or on a client."""
    return ()


def send_everything(params: Params, *_: Any) -> Params:
    """Send the global model."""
    return params


def start_there(message: Params, *_: Any) -> tuple[Params, tuple[()]]:
    """Start from what was sent, and give the optimiser nothing."""
    return message, ()


def as_sent(values: dict[str, Any], *_: Any) -> dict[str, Any]:
    """Take what clients sent as it is."""
    return values


def unchanged(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """Train by the user's optimiser as it is."""
    return base


class Link(NamedTuple):
    """What server and clients remember from round to round, and send each other beside updates.

    Most methods remember nothing and send the global model: those are the defaults.

    Attributes:
        init: (params, num_clients) -> state, what the server keeps; () for most.
        init_client: params -> local, what a client keeps and never sends; () for most.
        broadcast: (params, state, place) -> message, what the server sends to the client at that
            place among all; the place is None where it sends the same to all.
        receive: (message, local) -> (start, extras), what the client begins with and what its
            optimiser is given.
        personal: Whether `broadcast` sends something else to every client.
        draws: Whether `aggregate` draws noise that has to be secret: a merge then needs a key.
        whole: Whether `aggregate` runs the network: its params then have all leaves, not only
            those that are trained.
        keeps: statistics -> the names of those that each client keeps to itself.
        mix: (values, weights [K]) -> shares [K, K] of everybody's statistics for each client; None
            where all get the same.
    """

    init: Callable[[Params, int], Any] = nothing
    init_client: Callable[[Params], Any] = nothing
    broadcast: Callable[[Params, Any, Any], Any] = send_everything
    receive: Callable[[Any, Any], tuple[Params, Any]] = start_there
    personal: bool = False
    draws: bool = False
    whole: bool = False
    keeps: Callable[[Params], Collection[str]] = nothing
    mix: Callable[[dict[str, Any], Array], Array] | None = None


GIVES = ("model", "wider model", "model per client", "votes")
"""What a merge may give: one model of the clients' shapes, one of other shapes, a model for every
client and their mean, or all models stacked, which vote."""


class Algorithm(NamedTuple):
    """A method as pure functions; the module says when each is called.

    Attributes:
        summarize: (key, trained, examples, local) -> (update, local), on one client.
        aggregate: (key, sums or (updates, weights), params, state, cohort) -> (params, state,
            info); `cohort` are the places [K] of the clients that took part. One that takes long
            is `Stages`, which `in_stages` follows.
        reduce: (stacked updates, weights [K]) -> sums, or None if each update is needed.
        decode: (values of stacked updates, params) -> what `reduce` and `aggregate` take: undoes
            what a wrapper did to them on the clients, such as compression.
        optimizer: Wraps the user's optimiser; it is given `start`, `extras` and `last_epoch` as
            extra arguments. Equal bases give the same object.
        kind: What the updates are, in words.
        model: The network that `summarize` runs, for checks of the data; None if it runs none.
        gives: What a merge gives, one of `GIVES`.
        link: What is kept between rounds, and what is sent beside updates.
    """

    summarize: Callable[[Key, Trained, Examples, Any], tuple[dict[str, Any], Any]]
    aggregate: Callable[[Key, Any, Params, Any, Array], tuple[Params, Any, Any]]
    reduce: Callable[[dict[str, Any], Array], Any] | None = None
    decode: Callable[[dict[str, Any], Params], dict[str, Any]] = as_sent
    optimizer: Callable[[optax.GradientTransformation], Any] = unchanged
    kind: str = "unnamed"
    model: Model | None = None
    gives: str = "model"
    link: Link = Link()


def check_algorithm(value: Any) -> None:
    """Refuse what is no `Algorithm`, and a sequence of them, which only exchanges take."""
    several = isinstance(value, list | tuple) and len(value) > 0
    if several and all(isinstance(each, Algorithm) for each in value):
        raise TypeError(
            f"algorithm is a sequence of {len(value)}; expected one Algorithm such as "
            "algorithms.fedavg(). A sequence of messages, such as natural_gradient's, is played by "
            "merging.exchange, after any merge or round."
        )
    checks.instance("algorithm", value, Algorithm, "an Algorithm such as algorithms.fedavg()")
    checks.one_of("algorithm.gives", value.gives, GIVES)
    checks.instance("algorithm.link", value.link, Link, "a Link such as algorithms.Link()")


def as_sequence(value: Any) -> tuple[Algorithm, ...]:
    """Return an algorithm, or a sequence of them, as a tuple; refuse anything else.

    Example:
        >>> len(as_sequence(averaging())), len(as_sequence([averaging(), averaging()]))
        (1, 2)
    """
    is_sequence = isinstance(value, list | tuple) and not isinstance(value, Algorithm)
    found = tuple(value) if is_sequence and value else (value,)
    for each in found:
        check_algorithm(each)
    return found


def keeps_shapes(algorithm: Algorithm) -> bool:
    """Return whether merged leaves have the shapes of those that clients train."""
    return algorithm.gives not in ("wider model", "votes")


def check_same_shapes(algorithm: Algorithm) -> None:
    """Refuse a method whose merged leaves have other shapes than those that clients train."""
    if not keeps_shapes(algorithm):
        raise ValueError(
            f"This method gives '{algorithm.gives}', whose leaves have other shapes than those "
            "that clients train; expected a method that gives a model which clients can go on "
            "from, such as fedavg. Merge once, by merging.merge."
        )


class WeightedSum(NamedTuple):
    """A sum over clients, sum_i w_i x_i, at least float32, and sum_i w_i, its weight."""

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
    """Make federated averaging, W = sum_i p_i W_i, with some fields of `Algorithm` changed."""

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        del key, examples
        return {"params": trained.params}, local

    def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
        # Not divided yet: sums of groups add up, their means do not.
        return weighted_sum(updates["params"], weights)

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, params, cohort
        return sums.mean(), state, ()

    return Algorithm(summarize, aggregate, reduce, kind="params")._replace(**changes)
