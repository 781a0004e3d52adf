"""The one interface of all merging methods, and what several of them share.

An aggregator is four pure functions made by a factory:

    init(params) -> state
    summarize(key, params, examples, global_params) -> update
    reduce(updates, weights) -> sums                     or None
    finish(sums_or_updates, global_params, state) -> (params, state, info)

`summarize` runs on the client and gives a pytree of named arrays. Where the server needs only sums
over clients, `reduce` computes them from stacked updates and weights; sums of groups of clients add
up leaf by leaf, so uploads can be streamed, sharded and masked. `finish` takes the sums for weights
that add up to one, or all sums over the total weight, which must come to the same. Without `reduce`
the server needs each update, and `finish` takes the pair (updates, weights).

A method that changes how clients train says so in a fifth and a sixth field.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fisherjax import quadratic
from fisherjax.clients import Examples
from fisherjax.fisher import Operator
from fisherjax.likelihoods import Likelihood
from fisherjax.typing import Apply, Array, Key, Params


class Aggregator(NamedTuple):
    """A merging method as four pure functions.

    Attributes:
        init: `params -> state`, () for most.
        summarize: `(key, params, examples, global_params) -> update`, on one client.
        reduce: `(stacked updates, weights [M]) -> sums`, or None if each update is needed.
        finish: `(sums or (updates, weights), global_params, state) -> (params, state, info)`.
        correction: `state -> stacked params`, what every client subtracts after each of its steps
            (SCAFFOLD); such a method keeps something of every client and takes updates of all,
            zeros from those who sit a round out. None for the others.
        squared_gradients: whether `summarize` takes the squared gradients of the last epoch as a
            fifth argument (FedFish).
    """

    init: Callable[[Params], Any]
    summarize: Callable[..., Any]
    reduce: Callable[[Any, Array], Any] | None
    finish: Callable[[Any, Params, Any], tuple[Params, Any, Any]]
    correction: Callable[[Any], Params] | None = None
    squared_gradients: bool = False


def fisher_summary(
    apply: Apply,
    likelihood: Likelihood,
    fisher: Callable[..., Operator],
    kind: Callable[..., Array],
    batch_size: int,
) -> Callable[..., Any]:
    """Make the `summarize` of methods whose clients send their params and their Fisher information.

    Args:
        apply: `(params, inputs [B, ...]) -> outputs [B, ..., C]`.
        likelihood: What the outputs mean.
        fisher: The structure, such as `fisher.kfac`.
        kind: The kind, such as `fisher.true`.
        batch_size: Examples of a minibatch in the Fisher pass.

    Returns:
        `(key, params, examples, global_params) -> {"params": W_i, "fisher": F_i}`.
    """

    def summarize(key: Key, params: Params, examples: Examples, global_params: Params) -> Any:
        del global_params
        inputs, targets, indices, weights = examples
        options = {"kind": kind, "key": key, "batch_size": batch_size}
        rows = {"indices": indices, "weights": weights}
        curvature = fisher(apply, likelihood, params, inputs, targets, **rows, **options)
        return {"params": params, "fisher": curvature}

    return summarize


def fisher_sums(updates: Any, weights: Array) -> quadratic.Sums:
    """Add up what `fisher_summary` sends, diagonal or dense: the `reduce` of those methods.

    Args:
        updates: Stacked, {"params": W_i, "fisher": F_i}.
        weights: [M].

    Returns:
        sum_i p_i F_i, sum_i p_i F_i W_i and sum_i p_i W_i.
    """
    return quadratic.sums(updates["fisher"], updates["params"], weights)


def no_state(params: Params) -> tuple[()]:
    """Keep nothing between rounds: the `init` of most aggregators."""
    del params
    return ()
