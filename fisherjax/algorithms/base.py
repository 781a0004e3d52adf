"""The interface of all algorithms, and functions that several of them share.

An algorithm is a few pure functions, made by a factory; all except `summarize` and `aggregate` have
defaults. In a round, the server sends the message that `link.broadcast` returns. Each client gets
its initial model from the message by `link.receive`, trains it with the user's optimiser as wrapped
by `optimizer`, and calls `summarize`. The server then calls `reduce` and `aggregate`.

A method that needs only sums over clients has a `reduce`, which computes them from stacked updates
and weights of any sum, in at least float32. Sums over groups of clients can be added leaf by leaf,
so that uploads can be streamed, sharded and masked; `aggregate` divides by the total weight, which
is one of the sums. A method that needs each update has no `reduce`: its `aggregate` receives the
pair (updates, weights), with weights that sum to one.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import numpy as np
import optax

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.training import Trained
from fisherjax.typing import AnyArray, Array, Examples, Key, Model, Params

# Default number of a client's examples in a Fisher pass: more of them hardly make a merge by the
# true Fisher more accurate (see docs/results/examples.md).
FISHER_EXAMPLES = 2000


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class Update:
    """The upload of one client, or the stacked uploads of several.

    Attributes:
        values: Arrays and operators by name, such as {"params": W_i, "fisher": F_i}, which cover
            the trained leaves.
        kind: Description of the values, which is `kind` of the algorithm that made the update; an
            algorithm refuses updates of another kind.
        statistics: Leaves that training changed without a gradient, by name; the server averages
            them.
        frozen: Names of leaves that are not sent; the server keeps its own.

    Example:
        >>> twice = jax.tree.map(lambda x: 2 * x, Update({"params": jax.numpy.ones(3)}, "params"))
        >>> print(twice, twice.values["params"])
        Update(params, kind params, 1 leaf, 3 numbers, float32) [2. 2. 2.]
    """

    values: dict[str, Any]
    # Part of the structure, since a string cannot be a leaf under `vmap`.
    kind: str = field(metadata={"static": True})
    statistics: Mapping[str, AnyArray] = field(default_factory=dict)
    frozen: tuple[str, ...] = field(default=(), metadata={"static": True})

    def __repr__(self) -> str:
        """Describe the update in one line: its values, its kind and its size."""
        parts = " and ".join(map(str, self.values)) if isinstance(self.values, dict) else "?"
        return tree.describe("Update", self, parts[:80], f"kind {self.kind}"[:40])


def nothing(*_: Any) -> tuple[()]:
    """Return (), the state of a server or client that stores nothing between rounds."""
    return ()


def send_params(params: Params, *_: Any) -> Params:
    """Return the global model, the message of most methods."""
    return params


def start_from_message(message: Params, *_: Any) -> tuple[Params, tuple[()]]:
    """Return the received model as the initial one, and no extra arguments of the optimiser."""
    return message, ()


def as_sent(values: dict[str, Any], *_: Any) -> dict[str, Any]:
    """Return the values that clients sent, unchanged."""
    return values


def unchanged(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the user's optimiser, unchanged."""
    return base


class Link(NamedTuple):
    """State that server and clients store between rounds, and messages other than updates.

    Most methods store nothing and send the global model, which are the defaults.

    Attributes:
        init: (params, num_clients) -> state of the server; () for most methods.
        init_client: params -> local, the state of a client, which is never sent; () for most
            methods.
        broadcast: (params, state, place) -> message from the server to the client with that index
            among all clients; the place is None if all clients receive the same message.
        receive: (message, local) -> (start, extras), the client's initial model and extra
            arguments of its optimiser.
        personal: Whether `broadcast` sends each client a message of its own.
        draws: Whether `aggregate` draws noise that has to be secret: a merge then needs a key.
        whole: Whether `aggregate` runs the network: its params then contain all leaves, not only
            the trained ones.
        keeps: statistics -> names of the statistics that each client keeps to itself.
        mix: (values, weights [K]) -> shares [K, K], whose row k weighs all clients' statistics for
            client k; None if all clients get the same statistics.
        reads_start: Whether `aggregate` reads the values of its params, which files then need.
    """

    init: Callable[[Params, int], Any] = nothing
    init_client: Callable[[Params], Any] = nothing
    broadcast: Callable[[Params, Any, Any], Any] = send_params
    receive: Callable[[Any, Any], tuple[Params, Any]] = start_from_message
    personal: bool = False
    draws: bool = False
    whole: bool = False
    keeps: Callable[[Params], Collection[str]] = nothing
    mix: Callable[[dict[str, Any], Array], Array] | None = None
    reads_start: bool = False


