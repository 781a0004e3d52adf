"""A round is training, summarizing and merging a cohort; rounds can be stopped and branched."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import rounds

BATCH, EPOCHS, CLIENTS = 4, 2, 6
SIZES = (7, 0, 12, 4, 5, 9)
CATEGORICAL = fj.likelihoods.categorical


def apply(params, inputs):
    hidden = jnp.tanh(inputs @ params["first"]["kernel"])
    return hidden @ params["second"]["kernel"]


@pytest.fixture(scope="module")
def world():
    random = np.random.default_rng(0)
    inputs = random.normal(size=(sum(SIZES), 3)).astype(np.float32)
    targets = random.integers(0, 4, len(inputs)).astype(np.int32)
    rows = np.split(random.permutation(len(inputs)), np.cumsum(SIZES)[:-1])
    params = {
        "first": {"kernel": jnp.asarray(random.normal(size=(3, 5)), jnp.float32)},
        "second": {"kernel": jnp.asarray(random.normal(size=(5, 4)), jnp.float32)},
    }
    return fj.clients.federation((inputs, targets), rows), params


SGD = optax.sgd(0.1, 0.9)
METHODS = {
    "fedavg": fj.aggregation.fedavg(),
    "fedfish": fj.aggregation.fedfish(apply, CATEGORICAL, batch_size=BATCH),
    "fedfish_last_epoch": fj.aggregation.fedfish(
        apply, CATEGORICAL, batch_size=BATCH, last_epoch=True, average=True
    ),
    "fisher_merge": fj.aggregation.fisher_merge(apply, CATEGORICAL),
    "fedfisher_kfac": fj.aggregation.fedfisher(apply, CATEGORICAL),
    "fedfisher_full": fj.aggregation.fedfisher(
        apply, CATEGORICAL, fisher=fj.fisher.full, damping=0.1
    ),
    "regmean": fj.aggregation.regmean(apply),
    "fednova": fj.aggregation.fednova(epochs=EPOCHS, batch_size=BATCH, momentum=0.9),
    "fedlpa": fj.aggregation.fedlpa(apply, CATEGORICAL),
    "scaffold": fj.aggregation.scaffold(CLIENTS, epochs=EPOCHS, batch_size=BATCH),
}


def federated(name="fedavg", cohort=CLIENTS, **options):
    settings = {"optimizer": SGD, "epochs": EPOCHS, "batch_size": BATCH} | options
    return rounds.federated(apply, CATEGORICAL, METHODS[name], cohort=cohort, **settings)


def play(method, world, number=3, start=None, seed=0):
    federation, params = world
    state = method.init(params) if start is None else start
    return list(rounds.run(method, state, federation, key=jax.random.key(seed), rounds=number))


def assert_same(left, right, tolerance=0.0):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right
    )


@pytest.mark.parametrize("name", METHODS)
def test_a_round_of_everybody_is_training_summarizing_and_merging(world, name):
    federation, params = world
    key = jax.random.fold_in(jax.random.key(0), 0)
    models = fj.training.train(
        apply,
        CATEGORICAL,
        params,
        federation,
        key=key,
        optimizer=SGD,
        epochs=EPOCHS,
        batch_size=BATCH,
        squared_gradients=True,
    )
    method = METHODS[name]
    updates = fj.clients.summarize(method, models, federation, key=key, global_params=params)
    merged, _ = fj.aggregation.merge(method, params, updates, federation.weights)
    [(state, done)] = play(federated(name), world, 1)
    assert_same(done.models.params, models.params, 1e-6)
    assert_same(done.models.steps, models.steps)
    assert_same(state.params, merged, 2e-4)


def test_descent_at_rate_one_takes_the_merged_model(world):
    plain = play(federated(cohort=3), world)
    descent = play(federated(cohort=3, server_optimizer=optax.sgd(1.0)), world)
    assert_same(descent[-1][0].params, plain[-1][0].params, 1e-5)


def test_the_servers_optimiser_sees_the_pseudo_gradient(world):
    _, params = world
    adam = optax.adam(0.1)
    [(state, _)] = play(federated(server_optimizer=adam), world, 1)
    [(merged, _)] = play(federated(), world, 1)
    gradient = jax.tree.map(jnp.subtract, params, merged.params)
    updates, _ = adam.update(gradient, adam.init(params), params)
    assert_same(state.params, optax.apply_updates(params, updates), 1e-5)


def test_two_algorithms_with_one_key_see_the_same_cohorts_and_minibatches(world):
    results = [play(federated(name, cohort=3), world) for name in ("fedavg", "fedfish")]
    for (_, one), (_, other) in zip(*results, strict=True):
        assert_same(one.cohort, other.cohort)
    assert_same(results[0][0][1].models.params, results[1][0][1].models.params)
    other = play(federated(cohort=3), world, seed=1)
    pairs = zip(results[0], other, strict=True)
    assert any((a.cohort != b.cohort).any() for (_, a), (_, b) in pairs)


def test_cohorts_hold_nobody_twice_and_everybody_in_the_end(world):
    cohorts = [done.cohort for _, done in play(federated(cohort=2), world, 20)]
    assert all(len(set(cohort.tolist())) == 2 for cohort in cohorts)
    assert set(np.concatenate(cohorts).tolist()) == set(range(CLIENTS))


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_going_on_from_a_state_repeats_the_run_bit_for_bit(world, name):
    method = federated(name, cohort=3, server_optimizer=optax.adam(0.01))
    whole = play(method, world, 5)
    rest = play(method, world, 3, start=whole[1][0])
    assert_same(rest[-1], whole[-1])


def test_the_second_round_and_a_second_run_compile_nothing(world, compilations):
    method = federated("fedfish", cohort=3)
    play(method, world, 1)
    with compilations() as count:
        play(method, world, 2)
    assert count() == 0


@pytest.mark.parametrize("chunk", [2, 3])
def test_the_chunk_changes_rounding_only(world, chunk):
    one = play(federated("fedfish", cohort=3), world)
    other = play(federated("fedfish", cohort=3, clients_per_chunk=chunk), world)
    assert_same(one[-1][0].params, other[-1][0].params, 1e-4)


def spoiled(world, clients):
    federation, params = world
    inputs = federation.inputs
    for client in clients:
        rows = federation.indices[client, : SIZES[client]]
        inputs = inputs.at[rows[rows > 0]].set(jnp.nan)  # all clients are padded with row 0
    return federation._replace(inputs=inputs), params


@pytest.mark.parametrize("name", ["fedavg", "fedfish_last_epoch", "fedfisher_kfac", "scaffold"])
def test_a_client_that_diverges_is_left_out_and_reported(world, name):
    federation, params = spoiled(world, [2, 5])
    [(state, done)] = play(federated(name), (federation, params), 1)
    assert done.diverged.tolist() == [False, False, True, False, False, True]
    assert np.isfinite(done.loss)
    absent = federation._replace(sizes=federation.sizes.at[jnp.array([2, 5])].set(0))
    [(expected, _)] = play(federated(name), (absent, params), 1)
    assert_same(state.params, expected.params, 1e-5)


def test_a_round_in_which_everybody_diverges_changes_only_the_number(world):
    federation, params = spoiled(world, range(CLIENTS))
    method = federated(server_optimizer=optax.adam(0.1))
    start = method.init(params)
    [(state, done)] = play(method, (federation, params), 1)
    assert_same(state, start._replace(number=jnp.asarray(1)))
    assert done.loss == 0


def test_scaffolds_control_of_the_server_stays_the_mean_of_the_clients(world):
    for state, _ in play(federated("scaffold", cohort=3), world, 4):
        mean = jax.tree.map(lambda c: c.mean(0), state.aggregator.clients)
        assert_same(state.aggregator.server, mean, 1e-5)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(state.aggregator.server))


def test_leaves_that_are_not_trained_take_the_merged_value(world):
    mask = {"first": {"kernel": False}, "second": {"kernel": True}}
    method = federated(mask=mask, server_optimizer=optax.adamw(0.1, weight_decay=0.1))
    [(state, _)] = play(method, world, 1)
    assert_same(state.params["first"], world[1]["first"], 1e-6)
    assert np.any(state.params["second"]["kernel"] != world[1]["second"]["kernel"])


def test_the_proximal_term_holds_clients_back(world):
    def moved(mu):
        [(state, _)] = play(federated(proximal=mu), world, 1)
        change = jax.tree.map(jnp.subtract, state.params, world[1])
        return fj.tree.inner(change, change)

    assert moved(3.0) < moved(0.3) < moved(0.0)


def test_traffic_counts_bytes(world):
    federation, params = world
    size = 4 * (15 + 20)
    for name, expected in {
        "fedavg": (size, size),
        "fedfish": (size, 2 * size),
        "scaffold": (2 * size, size + 4),
    }.items():
        assert federated(name).traffic(params, federation) == expected


def test_the_barrier_of_a_single_client_is_zero(world):
    federation, _ = world
    for state, done in play(federated(cohort=1), world, 4):
        barrier = fj.metrics.client_server_barrier(
            apply, CATEGORICAL, state.params, done.models.params, federation, clients=done.cohort
        )
        assert_same(tuple(barrier), (0.0, 0.0), 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cohort": 7}, "cohort is 7, but the federation has 6"),
        ({"cohort": 0}, "cohort is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"proximal": -1.0}, "proximal is -1.0"),
        ({"clients_per_chunk": 9}, "clients_per_chunk is 9"),
    ],
)
def test_numbers_out_of_range_are_refused(world, change, message):
    with pytest.raises(ValueError, match=message):
        play(federated(**change), world)


def test_bad_input_is_refused_before_the_first_round(world):
    federation, params = world
    method, key = federated(server_optimizer=optax.adam(0.1)), jax.random.key(0)
    state = method.init(params)
    run = partial(rounds.run, method, state, federation)
    with pytest.raises(ValueError, match="rounds is 0"):
        run(key=key, rounds=0)
    with pytest.raises(TypeError, match="key is not a typed key"):
        run(key=0, rounds=1)
    with pytest.raises(TypeError, match=r"server_optimizer is 0\.1"):
        federated(server_optimizer=0.1)
    smaller = method.init({"first": params["first"]})
    with pytest.raises(ValueError, match=r"state.optimizer has leaves"):
        rounds.run(
            method, state._replace(optimizer=smaller.optimizer), federation, key=key, rounds=1
        )
