"""Whether what clients sent can be merged: its kind, its shapes, its weights, its numbers.

Values are checked on the host; under tracing they are not known, and who diverged can be left out,
but not refused.
"""

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.algorithms.base import Algorithm, Update, check_algorithm
from fisherjax.clients import shares
from fisherjax.devices import mesh_of
from fisherjax.fisher import Diagonal, Operator
from fisherjax.typing import AnyArray, Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diverged:
    """Whose values are not finite, and in which leaf first: data, which programs can return.

    Attributes:
        leaf: [K], the place of that leaf among `names`; -1 for a client whose values are finite.
        names: Of all leaves, static.
    """

    leaf: Array
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def present(self) -> Array:
        """Whether each client's values are finite, [K]."""
        return self.leaf < 0

    def by_client(self, cohort: Array | None = None) -> dict[int, str]:
        """Name the leaf of each client that diverged, by its number in `cohort`, [K], or here.

        Example:
            >>> Diverged(jnp.array([-1, 0, 1]), ("a", "b")).by_client(jnp.array([2, 5, 7]))
            {5: 'a', 7: 'b'}
        """
        leaf = np.asarray(self.leaf)
        clients = np.arange(len(leaf)) if cohort is None else np.asarray(cohort)
        return {int(clients[k]): self.names[leaf[k]] for k in np.flatnonzero(leaf >= 0)}


class Screened(NamedTuple):
    """What is left of updates: who diverged has zeros and weight zero.

    Attributes:
        values: [K, ...].
        weights: [K].
        diverged: Who is left out, and for which leaf.
    """

    values: Any
    weights: AnyArray
    diverged: Diverged


def stacked(algorithm: Algorithm, updates: Any) -> Update:
    """Stack updates if need be; refuse another kind, or leaves of different numbers of clients."""
    check_algorithm(algorithm)
    if isinstance(updates, (list, tuple)):
        # Before they are stacked, which would say only that their trees differ.
        for client, update in enumerate(updates):
            _check_kind(algorithm, update, f"The update of client {client}")
        updates = tree.stack(list(updates))
    _check_kind(algorithm, updates, "updates")
    shapes = tree.shapes(updates.values)
    if not shapes:
        raise ValueError(
            "Nothing was sent: this method, as single_set, merges nothing. Play it in "
            "rounds.federated, whose `models` gives every client's own."
        )
    lengths = {name: shape[0] if shape else None for name, shape in shapes.items()}
    if None in lengths.values() or len(set(lengths.values())) != 1:
        raise ValueError(
            f"The stacked updates have leading axes {lengths}; expected one length, the clients'."
        )
    _check_untrained(algorithm, updates)
    return tree.native(updates, "the stacked updates")


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


def check_some(weights: Any) -> None:
    """Refuse weights of which none counts."""
    if not checks.is_traced(weights) and not weights.sum() > 0:
        raise ValueError(
            "Every weight is zero; expected some clients to count, for instance "
            "federation.weights or numbers of examples."
        )


def screen(
    values: dict[str, Any],
    weights: AnyArray,
    on_nonfinite: str,
    *,
    first: int = 0,
    others: dict[str, Any] | None = None,
) -> Screened:
    """Find clients whose update holds NaN or infinity, before it spoils a merge.

    Fishers and Gram matrices that are not symmetric positive semi-definite, because they were
    quantised for instance, become the nearest that are.

    Args:
        values: Of all clients, leaves [K, ...], by name.
        weights: [K].
        on_nonfinite: "raise", or "drop": who diverged has weight zero and finite entries then, and
            a warning names it. Under tracing "raise" lets everything pass.
        first: Number of the first client, in messages.
        others: More of what clients computed, leaves [K, ...], that has to be finite too, by name.

    Raises:
        ValueError: With "raise", naming the clients and a leaf; if a client's Fisher information is
            negative.

    Example:
        >>> found = screen({"w": jnp.ones((2, 1))}, jnp.array([0.5, 0.5]), "raise")
        >>> print(found.weights, found.diverged.present)
        [0.5 0.5] [ True  True]
    """
    checks.one_of("on_nonfinite", on_nonfinite, ("raise", "drop"))
    seen, names = (values, others), (*tree.names(values), *tree.names(others))
    everybody = Screened(values, weights, Diverged(np.full(weights.shape, -1), names))
    if checks.is_traced(seen, weights):
        if on_nonfinite == "raise":
            return everybody
        found = _diverged(tree.finite(seen), names)
        # Zeros as well: weight zero does not silence NaN in a sum.
        kept = found.present
        return Screened(tree.keep(kept, values), jnp.where(kept, weights, 0), found)
    table = _finite_table(seen)
    if table is None:  # everything is known, but inside somebody's jit
        return everybody
    found = _diverged(table, names)
    kept = np.asarray(found.present)
    if where := found.by_client():
        _tell(on_nonfinite, {first + client: leaf for client, leaf in where.items()})
    counts = kept & (np.asarray(weights) > 0)  # whoever has no weight may have anything finite
    # Of convolutions alone there are no Gram matrices.
    fishers = {n: x for n, x in values.items() if isinstance(x, Operator) or (n == "grams" and x)}
    values = values | {name: _definite(name, x, counts, first) for name, x in fishers.items()}
    if kept.all():
        return Screened(values, weights, found)
    return Screened(tree.keep(kept, values), jnp.where(kept, weights, 0), found)


