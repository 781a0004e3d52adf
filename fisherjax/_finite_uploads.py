"""Find clients that diverged, whose updates have NaN or infinite entries.

Values are checked on the host. Under tracing they are unknown: clients that diverged can then be
left out, but no error can be raised.
"""

import dataclasses
import warnings
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._semidefinite_uploads import nearest_semidefinite
from fisherjax._upload_checks import check_any_left
from fisherjax.clients import shares
from fisherjax.devices import mesh_of
from fisherjax.fisher import Operator
from fisherjax.typing import AnyArray, Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diverged:
    """Clients whose values are not finite, and the first such leaf of each.

    It is a pytree, so that compiled functions can return it.

    Attributes:
        leaf: [K] place of that leaf among `names`; -1 for a client whose values are finite.
        names: Names of all leaves, static.
    """

    leaf: AnyArray
    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @property
    def present(self) -> AnyArray:
        """Whether each client's values are finite, [K]."""
        return self.leaf < 0

    def by_client(self, cohort: AnyArray | None = None) -> dict[int, str]:
        """Return the names of these leaves by client.

        Clients are named by the numbers [K] in `cohort`, or by their places if it is None.

        Example:
            >>> Diverged(jnp.array([-1, 0, 1]), ("a", "b")).by_client(jnp.array([2, 5, 7]))
            {5: 'a', 7: 'b'}
        """
        leaf = np.asarray(self.leaf)
        clients = np.arange(len(leaf)) if cohort is None else np.asarray(cohort)
        return {int(clients[k]): self.names[leaf[k]] for k in np.flatnonzero(leaf >= 0)}


class Screened(NamedTuple):
    """Updates without the clients that diverged.

    Attributes:
        values: Values of the updates, leaves [K, ...]; zeros for clients that are left out.
        weights: [K] weights of the clients; zero for those that are left out.
        diverged: Clients that are left out, and the leaf that is not finite.
    """

    values: Any
    weights: AnyArray
    diverged: Diverged


def screen(
    values: dict[str, Any],
    weights: AnyArray,
    on_nonfinite: str,
    *,
    first: int = 0,
    others: dict[str, Any] | None = None,
) -> Screened:
    """Find clients whose update has NaN or infinite entries, and raise or leave them out.

    Fisher matrices and Gram matrices that are not symmetric positive semi-definite, for instance
    because they were quantised, are replaced by the nearest matrices that are.

    Args:
        values: Values of all updates by name, leaves [K, ...].
        weights: [K] weights of the clients.
        on_nonfinite: "raise" for an error, or "drop" to give such clients zero weight and zero
            entries, with a warning that names them. Under tracing "raise" checks nothing.
        first: Number of the first client in messages.
        others: Other values of the clients by name that must be finite, leaves [K, ...].

    Raises:
        ValueError: If updates are not finite and on_nonfinite is "raise", or if a Fisher matrix of
            a client is negative. The message names the clients and a leaf.

    Example:
        >>> found = screen({"w": jnp.ones((2, 1))}, jnp.array([0.5, 0.5]), "raise")
        >>> print(found.weights, found.diverged.present)
        [0.5 0.5] [ True  True]
    """
    checks.one_of("on_nonfinite", on_nonfinite, ("raise", "drop"))
    checked, names = (values, others), (*tree.names(values), *tree.names(others))
    everybody = Screened(values, weights, Diverged(np.full(weights.shape, -1), names))
    if checks.is_traced(checked, weights):
        if on_nonfinite == "raise":
            return everybody
        found = _diverged(tree.finite_by_client(checked), names)
        # Entries become zero too, because zero times NaN is NaN in a sum.
        kept = found.present
        return Screened(tree.where(kept, values), jnp.where(kept, weights, 0), found)
    table = _finite_table(checked)
    if table is None:  # constants inside a jitted function
        return everybody
    found = _diverged(table, names)
    kept = np.asarray(found.present)
    if leaf_of := found.by_client():
        _report(on_nonfinite, {first + client: leaf for client, leaf in leaf_of.items()})
    # Clients of weight zero may have any finite matrix.
    counts = kept & (np.asarray(weights) > 0)
    # A network of convolutions alone has no Gram matrices.
    fishers = {n: x for n, x in values.items() if isinstance(x, Operator) or (n == "grams" and x)}
    values = values | {
        name: nearest_semidefinite(name, x, counts, first) for name, x in fishers.items()
    }
    if kept.all():
        return Screened(values, weights, found)
    return Screened(tree.where(kept, values), jnp.where(kept, weights, 0), found)


def diverged(values: Any) -> dict[int, str] | None:
    """Find the clients with a leaf [K, ...] that is not finite, and the first such leaf of each.

    `screen` uses it, and so does what reads uploads leaf by leaf, as `files.merge_files`.

    Returns:
        Names of leaves by the places of their clients; None inside `jit`, where values are unknown.

    Example:
        >>> diverged({"b": jnp.zeros((2, 3)), "w": jnp.array([1.0, jnp.nan])})
        {1: 'w'}
    """
    table = _finite_table(values)
    return None if table is None else _diverged(table, tree.names(values)).by_client()


