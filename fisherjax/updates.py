"""Whether what clients sent can be merged: its kind, its shapes, its weights, its numbers.

Values are checked on the host; under tracing they are not known and pass.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fisherjax import checks, tree
from fisherjax.algorithms.base import Algorithm, Update, check_algorithm
from fisherjax.fisher import Operator
from fisherjax.parallel import mesh_of
from fisherjax.typing import Array


def stacked_values(algorithm: Algorithm, updates: Any) -> dict[str, Any]:
    """Stack updates if need be; refuse another kind, or leaves of different numbers of clients."""
    check_algorithm(algorithm)
    if isinstance(updates, (list, tuple)):
        # Before they are stacked, which would say only that their trees differ.
        for client, update in enumerate(updates):
            _check_kind(algorithm, update, f"The update of client {client}")
        updates = tree.stack(list(updates))
    _check_kind(algorithm, updates, "updates")
    shapes = tree.shapes(updates.values)
    lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        raise ValueError(
            f"The stacked updates have leading axes {lengths}; expected one length, the clients'."
        )
    return updates.values


def check_weights(weights: Any, num_clients: int) -> Any:
    """Check the clients' weights, [M]; in float64 on the host unless they are traced."""
    if weights is None:
        return np.ones(num_clients)
    if not checks.is_traced(weights):
        try:
            # In float32 the sum of weights such as 1e38 would overflow.
            weights = np.asarray(weights, np.float64)
        except (TypeError, ValueError) as error:
            raise TypeError(f"weights are {weights!r}; expected numbers, one a client.") from error
    if weights.shape != (num_clients,):
        raise ValueError(
            f"weights has shape {weights.shape}; expected ({num_clients},), one for each update."
        )
    if not checks.is_traced(weights) and not (np.all(weights >= 0) and np.isfinite(weights).all()):
        raise ValueError(
            f"weights are {weights.tolist()}; expected finite non-negative numbers, one a client."
        )
    return weights


def shares(weights: Any) -> Any:
    """Scale weights to sum one, whatever their size."""
    # By the largest first: a sum of huge weights overflows, one of tiny weights underflows.
    scaled = weights / weights.max()
    return scaled / scaled.sum()


def check_updates(updates: Any, weights: Array, on_nonfinite: str = "raise") -> tuple[Any, Array]:
    """Find clients whose update, leaves [M, ...], holds NaN or infinity, before it spoils a merge.

    Returns:
        Updates and weights [M]. With `on_nonfinite="drop"` a diverged client has weight zero and
        finite entries, and the weights of the others sum to one again.

    Raises:
        ValueError: With "raise", naming the clients and a leaf; with "drop", if nobody is left; if
            a client's Fisher information is negative.

    Example:
        >>> updates = {"w": jnp.array([[1.0], [jnp.nan]])}
        >>> print(check_updates(updates, jnp.array([0.5, 0.5]), on_nonfinite="drop")[1])
        [1. 0.]
    """
    cleaned, kept = screen(updates, weights, on_nonfinite)
    # The same object says that nobody was left out: the weights keep their bits.
    if kept is weights:
        return cleaned, weights
    if not np.any(np.asarray(kept) > 0):
        raise ValueError("No client is left: every update with weight is not finite.")
    return cleaned, kept / kept.sum()


