"""Solvers against the pseudo-inverse, and against a plain loop of their own recurrence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from fisherjax import solvers

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
    """A solvable system for each leaf, A x = A w, and a start that is no solution."""
    leaves, structure = jax.tree.flatten(matrices)
    solutions, starts = (
        jax.tree.unflatten(structure, [vector(seed + i) for i in range(len(leaves))])
        for seed in (10, 20)
    )
    return Partial(multiply, matrices), multiply(matrices, solutions), starts


def nearest_solution(matrix, rhs, init):
    """Lemma 1: the solution that is nearest to the start."""
    return init + jnp.linalg.pinv(matrix, rtol=1e-9, hermitian=True) @ (rhs - matrix @ init)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("method", EXACT)
def test_solvers_find_the_solution_nearest_to_the_start(x64, method, spectrum):
    matrix = operator(SPECTRA[spectrum])
    matvec, rhs, init = system(matrix)
    found, info = EXACT[method](matvec, rhs, init)
    np.testing.assert_allclose(found, nearest_solution(matrix, rhs, init), rtol=1e-9, atol=1e-9)
    assert info.converged
    assert info.residual < 1e-9


@pytest.mark.parametrize("method", EXACT)
def test_the_null_space_component_of_the_start_never_moves(x64, method):
    matrix = operator(SPECTRA["singular"])
    matvec, rhs, init = system(matrix)
    null = jnp.eye(5) - jnp.linalg.pinv(matrix, hermitian=True) @ matrix
    found = EXACT[method](matvec, rhs, init).params
    assert jnp.linalg.norm(null @ init) > 0.1
    np.testing.assert_allclose(null @ found, null @ init, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("method", EXACT)
def test_each_leaf_is_a_system_of_its_own(x64, method):
    """Together or alone: scales that differ by 1e10 and a finished leaf disturb nobody."""
    matrices = {name: operator(SPECTRA[name], seed) for seed, name in enumerate(SPECTRA)}
    matvec, rhs, init = system(matrices)
    init["regular"] = nearest_solution(matrices["regular"], rhs["regular"], init["regular"])
    found, info = EXACT[method](matvec, rhs, init)
    for name, matrix in matrices.items():
        alone, _ = EXACT[method](Partial(jnp.matmul, matrix), rhs[name], init[name])
        np.testing.assert_allclose(found[name], alone, rtol=1e-9, atol=1e-9)
    assert all(jax.tree.leaves(info.converged))


def test_conjugate_gradients_need_one_step_per_distinct_eigenvalue(x64):
    matrices = {name: operator(SPECTRA[name]) for name in ("regular", "one eigenvalue", "singular")}
    info = EXACT["conjugate gradients"](*system(matrices)).info
    assert info.iterations == {"regular": 5, "one eigenvalue": 1, "singular": 3}


def test_more_iterations_never_raise_the_energy(x64):
    matrix = operator([0.01, 0.1, 1.0, 3.0, 20.0])
    matvec, rhs, init = system(matrix)
    energies = []
    for count in range(1, 7):
        x, info = solvers.conjugate_gradients(0.0, max_iterations=count)(matvec, rhs, init)
        energies.append(float(0.5 * x @ matrix @ x - rhs @ x))
        assert info.iterations <= count
    assert np.all(np.diff(energies) <= 1e-12)


def test_the_tolerance_is_a_relative_residual(x64):
    matvec, rhs, init = system(operator([1e-3, 1e-2, 0.1, 1.0, 10.0]))
    for tolerance in (1e-1, 1e-3, 1e-6):
        _, info = solvers.conjugate_gradients(tolerance)(matvec, rhs, init)
        assert info.converged
        assert info.residual <= tolerance * 1.001
    assert not solvers.conjugate_gradients(1e-6, max_iterations=1)(matvec, rhs, init).info.converged


def test_a_solution_at_the_start_is_left_alone():
    matrix = jnp.diag(jnp.array([1.0, 2.0, 0.0, 4.0, 8.0]))
    init = jnp.array([1.0, -2.0, 3.0, 0.5, 0.25])
    for solve in (*EXACT.values(), solvers.closed_form()):
        assert (solve(Partial(jnp.matmul, matrix), matrix @ init, init).params == init).all()


@pytest.mark.parametrize("method", EXACT)
def test_nothing_moves_where_there_is_no_curvature_at_all(method):
    matvec = Partial(jnp.matmul, jnp.zeros((2, 2)))
    found, info = EXACT[method](matvec, jnp.ones(2), jnp.array([3.0, 4.0]))
    assert found.tolist() == [3.0, 4.0]
    assert not info.converged


def test_closed_form_divides_where_there_is_curvature_and_keeps_the_start_elsewhere(x64):
    diagonal = {"a": jnp.array([2.0, 0.0, 1e-7]), "b": jnp.array(5.0)}
    rhs = {"a": jnp.array([3.0, 0.0, 1.0]), "b": jnp.array(1.0)}
    init = {"a": jnp.array([7.0, 8.0, 9.0]), "b": jnp.array(10.0)}
    matvec = Partial(partial(jax.tree.map, jnp.multiply), diagonal)
    found = solvers.closed_form(floor=1e-6)(matvec, rhs, init).params
    np.testing.assert_allclose(found["a"], [1.5, 8.0, 9.0])
    np.testing.assert_allclose(found["b"], 0.2)
    exact = solvers.closed_form(floor=0.0)(matvec, rhs, init).params
    np.testing.assert_allclose(exact["a"], [1.5, 8.0, 1e7])


def test_closed_form_and_conjugate_gradients_agree_on_diagonals(x64):
    diagonal = jnp.array([0.0, 1.0, 2.0, 3.0, 5.0])
    matvec, rhs = Partial(jnp.multiply, diagonal), diagonal * vector(0)
    left, right = (
        solve(matvec, rhs, vector(1)).params
        for solve in (solvers.closed_form(), EXACT["conjugate gradients"])
    )
    np.testing.assert_allclose(left, right, rtol=1e-10, atol=1e-10)


def adam_by_hand(matrix, rhs, init, steps, inside, eta=0.01, eps=0.01):
    """The recurrence of the FedFisher paper's code, in NumPy; the iterates after each step."""
    x, m, s, iterates = np.array(init), 0.0, 0.0, []
    for _ in range(steps):
        v = matrix @ x - rhs
        m, s = 0.9 * m + v, 0.99 * s + v**2
        x = x - eta * m / (np.sqrt(s + eps) if inside else np.sqrt(s) + eps)
        iterates.append(x)
    return iterates


