"""One model made of what clients sent: of all of it at once, of a stream, or of sums."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import leaves, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._upload_checks import check_some, check_weights, stacked
from fisherjax.algorithms.base import Algorithm, Report, Update, check_algorithm
from fisherjax.clients import shares
from fisherjax.devices import mesh_of, replicate
from fisherjax.leaves import Leaves
from fisherjax.merging._server_half import (
    Added,
    added,
    finished,
    screened,
    server_half,
    server_key,
    told_apart,
)
from fisherjax.typing import Array, Key, Params, Weights


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
        algorithm: The method.
        params: The model that clients started from; the result has its structure and dtypes.
        updates: Stacked, as `summarize` gives them, or a list of M as they were loaded from files.
        weights: [M], non-negative, for instance numbers of examples; equal if None. Scaled to sum
            one.
        state: What the algorithm kept of the last merge; None starts afresh.
        cohort: [M] places of these clients among all; all of them in order if None.
        key: For algorithms that draw on the server; those that draw what has to be secret, as
            `privacy.private`, want one.
        on_nonfinite: "raise" or "drop", what to do about a client that diverged.

    Returns:
        The merged params, the algorithm's state, and what it reports, a solver's info for instance.

    Raises:
        ValueError: If updates do not fit together or to the algorithm, the weights do not fit, or a
            client's update or the merged model is not finite; it names clients and leaves.
        TypeError: If params are not floating, or updates are something else.

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
    check_some(known)
    # Updates may be spread over a mesh: what is merged with them must be there too. Weights are
    # scaled before they are rounded to float32, in which their sum may overflow.
    mesh = mesh_of(update)
    params, scaled = replicate((params, jnp.asarray(shares(known), float)), mesh)
    cohort = jnp.arange(num_clients) if cohort is None else cohort
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
    """Merge client updates that arrive a chunk at a time, and hold one chunk and the sums only.

    The same as `merge` of all clients at once, to rounding, for an algorithm whose updates add up,
    that is with a `reduce`, such as fedavg or regmean. Chunks are pairs (updates, weights [m]) of
    some clients each; None is a weight of one each, and weights are scaled to sum one over all.
    Compiled once for each shape of a chunk: let all chunks but the last be equally long. The other
    arguments, what is returned and what is refused are those of `merge`.

    Raises:
        ValueError: Also if there are no chunks, or they do not fit together.

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
            "with K-FAC does: Kronecker factors do not add up. Use merge, or a method that adds up "
            "such as fedavg, fisher_merge, regmean or fedfisher(model, fisher=fisher.diagonal)."
        )
    totals, weight, seen, first, scale, own = None, 0.0, 0, None, 0.0, None
    for number, chunk in enumerate(chunks):
        update, weights = _chunk(algorithm, chunk, number)
        # Without the client axis: chunks may differ in length.
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
        scale = scale or weights.max(initial=0.0)  # on the host: whatever the size of the weights
        mesh = mesh_of(update)
        weights = replicate(jnp.asarray(weights / (scale or 1.0), float), mesh)
        own = told_apart(replicate(params, mesh), update, before=seen)
        given = screened(algorithm, own, update, weights, on_nonfinite, first=seen)
        # Not normalised: the total weight is known after the last chunk only.
        values, statistics = given.values
        sums = added(algorithm.reduce, values, statistics, given.weights)
        totals = sums if totals is None else _add(totals, sums)
        weight, seen = weight + float(given.weights.sum()), seen + num_clients
    if totals is None:
        raise ValueError("There are no chunks to merge: expected at least one pair of updates.")
    if not weight > 0:
        raise ValueError(f"None of the {seen} clients has weight: every weight is zero.")
    # Chunks, and so the sums, may be spread over a mesh: it is known only now.
    own = replicate(own, mesh_of(totals))
    return _of_sums(algorithm, own, totals, state, jnp.arange(seen), key)


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
    """Merge sums over clients that were made elsewhere, as secure aggregation makes them.

    Args:
        algorithm: One with a `reduce`, whose sums these are; weights may have any sum.
        params: The model that clients started from.
        sums: What `algorithm.reduce` gives, added up leaf by leaf over clients; of a network with
            running statistics `Added`, as `secure_aggregation.contributions` gives it.
        cohort: [m] places of the clients among all.
        frozen: Names of the leaves that clients did not send, `update.frozen`.
        state: What the algorithm kept of the last merge; None starts afresh.
        key: For algorithms that draw on the server, as in `merge`.

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
    statistics = tuple(sums.statistics.total) if isinstance(sums, Added) else ()
    if len(cohort) > 1:
        leaves.check_moments(statistics)
    # Sums may be spread over a mesh.
    own = leaves.named(checks.arrays(params), statistics, tuple(frozen))
    own = replicate(own, mesh_of(sums))
    return _of_sums(algorithm, own, sums, state, cohort, server_key(algorithm, key))


def _of_sums(
    algorithm: Algorithm[Report], own: Leaves, sums: Any, state: Any, cohort: Array, key: Key
) -> tuple[Params, Any, Report]:
    statistics = {}
    if isinstance(sums, Added):
        sums, statistics = sums.sums, sums.statistics.mean()
    return finished(algorithm, sums, statistics, own, state, cohort, key)


def _chunk(algorithm: Algorithm, chunk: Any, number: int) -> tuple[Update, np.ndarray]:
    if not (isinstance(chunk, tuple) and len(chunk) == 2):
        raise ValueError(
            f"Chunk {number} is a {type(chunk).__name__}; expected a pair (updates, weights), "
            "where weights may be None."
        )
    update = stacked(algorithm, chunk[0])
    return update, check_weights(chunk[1], jax.tree.leaves(update)[0].shape[0])


# The old totals are donated: a stream holds its sums once.
@partial(jit, donate_argnums=0)
def _add(totals: Any, sums: Any) -> Any:
    return jax.tree.map(jnp.add, totals, sums)
