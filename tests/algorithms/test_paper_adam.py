"""The optimiser of the FedFisher paper's experiments, against a plain loop of its recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from fisherjax.algorithms import paper_adam
from fisherjax.quadratic import Quadratic

SPECTRUM = [1.0, 2.0, 3.5, 4.0, 9.0]


def operator(spectrum=SPECTRUM):
    """Draw a symmetric matrix of these eigenvalues."""
    basis, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(5, 5)))
    return basis * np.asarray(spectrum) @ basis.T


def vector(seed):
    return np.random.default_rng(seed).normal(size=5)


def system(matrix):
    """A problem A x = A w, and a start that is no solution."""
    matvec = Partial(jnp.matmul, jnp.asarray(matrix))
    return Quadratic(matvec, jnp.asarray(matrix @ vector(10)), jnp.asarray(vector(20)))


def adam_by_hand(matrix, problem, steps, inside, eta=0.01, eps=0.01):
    """The recurrence of the FedFisher paper's code, in NumPy; the iterates after each step."""
    rhs, x = map(np.asarray, (problem.rhs, problem.init))
    m, s, iterates = 0.0, 0.0, []
    for _ in range(steps):
        v = matrix @ x - rhs
        m, s = 0.9 * m + v, 0.99 * s + v**2
        x = x - eta * m / (np.sqrt(s + eps) if inside else np.sqrt(s) + eps)
        iterates.append(x)
    return iterates


@pytest.mark.parametrize("inside", [True, False])
def test_paper_adam_is_its_recurrence(x64, inside):
    matrix = operator()
    problem = system(matrix)
    settings = {"learning_rate": 0.03, "epsilon": 0.2}
    found = paper_adam(epsilon_inside_root=inside, steps=137, **settings)(problem).params
    expected = adam_by_hand(matrix, problem, 137, inside, 0.03, 0.2)[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


CANDIDATES = [0, 100, 200]  # steps 1, 101, 201 of 250, counted from 0


@pytest.mark.parametrize("favourite", [0, 99, 100, 180, 200, 249])
def test_paper_adam_keeps_the_candidate_of_the_best_score(x64, favourite):
    """Candidates are the iterates after steps 1, 101, ...: not the start, nor the last one."""
    matrix = operator()
    problem = system(matrix)._replace(restore=Partial(lambda blocks: {"w": blocks}))
    iterates = adam_by_hand(matrix, problem, 250, True)
    target = jnp.asarray(iterates[favourite])

    def score(params):
        return -jnp.linalg.norm(params["w"] - target)

    found = paper_adam(epsilon_inside_root=True, steps=250, score=score)(problem).params
    best = min(CANDIDATES, key=lambda step: np.linalg.norm(iterates[step] - iterates[favourite]))
    np.testing.assert_allclose(found["w"], iterates[best], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("levels", "winner"), [((3, 3, 3), 0), ((1, 2, 2), 1), ((1, 0, 2), 2), ((np.nan, 1, 0), 1)]
)
def test_paper_adam_keeps_the_first_of_equal_scores(x64, levels, winner):
    matrix = operator()
    problem = system(matrix)
    iterates = adam_by_hand(matrix, problem, 250, False)
    marks = jnp.stack([jnp.asarray(iterates[step]) for step in CANDIDATES])

    def score(x):
        return jnp.asarray(levels)[jnp.argmin(jnp.linalg.norm(marks - x, axis=1))]

    found = paper_adam(epsilon_inside_root=False, steps=250, score=score)(problem).params
    np.testing.assert_allclose(found, marks[winner], rtol=1e-10, atol=1e-12)


def test_paper_adam_runs_under_jit_and_vmap(x64):
    matrices = jnp.stack([operator(), operator([0.0, 0.0, 0.5, 1.0, 4.0])])
    rhs = jnp.einsum("mij,mj->mi", matrices, jnp.stack([vector(1), vector(2)]))
    init = jnp.stack([vector(3), vector(4)])
    solve = paper_adam(epsilon_inside_root=True, steps=50)

    def one(matrix, rhs, init):
        return solve(Quadratic(Partial(jnp.matmul, matrix), rhs, init)).params

    alone = jnp.stack([one(*each) for each in zip(matrices, rhs, init, strict=True)])
    together = jax.jit(jax.vmap(one))(matrices, rhs, init)
    np.testing.assert_allclose(together, alone, rtol=1e-9, atol=1e-9)


def test_a_second_system_of_the_same_shape_compiles_nothing(compilations):
    def score(x):
        return -x @ x

    first, second = (
        system(operator(spectrum)) for spectrum in (SPECTRUM, [1e4, 2e4, 2e4, 3e4, 5e4])
    )
    paper_adam(epsilon_inside_root=True, steps=10, score=score)(first)
    with compilations() as count:
        paper_adam(epsilon_inside_root=True, steps=10, score=score)(second)
    assert count() == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"epsilon": 0.0}, r"epsilon is 0\.0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"score_every": 0}, "score_every is 0"),
    ],
)
def test_bad_numbers_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        paper_adam(epsilon_inside_root=True, **change)
