"""Factorisations of symmetric matrices, one after another whatever `vmap` makes of them.

XLA's batched factorisations divide a batch among the threads of a pool and wait for them in that
same pool: several of them in one program, such as the layers of a network, wait for each other for
ever on a CPU of two cores. So a batch is a loop here.
"""

import jax
import jax.numpy as jnp

from fisherjax.typing import Array


@jax.custom_batching.sequential_vmap
def definite(matrix: Array, rhs: Array) -> Array:
    """Solve matrix X = rhs for a symmetric positive definite matrix; NaN if it is not definite."""
    return jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(matrix), True), rhs)


def solve_definite(matrix: Array, rhs: Array) -> Array:
    """Solve matrix X = rhs for a symmetric positive definite matrix, with derivatives.

    Example:
        >>> print(solve_definite(jnp.eye(2) * 4, jnp.ones(2)))
        [0.25 0.25]
    """

    def multiply(x: Array) -> Array:
        return jnp.matmul(matrix, x, precision="highest")

    # A factorisation in a loop has no derivative of its own in reverse; the solve has this one.
    def solve(_: object, b: Array) -> Array:
        return definite(jax.lax.stop_gradient(matrix), b)

    return jax.lax.custom_linear_solve(multiply, rhs, solve, symmetric=True)