def screen(updates: Any, weights: Array, on_nonfinite: str, first: int = 0) -> tuple[Any, Array]:
    """Give diverged clients zeros and weight zero; `first` is the number of the first client.

    Fishers that are not symmetric positive semi-definite, because they were quantised for instance,
    become the nearest that are.
    """
    checks.one_of("on_nonfinite", on_nonfinite, ("raise", "drop"))
    if checks.is_traced(updates, weights):
        return updates, weights
    health = _health(mesh_of(updates), updates)
    if checks.is_traced(health):  # everything is known, but inside somebody's jit
        return updates, weights
    table, traces, sound = jax.tree.map(np.asarray, health)
    kept = table.all(0)
    if on_nonfinite == "raise" and not kept.all():
        diverged = np.flatnonzero(~kept)
        leaf = tree.names(updates)[table[:, diverged[0]].argmin()]
        raise ValueError(
            f"The updates of clients {(first + diverged).tolist()} are not finite (client "
            f"{first + diverged[0]}: leaf '{leaf}'): they diverged. Train them with a smaller "
            "learning rate, or leave them out with on_nonfinite='drop'."
        )
    for name, trace in zip(tree.names(traces), jax.tree.leaves(traces), strict=True):
        # Whoever has no weight may have anything that is finite.
        negative = kept & (trace < 0) & (np.asarray(weights) > 0)
        if negative.any():
            client = negative.argmax()
            raise ValueError(
                f"The Fisher information of client {first + client} is negative: '{name}' has "
                f"trace {trace[client]:.3g}; expected a positive semi-definite one."
            )
    if not all(each[kept].all() for each in jax.tree.leaves(sound)):
        updates = _semidefinite(updates)
    if kept.all():
        return updates, weights
    # Zeros as well: weight zero does not silence NaN in a sum.
    return tree.keep(kept, updates), jnp.where(kept, weights, 0)


def suspect(values: Any = None, weights: Array | None = None) -> str:
    """Name the client and leaf with the largest entry, where the updates of all are at hand."""
    advice = "its numbers are too large to merge, or a Fisher is not positive semi-definite"
    if values is None:
        return f"Every update is finite; of some client {advice}."
    # Who has no weight is not to blame.
    counted = jax.tree.leaves(tree.keep(weights > 0, values))
    # Every leaf [M, ...] to each client's largest entry [M], together [leaves, M].
    largest = jnp.stack([jnp.abs(x).reshape(x.shape[0], -1).max(1) for x in counted])
    leaf, client = divmod(int(largest.argmax()), len(weights))
    return (
        f"Every update is finite; client {client} has the largest entry, "
        f"{float(largest.max()):.3g} in leaf '{tree.names(values)[leaf]}': {advice}."
    )


@partial(jax.jit, static_argnums=0)
def _health(mesh: Mesh | None, updates: Any) -> tuple[Array, Any, Any]:
    """Say of every leaf and client whether it is finite, [leaves, M], and judge every Fisher.

    By its traces, and by whether it is symmetric positive semi-definite but for rounding, [M].
    """
    traces = _of_fishers(lambda fisher: fisher.traces(), updates)
    sound = _of_fishers(lambda fisher: fisher.is_semidefinite(), updates)
    health = tree.finite(updates), traces, sound
    if mesh is None:
        return health
    # With several processes, each can read only what lies wholly on its own devices.
    return jax.lax.with_sharding_constraint(health, NamedSharding(mesh, PartitionSpec()))


@jax.jit
def _semidefinite(updates: Any) -> Any:
    """Replace the Fishers that are not symmetric positive semi-definite by the nearest that are."""

    def mended(fisher: Operator) -> Operator:
        kept = fisher.is_semidefinite()
        return jax.tree.map(lambda x, y: jnp.where(kept, x, y), fisher, fisher.semidefinite())

    return _of_fishers(mended, updates, otherwise=lambda x: x)


def _of_fishers(function: Callable, updates: Any, otherwise: Callable = lambda _: None) -> Any:
    """Map a function of one client's Fisher over all stacked ones that are among the updates."""

    def one(x: Any) -> Any:
        return jax.vmap(function)(x) if isinstance(x, Operator) else otherwise(x)

    return jax.tree.map(one, updates, is_leaf=lambda x: isinstance(x, Operator))


def _check_kind(algorithm: Algorithm, update: Any, what: str) -> None:
    if not isinstance(update, Update):
        raise TypeError(
            f"{what} is a {type(update).__name__}; expected what merging.summarize returns, a list "
            "of algorithms.Update, or Update(stacked values, algorithm.kind)."
        )
    if update.kind != algorithm.kind:
        raise ValueError(
            f"{what} holds '{update.kind}', but this algorithm merges '{algorithm.kind}'. "
            "Summarize with the algorithm that merges."
        )
