"""Pytree algebra: names of leaves, stacking clients, weighted sums over the client axis."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax.typing import Array


def names(tree: Any) -> tuple[str, ...]:
    """Name the leaves of a pytree by their paths, joined by slashes.

    Args:
        tree: Any pytree.

    Returns:
        One name for every leaf, in the order of `jax.tree.leaves`.

    Example:
        >>> names({"dense": {"kernel": 1.0, "bias": 2.0}})
        ('dense/bias', 'dense/kernel')
    """
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return tuple(jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths)


def inner(left: Any, right: Any) -> Array:
    """Compute the inner product <u, v> = sum_leaves sum(u * v) of two pytrees.

    Args:
        left: A pytree of arrays.
        right: A pytree of the same structure and shapes.

    Returns:
        A scalar.

    Example:
        >>> print(inner({"w": jnp.ones(3)}, {"w": jnp.arange(3.0)}))
        3.0
    """
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, left, right)))


def weighted_sum(stacked: Any, weights: Array) -> Any:
    """Sum a stacked pytree over its clients, sum_i w_i x_i.

    Clients of weight zero have no influence, whatever finite values they hold.

    Args:
        stacked: Floating leaves [M, ...].
        weights: [M].

    Returns:
        The pytree without its client axis, leaves of the same dtype.

    Example:
        >>> print(weighted_sum({"w": jnp.array([[1.0], [3.0]])}, jnp.array([0.5, 0.5]))["w"])
        [2.]
    """

    def leaf(x: Array) -> Array:
        # Weights rounded to bfloat16 would no longer add up to one.
        wide = jnp.promote_types(x.dtype, jnp.float32)
        terms = (weights.astype(wide), x.astype(wide))
        return jnp.tensordot(*terms, 1, precision=jax.lax.Precision.HIGHEST).astype(x.dtype)

    return jax.tree.map(leaf, stacked)


def finite(stacked: Any) -> Array:
    """Say of every leaf and client whether all entries are finite.

    Args:
        stacked: Leaves [M, ...].

    Returns:
        True or False, [leaves, M].

    Example:
        >>> print(finite({"w": jnp.array([[1.0], [jnp.nan]])}))
        [[ True False]]
    """
    leaves = jax.tree.leaves(stacked)
    return jnp.stack([jnp.isfinite(leaf).reshape(leaf.shape[0], -1).all(1) for leaf in leaves])


def keep(kept: Array, stacked: Any) -> Any:
    """Replace what some clients hold by zeros.

    Args:
        kept: [M] False for those.
        stacked: Leaves [M, ...].

    Returns:
        The stacked pytree.

    Example:
        >>> print(keep(jnp.array([True, False]), jnp.array([[1.0], [jnp.nan]])).T)
        [[1. 0.]]
    """

    def leaf(x: Array) -> Array:
        return jnp.where(kept.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros_like(x))

    return jax.tree.map(leaf, stacked)


def stack(trees: Sequence[Any]) -> Any:
    """Stack one pytree a client into a single pytree with a leading client axis.

    Args:
        trees: M pytrees of one structure, with leaves of equal shapes and dtypes.

    Returns:
        The same structure, leaves [M, ...].

    Raises:
        ValueError: If the list is empty, or a client differs from client 0; the message names the
            client and the leaf.

    Example:
        >>> stack([{"w": 1.0}, {"w": 2.0}])["w"].shape
        (2,)
    """
    if not trees:
        raise ValueError(
            "Nothing to stack: got an empty list, expected one pytree for each client."
        )
    first = trees[0]
    for client, tree in enumerate(trees):
        _check_same(first, tree, client)
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(x) for x in leaves]), *trees)


def _check_same(first: Any, tree: Any, client: int) -> None:
    if jax.tree.structure(first) != jax.tree.structure(tree):
        raise ValueError(
            f"Client {client} holds another tree than client 0: leaves {list(names(tree))}, "
            f"expected {list(names(first))}. All clients must have trained the same network."
        )
    for name, x, y in zip(names(first), jax.tree.leaves(first), jax.tree.leaves(tree), strict=True):
        expected, given = (jnp.shape(x), jnp.result_type(x)), (jnp.shape(y), jnp.result_type(y))
        if expected != given:
            raise ValueError(
                f"Leaf '{name}' of client {client} has shape {given[0]} and dtype {given[1]}, but "
                f"client 0 has {expected[0]} and {expected[1]}. Bring all clients to one network."
            )


def check_floating(params: Any, what: str = "params") -> None:
    """Refuse a pytree that has no leaves, or leaves that are not floating-point arrays.

    Args:
        params: The pytree to look at; only its dtypes are read.
        what: How the message calls it.

    Raises:
        ValueError: If there is no leaf.
        TypeError: If a leaf is not floating; the message names it.
    """
    if not jax.tree.leaves(params):
        raise ValueError(f"{what} has no leaves; expected a pytree of floating-point arrays.")
    for name, leaf in zip(names(params), jax.tree.leaves(params), strict=True):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise TypeError(
                f"Leaf '{name}' of {what} has dtype {jnp.result_type(leaf)}; expected floating "
                "point. Convert it, or keep integers out of the pytree (close over them in apply)."
            )