@pytest.mark.parametrize("inside", [True, False])
def test_paper_adam_is_its_recurrence(x64, inside):
    matrix = np.asarray(operator(SPECTRA["regular"]))
    _, rhs, init = system(jnp.asarray(matrix))
    settings = {"learning_rate": 0.03, "epsilon": 0.2}
    solve = solvers.paper_adam(epsilon_inside_root=inside, steps=137, **settings)
    found = solve(Partial(jnp.matmul, jnp.asarray(matrix)), rhs, init).params
    expected = adam_by_hand(matrix, np.asarray(rhs), init, 137, inside, 0.03, 0.2)[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


CANDIDATES = [0, 100, 200]  # steps 1, 101, 201 of 250, counted from 0


@pytest.mark.parametrize("favourite", [0, 99, 100, 180, 200, 249])
def test_paper_adam_keeps_the_candidate_of_the_best_score(x64, favourite):
    """Candidates are the iterates after steps 1, 101, ...: not the start, nor the last one."""
    matrix = np.asarray(operator(SPECTRA["regular"]))
    _, rhs, init = system(jnp.asarray(matrix))
    iterates = adam_by_hand(matrix, np.asarray(rhs), init, 250, True)
    target = jnp.asarray(iterates[favourite])

    def score(params):
        return -jnp.linalg.norm(params["w"] - target)

    solve = solvers.paper_adam(epsilon_inside_root=True, steps=250, score=score)
    found = solve(
        Partial(jnp.matmul, jnp.asarray(matrix)), rhs, init, Partial(lambda blocks: {"w": blocks})
    ).params
    best = min(CANDIDATES, key=lambda step: np.linalg.norm(iterates[step] - iterates[favourite]))
    np.testing.assert_allclose(found["w"], iterates[best], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("levels", "winner"), [((3, 3, 3), 0), ((1, 2, 2), 1), ((1, 0, 2), 2)])
def test_paper_adam_keeps_the_first_of_equal_scores(x64, levels, winner):
    matrix = np.asarray(operator(SPECTRA["regular"]))
    _, rhs, init = system(jnp.asarray(matrix))
    iterates = adam_by_hand(matrix, np.asarray(rhs), init, 250, False)
    marks = jnp.stack([jnp.asarray(iterates[step]) for step in CANDIDATES])

    def score(x):
        return jnp.asarray(levels)[jnp.argmin(jnp.linalg.norm(marks - x, axis=1))]

    solve = solvers.paper_adam(epsilon_inside_root=False, steps=250, score=score)
    found = solve(Partial(jnp.matmul, jnp.asarray(matrix)), rhs, init).params
    np.testing.assert_allclose(found, marks[winner], rtol=1e-10, atol=1e-12)


def test_solvers_run_under_jit_and_vmap(x64):
    matrices = jnp.stack([operator(SPECTRA[name]) for name in ("regular", "singular")])
    rhs = jnp.einsum("mij,mj->mi", matrices, jnp.stack([vector(1), vector(2)]))
    init = jnp.stack([vector(3), vector(4)])
    for solve in (*EXACT.values(), solvers.paper_adam(epsilon_inside_root=True, steps=50)):

        @jax.jit
        @jax.vmap
        def together(matrix, rhs, init, solve=solve):
            return solve(Partial(jnp.matmul, matrix), rhs, init).params

        alone = [
            solve(Partial(jnp.matmul, *m), b, x).params
            for *m, b, x in zip(matrices, rhs, init, strict=True)
        ]
        np.testing.assert_allclose(
            together(matrices, rhs, init), jnp.stack(alone), rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize(
    "solve",
    [
        solvers.conjugate_gradients(),
        solvers.gradient_descent(),
        solvers.closed_form(),
        solvers.paper_adam(epsilon_inside_root=True, steps=10, score=lambda x: -x @ x),
    ],
    ids=["cg", "gd", "closed form", "adam"],
)
def test_a_second_system_of_the_same_shape_compiles_nothing(solve, compilations):
    systems = [system(operator(SPECTRA[name]).astype(jnp.float32)) for name in ("regular", "large")]
    solve(*systems[0])
    with compilations() as count:
        solve(*systems[1])
    assert count() == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: solvers.conjugate_gradients(tolerance=-1.0), "tolerance is -1.0"),
        (lambda: solvers.conjugate_gradients(tolerance=float("nan")), "tolerance is nan"),
        (lambda: solvers.conjugate_gradients(max_iterations=0), "max_iterations is 0"),
        (lambda: solvers.gradient_descent(steps=0), "steps is 0"),
        (lambda: solvers.gradient_descent(power_iterations=-1), "power_iterations is -1"),
        (lambda: solvers.closed_form(floor=-1e-6), "floor is -1e-06"),
        (lambda: solvers.paper_adam(epsilon_inside_root=True, steps=0), "steps is 0"),
        (lambda: solvers.paper_adam(epsilon_inside_root=True, epsilon=0.0), "epsilon is 0.0"),
        (lambda: solvers.paper_adam(epsilon_inside_root=True, score_every=0), "score_every is 0"),
    ],
)
def test_bad_numbers_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_the_exact_inverse_as_preconditioner_solves_in_one_step(x64):
    matrices = {name: operator(SPECTRA[name]) for name in ("regular", "large")}
    matvec, rhs, init = system(matrices)
    inverse = Partial(multiply, jax.tree.map(jnp.linalg.inv, matrices))
    solve = solvers.conjugate_gradients(tolerance=1e-10)
    solution = solve(matvec, rhs, init, precondition=inverse)
    assert jax.tree.leaves(solution.info.iterations) == [1, 1]
    for name, matrix in matrices.items():
        np.testing.assert_allclose(matrix @ solution.params[name], rhs[name], rtol=1e-9)


def test_a_system_that_is_not_finite_never_counts_as_solved():
    solution = solvers.conjugate_gradients()(lambda x: x, jnp.array([jnp.nan, 1.0]), jnp.zeros(2))
    assert not solution.info.converged
    assert jnp.isnan(solution.info.residual)
