"""Pytrees with and without a leading client axis."""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax.typing import Array


def copies(params: Any, number: int) -> Any:
    """Repeat the leaves of a pytree along a new leading axis.

    Example:
        >>> copies({"w": jnp.zeros(3)}, 2)["w"].shape
        (2, 3)
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (number, *jnp.shape(x))), params)


def shapes_of_one(stacked: Any) -> Any:
    """Return the shapes and dtypes that one client's leaves have, from leaves [M, ...].

    Example:
        >>> shapes_of_one({"w": jnp.zeros((2, 3))})["w"].shape
        (3,)
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def plain_sum(stacked: Any, present: Array) -> Any:
    """Sum leaves [M, ...] over the clients with `present` [M] one and not zero, nearly exactly.

    What rounding takes from each addition is added later (Kahan, Communications of the ACM 1965).
    In a sum of a thousand models, `tree.weighted_sum` loses as much as they changed from a common
    start.

    Example:
        >>> print(plain_sum({"w": jnp.full(1000, 0.1)}, jnp.ones(1000))["w"])
        100.0
    """

    def add(sums: tuple[Any, Any], one: tuple[Any, Array]) -> tuple[tuple[Any, Any], None]:
        (total, lost), (x, weight) = sums, one
        new = jax.tree.map(lambda x, lost: x * weight.astype(lost.dtype) - lost, x, lost)
        after = jax.tree.map(jnp.add, total, new)
        lost = jax.tree.map(lambda after, total, new: (after - total) - new, after, total, new)
        return (after, lost), None

    def zeros(x: Array) -> Array:
        return jnp.zeros(x.shape[1:], jnp.promote_types(x.dtype, jnp.float32))

    zero = jax.tree.map(zeros, stacked)
    (total, lost), _ = jax.lax.scan(add, (zero, zero), (stacked, present))
    return jax.tree.map(jnp.subtract, total, lost)
