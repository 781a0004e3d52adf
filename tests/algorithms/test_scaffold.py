"""SCAFFOLD against its pseudocode, and what it is for."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, rounds, training

SIZES = (7, 3, 0, 12)
RATE, EPOCHS, BATCH = 0.05, 2, 12
OPTIMIZER = optax.sgd(RATE)
SCAFFOLD, FEDAVG = algorithms.scaffold(), algorithms.fedavg()


def apply(params, x):
    return x @ params["w"] + params["b"]


MODEL = fj.Model(apply, fj.likelihoods.gaussian)


@pytest.fixture
def start(x64):
    source = np.random.default_rng(1)
    return {"w": jnp.asarray(source.normal(size=(3, 2))), "b": jnp.asarray(source.normal(size=2))}


@pytest.fixture
def federation(x64):
    source = np.random.default_rng(0)
    data = source.normal(size=(22, 3)), source.normal(size=(22, 2))
    return clients.federation(data, np.split(np.arange(22), np.cumsum(SIZES)[:-1]))


def experiment_of(method, cohort=4, epochs=EPOCHS, batch_size=BATCH, model=MODEL):
    return rounds.federated(
        model, method, cohort=cohort, optimizer=OPTIMIZER, epochs=epochs, batch_size=batch_size
    )


def play(experiment, start, federation, number):
    state = experiment.init(start, federation.num_clients)
    return list(rounds.run(experiment, state, federation, key=jax.random.key(0), rounds=number))


def combine(*terms):
    """Add up (factor, params) pairs."""
    return jax.tree.map(
        lambda *leaves: sum(f * x for (f, _), x in zip(terms, leaves, strict=True)),
        *(tree for _, tree in terms),
    )


@jax.jit
def gradient_of(params, x, y):
    loss = fj.likelihoods.gaussian.negative_log_likelihood
    return jax.grad(lambda params: loss(apply(params, x), y).mean())(params)


@pytest.mark.parametrize("cohort", [4, 2])
def test_rounds_are_those_of_the_pseudocode(start, federation, cohort):
    """Written with gradients and the learning rate, client by client."""
    zeros = jax.tree.map(jnp.zeros_like, start)
    expected, c, own = start, zeros, [zeros] * 4
    met = set()
    for state, done in play(experiment_of(SCAFFOLD, cohort), start, federation, 4):
        drawn = done.cohort.tolist()
        ends, changes = [], []
        for i in drawn:
            rows = np.asarray(federation.indices[i, : SIZES[i]])
            x, y = federation.inputs[rows], federation.targets[rows]
            y_i = expected
            for _ in range(EPOCHS if SIZES[i] else 0):  # one batch an epoch
                y_i = combine((1, y_i), (-RATE, gradient_of(y_i, x, y)), (-RATE, c), (RATE, own[i]))
            ends.append(y_i)
            if SIZES[i]:
                k = EPOCHS * RATE
                new = combine((1, own[i]), (-1, c), (1 / k, expected), (-1 / k, y_i))
                changes.append(combine((1, new), (-1, own[i])))
                own[i] = new
        shares = np.array(SIZES)[drawn] / np.array(SIZES)[drawn].sum()
        expected = combine(*zip(shares, ends, strict=True))
        c = combine((1, c), *((1 / 4, change) for change in changes))
        stacked = jax.tree.map(lambda *leaves: RATE * jnp.stack(leaves), *own)
        for left, right in (
            (state.params, expected),
            (state.algorithm.server, combine((RATE, c))),
            (state.private, stacked),
        ):
            chex.assert_trees_all_close(left, right, rtol=1e-10, atol=1e-12)
        met.add(tuple(drawn))
    assert len(met) == 1 if cohort == 4 else len(met) > 1


def test_the_first_round_is_federated_averaging_bit_for_bit(start, federation, rounding):
    settings = {"epochs": 3, "batch_size": 2}
    (one, _), (later, _) = play(experiment_of(SCAFFOLD, **settings), start, federation, 2)
    (average, _), (other, _) = play(experiment_of(FEDAVG, **settings), start, federation, 2)
    chex.assert_trees_all_close(one.params, average.params, rtol=rounding, atol=rounding)
    assert jnp.abs(later.params["w"] - other.params["w"]).max() > 1e-3
    key = jax.random.fold_in(jax.random.key(0), 0)
    merged = []
    for method in (SCAFFOLD, FEDAVG):
        trained = training.train(
            MODEL, start, federation, key=key, optimizer=method.optimizer(OPTIMIZER), **settings
        )
        updates = merging.summarize(method, trained, federation, key=key)
        merged.append(merging.merge(method, start, updates, federation.weights))
    chex.assert_trees_all_close(merged[0][0], merged[1][0], rtol=rounding, atol=rounding)
    chex.assert_trees_all_close(merged[0][0], one.params, rtol=1e-12, atol=1e-12)
    chex.assert_trees_all_close(merged[0][1], one.algorithm, rtol=1e-10, atol=1e-12)


def test_corrections_may_be_given_to_training(start, federation):
    """Stacked, as `broadcast` makes them: each step is shorter by its client's."""
    constant = jax.tree.map(lambda leaf: jnp.stack([leaf * i for i in range(4)]), start)
    flat = fj.Model(lambda params, x: 0 * apply(params, x), fj.likelihoods.gaussian)
    trained = training.train(
        flat,
        start,
        federation,
        key=jax.random.key(0),
        optimizer=SCAFFOLD.optimizer(OPTIMIZER),
        epochs=EPOCHS,
        batch_size=BATCH,
        extras=constant,
    )
    steps = trained.steps.astype(float)
    for name, leaf in start.items():
        expected = leaf * (1 - jnp.arange(4.0) * steps).reshape(-1, *(1,) * leaf.ndim)
        np.testing.assert_allclose(trained.params[name], expected, rtol=1e-12)
        kept = constant[name] * (steps > 0).reshape(-1, *(1,) * leaf.ndim)
        np.testing.assert_array_equal(trained.extras[name], kept)