def diverged(values: Any) -> dict[int, str] | None:
    """Find the clients whose values, leaves [K, ...], are not finite: each one's first such leaf.

    This is how `screen` judges, and whoever reads uploads leaf by leaf, as `files.merge_files`.

    Returns:
        Names of leaves by clients' places; None inside somebody's `jit`, where nothing is known.

    Example:
        >>> diverged({"b": jnp.zeros((2, 3)), "w": jnp.array([1.0, jnp.nan])})
        {1: 'w'}
    """
    table = _finite_table(values)
    return None if table is None else _diverged(table, tree.names(values)).by_client()


def _tell(on_nonfinite: str, where: dict[int, str]) -> None:
    """Say which clients diverged, and where: as an error, or as a warning if they are left out."""
    if on_nonfinite == "raise":
        client, leaf = next(iter(where.items()))
        raise ValueError(
            f"The updates of clients {list(where)} are not finite (client "
            f"{client}: leaf '{leaf}'): they diverged. Train them with a smaller "
            "learning rate, or leave them out with on_nonfinite='drop'."
        )
    said = "; ".join(f"client {client} for leaf '{leaf}'" for client, leaf in where.items())
    warnings.warn(f"Left out, as updates that are not finite: {said}.", stacklevel=4)


def check_updates(
    updates: Any, weights: AnyArray, on_nonfinite: str = "raise"
) -> tuple[Any, AnyArray]:
    """Screen stacked values [M, ...]; return them, and weights that sum to one again.

    Raises:
        ValueError: As `screen`; with "drop", if nobody is left.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore")
        >>> updates = {"w": jnp.array([[1.0], [jnp.nan]])}
        >>> print(check_updates(updates, jnp.array([0.5, 0.5]), on_nonfinite="drop")[1])
        [1. 0.]
    """
    found = screen(updates, weights, on_nonfinite)
    # The same object says that nobody was left out: the weights keep their bits.
    if found.weights is weights:
        return found.values, weights
    check_left(found.weights)
    return found.values, shares(found.weights)


def check_left(weights: AnyArray) -> None:
    """Refuse a merge of nobody."""
    if not checks.is_traced(weights) and not np.any(np.asarray(weights) > 0):
        raise ValueError("No client is left: every update with weight is not finite.")


def indefinite(fisher: Any) -> list[str]:
    """Name what of a client's Fisher or Gram matrices is indefinite or not symmetric, by names.

    Example:
        >>> indefinite(Diagonal({"w": np.array([1.0, -1.0]), "b": np.zeros(2)}))
        ['entries/w']
    """
    sound = _map_parts(fisher, _is_semidefinite, lambda entries: np.all(entries >= 0))
    named = zip(tree.names(sound), jax.tree.leaves(sound), strict=True)
    return [name for name, x in named if not np.all(x)]


def suspect(values: Any = None, weights: AnyArray | None = None) -> str:
    """Name the client and leaf with the largest entry, where the updates of all are at hand."""
    advice = "its numbers are too large to merge, or a Fisher is not positive semi-definite"
    if values is None or weights is None:
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


def _finite_table(values: Any) -> np.ndarray | None:
    """Say of every leaf and client whether it is finite, [leaves, K]; None inside a `jit`."""
    leaves = jax.tree.leaves(values)
    # What comes of files is looked at as it is, without a program for each shape.
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    table = [*map(_finite_on_host, leaves)] if on_host else _finite(mesh_of(values), values)
    return None if checks.is_traced(table) else np.asarray(table)


def _diverged(table: Any, names: tuple[str, ...]) -> Diverged:
    """Find each client's first leaf that is not finite in a table [leaves, K], of either kind."""
    array = np if isinstance(table, np.ndarray) else jnp
    return Diverged(array.where(table.all(0), -1, table.argmin(0)), names)


@partial(jit, static_argnums=0)
def _finite(mesh: Mesh | None, updates: Any) -> Array:
    """Say of every leaf and client whether it is finite, [leaves, M], on every device."""
    table = tree.finite(updates)
    if mesh is None:
        return table
    # With several processes, each can read only what lies wholly on its own devices.
    return jax.lax.with_sharding_constraint(table, NamedSharding(mesh, PartitionSpec()))


