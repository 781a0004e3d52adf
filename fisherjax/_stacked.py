"""Pytrees with and without a leading client axis."""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
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

    The leading halves of the digits of up to 4,096 float32 numbers of one size add up without
    rounding. Rounding that `tree.weighted_sum` leaves in a sum of thousand models is as large as
    their changes from a common start.

    Example:
        >>> print(plain_sum({"w": jnp.full(1000, 0.1)}, jnp.ones(1000))["w"])
        100.0
    """

    def leading(x: Array) -> Array:
        form = jnp.finfo(x.dtype)
        return jax.lax.reduce_precision(x, form.nexp, form.nmant // 2)

    halves = jax.tree.map(leading, stacked)
    rest = tree.weighted_sum(jax.tree.map(jnp.subtract, stacked, halves), present)
    # Without the barrier, XLA of jaxlib 0.7 adds the halves up again before it sums over clients.
    both = jax.lax.optimization_barrier((tree.weighted_sum(halves, present), rest))
    return jax.tree.map(jnp.add, *both)