GIVES = ("model", "wider model", "model per client", "votes")
"""What a merge can return: one model of the clients' shapes, one of other shapes, a model for each
client together with their mean, or all models stacked, for a vote."""


Report = TypeVar("Report", covariant=True)


class Algorithm(NamedTuple, Generic[Report]):
    """A method, as a tuple of pure functions; the module's docstring says when each is called.

    `Algorithm[Info]` is the type of one that reports an `Info`, which `merging.merge` returns.

    Attributes:
        summarize: (key, trained, examples, local) -> (update, local), called for one client. An
            update's "statistics", running statistics by name, replace those that training left.
        aggregate: (key, sums or (updates, weights), params, state, cohort) -> (params, state,
            info), where `cohort` [K] are the indices of the participating clients. An `aggregate`
            that takes long is a `Stages`, whose progress `in_stages` reports.
        reduce: (stacked updates, weights [K]) -> sums, or None if the server needs each update.
        decode: (values of stacked updates, params) -> input of `reduce` and `aggregate`; it
            inverts what a wrapper, such as compression, did to the values on the clients.
        optimizer: Function that wraps the user's optimiser, which then receives `start`, `extras`
            and `last_epoch` too. It returns the same object for equal optimisers.
        kind: Description of the updates.
        model: The network that `summarize` runs, by which the data are checked; None if it runs
            none.
        gives: What a merge returns, one of `GIVES`.
        link: State between rounds, other messages, and what `aggregate` reads.
    """

    summarize: Callable[[Key, Trained, Examples, Any], tuple[dict[str, Any], Any]]
    aggregate: Callable[[Key, Any, Params, Any, Array], tuple[Params, Any, Report]]
    reduce: Callable[[dict[str, Any], Array], Any] | None = None
    decode: Callable[[dict[str, Any], Params], dict[str, Any]] = as_sent
    optimizer: Callable[[optax.GradientTransformation], Any] = unchanged
    kind: str = "unnamed"
    model: Model | None = None
    gives: str = "model"
    link: Link = Link()


def check_algorithm(value: Any) -> None:
    """Raise unless the value is an `Algorithm`; only exchanges accept a sequence of them."""
    if _is_sequence(value) and all(isinstance(each, Algorithm) for each in value):
        raise TypeError(
            f"algorithm is a sequence of {len(value)}; expected one Algorithm such as "
            "algorithms.fedavg(). Pass a sequence of messages, such as natural_gradient's, to "
            "merging.exchange, after any merge or round."
        )
    checks.instance("algorithm", value, Algorithm, "an Algorithm such as algorithms.fedavg()")
    checks.one_of("algorithm.gives", value.gives, GIVES)
    checks.instance("algorithm.link", value.link, Link, "a Link such as algorithms.Link()")


def as_sequence(value: Any) -> tuple[Algorithm, ...]:
    """Return an algorithm, or a sequence of them, as a tuple.

    Raises:
        TypeError: If the value is neither.

    Example:
        >>> len(as_sequence(averaging())), len(as_sequence([averaging(), averaging()]))
        (1, 2)
    """
    found = tuple(value) if _is_sequence(value) else (value,)
    for each in found:
        check_algorithm(each)
    return found


