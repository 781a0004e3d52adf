"""Solvers against the pseudo-inverse, and against a plain loop of their own recurrence."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from fisherjax import solvers
from fisherjax.fisher.operators import Dense, Template
from fisherjax.quadratic import Quadratic, in_fisher_units, quadratic

SPECTRA = {
    "regular": [1.0, 2.0, 3.5, 4.0, 9.0],
    "one eigenvalue": [2.0, 2.0, 2.0, 2.0, 2.0],
    "singular": [0.0, 0.0, 0.5, 1.0, 4.0],
    "large": [1e4, 2e4, 2e4, 3e4, 5e4],
    "small and singular": [0.0, 1e-6, 2e-6, 2e-6, 8e-6],
    "zero": [0.0] * 5,
}
EXACT = {
    "conjugate gradients": solvers.conjugate_gradients(tolerance=1e-12),
    "gradient descent": solvers.gradient_descent(steps=400),
}


def operator(spectrum, seed=0):
    """Draw a symmetric matrix of these eigenvalues."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(5, 5)))
    return jnp.asarray(basis * np.asarray(spectrum) @ basis.T)


def vector(seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=5))


def multiply(matrices, x):
    return jax.tree.map(jnp.matmul, matrices, x)


def system(matrices):
    """A solvable problem for each leaf, A x = A w, and a start that is no solution."""
    leaves, structure = jax.tree.flatten(matrices)
    solutions, starts = (
        jax.tree.unflatten(structure, [vector(seed + i) for i in range(len(leaves))])
        for seed in (10, 20)
    )
    return Quadratic(Partial(multiply, matrices), multiply(matrices, solutions), starts)


def diagonal_system(entries, rhs, init):
    matvec = Partial(partial(jax.tree.map, jnp.multiply), entries)
    return Quadratic(matvec, rhs, init, is_diagonal=True)


def nearest_solution(matrix, rhs, init):
    """Lemma 1: the solution that is nearest to the start."""
    return init + jnp.linalg.pinv(matrix, rtol=1e-9, hermitian=True) @ (rhs - matrix @ init)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("method", EXACT)
def test_solvers_find_the_solution_nearest_to_the_start(x64, method, spectrum):
    matrix = operator(SPECTRA[spectrum])
    problem = system(matrix)
    found, info = EXACT[method](problem)
    expected = nearest_solution(matrix, problem.rhs, problem.init)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    assert info.converged
    assert info.residual < 1e-9