def _finite_on_host(leaf: np.ndarray) -> np.ndarray:
    """Say of every client whether a leaf is finite, [M], in the precision that JAX has."""
    with np.errstate(over="ignore"):
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
    return np.asarray(np.isfinite(leaf).all(tuple(range(1, leaf.ndim))))


# By NumPy: whether a matrix is definite is asked once, and its answer changes what happens.
def _definite(name: str, stacked: Any, counts: np.ndarray, first: int) -> Any:
    """Replace what is not symmetric positive semi-definite by the nearest that is; refuse less.

    Fishers that are spread over several processes are not looked at.
    """
    leaves, structure = jax.tree.flatten(stacked)
    if not all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        return stacked
    arrays = [np.asarray(leaf) for leaf in leaves]
    # All clients at once where there is no matrix: streams have thousands.
    if isinstance(stacked, Diagonal) and all(np.all(x >= 0) for x in arrays):
        return stacked
    changed = {}
    for client in np.flatnonzero(counts):
        own = jax.tree.unflatten(structure, [x[client] for x in arrays])
        traces = _map_parts(own, np.trace, np.sum)
        least = min(zip(map(np.min, jax.tree.leaves(traces)), tree.names(traces), strict=True))
        if least[0] < 0:
            raise ValueError(
                f"{'The Gram matrix' if name == 'grams' else 'The Fisher information'} of client "
                f"{first + client} is negative: "
                f"'{name}/{least[1]}' has trace {least[0]:.3g}; expected a positive semi-definite "
                "one."
            )
        mended = _map_parts(own, _nearest, _positive)
        pairs = zip(jax.tree.leaves(own), jax.tree.leaves(mended), strict=True)
        # Most often the very array comes back, and nothing is compared.
        if not all(new is old or np.array_equal(new, old) for old, new in pairs):
            changed[client] = mended
    if changed:
        arrays = [x.copy() for x in arrays]
        for client, own in changed.items():
            for x, new in zip(arrays, jax.tree.leaves(own), strict=True):
                x[client] = new
        leaves = [_like(leaf, x) for leaf, x in zip(leaves, arrays, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _map_parts(fisher: Any, on_matrix: Callable, on_entries: Callable) -> Any:
    """Change every part of a Fisher, or of Gram matrices, by leaf."""
    if isinstance(fisher, Operator):
        return fisher.map_parts(on_matrix, on_entries)
    return jax.tree.map(on_matrix, fisher)


def _like(leaf: Any, changed: np.ndarray) -> Any:
    """Place an array where a leaf lies; what is bound to no device stays so."""
    if not isinstance(leaf, jax.Array):
        return changed
    return jax.device_put(changed, leaf.sharding) if leaf.committed else jnp.asarray(changed)


def _is_semidefinite(matrix: np.ndarray) -> bool:
    """Say whether a matrix is symmetric positive semi-definite, but for rounding."""
    wide = matrix.astype(np.promote_types(matrix.dtype, np.float32), copy=False)
    scaled = wide / (max(wide.max(), -wide.min()) or 1)
    # The triangles of a float32 sum of a million products differ by 1e-5 of the largest entry.
    if not np.abs(scaled - scaled.T).max() <= 1e-4:
        return False
    # A sum of many outer products is singular up to rounding, which grows with the size.
    np.einsum("ii->i", scaled)[:] += len(matrix) * np.finfo(wide.dtype).eps
    # LAPACK itself, as what looks at its arguments first takes longer than it does.
    from scipy.linalg import lapack  # 0.4 s to import, which only host checks need

    [factorise] = lapack.get_lapack_funcs(["potrf"], (scaled,))
    return not factorise(scaled.T, lower=False, clean=False, overwrite_a=True)[1]


def _nearest(matrix: np.ndarray) -> np.ndarray:
    """Give the nearest symmetric positive semi-definite matrix: no eigenvalue below zero."""
    # First, since the eigenvalues of a wide layer's take seconds.
    if _is_semidefinite(matrix):
        return matrix
    wide = matrix.astype(np.float64)
    values, vectors = np.linalg.eigh((wide + wide.T) / 2)
    return ((vectors * np.maximum(values, 0)) @ vectors.T).astype(matrix.dtype)


def _positive(entries: np.ndarray) -> np.ndarray:
    return entries if np.all(entries >= 0) else np.maximum(entries, 0)


def _check_untrained(algorithm: Algorithm, update: Update) -> None:
    """Refuse updates by hand that hold what the model does not train among what it does."""
    mask = () if algorithm.model is None else algorithm.model.mask or ()
    said = {*update.statistics, *update.frozen}
    if missing := [name for name, trained in mask if not trained and name not in said]:
        raise ValueError(
            f"The model's mask does not train {missing}, but the update says nothing of these "
            "leaves: its values may hold them among trained ones. Make updates by "
            "merging.summarize, or name the leaves in Update(..., statistics=, frozen=)."
        )


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
