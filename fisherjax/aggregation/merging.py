"""The server's half of a round: check what the clients sent, and merge it, whole or as a stream."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fisherjax import tree
from fisherjax.aggregation.base import Aggregator
from fisherjax.mapping import mesh_of, replicate
from fisherjax.typing import Array, Params


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
    mesh = mesh_of(updates)
    params, weights = replicate((params, _weights(weights, updates)), mesh)
    if not isinstance(weights, jax.core.Tracer) and not weights.sum() > 0:
        raise ValueError(
            "Every weight is zero; expected some clients to count, for instance "
            "federation.weights or numbers of examples."
        )
    updates, weights = check_updates(updates, weights / weights.sum(), on_nonfinite)
    received = (updates, weights)
    if aggregator.reduce is not None:
        received = _reduce(aggregator.reduce, updates, weights)
    return _finish(aggregator, received, params)


def merge_stream(
    aggregator: Aggregator,
    params: Params,
    chunks: Iterable[tuple[Any, Array | None]],
    *,
    on_nonfinite: str = "raise",
) -> tuple[Params, Any]:
    """Merge client updates that arrive a chunk at a time, and hold one chunk and the sums only.

    The same as `merge` of all chunks at once, to rounding. Compiled once for each shape of a chunk:
    let all chunks but the last be equally long.

    Args:
        aggregator: A method whose updates add up, that is with a `reduce`: fedavg, fisher_merge,
            regmean, fednova, fedfisher with a diagonal or full Fisher.
        params: The global params that clients started from, as for `merge`.
        chunks: Pairs (updates, weights [m]) of some clients each: stacked updates with leaves
            [m, ...], or a list of m; weights non-negative, for instance numbers of examples, or
            None for one each. They are scaled to sum one over all chunks.
        on_nonfinite: "raise" or "drop", what to do about a client that diverged.

    Returns:
        The merged params, and what the method reports.

    Raises:
        ValueError: If the method needs all updates at once, there are no chunks, a chunk does not
            fit, no client has weight, or a client's update is not finite and `on_nonfinite` is
            "raise"; the message counts clients from the first chunk on.
        TypeError: If params are not floating.

    Example:
        >>> import fisherjax as fj
        >>> arriving = (({"params": {"w": jnp.full((2, 1), x)}}, jnp.ones(2)) for x in (1.0, 3.0))
        >>> print(merge_stream(fj.aggregation.fedavg(), {"w": jnp.zeros(1)}, arriving)[0]["w"])
        [2.]
    """
    tree.check_floating(params)
    if aggregator.reduce is None:
        raise ValueError(
            "This method needs every client's update at once (its reduce is None), as FedFisher "
            "with K-FAC does: Kronecker factors do not add up. Use merge, or a method that adds up "
            "such as fedavg, fisher_merge, regmean or fedfisher(fisher=fisher.diagonal)."
        )
    totals, clients = None, 0
    for updates, weights in chunks:
        updates = tree.stack(updates) if isinstance(updates, list) else updates
        weights = replicate(_weights(weights, updates), mesh_of(updates))
        updates, weights = _screened(updates, weights, on_nonfinite, first=clients)
        sums = (_reduce(aggregator.reduce, updates, weights), weights.sum())
        totals = sums if totals is None else _add(totals, sums)
        clients += weights.shape[0]
    if totals is None:
        raise ValueError("There are no chunks to merge: expected at least one pair of updates.")
    sums, weight = totals
    if not weight > 0:
        raise ValueError(f"None of the {clients} clients has weight: every weight is zero.")
    sums = jax.tree.map(lambda x: x / weight.astype(x.dtype), sums)
    return _finish(aggregator, sums, replicate(params, mesh_of(sums)))


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
    cleaned, kept = _screened(updates, weights, on_nonfinite)
    if kept is weights:
        return updates, weights
    if not np.any(np.asarray(kept) > 0):
        raise ValueError("No client is left: every update with weight is not finite.")
    return cleaned, kept / kept.sum()


def _screened(updates: Any, weights: Array, on_nonfinite: str, first: int = 0) -> tuple[Any, Array]:
    """Give diverged clients zeros and weight zero; `first` is the number of the first client."""
    if on_nonfinite not in ("raise", "drop"):
        raise ValueError(f"on_nonfinite is {on_nonfinite!r}; expected 'raise' or 'drop'.")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(updates)):
        return updates, weights
    table = np.asarray(_finite(mesh_of(updates), updates))  # [leaves, M]
    diverged = np.flatnonzero(~table.all(0))
    if diverged.size == 0:
        return updates, weights
    if on_nonfinite == "raise":
        leaf = tree.names(updates)[int(np.flatnonzero(~table[:, diverged[0]])[0])]
        raise ValueError(
            f"The updates of clients {(first + diverged).tolist()} are not finite (client "
            f"{first + diverged[0]}: leaf '{leaf}'): they diverged. Train them with a smaller "
            "learning rate, or leave them out with on_nonfinite='drop'."
        )
    kept = table.all(0)
    return tree.keep(kept, updates), jnp.where(kept, weights, 0)


@partial(jax.jit, static_argnums=0)
def _finite(mesh: Mesh | None, updates: Any) -> Array:
    """Say of every leaf and client whether it is finite, [leaves, M], on every device."""
    table = tree.finite(updates)
    if mesh is None:
        return table
    return jax.lax.with_sharding_constraint(table, NamedSharding(mesh, PartitionSpec()))


@partial(jax.jit, static_argnums=0)
def _reduce(reduce: Callable[[Any, Array], Any], updates: Any, weights: Array) -> Any:
    return reduce(updates, weights)


@partial(jax.jit, donate_argnums=0)
def _add(totals: Any, sums: Any) -> Any:
    return jax.tree.map(jnp.add, totals, sums)


def _finish(aggregator: Aggregator, received: Any, params: Params) -> tuple[Params, Any]:
    merged, _, info = aggregator.finish(received, params, aggregator.init(params))
    _check_shapes(merged, params)
    merged = jax.tree.map(lambda leaf, start: leaf.astype(jnp.result_type(start)), merged, params)
    return merged, info


def _check_shapes(merged: Params, params: Params) -> None:
    def described(model: Params) -> dict[str, tuple[int, ...]]:
        return dict(zip(tree.names(model), map(jnp.shape, jax.tree.leaves(model)), strict=True))

    same = jax.tree.structure(merged) == jax.tree.structure(params)
    if not same or described(merged) != described(params):
        raise ValueError(
            f"The merged model has leaves of shapes {described(merged)}, but params has "
            f"{described(params)}. Pass the params of the network that the clients trained."
        )


def _weights(weights: Array | None, updates: Any) -> Array:
    """Check the clients' weights, [M]."""
    num_clients = jax.tree.leaves(updates)[0].shape[0]
    weights = jnp.ones(num_clients) if weights is None else jnp.asarray(weights, float)
    if weights.shape != (num_clients,):
        raise ValueError(
            f"weights has shape {weights.shape}; expected ({num_clients},), one for each update."
        )
    if not isinstance(weights, jax.core.Tracer) and not (
        bool(jnp.all(weights >= 0)) and float(weights.sum()) < float("inf")
    ):
        raise ValueError(
            f"weights are {np.asarray(weights).tolist()}; expected finite non-negative "
            "numbers, for instance federation.weights or numbers of examples."
        )
    return weights
