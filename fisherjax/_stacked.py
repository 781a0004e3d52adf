"""Pytrees with and without a leading client axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax.typing import AnyArray


def copies(params: Any, number: int) -> Any:
    """Repeat the leaves of a pytree along a new leading axis.

    Example:
        >>> copies({"w": jnp.zeros(3)}, 2)["w"].shape
        (2, 3)
    """

    def repeat(x: AnyArray) -> AnyArray:
        # NumPy's copies need no memory, and no program is compiled for their shape.
        numpy = np if isinstance(x, np.ndarray) else jnp
        return numpy.broadcast_to(x, (number, *jnp.shape(x)))

    return jax.tree.map(repeat, params)


def shapes_of_one(stacked: Any) -> Any:
    """Return the shapes and dtypes that one client's leaves have, from leaves [M, ...].

    Example:
        >>> shapes_of_one({"w": jnp.zeros((2, 3))})["w"].shape
        (3,)
    """
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)