@pytest.mark.parametrize("method", EXACT)
def test_the_null_space_component_of_the_start_never_moves(x64, method):
    matrix = operator(SPECTRA["singular"])
    problem = system(matrix)
    null = jnp.eye(5) - jnp.linalg.pinv(matrix, hermitian=True) @ matrix
    found = EXACT[method](problem).params
    assert jnp.linalg.norm(null @ problem.init) > 0.1
    np.testing.assert_allclose(null @ found, null @ problem.init, rtol=1e-10, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("method", EXACT)
def test_each_leaf_is_a_system_of_its_own(x64, method):
    """Together or alone: scales that differ by 1e10 and a finished leaf disturb nobody."""
    matrices = {name: operator(SPECTRA[name], seed) for seed, name in enumerate(SPECTRA)}
    problem = system(matrices)
    _, rhs, init, *_ = problem
    init["regular"] = nearest_solution(matrices["regular"], rhs["regular"], init["regular"])
    found, info = EXACT[method](problem)
    alone = {
        name: EXACT[method](Quadratic(Partial(jnp.matmul, matrix), rhs[name], init[name])).params
        for name, matrix in matrices.items()
    }
    chex.assert_trees_all_close(found, alone, rtol=1e-9, atol=1e-9)
    assert all(jax.tree.leaves(info.converged))


def test_conjugate_gradients_need_one_step_per_distinct_eigenvalue(x64):
    matrices = {name: operator(SPECTRA[name]) for name in ("regular", "one eigenvalue", "singular")}
    info = EXACT["conjugate gradients"](system(matrices)).info
    assert info.iterations == {"regular": 5, "one eigenvalue": 1, "singular": 3}


def test_more_iterations_never_raise_the_energy(x64):
    matrix = operator([0.01, 0.1, 1.0, 3.0, 20.0])
    problem = system(matrix)
    energies = []
    for count in range(1, 7):
        x, info = solvers.conjugate_gradients(0.0, max_iterations=count)(problem)
        energies.append(float(0.5 * x @ matrix @ x - problem.rhs @ x))
        assert info.iterations <= count
    assert np.all(np.diff(energies) <= 1e-12)


def test_the_tolerance_is_a_relative_residual(x64):
    problem = system(operator([1e-3, 1e-2, 0.1, 1.0, 10.0]))
    for tolerance in (1e-1, 1e-3, 1e-6):
        _, info = solvers.conjugate_gradients(tolerance)(problem)
        assert info.converged
        assert info.residual <= tolerance * 1.001
    assert not solvers.conjugate_gradients(1e-6, max_iterations=1)(problem).info.converged


def test_a_solution_at_the_start_is_left_alone():
    entries = jnp.array([1.0, 2.0, 0.0, 4.0, 8.0])
    init = jnp.array([1.0, -2.0, 3.0, 0.5, 0.25])
    for solve in (*EXACT.values(), solvers.closed_form()):
        assert (solve(diagonal_system(entries, entries * init, init)).params == init).all()


@pytest.mark.parametrize("method", EXACT)
def test_nothing_moves_where_there_is_no_curvature_at_all(method):
    matvec = Partial(jnp.matmul, jnp.zeros((2, 2)))
    found, info = EXACT[method](Quadratic(matvec, jnp.ones(2), jnp.array([3.0, 4.0])))
    assert found.tolist() == [3.0, 4.0]
    assert not info.converged


def test_closed_form_divides_where_there_is_curvature_and_keeps_the_start_elsewhere(x64):
    diagonal = {"a": jnp.array([2.0, 0.0, 1e-7]), "b": jnp.array(5.0)}
    rhs = {"a": jnp.array([3.0, 0.0, 1.0]), "b": jnp.array(1.0)}
    init = {"a": jnp.array([7.0, 8.0, 9.0]), "b": jnp.array(10.0)}
    problem = diagonal_system(diagonal, rhs, init)
    found = solvers.closed_form(floor=1e-6)(problem).params
    np.testing.assert_allclose(found["a"], [1.5, 8.0, 9.0])
    np.testing.assert_allclose(found["b"], 0.2)
    exact = solvers.closed_form(floor=0.0)(problem).params
    np.testing.assert_allclose(exact["a"], [1.5, 8.0, 1e7])


def test_a_start_far_away_is_no_excuse(x64):
    """Residuals are relative to the right-hand side, and not to the first of them."""
    scales = jnp.linspace(1.0, 9.0, 30)
    problem = Quadratic(lambda x: scales * x, jnp.ones(30), jnp.full(30, 1e6))
    solved = solvers.conjugate_gradients(tolerance=1e-8)(problem)
    assert solved.info.status == solvers.Status.CONVERGED
    np.testing.assert_allclose(scales * solved.params, 1, atol=1e-8 * np.sqrt(30))


def of_condition(condition, dtype):
    """Draw a system of 60 unknowns whose eigenvalues spread evenly, as orders of magnitude."""
    random = np.random.default_rng(4)
    basis, _ = np.linalg.qr(random.normal(size=(60, 60)))
    matrix = jnp.asarray(basis * np.geomspace(1 / condition, 1, 60) @ basis.T, dtype)
    rhs, init = (jnp.asarray(random.normal(size=60), dtype) for _ in range(2))
    return Quadratic(Partial(jnp.matmul, matrix), matrix @ rhs, init)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
def test_conjugate_gradients_take_no_product_more_than_the_tolerance_needs(x64, tolerance):
    problem = of_condition(50.0, float)
    found = solvers.conjugate_gradients(tolerance)(problem).info
    assert found.status == solvers.Status.CONVERGED
    fewer = solvers.conjugate_gradients(tolerance, max_iterations=int(found.iterations) - 1)
    assert fewer(problem).info.residual > tolerance


@pytest.mark.parametrize("condition", [300.0, 800.0])
def test_rounding_does_not_call_a_leaf_that_is_done_out_of_iterations(condition):
    """In float32 the residual that is carried along is not that of the answer."""
    info = solvers.conjugate_gradients(1e-6)(of_condition(condition, jnp.float32)).info
    assert info.status == solvers.Status.CONVERGED


# What a residual promises


def gain_left(problem, matrix, x, metric=None):
    """The part of the quadratic's gain that x lacks, and its bound by the residual, in NumPy.

    The metric is the preconditioner's, by which residuals are measured; None is the identity.
    """
    matrix, rhs, start, x = (np.asarray(a) for a in (matrix, problem.rhs, problem.init, x))
    metric = np.eye(len(x)) if metric is None else metric
    best = start + np.linalg.pinv(matrix, rcond=1e-13, hermitian=True) @ (rhs - matrix @ start)
    lacking = (x - best) @ matrix @ (x - best) / ((start - best) @ matrix @ (start - best))
    root = np.linalg.cholesky(metric)
    eigenvalues = np.linalg.eigvalsh(root.T @ matrix @ root)
    eigenvalues = eigenvalues[eigenvalues > 1e-13 * eigenvalues[-1]]
    left, first = rhs - matrix @ x, rhs - matrix @ start
    squares = (left @ metric @ left) / (first @ metric @ first)
    far = np.linalg.norm(x - best) / np.linalg.norm(start - best)
    return lacking, eigenvalues[-1] / eigenvalues[0] * squares, far


WIDE = {
    "definite": np.geomspace(1e-3, 1, 40),
    "singular": np.r_[np.zeros(15), np.geomspace(1e-2, 1, 25)],
    "nearly singular": np.geomspace(1e-9, 1, 40),
    "two scales": np.r_[np.full(20, 1e-6), np.ones(20)],
}


def wide(name, seed):
    random = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(random.normal(size=(40, 40)))
    matrix = basis * WIDE[name] @ basis.T
    rhs, start = matrix @ random.normal(size=40), random.normal(size=40)
    return matrix, Quadratic(Partial(jnp.matmul, jnp.asarray(matrix)), rhs, start)


@pytest.mark.parametrize("tolerance", [1e-1, 1e-2, 1e-4])
@pytest.mark.parametrize("name", WIDE)
def test_what_is_left_of_the_gain_is_bounded_by_the_residual(x64, name, tolerance):
    """Of a definite system and of a singular one: k |r|^2 / |r_0|^2, whatever solved it."""
    for seed in range(3):
        matrix, problem = wide(name, seed)
        found, info = solvers.conjugate_gradients(tolerance, 1000)(problem)
        assert info.status == solvers.Status.CONVERGED
        lacking, bound, _ = gain_left(problem, matrix, found)
        assert lacking <= bound * (1 + 1e-6)
        descended = solvers.gradient_descent(steps=20)(problem).params
        lacking, bound, _ = gain_left(problem, matrix, descended)
        assert lacking <= bound * (1 + 1e-6)


@pytest.mark.parametrize("name", ["definite", "two scales"])
def test_with_a_preconditioner_the_bound_is_in_its_norm(x64, name):
    matrix, problem = wide(name, 0)
    # Nearly the inverse: the eigenvalues of the preconditioned system are near one.
    error = 0.1 * np.random.default_rng(9).normal(size=(40, 40)) / np.sqrt(40)
    root = np.linalg.cholesky(np.linalg.inv(matrix)) @ (np.eye(40) + error)
    metric = root @ root.T
    preconditioned = problem._replace(precondition=Partial(jnp.matmul, jnp.asarray(metric)))
    found = solvers.conjugate_gradients(1e-3)(preconditioned).params
    lacking, bound, _ = gain_left(problem, matrix, found, metric)
    _, plain, _ = gain_left(problem, matrix, found)
    assert lacking <= bound * (1 + 1e-6)
    assert bound < plain


@pytest.mark.parametrize("damping", [0.03, 1.0])
def test_damping_bounds_what_is_left_whatever_clients_sent(x64, damping):
    """k <= 1 + d / damping, of clients whose Fishers are singular and of unlike scales."""
    random = np.random.default_rng(3)
    size, clients = 12, 3
    roots = random.normal(size=(clients, size, 2)) * np.array([1e-4, 1.0, 30.0])[:, None, None]
    fishers = Dense(jnp.asarray(roots @ roots.swapaxes(1, 2)), Template.of(jnp.zeros(size)))
    models, weights = random.normal(size=(clients, size)), jnp.full(clients, 1 / clients)
    problem = in_fisher_units(quadratic(fishers, jnp.asarray(models), weights, damping))
    matrix = jax.vmap(problem.matvec, 1, 1)(jnp.eye(size))
    eigenvalues = np.linalg.eigvalsh(matrix)
    assert eigenvalues[-1] / eigenvalues[0] <= 1 + size / damping
    for steps in (1, 2, 4):
        found = solvers.conjugate_gradients(0.0, steps)(problem._replace(precondition=None)).params
        lacking, bound, _ = gain_left(problem, matrix, found)
        first = np.asarray(problem.rhs - matrix @ problem.init)
        left = np.asarray(problem.rhs - matrix @ found)
        assert lacking <= bound * (1 + 1e-6)
        assert bound <= (1 + size / damping) * (left @ left) / (first @ first) * (1 + 1e-6)


def test_without_damping_a_small_residual_leaves_the_unknowns_far(x64):
    matrix, problem = wide("nearly singular", 0)
    found, info = solvers.conjugate_gradients(1e-4, 1000)(problem)
    assert info.status == solvers.Status.CONVERGED
    lacking, _, far = gain_left(problem, matrix, found)
    assert lacking < 1e-3
    assert far > 0.5


def test_closed_form_and_conjugate_gradients_agree_on_diagonals(x64):
    diagonal = jnp.array([0.0, 1.0, 2.0, 3.0, 5.0])
    problem = diagonal_system(diagonal, diagonal * vector(0), vector(1))
    left, right = (
        solve(problem).params for solve in (solvers.closed_form(), EXACT["conjugate gradients"])
    )
    np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-10)


