"""Factorisations in loops: the same numbers as in batches, and none waits for another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from fisherjax._core import linalg


def definite(size, seed=0, count=5, dtype=np.float32):
    basis = np.random.default_rng(seed).normal(size=(count, size, 2 * size)).astype(dtype)
    return jnp.asarray(basis @ basis.swapaxes(1, 2) / size)


@pytest.mark.long
def test_many_batches_in_one_program_end():
    """Of these sizes, side by side, batched factorisations wait for each other on two cores."""
    matrices = [definite(size) for size in (25, 150, 256, 120, 84, 6, 16, 120, 84, 10)]

    @jax.jit
    @jax.vmap
    def solved(matrices):
        return [linalg.cholesky_solve(x, jnp.eye(len(x))) for x in matrices]

    for matrix, inverse in zip(matrices, solved(matrices), strict=True):
        unit = np.broadcast_to(np.eye(matrix.shape[1]), matrix.shape)
        np.testing.assert_allclose(matrix @ inverse, unit, atol=1e-2)


@pytest.mark.long
def test_many_pseudo_inverses_in_one_program_end():
    """Eight batches of about 60 x 60 wait for each other, as factorisations do."""
    matrices = [definite(60 + more, count=12) for more in range(8)]
    inverses = jax.jit(jax.vmap(lambda some: [linalg.pseudo_inverse(x) for x in some]))(matrices)
    for matrix, inverse in zip(matrices, inverses, strict=True):
        unit = np.broadcast_to(np.eye(matrix.shape[1]), matrix.shape)
        np.testing.assert_allclose(matrix @ inverse, unit, atol=1e-2)


@pytest.mark.parametrize("rank", [2, 4])
def test_pseudo_inverses_have_the_derivatives_of_numpys(x64, rank):
    """Along changes that keep the rank, M = B S B^T: of the root and of the middle."""
    root = jnp.asarray(np.random.default_rng(2).normal(size=(4, rank)))

    def inverse(root, middle):
        return linalg.pseudo_inverse(root @ (middle + middle.T) @ root.T)

    middle = definite(rank, count=1, dtype=np.float64)[0]
    whole = np.asarray(root @ (middle + middle.T) @ root.T)
    inverse = jax.jit(inverse)
    np.testing.assert_allclose(inverse(root, middle), np.linalg.pinv(whole), atol=1e-9)
    check_grads(inverse, (root, middle), order=1, modes=("fwd", "rev"), rtol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (4, 3)])
def test_definite_systems_are_solved_with_derivatives(x64, shape):
    matrix = definite(4, count=1, dtype=np.float64)[0]
    rhs = jnp.asarray(np.random.default_rng(1).normal(size=shape))
    np.testing.assert_allclose(matrix @ linalg.solve_definite(matrix, rhs), rhs, atol=1e-12)

    def symmetric(matrix, rhs):
        return linalg.solve_definite((matrix + matrix.T) / 2, rhs)

    check_grads(jax.jit(symmetric), (matrix, rhs), order=1, modes=("fwd", "rev"), rtol=1e-6)
    batch = definite(4, seed=2, dtype=np.float64)
    together = jax.vmap(linalg.solve_definite, (0, None))(batch, rhs)
    for one, x in zip(batch, together, strict=True):
        np.testing.assert_allclose(one @ x, rhs, atol=1e-12)