def test_many_local_steps_still_lead_to_the_optimum_of_all(x64):
    """Clients differ in curvature, which leads federated averaging astray."""
    curvature, centre = np.array([1.0, 9.0]), np.array([[1.0, -1.0]])
    root = np.sqrt(curvature)[:, None]
    federation = clients.federation((root, root * centre.T), [np.array([0]), np.array([1])])
    optimum = (curvature * centre[0]).sum() / curvature.sum()
    model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
    params = {"w": jnp.zeros((1, 1))}
    ends = []
    for method in (SCAFFOLD, FEDAVG):
        experiment = experiment_of(method, 2, epochs=10, batch_size=1, model=model)
        ends.append(play(experiment, params, federation, 60)[-1][0].params["w"].item())
    np.testing.assert_allclose(ends[0], optimum, rtol=1e-6)
    assert abs(ends[1] - optimum) > 0.1


def test_who_sits_out_keeps_its_control_and_counts_in_the_mean(start, federation):
    (before, _), (after, done) = play(experiment_of(SCAFFOLD, 1), start, federation, 2)
    (client,) = done.cohort.tolist()
    assert SIZES[client] > 0
    others = np.delete(np.arange(4), client)
    for name in start:
        left, right = after.private[name], before.private[name]
        np.testing.assert_array_equal(left[others], right[others])
        moved = (before.params[name] - done.trained.params[name][0]) / done.trained.steps[0]
        change = left[client] - right[client]
        np.testing.assert_allclose(change, moved - before.algorithm.server[name], rtol=1e-10)
        server = after.algorithm.server[name] - before.algorithm.server[name]
        np.testing.assert_allclose(server, change / 4, rtol=1e-10)
        np.testing.assert_allclose(after.params[name], done.trained.params[name][0], rtol=1e-12)


@pytest.mark.parametrize("lacking", [{"start": None}, {"steps": None}, {"extras": ()}])
def test_its_optimiser_start_and_steps_are_needed(start, federation, lacking):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), start)
    trained = training.Trained(stacked, start, jnp.ones(4, int), None, stacked)
    with pytest.raises(
        ValueError, match=r"SCAFFOLD needs .*optimizer=algorithm\.optimizer\(base\)"
    ):
        merging.summarize(SCAFFOLD, trained._replace(**lacking), federation, key=jax.random.key(0))