def test_solvers_run_under_jit_and_vmap(x64):
    matrices = jnp.stack([operator(SPECTRA[name]) for name in ("regular", "singular")])
    rhs = jnp.einsum("mij,mj->mi", matrices, jnp.stack([vector(1), vector(2)]))
    init = jnp.stack([vector(3), vector(4)])
    for solve in EXACT.values():

        @jax.jit
        @jax.vmap
        def together(matrix, rhs, init, solve=solve):
            return solve(Quadratic(Partial(jnp.matmul, matrix), rhs, init)).params

        alone = [
            solve(Quadratic(Partial(jnp.matmul, m), b, x)).params
            for m, b, x in zip(matrices, rhs, init, strict=True)
        ]
        np.testing.assert_allclose(
            together(matrices, rhs, init), jnp.stack(alone), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("name", ["conjugate_gradients", "gradient_descent", "closed_form"])
def test_a_second_system_of_the_same_shape_compiles_nothing(name, compilations):
    factory, is_diagonal = getattr(solvers, name), name == "closed_form"
    first, second = (
        system(operator(SPECTRA[name]).astype(jnp.float32))._replace(is_diagonal=is_diagonal)
        for name in ("regular", "large")
    )
    factory()(first)
    with compilations() as count:
        factory()(second)
    assert count() == 0


def test_closed_form_refuses_what_is_not_diagonal():
    problem = system(operator(SPECTRA["regular"]))
    with pytest.raises(ValueError, match=r"is_diagonal is False.*conjugate_gradients\(\)"):
        solvers.closed_form()(problem)


@pytest.mark.long
def test_restore_puts_blocks_back_together_to_params(x64):
    entries = jnp.array([1.0, 2.0, 4.0, 8.0, 16.0])
    problem = diagonal_system(entries, vector(0), vector(1))
    for solve in (*EXACT.values(), solvers.closed_form()):
        plain, info = solve(problem)
        restored, same_info = solve(problem._replace(restore=Partial(lambda blocks: {"w": blocks})))
        chex.assert_trees_all_equal(restored, {"w": plain})
        chex.assert_trees_all_equal(info, same_info)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: solvers.conjugate_gradients(tolerance=-1.0), "tolerance is -1.0"),
        (lambda: solvers.conjugate_gradients(tolerance=float("nan")), "tolerance is nan"),
        (lambda: solvers.conjugate_gradients(max_iterations=0), "max_iterations is 0"),
        (lambda: solvers.gradient_descent(steps=0), "steps is 0"),
        (lambda: solvers.gradient_descent(power_iterations=-1), "power_iterations is -1"),
        (lambda: solvers.closed_form(floor=-1e-6), "floor is -1e-06"),
        (lambda: solvers.conjugate_gradients(tolerance=float("inf")), "tolerance is inf"),
        (lambda: solvers.conjugate_gradients(max_iterations=2.5), r"max_iterations is 2\.5"),
        (lambda: solvers.gradient_descent(steps=True), "steps is True"),
        (lambda: solvers.closed_form(floor=float("nan")), "floor is nan"),
    ],
)
def test_bad_numbers_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_exact_inverse_as_preconditioner_solves_in_one_step(x64):
    matrices = {name: operator(SPECTRA[name]) for name in ("regular", "large")}
    problem = system(matrices)
    inverse = Partial(multiply, jax.tree.map(jnp.linalg.inv, matrices))
    solve = solvers.conjugate_gradients(tolerance=1e-10)
    solution = solve(problem._replace(precondition=inverse))
    assert jax.tree.leaves(solution.info.iterations) == [1, 1]
    chex.assert_trees_all_close(multiply(matrices, solution.params), problem.rhs, rtol=1e-9)


