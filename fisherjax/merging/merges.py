"""Merge client updates to one model: all at once, as a stream, or from sums."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import leaves, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._upload_checks import check_not_all_zero, check_weights, stacked
from fisherjax.algorithms.base import Algorithm, Report, Update, check_algorithm
from fisherjax.clients import shares
from fisherjax.devices import mesh_of, replicate
from fisherjax.leaves import Leaves
from fisherjax.merging._running_statistics import SumsAndStatistics, add_up
from fisherjax.merging._server_half import (
    decode_and_screen,
    finish,
    server_half,
    server_key,
    split_params,
)
from fisherjax.typing import AnyArray, Array, Key, Params, Weights


def merge(
    algorithm: Algorithm[Report],
    params: Params,
    updates: Update | Sequence[Update],
    weights: Weights | None = None,
    *,
    state: Any = None,
    cohort: Array | None = None,
    key: Key | None = None,
    on_nonfinite: str = "raise",
) -> tuple[Params, Any, Report]:
    """Merge client updates to one model: the server's half of a round.

    Args:
        algorithm: Method that merges.
        params: Model that clients started from; the result has its structure and dtypes.
        updates: Result of `summarize`, or a list of M updates, for instance loaded from files.
        weights: [M] non-negative weights of the clients, for instance their numbers of examples,
            which are scaled to sum one; None means equal weights.
        state: State of the algorithm after the last merge; None starts afresh.
        cohort: [M] places of these clients in the federation; None means 0 to M - 1.
        key: Random key of algorithms that draw on the server. Those whose noise must be secret, as
            `privacy.private`, require one.
        on_nonfinite: "raise" for an error if a client diverged, or "drop" to leave it out.

    Returns:
        The merged params, the state of the algorithm, and its info, for instance a solver's.

    Raises:
        ValueError: If the updates do not fit each other or the algorithm, the weights do not fit,
            or an update or the merged model is not finite. The message names clients and leaves.
        TypeError: If params are not floating, or updates have another type.

    Example:
        >>> import fisherjax as fj
        >>> updates = [fj.algorithms.Update({"params": {"w": w}}, "params") for w in jnp.eye(2)]
        >>> merged, _, _ = merge(fj.algorithms.fedavg(), {"w": jnp.zeros(2)}, updates, [1, 3])
        >>> print(merged["w"])
        [0.25 0.75]
    """
    params = checks.arrays(params)
    update = stacked(algorithm, updates)
    num_clients = jax.tree.leaves(update)[0].shape[0]
    known = check_weights(weights, num_clients)
    check_not_all_zero(known)
    # Updates may be spread over a mesh, and other arrays must be there too. Weights are scaled
    # before they are rounded to float32, in which their sum may overflow.
    mesh = mesh_of(update)
    params, scaled = replicate((params, _as_floats(shares(known))), mesh)
    cohort = np.arange(num_clients) if cohort is None else cohort
    key = server_key(algorithm, key)
    how = {"state": state, "cohort": cohort, "key": key, "on_nonfinite": on_nonfinite}
    found = server_half(algorithm, params, update, scaled, **how)
    return found.params, found.state, found.info


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
    if algorithm.reduce is None:
        raise ValueError(
            "This method needs every client's update at once (its reduce is None), as FedFisher "
            "with K-FAC does: Kronecker factors do not add up. Use merge, or a method whose "
            "updates add up, such as fedavg, fisher_merge, regmean or "
            "fedfisher(model, fisher=fisher.diagonal)."
        )
    totals, weight, seen, first, scale, parts = None, 0.0, 0, None, 0.0, None
    for number, chunk in enumerate(chunks):
        update, weights = _chunk(algorithm, chunk, number)
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
        weights = replicate(_as_floats(weights / (scale or 1.0)), mesh)
        parts = split_params(replicate(params, mesh), update, before=seen)
        found = decode_and_screen(algorithm, parts, update, weights, on_nonfinite, first=seen)
        # The total weight is known after the last chunk, so that nothing can be normalised here.
        values, statistics = found.values
        sums = add_up(algorithm.reduce, values, statistics, found.weights)
        totals = sums if totals is None else _add(totals, sums)
        weight, seen = weight + float(found.weights.sum()), seen + num_clients
    if totals is None:
        raise ValueError("There are no chunks to merge: expected at least one pair of updates.")
    if not weight > 0:
        raise ValueError(f"None of the {seen} clients has weight: every weight is zero.")
    # Chunks, and with them the sums, may be spread over a mesh.
    parts = replicate(parts, mesh_of(totals))
    return _merge_totals(algorithm, parts, totals, state, jnp.arange(seen), key)


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


def _merge_totals(
    algorithm: Algorithm[Report], parts: Leaves, sums: Any, state: Any, cohort: Array, key: Key
) -> tuple[Params, Any, Report]:
    statistics = {}
    if isinstance(sums, SumsAndStatistics):
        sums, statistics = sums.sums, sums.statistics.mean()
    return finish(algorithm, sums, statistics, parts, state, cohort, key)


def _as_floats(weights: AnyArray) -> Array:
    """Return weights as an array of the default precision; from NumPy without a program."""
    if isinstance(weights, np.ndarray):
        return jax.device_put(weights.astype(jnp.result_type(float)))
    return jnp.asarray(weights, float)


def _chunk(algorithm: Algorithm, chunk: Any, number: int) -> tuple[Update, np.ndarray]:
    if not (isinstance(chunk, tuple) and len(chunk) == 2):
        raise ValueError(
            f"Chunk {number} is a {type(chunk).__name__}; expected a pair (updates, weights), "
            "where weights may be None."
        )
    update = stacked(algorithm, chunk[0])
    return update, check_weights(chunk[1], jax.tree.leaves(update)[0].shape[0])


# The old totals are donated, so that memory holds the sums once.
@partial(jit, donate_argnums=0)
def _add(totals: Any, sums: Any) -> Any:
    return jax.tree.map(jnp.add, totals, sums)
