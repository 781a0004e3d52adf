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


@jax.custom_batching.sequential_vmap
def eigh(matrix: Array) -> tuple[Array, Array]:
    """Give the eigenvalues [n] of a symmetric matrix, in ascending order, and its eigenvectors.

    Example:
        >>> print(eigh(jnp.diag(jnp.array([3.0, 1.0])))[0])
        [1. 3.]
    """
    return tuple(jnp.linalg.eigh(matrix))


@jax.custom_jvp
def pseudo_inverse(matrix: Array) -> Array:
    """Invert a symmetric matrix, but for eigenvalues of the size of rounding, with derivatives.

        dP = -P dM P + P P dM (I - M P) + (I - P M) dM P P    for P = M^+, where the rank stays.

    Source: Golub and Pereyra, The differentiation of pseudo-inverses and nonlinear least squares
        problems whose variables separate, SIAM Journal on Numerical Analysis 1973, theorem 4.3.

    Example:
        >>> print(pseudo_inverse(jnp.diag(jnp.array([4.0, 0.0]))))
        [[0.25 0.  ]
         [0.   0.  ]]
    """
    return _pseudo_inverse(matrix)


@jax.custom_batching.sequential_vmap
def _pseudo_inverse(matrix: Array) -> Array:
    # The inverses of eigenvalues of the size of rounding would be noise.
    return jnp.linalg.pinv(matrix, rtol=10 * jnp.finfo(matrix.dtype).eps, hermitian=True)


@pseudo_inverse.defjvp
def _pseudo_inverse_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (matrix,), (change,) = primals, tangents
    inverse = pseudo_inverse(matrix)

    def product(*factors: Array) -> Array:
        return jnp.linalg.multi_dot(factors, precision="highest")

    rest = jnp.eye(len(matrix), dtype=matrix.dtype) - product(matrix, inverse)
    turned = product(inverse, inverse, change, rest)
    return inverse, turned + turned.T - product(inverse, change, inverse)