def test_a_system_that_is_not_finite_never_counts_as_solved():
    problem = Quadratic(lambda x: x, jnp.array([jnp.nan, 1.0]), jnp.zeros(2))
    solution = solvers.conjugate_gradients()(problem)
    assert not solution.info.converged
    assert jnp.isnan(solution.info.residual)


# Each with what its preconditioner is of.
SCALED = {
    "conjugate gradients": (solvers.conjugate_gradients(tolerance=1e-5), None),
    "preconditioned": (solvers.conjugate_gradients(tolerance=1e-5), jnp.diagonal),
    "gradient descent": (solvers.gradient_descent(steps=50), None),
}


@pytest.mark.parametrize("params", [-30, 0, 80])
@pytest.mark.parametrize("fisher", [-60, 0, 40])
@pytest.mark.parametrize("name", SCALED)
def test_the_scale_of_a_problem_changes_no_bit(name, fisher, params):
    solver, condition = SCALED[name]
    # Squares of such numbers are not in the range of float32, from 2^-126 to 2^128.
    single = partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    matrix = single(operator(SPECTRA["regular"]))
    rhs, init = matrix @ single(vector(10)), single(vector(20))
    inverse = None if condition is None else single(jnp.diag(1 / condition(matrix)))

    def solve(a, w):
        precondition = None if inverse is None else Partial(multiply, inverse / a)
        system = Quadratic(Partial(multiply, a * matrix), a * rhs * w, init * w)
        return solver(system._replace(precondition=precondition))

    expected, found = solve(1.0, 1.0), solve(2.0**fisher, 2.0**params)
    chex.assert_trees_all_equal(found.params, expected.params * 2.0**params)
    chex.assert_trees_all_equal(found.info, expected.info)
    assert np.abs(expected.params - init).max() > 0.1


@pytest.mark.parametrize("name", SCALED)
def test_a_system_that_is_not_finite_has_no_answer(name):
    matrix = operator(SPECTRA["regular"]).astype(jnp.float32) * 2.0**100
    rhs = matrix @ jnp.full(5, 2.0**60)
    solver, _ = SCALED[name]
    found = solver(Quadratic(Partial(multiply, matrix), rhs, jnp.ones(5, jnp.float32)))
    assert np.isnan(found.params).all()
    assert not found.info.converged


def test_a_quotient_of_what_is_not_finite_is_no_answer():
    """b / infinity would be zero, and look solved."""
    entries, rhs = jnp.array([2.0, jnp.inf, 1.0]), jnp.array([4.0, 1.0, jnp.inf])
    problem = Quadratic(lambda x: entries * x, rhs, jnp.zeros(3), is_diagonal=True)
    found, info = solvers.closed_form()(problem)
    assert np.isnan(found).tolist() == [False, True, True]
    assert info.status == solvers.Status.BROKE_DOWN
