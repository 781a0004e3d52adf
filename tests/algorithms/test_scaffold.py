"""SCAFFOLD against its pseudocode, and what it is for."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, rounds, training

RATE, EPOCHS, BATCH = 0.05, 2, 12
OPTIMIZER = optax.sgd(RATE)
SCAFFOLD, FEDAVG = algorithms.scaffold(), algorithms.fedavg()


@pytest.fixture
def start(x64, draw):
    return draw(1)


def play(method, start, world, number, cohort=4, epochs=EPOCHS, batch_size=BATCH):
    options = {"optimizer": OPTIMIZER, "epochs": epochs, "batch_size": batch_size}
    experiment = rounds.federated(world.model, method, cohort=cohort, **options)
    state = experiment.init(start, world.federation.num_clients)
    key = jax.random.key(0)
    return list(rounds.run(experiment, state, world.federation, key=key, rounds=number))


def combine(*terms):
    """Add up (factor, params) pairs."""
    return jax.tree.map(
        lambda *leaves: sum(f * np.asarray(x) for (f, _), x in zip(terms, leaves, strict=True)),
        *(tree for _, tree in terms),
    )


@pytest.mark.long
@pytest.mark.parametrize("cohort", [4, 2])
def test_rounds_are_those_of_the_pseudocode(start, regression, cohort):
    """Written with gradients and the learning rate, client by client."""
    sizes = np.array(regression.sizes)
    zeros = jax.tree.map(np.zeros_like, start)
    expected, c, own = start, zeros, [zeros] * 4
    met = set()
    for state, done in play(SCAFFOLD, start, regression, 4, cohort):
        drawn = done.cohort.tolist()
        ends, changes = [], []
        for i in drawn:
            y_i = expected
            for _ in range(EPOCHS if sizes[i] else 0):  # one batch an epoch
                _, gradient = regression.loss_and_gradient(y_i, *regression.own(i))
                y_i = combine((1, y_i), (-RATE, gradient), (-RATE, c), (RATE, own[i]))
            ends.append(y_i)
            if sizes[i]:
                k = EPOCHS * RATE
                new = combine((1, own[i]), (-1, c), (1 / k, expected), (-1 / k, y_i))
                changes.append(combine((1, new), (-1, own[i])))
                own[i] = new
        shares = sizes[drawn] / sizes[drawn].sum()
        expected = combine(*zip(shares, ends, strict=True))
        c = combine((1, c), *((1 / 4, change) for change in changes))
        stacked = jax.tree.map(lambda *leaves: RATE * np.stack(leaves), *own)
        for left, right in (
            (state.params, expected),
            (state.algorithm.server, combine((RATE, c))),
            (state.local, stacked),
        ):
            chex.assert_trees_all_close(left, right, rtol=1e-10, atol=1e-12)
        met.add(tuple(drawn))
    assert len(met) == 1 if cohort == 4 else len(met) > 1


@pytest.mark.long
def test_the_first_round_is_federated_averaging_bit_for_bit(start, regression, rounding):
    settings, federation = {"epochs": 3, "batch_size": 2}, regression.federation
    (one, _), (later, _) = play(SCAFFOLD, start, regression, 2, **settings)
    (average, _), (other, _) = play(FEDAVG, start, regression, 2, **settings)
    chex.assert_trees_all_close(one.params, average.params, rtol=rounding, atol=rounding)
    assert jnp.abs(later.params["w"] - other.params["w"]).max() > 1e-3
    key = jax.random.fold_in(jax.random.key(0), 0)
    merged = []
    for method in (SCAFFOLD, FEDAVG):
        trained = regression.train(start, method.optimizer(OPTIMIZER), key=key, **settings)
        updates = merging.summarize(method, trained, federation, key=key)
        merged.append(merging.merge(method, start, updates, federation.weights))
    chex.assert_trees_all_close(merged[0][0], merged[1][0], rtol=rounding, atol=rounding)
    chex.assert_trees_all_close(merged[0][0], one.params, rtol=1e-12, atol=1e-12)
    chex.assert_trees_all_close(merged[0][1], one.algorithm, rtol=1e-10, atol=1e-12)


def test_corrections_may_be_given_to_training(start, regression):
    """Stacked, as `broadcast` makes them: each step is shorter by its client's."""
    constant = jax.tree.map(lambda leaf: np.stack([np.asarray(leaf) * i for i in range(4)]), start)
    apply = regression.model.apply
    flat = fj.Model(lambda params, x: 0 * apply(params, x), fj.likelihoods.gaussian)
    optimizer = SCAFFOLD.optimizer(OPTIMIZER)
    trained = regression._replace(model=flat).train(start, optimizer, extras=constant)
    steps = np.asarray(trained.steps, float)
    for name, leaf in start.items():
        expected = np.asarray(leaf) * (1 - np.arange(4.0) * steps).reshape(-1, *(1,) * leaf.ndim)
        np.testing.assert_allclose(trained.params[name], expected, rtol=1e-12)
        kept = constant[name] * (steps > 0).reshape(-1, *(1,) * leaf.ndim)
        np.testing.assert_array_equal(trained.extras[name], kept)


@pytest.mark.long
def test_many_local_steps_still_lead_to_the_optimum_of_all(regression):
    """Clients differ in curvature, which leads federated averaging astray."""
    curvature, centre = np.array([1.0, 9.0]), np.array([[1.0, -1.0]])
    root = np.sqrt(curvature)[:, None]
    federation = clients.federation((root, root * centre.T), [np.array([0]), np.array([1])])
    optimum = (curvature * centre[0]).sum() / curvature.sum()
    model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
    world = regression._replace(model=model, federation=federation)
    settings = {"cohort": 2, "epochs": 10, "batch_size": 1}
    ends = [
        play(method, jnp.zeros((1, 1)), world, 60, **settings)[-1][0].params.item()
        for method in (SCAFFOLD, FEDAVG)
    ]
    np.testing.assert_allclose(ends[0], optimum, rtol=1e-6)
    assert abs(ends[1] - optimum) > 0.1


def test_who_sits_out_keeps_its_control_and_counts_in_the_mean(start, regression):
    played = play(SCAFFOLD, start, regression, 2, cohort=1)
    (before, _), (after, done) = jax.device_get(played)
    (client,) = done.cohort.tolist()
    assert regression.sizes[client] > 0
    others = np.delete(np.arange(4), client)
    for name in start:
        left, right = after.local[name], before.local[name]
        np.testing.assert_array_equal(left[others], right[others])
        moved = (before.params[name] - done.trained.params[name][0]) / done.trained.steps[0]
        change = left[client] - right[client]
        np.testing.assert_allclose(change, moved - before.algorithm.server[name], rtol=1e-10)
        server = after.algorithm.server[name] - before.algorithm.server[name]
        np.testing.assert_allclose(server, change / 4, rtol=1e-10)
        np.testing.assert_allclose(after.params[name], done.trained.params[name][0], rtol=1e-12)


@pytest.mark.parametrize("lacking", [{"start": None}, {"steps": None}, {"extras": ()}])
def test_its_optimiser_start_and_steps_are_needed(start, regression, lacking):
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * 4), start)
    trained = training.Trained(stacked, start, jnp.ones(4, int), None, stacked)._replace(**lacking)
    words = r"SCAFFOLD needs .*optimizer=algorithm\.optimizer\(base\)"
    with pytest.raises(ValueError, match=words):
        merging.summarize(SCAFFOLD, trained, regression.federation, key=jax.random.key(0))
