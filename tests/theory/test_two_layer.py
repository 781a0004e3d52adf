"""FedFisher's theorem: two ways to its optimum, the server's bound, where the loss comes from."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax.theory import laplace, two_layer

SMALL = 3  # examples of a client: few enough for a Gram matrix that is far from singular


# A program each; eagerly every operation is one.
DECOMPOSE, GRAM = jax.jit(laplace.decompose), jax.jit(laplace.gram)
DRAW = jax.jit(two_layer.draw, static_argnums=(1, 2))
OPTIMUM, DESCENT = jax.jit(laplace.optimum), jax.jit(laplace.descent)


def bound(quadratic, steps, rate):
    """Bound ||Phi (W_T - W*)||^2 / (2 N) by the smallest eigenvalue that is not zero."""
    values = np.asarray(quadratic.eigenvalues)
    counts = values > laplace.RCOND * values[-1]
    # Phi (mean - W*) is the part of the residuals in the range of K.
    start = (np.asarray(quadratic.eigenvectors).T @ np.asarray(quadratic.residuals))[counts]
    left = max(1 - rate * values[counts].min(), 0) ** (2 * steps)
    return left * np.sum(start**2) / (2 * len(values))


@pytest.fixture
def drawn(x64):
    return draw(SMALL, 256)


def draw(num_examples, width, seed=0, steps=50):
    key = jax.random.key(seed)
    federation = DRAW(key, 2, num_examples)
    return federation, *_trained(federation, jax.random.fold_in(key, 1), width, steps)


@partial(jax.jit, static_argnums=(2, 3))
def _trained(federation, key, width, steps):
    start = two_layer.initial(key, width)
    [models] = two_layer.descend(start, federation, [steps])
    return start, models, laplace.gram(models, federation)


def by_library(models, federation, solver):
    """Solve sum_i p_i F_i (W - W_i) = 0 with dense Fishers of the library."""
    model = two_layer.network(models.shape[-1])
    method = fj.algorithms.fedfisher(model, fisher=fj.fisher.full, damping=0.0, solver=solver)
    update = fj.merging.summarize(
        method, fj.training.Trained(models), federation, key=jax.random.key(0)
    )
    return fj.merging.merge(method, models[0], update, federation.weights)


@pytest.mark.long
def test_each_client_has_its_own_piece_of_the_circle_and_its_own_linear_target(x64):
    federation = DRAW(jax.random.key(0), 3, 5)
    assert np.allclose(np.linalg.norm(federation.inputs, axis=1), 1)
    for client in range(3):
        x, y = (np.asarray(z[federation.indices[client]]) for z in federation[:2])
        _, residual, rank, _ = np.linalg.lstsq(x, y)
        assert rank == 2
        assert residual < 1e-20


def test_the_second_layer_has_as_many_of_each_sign_and_norm_one():
    second = two_layer.signs(6)
    assert np.allclose(second**2, 1 / 6)
    assert np.isclose(second.sum(), 0)


@pytest.mark.long
def test_local_descent_is_training_on_whole_data_sets(drawn):
    federation, start, models, _ = drawn
    how = {"optimizer": optax.sgd(0.1), "epochs": 50, "batch_size": SMALL}
    trained = fj.training.train(
        two_layer.network(256), start, federation, key=jax.random.key(1), **how
    )
    assert np.allclose(trained.params, models, atol=1e-10)


@pytest.mark.long
def test_what_is_kept_on_the_way_is_what_fewer_steps_give(x64):
    federation = DRAW(jax.random.key(0), 2, 5)
    start = np.random.default_rng(1).normal(size=(2, 16))
    kept = two_layer.descend(start, federation, [3, 8])
    for models, steps in zip(kept, (3, 8), strict=True):
        assert np.allclose(models, two_layer.descend(start, federation, [steps])[0], atol=1e-14)


def test_the_gram_matrix_has_the_eigenvalues_of_the_full_fisher(drawn):
    federation, _, models, quadratic = drawn
    model = two_layer.network(256)
    fishers = [
        fj.fisher.full(model, w, fj.clients.view(federation, client)).matrix
        for client, w in enumerate(models)
    ]
    largest = np.linalg.eigvalsh(np.mean(fishers, 0))[-2 * SMALL :]
    assert np.allclose(quadratic.eigenvalues, largest, rtol=1e-10)


@pytest.mark.long
def test_the_closed_form_is_what_conjugate_gradients_find(drawn):
    federation, _, models, quadratic = drawn
    exact = fj.solvers.conjugate_gradients(max_iterations=500, tolerance=1e-13)
    merged, _, info = by_library(models, federation, exact)
    assert np.max(np.abs(np.asarray(merged) - OPTIMUM(quadratic))) < 1e-6
    assert bool(info.converged)


def test_the_closed_form_is_where_gradient_descent_goes(drawn):
    federation, _, models, quadratic = drawn
    values = np.asarray(quadratic.eigenvalues)
    steps = int(20 * values[-1] / values[0])
    merged, *_ = by_library(models, federation, fj.solvers.gradient_descent(steps=steps))
    assert np.max(np.abs(np.asarray(merged) - OPTIMUM(quadratic))) < 1e-6


@pytest.mark.parametrize("steps", [1, 7, 300])
def test_descent_in_closed_form_is_that_of_the_solver(x64, steps):
    federation, _, models, quadratic = draw(20, 64)
    solver = fj.solvers.gradient_descent(steps=steps, power_iterations=3000)
    merged, *_ = by_library(models, federation, solver)
    found = DESCENT(quadratic, steps, 1 / np.asarray(quadratic.eigenvalues)[-1])
    assert np.max(np.abs(np.asarray(merged) - found)) < 1e-6


@pytest.mark.long
def test_many_examples_leave_the_same_function(x64):
    """Eigenvalues of 1e-12 leave directions free in which weights, but not outputs, differ."""
    federation, _, models, quadratic = draw(50, 128)
    exact = fj.solvers.conjugate_gradients(max_iterations=4000, tolerance=1e-12)
    merged, *_ = by_library(models, federation, exact)
    linear = [
        np.einsum("nd,dr,nr->n", quadratic.inputs, w, quadratic.gates)
        for w in (merged, OPTIMUM(quadratic))
    ]
    assert np.max(np.abs(linear[0] - linear[1])) < 1e-4


def test_among_the_solutions_it_is_the_nearest_to_the_mean(drawn):
    _, _, models, quadratic = drawn
    step = np.asarray(OPTIMUM(quadratic)) - np.mean(models, 0)
    features = np.einsum("nd,nr->ndr", quadratic.inputs, quadratic.gates).reshape(2 * SMALL, -1)
    combination = np.linalg.lstsq(features.T, step.ravel())[0]
    assert np.allclose(combination @ features, step.ravel(), atol=1e-9)
    assert np.allclose(features @ step.ravel(), quadratic.residuals, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_descent_follows_its_bound_step_by_step(x64, seed):
    *_, quadratic = draw(5, 512, seed)
    best, rate = np.asarray(OPTIMUM(quadratic)), 1 / np.asarray(quadratic.eigenvalues)[-1]
    for steps in [0, 1, 2, 5, 10, 100, 1000, 10000]:
        away = DESCENT(quadratic, steps, rate) - best
        moved = np.einsum("nd,dr,nr->n", quadratic.inputs, away, quadratic.gates)
        left = np.mean(moved**2) / 2
        assert left <= bound(quadratic, steps, rate) * (1 + 1e-6) + 1e-18
    assert np.isclose(bound(quadratic, 0, rate), np.mean(np.square(quadratic.residuals)) / 2)


def test_the_bound_is_reached_where_all_eigenvalues_are_equal(x64):
    *_, quadratic = draw(5, 512)
    equal = jax.tree.map(np.asarray, quadratic._replace(eigenvalues=np.full(10, 0.3)))
    best = np.asarray(OPTIMUM(equal))
    away = np.asarray(DESCENT(equal, 4, 1.0)) - best
    assert np.allclose(away, 0.7**4 * (equal.mean - best))
    start = bound(equal, 0, 1.0)
    assert np.isclose(bound(equal, 4, 1.0), 0.7**8 * start)


@pytest.mark.parametrize(("seed", "width"), [(0, 16), (1, 64), (2, 256), (3, 1024)])
def test_the_loss_is_at_most_what_its_three_sources_allow(x64, seed, width):
    federation, start, models, quadratic = draw(20, width, seed)
    rate = 0.5 / np.asarray(quadratic.eigenvalues)[-1]
    merged = OPTIMUM(quadratic), DESCENT(quadratic, 1000, rate), quadratic.mean
    for params in merged:
        found = DECOMPOSE(params, start, models, quadratic, federation)
        roots = np.sqrt([found.laplace, found.server, found.local])
        assert np.sqrt(found.loss) <= roots.sum() * (1 + 1e-9)


@pytest.mark.long
def test_the_account_is_made_of_what_the_library_measures(drawn):
    federation, start, models, quadratic = drawn
    best = OPTIMUM(quadratic)
    found = DECOMPOSE(best, start, models, quadratic, federation)
    model = two_layer.network(256)
    assert np.isclose(found.loss, fj.metrics.performance(model, best, federation).loss.mean())
    own = fj.metrics.performance(model, models, federation, stacked=True).loss
    assert np.isclose(found.local, own.mean())
    assert found.server < 1e-15  # wide enough to agree with everybody
    assert np.isclose(found.moved, np.linalg.norm(best - np.mean(models, 0)))
    moved = np.asarray(models) - np.asarray(start)
    assert np.isclose(found.distance**2, np.mean(np.sum(moved**2, (1, 2))))
    assert 0 < found.switched < 1


def test_clients_that_agree_are_their_own_optimum(drawn):
    federation, start, models, _ = drawn
    same = np.stack([np.asarray(models)[0]] * 2)
    quadratic = GRAM(same, federation)
    best = OPTIMUM(quadratic)
    assert np.allclose(best, models[0], atol=1e-9)
    found = DECOMPOSE(best, start, same, quadratic, federation)
    assert found.laplace + found.server + found.switched < 1e-15


@pytest.mark.long
def test_wide_networks_are_linear(x64):
    """The theorem's first error falls with the width: means over ten draws."""
    falls = []
    for width in (64, 1024):
        errors = []
        for seed in range(10):
            federation, start, models, quadratic = draw(5, width, seed, steps=200)
            found = DECOMPOSE(DESCENT(quadratic, 1e4, 0.1), start, models, quadratic, federation)
            errors.append(found.laplace)
        falls.append(np.median(errors))
    assert falls[1] < falls[0] / 4


