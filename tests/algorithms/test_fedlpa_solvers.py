"""FedLPA's own solvers on bare systems; `test_fedlpa` has them within the method."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from fisherjax.algorithms import expectation_approximation, residual_descent
from fisherjax.quadratic import Quadratic

SPECTRA = {"regular": [1.0, 2.0, 3.5, 4.0, 9.0], "small": [1e-3, 2e-3, 3e-3, 5e-3, 6e-3]}
BOTH = {"ea": expectation_approximation(), "gd": residual_descent(steps=30)}


def operator(spectrum, seed=0):
    """Draw a symmetric matrix of these eigenvalues."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(5, 5)))
    return jnp.asarray(basis * np.asarray(spectrum) @ basis.T)


def multiply(matrices, x):
    return jax.tree.map(jnp.matmul, matrices, x)


def system(matrices, near=0.9):
    """A problem for each leaf, with a preconditioner that is nearly its inverse."""
    leaves, structure = jax.tree.flatten(matrices)
    draws = [jnp.asarray(np.random.default_rng(i).normal(size=5)) for i in range(len(leaves))]
    rhs = multiply(matrices, jax.tree.unflatten(structure, draws))
    about = jax.tree.map(lambda matrix: near * jnp.linalg.inv(matrix), matrices)
    init = jax.tree.map(jnp.zeros_like, rhs)
    return Quadratic(Partial(multiply, matrices), rhs, init, None, Partial(multiply, about))


@pytest.fixture
def matrices(x64):
    return {name: operator(spectrum) for name, spectrum in SPECTRA.items()}


def test_the_approximation_is_the_preconditioned_right_side_and_its_residual_is_told(matrices):
    problem = system(matrices)
    found, info = expectation_approximation()(problem)
    chex.assert_trees_all_close(found, problem.precondition(problem.rhs), rtol=1e-12)
    chex.assert_trees_all_close(info.residual, dict.fromkeys(matrices, 0.1), rtol=1e-9)
    assert not any(jax.tree.leaves(info.converged))
    exact = expectation_approximation()(system(matrices, near=1.0)).info
    assert all(jax.tree.leaves(exact.converged))


@pytest.mark.parametrize("name", BOTH)
def test_the_start_of_the_problem_is_not_used(matrices, name):
    problem = system(matrices)
    elsewhere = problem._replace(init=jax.tree.map(jnp.ones_like, problem.init))
    chex.assert_trees_all_equal(BOTH[name](problem), BOTH[name](elsewhere))


def test_descent_starts_at_the_approximation_and_follows_its_recurrence(matrices):
    steps, eta = 7, 1e-2
    problem = system(matrices)
    found = residual_descent(steps=steps, learning_rate=eta, power_iterations=500)(problem).params
    for name, matrix in matrices.items():
        x, rhs = 0.9 * jnp.linalg.solve(matrix, problem.rhs[name]), problem.rhs[name]
        rate = min(2 * eta / x.size, 1 / max(SPECTRA[name]) ** 2)
        for _ in range(steps):
            x = x - rate * matrix @ (matrix @ x - rhs)
        np.testing.assert_allclose(found[name], x, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BOTH)
def test_each_leaf_is_a_system_of_its_own(matrices, name):
    together = BOTH[name](system(matrices)).params
    problem = system(matrices)
    for leaf, matrix in matrices.items():
        alone = Quadratic(
            Partial(jnp.matmul, matrix),
            problem.rhs[leaf],
            problem.init[leaf],
            precondition=Partial(jnp.matmul, 0.9 * jnp.linalg.inv(matrix)),
        )
        np.testing.assert_allclose(together[leaf], BOTH[name](alone).params, rtol=1e-9)


@pytest.mark.parametrize("name", BOTH)
def test_they_run_under_jit_and_vmap(x64, name):
    stacked = jnp.stack([operator(spectrum) for spectrum in SPECTRA.values()])

    def one(matrix):
        return BOTH[name](system(matrix)).params

    alone = jnp.stack([one(matrix) for matrix in stacked])
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(stacked), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [expectation_approximation, residual_descent])
def test_a_second_system_of_the_same_shape_compiles_nothing(make, compilations):
    first, second = (
        system(operator(spectrum).astype(jnp.float32)) for spectrum in SPECTRA.values()
    )
    make()(first)
    with compilations() as count:
        make()(second)
    assert count() == 0


@pytest.mark.parametrize("name", BOTH)
def test_a_problem_without_a_preconditioner_is_refused(name):
    problem = Quadratic(lambda x: x, jnp.ones(2), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"this problem has none\. Use solvers\.conjugate_grad"):
        BOTH[name](problem)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps is 0; expected an integer"),
        ({"learning_rate": 0}, "learning_rate is 0; expected a positive number"),
        ({"learning_rate": float("inf")}, "learning_rate is inf; expected a positive number"),
        ({"power_iterations": 0}, "power_iterations is 0; expected an integer"),
    ],
)
def test_descent_refuses_numbers_that_are_not_positive(change, words):
    with pytest.raises(ValueError, match=words):
        residual_descent(**change)