def _is_sequence(value: Any) -> bool:
    # An algorithm is itself a tuple, but not a sequence of algorithms.
    return isinstance(value, list | tuple) and not isinstance(value, Algorithm) and len(value) > 0


def keeps_shapes(algorithm: Algorithm) -> bool:
    """Return whether merged leaves have the shapes of those that clients train."""
    return algorithm.gives not in ("wider model", "votes")


def check_same_shapes(algorithm: Algorithm) -> None:
    """Raise if merged leaves have other shapes than those that clients train."""
    if not keeps_shapes(algorithm):
        raise ValueError(
            f"This method returns '{algorithm.gives}', whose leaves have other shapes than those "
            "that clients train; expected a method whose merged model clients can train further, "
            "such as fedavg. Merge once, by merging.merge."
        )


def check_pass(batch_size: Any, max_examples: Any) -> None:
    """Raise unless both are positive integers, or `max_examples` is None, for all examples."""
    checks.count("batch_size", batch_size)
    if max_examples is not None:
        checks.count("max_examples", max_examples)


def present_on_host(what: str, received: Any, params: Params, *others: Any) -> np.ndarray:
    """Return the indices of the clients that have a weight, for a merge that `jit` cannot compile.

    Args:
        what: Beginning of the message of the TypeError, such as "PFNM computes its width".
        received: The pair (updates, weights), with stacked params among the updates.
        params: The leaves that clients train.
        others: Further arguments that must not be traced.

    Raises:
        TypeError: If an argument is traced.
        ValueError: If the clients' leaves have other shapes than params.
    """
    if checks.is_traced(received, *others):
        raise TypeError(
            f"{what} on the host: call merging.merge outside of jit and vmap, and not in rounds."
        )
    updates, weights = received
    shapes = tree.shapes(jax.tree.map(lambda leaf: leaf[0], updates["params"]))
    if shapes != tree.shapes(params):
        raise ValueError(
            f"Clients have leaves of shapes {shapes}, but params has {tree.shapes(params)}. Pass "
            "the params of the network that the clients trained."
        )
    return np.flatnonzero(np.asarray(weights) > 0)


class WeightedSum(NamedTuple):
    """A weighted sum over clients and its weight.

    Attributes:
        total: sum_i w_i x_i, in at least float32.
        weight: sum_i w_i, a number.
    """

    total: Any
    weight: Array

    def mean(self) -> Any:
        """Return the total divided by the weight, or zero if the weight is zero."""
        return _divided(self.total, self.weight)


@jit
def _divided(total: Any, weight: Array) -> Any:
    # For one leaf, XLA would multiply by the reciprocal, which is not rounded as the quotient is.
    safe = jax.numpy.where(weight > 0, weight, 1)

    def quotient(x: Array) -> Array:
        return x / jax.lax.optimization_barrier(jax.numpy.full(x.shape, safe, x.dtype))

    return jax.tree.map(quotient, total)


def weighted_sum(values: Any, weights: Array) -> WeightedSum:
    """Compute sum_i w_i x_i of stacked values x, with its weight."""
    return WeightedSum(tree.weighted_sum(values, weights), weights.sum())


def averaging(**changes: Any) -> Algorithm[tuple[()]]:
    """Make federated averaging, W = sum_i p_i W_i, with some fields of `Algorithm` replaced."""

    def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
        # Sums over groups of clients can be added; their means cannot.
        return weighted_sum(updates["params"], weights)

    def aggregate(
        key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array
    ) -> tuple[Params, Any, tuple[()]]:
        del key, params, cohort
        return sums.mean(), state, ()

    return Algorithm(_only_params, aggregate, reduce, kind="params")._replace(**changes)


def _only_params(_: Key, trained: Trained, __: Examples, local: Any) -> tuple[dict[str, Any], Any]:
    return {"params": trained.params}, local
