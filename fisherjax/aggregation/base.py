"""The one interface of all merging methods, and the server half of a round.

An aggregator is four pure functions made by a factory:

    init(params) -> state
    summarize(key, params, examples, global_params) -> update
    reduce(updates, weights) -> sums                     or None
    finish(sums_or_updates, global_params, state) -> (params, state, info)

`summarize` runs on the client and gives a pytree of named arrays. Where the server needs only sums
over clients, `reduce` computes them from stacked updates and weights that add up to one over all
clients; sums of groups of clients add up leaf by leaf, so uploads can be streamed, sharded and
masked. Where it is None the server needs each update, and `finish` takes the pair (updates,
weights).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
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
    """

    init: Callable[[Params], Any]
    summarize: Callable[..., Any]
    reduce: Callable[[Any, Array], Any] | None
    finish: Callable[[Any, Params, Any], tuple[Params, Any, Any]]


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


def no_state(params: Params) -> tuple[()]:
    """Keep nothing between rounds: the `init` of most aggregators."""
    del params
    return ()


def merge(
    aggregator: Aggregator,
    params: Params,
    updates: Any,
    weights: Array | None = None,
    *,
    on_nonfinite: str = "raise",
) -> tuple[Params, Any]:
    """Merge client updates to one model: the server's half of a round.

    Args:
        aggregator: The method.
        params: The global params that clients started from; their structure and dtypes are the
            result's.
        updates: Stacked updates, leaves [M, ...], or a list of M updates, as
            `clients.summarize` gives them or as they were loaded from files.
        weights: [M], non-negative, for instance numbers of examples; scaled to sum one. Equal
            weights if None.
        on_nonfinite: "raise" or "drop", what to do about a client that diverged.

    Returns:
        The merged params, and what the method reports (of a solver: iterations, residual,
        converged).

    Raises:
        ValueError: If updates do not fit together or the weights do not fit, or if a client's
            update is not finite and `on_nonfinite` is "raise"; the message names clients.
        TypeError: If params are not floating.

    Example:
        >>> import fisherjax as fj
        >>> updates = [{"params": {"w": jnp.zeros(1)}}, {"params": {"w": jnp.ones(1)}}]
        >>> merged, _ = merge(fj.aggregation.fedavg(), {"w": jnp.zeros(1)}, updates, [1, 3])
        >>> print(merged["w"])
        [0.75]
    """
    tree.check_floating(params)
    updates = tree.stack(updates) if isinstance(updates, list) else updates
    weights = _normalized(weights, jax.tree.leaves(updates)[0].shape[0])
    updates, weights = check_updates(updates, weights, on_nonfinite)
    received = (updates, weights)
    if aggregator.reduce is not None:
        received = aggregator.reduce(updates, weights)
    merged, _, info = aggregator.finish(received, params, aggregator.init(params))
    _check_shapes(merged, params)
    merged = jax.tree.map(lambda leaf, start: leaf.astype(jnp.result_type(start)), merged, params)
    return merged, info


def check_updates(updates: Any, weights: Array, on_nonfinite: str = "raise") -> tuple[Any, Array]:
    """Find clients whose update holds NaN or infinity, on the host, before they spoil a merge.

    Args:
        updates: Stacked updates, leaves [M, ...].
        weights: [M].
        on_nonfinite: "raise", or "drop" to leave those clients out.

    Returns:
        Updates and weights. With "drop", a diverged client has weight zero and finite entries, and
        the weights of the others sum to one again. Under tracing nothing is checked.

    Raises:
        ValueError: With "raise", naming the diverged clients and the first leaf concerned; with
            "drop", if no client is left.

    Example:
        >>> updates = {"w": jnp.array([[1.0], [jnp.nan]])}
        >>> print(check_updates(updates, jnp.array([0.5, 0.5]), on_nonfinite="drop")[1])
        [1. 0.]
    """
    if on_nonfinite not in ("raise", "drop"):
        raise ValueError(f"on_nonfinite is {on_nonfinite!r}; expected 'raise' or 'drop'.")
    leaves = jax.tree.leaves(updates)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return updates, weights
    finite = [jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(1) for leaf in leaves]
    table = np.stack([np.asarray(f) for f in finite])  # [leaves, M]
    diverged = np.flatnonzero(~table.all(0))
    if diverged.size == 0:
        return updates, weights
    if on_nonfinite == "raise":
        leaf = tree.names(updates)[int(np.flatnonzero(~table[:, diverged[0]])[0])]
        raise ValueError(
            f"The updates of clients {diverged.tolist()} are not finite (client {diverged[0]}: "
            f"leaf '{leaf}'): they diverged. Train them with a smaller learning rate, or "
            "leave them out with on_nonfinite='drop'."
        )
    kept = jnp.asarray(table.all(0))
    if not np.any(np.asarray(weights)[table.all(0)] > 0):
        raise ValueError("No client is left: every update with weight is not finite.")
    cleaned = jax.tree.map(lambda x: jnp.where(_along(kept, x), x, jnp.zeros_like(x)), updates)
    weights = jnp.where(kept, weights, 0)
    return cleaned, weights / weights.sum()


def _check_shapes(merged: Params, params: Params) -> None:
    def described(model: Params) -> dict[str, tuple[int, ...]]:
        return dict(zip(tree.names(model), map(jnp.shape, jax.tree.leaves(model)), strict=True))

    same = jax.tree.structure(merged) == jax.tree.structure(params)
    if not same or described(merged) != described(params):
        raise ValueError(
            f"The merged model has leaves of shapes {described(merged)}, but params has "
            f"{described(params)}. Pass the params of the network that the clients trained."
        )


def _along(flags: Array, leaf: Array) -> Array:
    return flags.reshape(-1, *(1,) * (leaf.ndim - 1))


def _normalized(weights: Array | None, num_clients: int) -> Array:
    weights = jnp.ones(num_clients) if weights is None else jnp.asarray(weights, float)
    if weights.shape != (num_clients,):
        raise ValueError(
            f"weights has shape {weights.shape}; expected ({num_clients},), one for each update."
        )
    if not isinstance(weights, jax.core.Tracer) and not (
        bool(jnp.all(weights >= 0)) and 0 < float(weights.sum()) < float("inf")
    ):
        raise ValueError(
            f"weights are {np.asarray(weights).tolist()}; expected finite non-negative "
            "numbers, not all zero, for instance federation.weights or numbers of examples."
        )
    return weights / weights.sum()