def _report(on_nonfinite: str, leaf_of: dict[int, str]) -> None:
    """Raise an error that names clients that diverged, or warn that they are left out."""
    if on_nonfinite == "raise":
        client, leaf = next(iter(leaf_of.items()))
        raise ValueError(
            f"The updates of clients {list(leaf_of)} are not finite (client "
            f"{client}: leaf '{leaf}'): they diverged. Train them with a smaller "
            "learning rate, or leave them out with on_nonfinite='drop'."
        )
    named = "; ".join(f"client {client} for leaf '{leaf}'" for client, leaf in leaf_of.items())
    warnings.warn(f"Left out because their updates are not finite: {named}.", stacklevel=4)


def check_updates(
    updates: Any, weights: AnyArray, on_nonfinite: str = "raise"
) -> tuple[Any, AnyArray]:
    """Check that stacked values [M, ...] are finite, or leave out the clients that diverged.

    Args:
        updates: Values of the updates by name, leaves [M, ...].
        weights: [M] weights of the clients, with sum one.
        on_nonfinite: "raise", or "drop" to leave out clients whose values are not finite.

    Returns:
        The values, with zeros for clients that are left out, and weights [M] with sum one.

    Raises:
        ValueError: As `screen`, or if no client is left.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore")
        >>> updates = {"w": jnp.array([[1.0], [jnp.nan]])}
        >>> print(check_updates(updates, jnp.array([0.5, 0.5]), on_nonfinite="drop")[1])
        [1. 0.]
    """
    found = screen(updates, weights, on_nonfinite)
    # If no client was left out, the weights are the same object, and keep their bits.
    if found.weights is weights:
        return found.values, weights
    check_any_left(found.weights)
    return found.values, shares(found.weights)


def finite_leaves(values: Any) -> np.ndarray:
    """Return whether each leaf is finite, [leaves], on the host.

    Example:
        >>> print(finite_leaves({"b": jnp.zeros(3), "w": np.array([1.0, np.inf])}))
        [ True False]
    """
    leaves = jax.tree.leaves(values)
    if all(map(checks.is_in_host_memory, leaves)):
        return np.array([np.isfinite(leaf).all() for leaf in leaves])
    return np.asarray(_finite_leaves(values))


_finite_leaves = jit(tree.finite_leaves)


def probable_cause(values: Any = None, weights: AnyArray | None = None) -> str:
    """Describe the probable cause of a merged model that is not finite.

    The description names the client and leaf with the largest entry if all updates are given.
    """
    cause = "are too large to merge, or a Fisher matrix is not positive semi-definite."
    if values is None or weights is None:
        return f"Every update is finite; the numbers of some client {cause}"
    # Clients of weight zero have no influence on the model.
    counted = jax.tree.leaves(tree.where(weights > 0, values))
    # The largest entry of each leaf and client, [leaves, M].
    largest = jnp.stack([jnp.abs(x).reshape(x.shape[0], -1).max(1) for x in counted])
    leaf, client = divmod(int(largest.argmax()), len(weights))
    return (
        f"Every update is finite; client {client} has the largest entry, "
        f"{float(largest.max()):.3g} in leaf '{tree.names(values)[leaf]}': its numbers {cause}"
    )


def _finite_table(values: Any) -> np.ndarray | None:
    """Return whether each leaf of each client is finite, [leaves, K]; None inside `jit`."""
    leaves = jax.tree.leaves(values)
    # NumPy checks arrays from files and of a CPU, without compiling a program for each shape.
    on_host = all(map(checks.is_in_host_memory, leaves))
    table = [*map(_finite_on_host, leaves)] if on_host else _finite(mesh_of(values), values)
    return None if checks.is_traced(table) else np.asarray(table)


def _diverged(table: Any, names: tuple[str, ...]) -> Diverged:
    """Find the first leaf of each client that is False in a table [leaves, K] of NumPy or JAX."""
    array = np if isinstance(table, np.ndarray) else jnp
    return Diverged(array.where(table.all(0), -1, table.argmin(0)), names)


@partial(jit, static_argnums=0)
def _finite(mesh: Mesh | None, updates: Any) -> Array:
    """Return whether each leaf of each client is finite, [leaves, M], on every device."""
    table = tree.finite_by_client(updates)
    if mesh is None:
        return table
    # Of several processes, each can read only arrays that lie on its own devices.
    return jax.lax.with_sharding_constraint(table, NamedSharding(mesh, PartitionSpec()))


def _finite_on_host(leaf: AnyArray) -> np.ndarray:
    """Return whether a leaf of each client is finite, [M], in the precision that JAX will use."""
    with np.errstate(over="ignore"):
        leaf = np.asarray(leaf)
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
    return np.asarray(np.isfinite(leaf).all(tuple(range(1, leaf.ndim))))
