"""Pytrees with and without a leading client axis."""

from typing import Any

import jax
import jax.numpy as jnp


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
