"""Factorise matrices one after another, also under `vmap`.

XLA's batched factorisations divide a batch among the threads of a pool and wait in the same pool
until these are done. With several of them in one program, such as one for each layer of a network,
a CPU of two cores waits for ever. Therefore these functions turn a batch into a loop.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax.typing import Array


@jax.custom_batching.sequential_vmap
def cholesky_solve(matrix: Array, rhs: Array) -> Array:
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

    # A factorisation in a loop has no reverse-mode derivative; custom_linear_solve has one.
    def solve(_: object, b: Array) -> Array:
        return cholesky_solve(jax.lax.stop_gradient(matrix), b)

    return jax.lax.custom_linear_solve(multiply, rhs, solve, symmetric=True)


@jax.custom_batching.sequential_vmap
def eigh(matrix: Array) -> tuple[Array, Array]:
    """Compute the eigenvalues [n] of a symmetric matrix, ascending, and its eigenvectors.

    Example:
        >>> print(eigh(jnp.diag(jnp.array([3.0, 1.0])))[0])
        [1. 3.]
    """
    return tuple(jnp.linalg.eigh(matrix))


@jax.custom_batching.sequential_vmap
def svd(matrix: Array) -> tuple[Array, Array, Array]:
    """Compute U [m, r], s [r] in descending order and V^T [r, n] of matrix = U diag(s) V^T.

    Example:
        >>> print(svd(jnp.diag(jnp.array([1.0, 3.0])))[1])
        [3. 1.]
    """
    return tuple(jnp.linalg.svd(matrix, full_matrices=False))


@jax.custom_batching.sequential_vmap
def orthonormal_basis(matrix: Array) -> Array:
    """Compute an orthonormal basis [m, r] of the columns of a matrix [m, r].

    Example:
        >>> print(jnp.abs(orthonormal_basis(jnp.array([[2.0], [0.0]]))))
        [[1.]
         [0.]]
    """
    return jnp.linalg.qr(matrix)[0]


@jax.custom_batching.sequential_vmap
def pinv(matrix: Array) -> Array:
    """Compute the pseudo-inverse [n, m] of any matrix [m, n]; it has no derivatives.

    Example:
        >>> print(pinv(jnp.array([[2.0], [0.0]])))
        [[0.5 0. ]]
    """
    return jnp.linalg.pinv(matrix)


@jax.custom_jvp
def pseudo_inverse(matrix: Array) -> Array:
    """Compute the pseudo-inverse of a symmetric matrix, with derivatives.

        dP = -P dM P + P P dM (I - M P) + (I - P M) dM P P    for P = M^+ and a constant rank.

    Eigenvalues of the size of rounding errors count as zeros.

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
    # Inverses of eigenvalues of the size of rounding errors would be noise.
    return jnp.linalg.pinv(matrix, rtol=10 * jnp.finfo(matrix.dtype).eps, hermitian=True)


@pseudo_inverse.defjvp
def _pseudo_inverse_jvp(primals: tuple, tangents: tuple) -> tuple[Array, Array]:
    (matrix,), (change,) = primals, tangents
    inverse = pseudo_inverse(matrix)

    def product(*factors: Array) -> Array:
        return jnp.linalg.multi_dot(factors, precision="highest")

    rest = jnp.eye(len(matrix), dtype=matrix.dtype) - product(matrix, inverse)
    half = product(inverse, inverse, change, rest)
    return inverse, half + half.T - product(inverse, change, inverse)


def fold_triangle(matrix: Array) -> Array:
    """Return the upper triangle of a symmetric matrix [n, n] as a rectangle, n (n + 1) / 2 entries.

    Row i lies beside row n - i, or n - 1 - i if n is even; the shape is [(n + 1) / 2, n], or
    [n / 2, n + 1]. Unlike a triangle in one row, this form needs no table of indices.

    Example:
        >>> print(fold_triangle(jnp.array([[1, 2, 3], [2, 4, 5], [3, 5, 6]])))
        [[1 2 3]
         [6 4 5]]
    """
    half, reversed_ = (len(matrix) + 1) // 2, matrix[::-1, ::-1]
    if len(matrix) % 2:
        top = matrix[:half]
        rest = jnp.concatenate([jnp.zeros_like(matrix[:1]), reversed_[: half - 1]])
    else:
        top = jnp.pad(matrix[:half], ((0, 0), (1, 0)))
        rest = jnp.pad(reversed_[:half], ((0, 0), (0, 1)))
    return jnp.where(_from_diagonal(top.shape), top, rest)


def unfold_triangle(rectangle: Array) -> Array:
    """Return the symmetric matrix of a folded triangle: the inverse of `fold_triangle`.

    Example:
        >>> print(unfold_triangle(jnp.array([[1, 2, 3], [6, 4, 5]])))
        [[1 2 3]
         [2 4 5]
         [3 5 6]]
    """
    first = _from_diagonal(rectangle.shape)
    top, rest = jnp.where(first, rectangle, 0), jnp.where(first, 0, rectangle)
    if _is_odd(rectangle.shape):
        rest = rest[1:]
    else:
        top, rest = top[:, 1:], rest[:, :-1]
    upper = jnp.concatenate([top, rest[::-1, ::-1]])
    return upper + jnp.triu(upper, 1).T


def _from_diagonal(shape: tuple[int, ...]) -> np.ndarray:
    """Return a mask of the entries of a folded triangle that belong to rows of its first half."""
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    return columns >= rows + (not _is_odd(shape))


def _is_odd(shape: tuple[int, ...]) -> bool:
    return shape[1] < 2 * shape[0]
