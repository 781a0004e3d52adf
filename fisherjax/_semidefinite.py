"""Positive semi-definite matrices near those that clients sent."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax.fisher import Diagonal, Operator


def indefinite(fisher: Any) -> list[str]:
    """Name what of a client's Fisher or Gram matrices is indefinite or not symmetric, by names.

    Example:
        >>> indefinite(Diagonal({"w": np.array([1.0, -1.0]), "b": np.zeros(2)}))
        ['entries/w']
    """
    sound = _map_parts(fisher, _is_semidefinite, lambda entries: np.all(entries >= 0))
    named = zip(tree.names(sound), jax.tree.leaves(sound), strict=True)
    return [name for name, x in named if not np.all(x)]


# By NumPy: whether a matrix is definite is asked once, and its answer changes what happens.
def nearest_semidefinite(name: str, stacked: Any, counts: np.ndarray, first: int) -> Any:
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

    factorise = lapack.get_lapack_funcs("potrf", (scaled,))
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