@pytest.mark.long
def test_seeds_side_by_side_give_what_each_gives(x64):
    @jax.jit
    def one(key):
        federation = two_layer.draw(key, 2, 4)
        start = two_layer.initial(key, 32)
        models = two_layer.descend(start, federation, [5])[0]
        quadratic = laplace.gram(models, federation)
        best = laplace.descent(quadratic, 100, 0.1)
        return laplace.decompose(best, start, models, quadratic, federation)

    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.jit(jax.vmap(one))(keys)
    apart = jax.tree.map(lambda *x: np.stack(x), *map(one, keys))
    for name, left, right in zip(together._fields, together, apart, strict=True):
        assert np.allclose(left, right, rtol=1e-6, atol=1e-12), name


def refused():
    key = jax.random.key(0)
    federation, start = two_layer.draw(key, 2, 3), two_layer.initial(key, 4)
    models = jnp.stack([start] * 2)
    quadratic = laplace.gram(models, federation)
    ragged = fj.clients.federation((np.zeros((3, 2)), np.zeros((3, 1))), [[0], [1, 2]])
    return {
        "num_clients is 0; expected": lambda: two_layer.draw(key, 0),
        "num_examples is 0; expected": lambda: two_layer.draw(key, 2, 0),
        "width is 0; expected": lambda: two_layer.network(0),
        "width is -1; expected": lambda: two_layer.initial(key, -1),
        "variance is 0; expected": lambda: two_layer.initial(key, 4, variance=0),
        "use jax.random.key": lambda: two_layer.initial(jax.random.PRNGKey(0), 4),
        "expected ascending integers": lambda: two_layer.descend(start, federation, [5, 5]),
        "steps is 0; expected": lambda: two_layer.descend(start, federation, [0]),
        "learning_rate is 0; expected": lambda: two_layer.descend(start, federation, [1], 0),
        r"Clients have \[1, 2\] examples": lambda: two_layer.descend(start, ragged, [1]),
        r"params has shape \(3, 4\)": lambda: two_layer.descend(jnp.ones((3, 4)), federation, [1]),
        r"models have shape \(2, 4\)": lambda: laplace.gram(start, federation),
        "a leading axis of 2 clients": lambda: laplace.gram(models[:1], federation),
        "rcond is -1; expected": lambda: laplace.optimum(quadratic, -1),
        "steps is -1; expected": lambda: laplace.descent(quadratic, -1, 0.1),
        "learning_rate is 1000; expected at most": lambda: laplace.descent(quadratic, 1, 1000),
        r"start has shape \(3, 4\)": lambda: laplace.decompose(
            start, jnp.ones((3, 4)), models, quadratic, federation
        ),
    }


@pytest.mark.parametrize("said", refused())
def test_bad_input_is_refused_by_name(said):
    with pytest.raises((ValueError, TypeError), match=said):
        refused()[said]()


def test_the_smallest_eigenvalue_is_that_of_the_gram_matrix_at_the_start(drawn):
    federation, start, models, quadratic = drawn
    found = DECOMPOSE(quadratic.mean, start, models, quadratic, federation)
    begun = GRAM(np.broadcast_to(start, models.shape), federation)
    assert np.isclose(found.smallest, begun.eigenvalues[0], rtol=1e-9)
    assert found.rank == 2 * SMALL
