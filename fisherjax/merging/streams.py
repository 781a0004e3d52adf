"""Merge client updates that arrive one after the other, on one server or on a tree of servers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import leaves, tree
from fisherjax._core import checks
from fisherjax._one_device import on_one_device
from fisherjax._upload_checks import check_weights, stacked
from fisherjax.algorithms.base import Algorithm, Report, Update, check_algorithm
from fisherjax.devices import mesh_of, replicate
from fisherjax.leaves import Leaves
from fisherjax.merging._running_statistics import SumsAndStatistics, add_to, add_up
from fisherjax.merging._server_half import decode_and_screen, finish, server_key, split_params
from fisherjax.merging.merges import as_floats
from fisherjax.typing import Array, Key, Params, Weights


def merge_stream(
    algorithm: Algorithm[Report],
    params: Params,
    chunks: Iterable[tuple[Any, Weights | None]],
    *,
    state: Any = None,
    key: Key | None = None,
    on_nonfinite: str = "raise",
) -> tuple[Params, Any, Report]:
    """Merge client updates that arrive in chunks, with one chunk and the sums in memory.

    The result equals `merge` of all clients at once, up to rounding. The algorithm must have a
    `reduce`, that is, its updates must add up, as for fedavg or regmean. Programs are compiled for
    each shape of a chunk, so all chunks but the last should have the same length.

    Args:
        algorithm: Method that merges, with a `reduce`.
        params: Model that clients started from.
        chunks: Pairs (updates, weights [m]) of m clients each. None means that each of them has
            weight one. Weights are scaled to sum one over all clients.
        state: As in `merge`.
        key: As in `merge`.
        on_nonfinite: As in `merge`.

    Returns:
        What `merge` returns.

    Raises:
        ValueError: As `merge`, and if there are no chunks, or they do not fit each other.

    Example:
        >>> import fisherjax as fj
        >>> models = (Update({"params": {"w": jnp.full((2, 1), x)}}, "params") for x in (1.0, 3.0))
        >>> chunks = ((updates, None) for updates in models)
        >>> print(merge_stream(fj.algorithms.fedavg(), {"w": jnp.zeros(1)}, chunks)[0]["w"])
        [2.]
    """
    params = checks.arrays(params)
    check_algorithm(algorithm)
    key = server_key(algorithm, key)
    found = _added(algorithm, params, chunks, on_nonfinite)
    if not found.weight > 0:
        raise ValueError(f"None of the {found.seen} clients has weight: every weight is zero.")
    # Chunks, and with them the sums, may be spread over a mesh.
    parts = replicate(found.parts, mesh_of(found.totals))
    return _merge_totals(algorithm, parts, found.totals, state, jnp.arange(found.seen), key)


def sum_stream(
    algorithm: Algorithm,
    params: Params,
    chunks: Iterable[tuple[Any, Weights | None]],
    *,
    on_nonfinite: str = "raise",
) -> tuple[Any, int]:
    """Add client updates that arrive in chunks, on one of several servers.

    Each server of a tree adds the updates of its own clients. Sums of all servers, added leaf by
    leaf, are those of all clients up to rounding, however the clients are divided; `merge_sums`
    then merges them at the root.

    Args:
        algorithm: Method that merges, with a `reduce`.
        params: Model that clients started from.
        chunks: As in `merge_stream`. Weights count as they are, such as numbers of examples, so
            that the sums of servers have the same unit.
        on_nonfinite: As in `merge`.

    Returns:
        The sums, and the number of clients in the chunks.

    Raises:
        ValueError: As `merge_stream`.

    Example:
        >>> import fisherjax as fj
        >>> average, start = fj.algorithms.fedavg(), {"w": jnp.zeros(1)}
        >>> updates = Update({"params": {"w": jnp.array([[1.0], [3.0]])}}, "params")
        >>> sums, number = sum_stream(average, start, [(updates, [10, 30])])
        >>> both = jax.tree.map(jnp.add, sums, sums)  # another server's are the same here
        >>> print(merge_sums(average, start, both, jnp.arange(2 * number))[0]["w"])
        [2.5]
    """
    params = checks.arrays(params)
    check_algorithm(algorithm)
    found = _added(algorithm, params, chunks, on_nonfinite, scale=1.0)
    return found.totals, found.seen


def merge_sums(
    algorithm: Algorithm[Report],
    params: Params,
    sums: Any,
    cohort: Array,
    *,
    frozen: Sequence[str] = (),
    state: Any = None,
    key: Key | None = None,
) -> tuple[Params, Any, Report]:
    """Merge sums over clients that were computed elsewhere, for instance by secure aggregation.

    Args:
        algorithm: Method that merges, with a `reduce`; weights may have any sum.
        params: Model that clients started from.
        sums: Results of `algorithm.reduce`, summed leaf by leaf over clients; for a network with
            running statistics `SumsAndStatistics`, see `secure_aggregation.contributions`.
        cohort: [m] places of the clients in the federation.
        frozen: Names of the leaves that clients did not send, `update.frozen`.
        state: State of the algorithm after the last merge; None starts afresh.
        key: Random key of algorithms that draw on the server, as in `merge`.

    Returns:
        What `merge` returns.

    Raises:
        ValueError: If the merged model is not finite or does not fit params.

    Example:
        >>> import fisherjax as fj
        >>> average = fj.algorithms.fedavg()
        >>> ones = [average.reduce({"params": {"w": w}}, jnp.ones(1)) for w in jnp.eye(2)[:, None]]
        >>> sums = jax.tree.map(jnp.add, *ones)
        >>> print(merge_sums(average, {"w": jnp.zeros(2)}, sums, jnp.arange(2))[0]["w"])
        [0.5 0.5]
    """
    statistics = tuple(sums.statistics.total) if isinstance(sums, SumsAndStatistics) else ()
    if len(cohort) > 1:
        leaves.check_moments(statistics)
    # Sums may be spread over a mesh.
    parts = leaves.split_by_name(checks.arrays(params), statistics, tuple(frozen))
    parts = replicate(parts, mesh_of(sums))
    return _merge_totals(algorithm, parts, sums, state, cohort, server_key(algorithm, key))


class _Added(NamedTuple):
    """Sums of a stream, the weight and the number of its clients, and the split params."""

    totals: Any
    weight: float
    seen: int
    parts: Leaves


def _reduce_of(algorithm: Algorithm) -> Callable[[Any, Array], Any]:
    """Return the function that adds updates; raise if the method has none."""
    if algorithm.reduce is None:
        raise ValueError(
            "This method needs every client's update at once (its reduce is None), as FedFisher "
            "with K-FAC does: Kronecker factors do not add up. Use merge, or a method whose "
            "updates add up, such as fedavg, fisher_merge, regmean or "
            "fedfisher(model, fisher=fisher.diagonal)."
        )
    return algorithm.reduce


def _added(
    algorithm: Algorithm, params: Params, chunks: Iterable, on_nonfinite: str, scale: float = 0.0
) -> _Added:
    """Add the updates of a stream, with weights over `scale`; 0 is the largest of chunk 0."""
    reduce = _reduce_of(algorithm)
    totals, weight, seen, first, parts = None, 0.0, 0, None, None
    for number, chunk in enumerate(chunks):
        update, weights = _chunk(algorithm, chunk, number)
        _, update, params = on_one_device((totals, update, params))
        # Shapes without the client axis, because chunks may differ in length.
        sent = update.values | {"statistics": update.statistics}
        shapes = {name: shape[1:] for name, shape in tree.shapes(sent).items()}
        shapes |= dict.fromkeys(update.frozen, "frozen")
        first = shapes if first is None else first
        if shapes != first:
            raise ValueError(
                f"Chunk {number} holds leaves of shapes {shapes} for each client, but chunk 0 "
                f"{first}. All clients must have trained the same network."
            )
        num_clients = weights.shape[0]
        # Scaled in float64 on the host, so that large weights cannot overflow float32.
        scale = scale or weights.max(initial=0.0)
        mesh = mesh_of(update)
        weights = replicate(as_floats(weights / (scale or 1.0)), mesh)
        parts = split_params(replicate(params, mesh), update, before=seen)
        found = decode_and_screen(algorithm, parts, update, weights, on_nonfinite, first=seen)
        # The total weight is known after the last chunk, so that nothing can be normalised here.
        values, statistics = found.values
        sums = add_up(reduce, values, statistics, found.weights)
        totals = sums if totals is None else add_to(totals, sums)
        weight, seen = weight + float(found.weights.sum()), seen + num_clients
    if parts is None:
        raise ValueError("There are no chunks to merge: expected at least one pair of updates.")
    return _Added(totals, weight, seen, parts)


def _merge_totals(
    algorithm: Algorithm[Report], parts: Leaves, sums: Any, state: Any, cohort: Array, key: Key
) -> tuple[Params, Any, Report]:
    sums, parts, state, key = on_one_device((sums, parts, state, key))
    statistics = {}
    if isinstance(sums, SumsAndStatistics):
        sums, statistics = sums.sums, sums.statistics.mean()
    return finish(algorithm, sums, statistics, parts, state, cohort, key)


def _chunk(algorithm: Algorithm, chunk: Any, number: int) -> tuple[Update, np.ndarray]:
    if not (isinstance(chunk, tuple) and len(chunk) == 2):
        raise ValueError(
            f"Chunk {number} is a {type(chunk).__name__}; expected a pair (updates, weights), "
            "where weights may be None."
        )
    update = stacked(algorithm, chunk[0])
    return update, check_weights(chunk[1], jax.tree.leaves(update)[0].shape[0])
