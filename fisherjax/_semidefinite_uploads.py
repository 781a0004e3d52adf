"""Check and repair the Fisher matrices and Gram matrices of uploads: positive semi-definite or not.

NumPy does this on the host, because control flow depends on the result.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax.fisher import Diagonal, Operator


def indefinite(fisher: Any) -> list[str]:
    """Return the names of a client's Fisher or Gram matrices that are indefinite or not symmetric.

    Example:
        >>> indefinite(Diagonal({"w": np.array([1.0, -1.0]), "b": np.zeros(2)}))
        ['entries/w']
    """
    sound = _map_parts(fisher, _is_semidefinite, lambda entries: np.all(entries >= 0))
    return [name for name, x in tree.by_name(sound).items() if not np.all(x)]


def nearest_semidefinite(name: str, stacked: Any, counts: np.ndarray, first: int) -> Any:
    """Replace matrices by the nearest that are symmetric positive semi-definite.

    Fisher matrices that are spread over several processes are returned as they are.

    Args:
        name: Name of these values in the update, for errors.
        stacked: Fisher operator or Gram matrices of all clients, leaves [K, ...].
        counts: [K] whether a client is checked.
        first: Number of the first client in errors.

    Raises:
        ValueError: If a matrix has a negative trace.
    """
    leaves, structure = jax.tree.flatten(stacked)
    if not all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        return stacked
    arrays = [np.asarray(leaf) for leaf in leaves]
    # Diagonals are checked for all clients at once, because streams have thousands.
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
        repaired = _map_parts(own, _nearest_matrix, _clip_below_zero)
        pairs = zip(jax.tree.leaves(own), jax.tree.leaves(repaired), strict=True)
        # A part that needs no repair is the same array.
        if not all(new is old or np.array_equal(new, old) for old, new in pairs):
            changed[client] = repaired
    if changed:
        arrays = [x.copy() for x in arrays]
        for client, own in changed.items():
            for x, new in zip(arrays, jax.tree.leaves(own), strict=True):
                x[client] = new
        leaves = [_placed_like(leaf, x) for leaf, x in zip(leaves, arrays, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def _map_parts(fisher: Any, on_matrix: Callable, on_entries: Callable) -> Any:
    """Apply functions to the matrices and diagonals of a Fisher operator, or to Gram matrices."""
    if isinstance(fisher, Operator):
        return fisher.map_parts(on_matrix, on_entries)
    return jax.tree.map(on_matrix, fisher)


def _placed_like(leaf: Any, changed: np.ndarray) -> Any:
    """Place an array on the devices of a leaf, and commit it to them only if the leaf is."""
    if not isinstance(leaf, jax.Array):
        return changed
    return jax.device_put(changed, leaf.sharding) if leaf.committed else jnp.asarray(changed)


def _is_semidefinite(matrix: np.ndarray) -> bool:
    """Return whether a matrix is symmetric positive semi-definite up to rounding."""
    wide = matrix.astype(np.promote_types(matrix.dtype, np.float32), copy=False)
    scaled = wide / (max(wide.max(), -wide.min()) or 1)
    # The two triangles of a float32 sum of a million products differ by 1e-5 of its largest entry.
    if not np.abs(scaled - scaled.T).max() <= 1e-4:
        return False
    # Low-rank sums of outer products are singular up to rounding, which grows with their size.
    np.einsum("ii->i", scaled)[:] += len(matrix) * np.finfo(wide.dtype).eps
    # LAPACK is called directly, because SciPy's checks of arguments take longer than it does.
    from scipy.linalg import lapack  # imported here, because the import takes 0.4 s

    [factorise] = lapack.get_lapack_funcs(["potrf"], (scaled,))
    return not factorise(scaled.T, lower=False, clean=False, overwrite_a=True)[1]


def _nearest_matrix(matrix: np.ndarray) -> np.ndarray:
    """Return the nearest symmetric positive semi-definite matrix, without negative eigenvalues."""
    # Checked first, because eigenvalues of a wide layer's factor take seconds.
    if _is_semidefinite(matrix):
        return matrix
    wide = matrix.astype(np.float64)
    values, vectors = np.linalg.eigh((wide + wide.T) / 2)
    return ((vectors * np.maximum(values, 0)) @ vectors.T).astype(matrix.dtype)


def _clip_below_zero(entries: np.ndarray) -> np.ndarray:
    return entries if np.all(entries >= 0) else np.maximum(entries, 0)
