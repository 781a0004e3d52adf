"""A round is training, summarizing and merging a cohort; rounds can be stopped and branched."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, merging, rounds, training
from fisherjax.algorithms import with_server_optimizer
from tests.methods import MERGED, reads

BATCH, EPOCHS, CLIENTS = 4, 2, 6
SIZES = (7, 0, 12, 4, 5, 9)


def apply(params, inputs):
    hidden = jnp.tanh(inputs @ params["first"]["kernel"])
    return hidden @ params["second"]["kernel"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)


@pytest.fixture
def world(x64):
    """Of float64 in every test: the programs of one serve the others."""
    random = np.random.default_rng(0)
    inputs = random.normal(size=(sum(SIZES), 3))
    targets = random.integers(0, 4, len(inputs)).astype(np.int32)
    rows = np.split(random.permutation(len(inputs)), np.cumsum(SIZES)[:-1])
    params = {
        "first": {"kernel": jnp.asarray(random.normal(size=(3, 5)))},
        "second": {"kernel": jnp.asarray(random.normal(size=(5, 4)))},
    }
    return fj.clients.federation((inputs, targets), rows), params


SGD = optax.sgd(0.1, 0.9)
ADAM = optax.adam(0.01)
EXACT = fj.solvers.conjugate_gradients(tolerance=1e-10, max_iterations=500)
METHODS = {name: algorithms.make(name, MODEL) for name in MERGED} | {
    "fedfisher_full_exact": algorithms.fedfisher(
        MODEL, fisher=fj.fisher.full, damping=0.1, solver=EXACT
    ),
    "fedfish": algorithms.fedfish(MODEL, batch_size=BATCH),
    "fedfish_last_epoch": algorithms.fedfish(
        MODEL, batch_size=BATCH, last_epoch=True, average=True
    ),
    "adam": with_server_optimizer(algorithms.fedavg(), ADAM),
    "scaffold_adam": with_server_optimizer(algorithms.scaffold(), ADAM),
}


# A round does not know what clients send: these stand for the rest, and for each kind of state.
PLAYED = {"fedavg", "fedfisher_kfac", "scaffold", "fedfish_last_epoch", "adam", "scaffold_adam"}
UNDAMPED = {name for name in MERGED if fj.fisher.Dense in reads(name).values()}


def federated(method="fedavg", cohort=CLIENTS, model=MODEL, **options):
    algorithm = METHODS[method] if isinstance(method, str) else method
    settings = {"optimizer": SGD, "epochs": EPOCHS, "batch_size": BATCH} | options
    return rounds.federated(model, algorithm, cohort=cohort, **settings)


def play(experiment, world, number=3, start=None, seed=0):
    federation, params = world
    state = experiment.init(params, federation.num_clients) if start is None else start
    return list(rounds.run(experiment, state, federation, key=jax.random.key(seed), rounds=number))


def assert_same(left, right, tolerance=0.0):
    chex.assert_trees_all_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [name if name in PLAYED else pytest.param(name, marks=pytest.mark.slow) for name in METHODS],
)
def test_a_round_of_everybody_is_training_summarizing_and_merging(world, name, compilations):
    federation, params = world
    (state, done), (after, _) = play(federated(name), (federation, params), 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))

    key, method = jax.random.fold_in(jax.random.key(0), 0), METHODS[name]
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "optimizer": method.optimizer(SGD)}
    trained = training.train(MODEL, params, federation, key=key, **settings)
    updates = merging.summarize(method, trained, federation, key=key)
    merged, kept, _ = merging.merge(method, params, updates, federation.weights, key=key)
    for field in ("params", "loss", "steps", "extras"):
        assert_same(getattr(done.trained, field), getattr(trained, field), 1e-12)
    # Where nothing is damped, conjugate gradients that stop at 1e-4 amplify rounding.
    assert_same(state.params, merged, 1e-3 if name in UNDAMPED else 1e-6)
    assert_same(state.algorithm, kept, 1e-6)

    # The same experiment put together a second time is the first one.
    by_default = name in MERGED and method is algorithms.make(name, MODEL)
    fresh = algorithms.make(name, fj.Model(*MODEL)) if by_default else method
    with compilations() as count:
        again = federated(fresh)
        [(repeated, _)] = play(again, (federation, params), 1)
    assert count() == 0
    assert_same(repeated, state)


@pytest.mark.parametrize("name", MERGED)
def test_equal_arguments_are_one_experiment(name):
    def experiment(**changes):
        return federated(algorithms.make(name, fj.Model(*MODEL)), **changes)

    assert experiment() == experiment()
    assert hash(experiment()) == hash(experiment())
    assert experiment(epochs=3) != experiment()


@pytest.mark.long
def test_the_number_of_a_round_is_an_integer_also_of_a_run_that_goes_on(world):
    first = play(federated(), world, 2)
    later = play(federated(), world, 2, start=first[-1][0])
    numbers = [done.number for _, done in first + later]
    assert numbers == [0, 1, 2, 3]
    assert all(type(number) is int for number in numbers)
    assert f"round {numbers[-1]}" == "round 3"


@pytest.mark.long
def test_descent_at_rate_one_takes_the_merged_model(world):
    plain = play(federated(cohort=3), world)
    method = with_server_optimizer(algorithms.fedavg(), optax.sgd(1.0))
    descent = play(federated(method, cohort=3), world)
    assert_same(descent[-1][0].params, plain[-1][0].params, 1e-5)


@pytest.mark.long
def test_the_servers_optimiser_sees_the_pseudo_gradient(world):
    _, params = world
    [(state, _)] = play(federated("adam", cohort=3), world, 1)
    [(merged, _)] = play(federated(cohort=3), world, 1)
    gradient = jax.tree.map(np.subtract, params, merged.params)
    updates, _ = jax.jit(ADAM.update)(gradient, ADAM.init(params), params)
    assert_same(state.params, jax.tree.map(np.add, params, updates), 1e-5)


@pytest.mark.long
def test_two_algorithms_with_one_key_see_the_same_cohorts_and_minibatches(world):
    results = [play(federated(name, cohort=3), world) for name in ("fedavg", "fedfish")]
    for (_, one), (_, other) in zip(*results, strict=True):
        assert_same(one.cohort, other.cohort)
    assert_same(results[0][0][1].trained.params, results[1][0][1].trained.params)
    other = play(federated(cohort=3), world, seed=1)
    pairs = zip(results[0], other, strict=True)
    assert any((a.cohort != b.cohort).any() for (_, a), (_, b) in pairs)


def test_clients_of_a_cohort_train_as_they_do_among_all(world):
    federation, params = world
    [(_, done)] = play(federated(cohort=3), world, 1)
    key = jax.random.fold_in(jax.random.key(0), 0)
    settings = {"epochs": EPOCHS, "batch_size": BATCH, "optimizer": SGD}
    everybody = training.train(MODEL, params, federation, key=key, **settings)
    assert_same(done.trained.params, own(everybody.params, np.asarray(done.cohort)), 1e-6)


def test_cohorts_hold_nobody_twice_and_everybody_in_the_end(world):
    cohorts = [done.cohort for _, done in play(federated(cohort=3), world, 20)]
    assert all(len(set(cohort.tolist())) == 3 for cohort in cohorts)
    assert set(np.concatenate(cohorts).tolist()) == set(range(CLIENTS))


@pytest.mark.long
@pytest.mark.parametrize("name", ["adam", "scaffold_adam"])
def test_going_on_from_a_state_repeats_the_run_bit_for_bit(world, name):
    method = federated(name, cohort=3)
    whole = play(method, world, 5)
    rest = play(method, world, 3, start=whole[1][0])
    assert_same(rest[-1], whole[-1])


def test_the_second_round_and_a_second_run_compile_nothing(world, compilations):
    method = federated("fedfish", cohort=3)
    play(method, world, 1)
    with compilations() as count:
        play(method, world, 2)
    assert count() == 0


@pytest.mark.long
@pytest.mark.parametrize("chunk", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_chunk_changes_rounding_only(world, chunk):
    one = play(federated("fedfish", cohort=3), world)
    other = play(federated("fedfish", cohort=3, clients_per_chunk=chunk), world)
    assert_same(one[-1][0].params, other[-1][0].params, 1e-4)


def spoiled(world, clients):
    federation, params = world
    inputs, indices = np.array(federation.inputs), np.asarray(federation.indices)
    for client in clients:
        # Row 0, with which all clients are padded, may be among them: padding is never read.
        inputs[indices[client, : SIZES[client]]] = np.nan
    return federation._replace(inputs=jnp.asarray(inputs)), params


@pytest.mark.parametrize("name", ["fedavg", "fedfish_last_epoch", "fedfisher_kfac", "scaffold"])
def test_a_client_that_diverges_is_left_out_and_reported(world, name):
    federation, params = spoiled(world, [2, 5])
    method = federated(name)
    [(state, done)] = play(method, (federation, params), 1)
    assert done.diverged.tolist() == [False, False, True, False, False, True]
    assert np.isfinite(done.loss)
    sizes = np.where(np.isin(np.arange(CLIENTS), [2, 5]), 0, federation.sizes)
    absent = federation._replace(sizes=jnp.asarray(sizes))
    [(expected, _)] = play(method, (absent, params), 1)
    assert_same(state.params, expected.params, 1e-5)
    # It keeps what it kept, here the start.
    start = method.init(params, CLIENTS)
    for new, old in zip(*map(jax.tree.leaves, (state.local, start.local)), strict=True):
        assert_same(*(np.asarray(leaf)[[2, 5]] for leaf in (new, old)))


def spoil_sent(values, private):
    params = values["params"]
    second = jax.tree.map(nothing, params["second"])
    return values | {"params": params | {"second": second}}, private


def spoil_kept(values, private):
    return values, private | {"second": jax.tree.map(nothing, private["second"])}


def nothing(leaf):
    return leaf * jnp.nan


def spoiling(base, spoil):
    """The method whose client of 12 examples is not finite in one leaf."""

    def summarize(key, trained, examples, private):
        found = base.summarize(key, trained, examples, private)
        bad = examples.weights.sum() == max(SIZES)
        return jax.tree.map(lambda x, y: jnp.where(bad, x, y), spoil(*found), found)

    return base._replace(summarize=summarize)


@pytest.mark.parametrize(
    ("base", "spoil", "leaf"),
    [
        ("fedavg", spoil_sent, "params/second/kernel"),
        ("scaffold", spoil_kept, "kept/algorithm/second/kernel"),
    ],
)
def test_the_report_names_the_first_leaf_that_is_not_finite(world, base, spoil, leaf):
    spoiled_client, places = SIZES.index(max(SIZES)), set()
    for _, done in play(federated(spoiling(METHODS[base], spoil), cohort=4), world, 8):
        cohort = done.cohort.tolist()
        expected = {spoiled_client: leaf} if spoiled_client in cohort else {}
        assert done.left_out.by_client(done.cohort) == expected
        assert done.diverged.tolist() == [client == spoiled_client for client in cohort]
        places |= {cohort.index(client) for client in expected}
    assert places - {spoiled_client}


def test_the_padding_of_clients_is_never_read(world):
    federation, _ = world
    # Row 0 pads everybody, and is one client's own.
    indices = np.asarray(federation.indices)
    owner = next(c for c in range(CLIENTS) if 0 in indices[c, : SIZES[c]].tolist())
    [(_, done)] = play(federated(), spoiled(world, [owner]), 1)
    assert done.diverged.tolist() == [client == owner for client in range(CLIENTS)]


@pytest.mark.long
def test_a_round_in_which_everybody_diverges_changes_only_the_number(world):
    federation, params = spoiled(world, range(CLIENTS))
    for name in ("adam", "scaffold"):
        method = federated(name, cohort=3)
        start = method.init(params, CLIENTS)
        [(state, done)] = play(method, (federation, params), 1)
        assert_same(state, start._replace(number=jnp.asarray(1)))
        assert np.isnan(done.loss)
        with_data = {client for client in done.cohort.tolist() if SIZES[client]}
        assert done.left_out.by_client(done.cohort).keys() == with_data


def test_scaffolds_control_of_the_server_stays_the_mean_of_the_clients(world):
    for state, _ in play(federated("scaffold", cohort=3), world, 4):
        mean = jax.tree.map(lambda c: np.mean(c, 0), state.local)
        assert_same(state.algorithm.server, mean, 1e-5)
    assert any(np.any(leaf != 0) for leaf in jax.tree.leaves(state.algorithm.server))


def own(stacked, client):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[client], stacked)


def test_clients_that_sit_a_round_out_keep_their_own_state(world):
    method = federated("scaffold", cohort=3)
    before = method.init(world[1], CLIENTS)
    changed = set()
    for state, done in play(method, world, 6):
        for client in range(CLIENTS):
            old, new = (own(s.local, client) for s in (before, state))
            if client in done.cohort.tolist():
                if SIZES[client]:
                    assert any(map(np.any, jax.tree.leaves(jax.tree.map(np.subtract, new, old))))
                changed.add(client)
            else:
                assert_same(new, old)
        before = state
    assert len(changed) > 3


@pytest.mark.long
def test_what_clients_keep_is_theirs_and_is_carried_from_round_to_round(world):
    # Every client counts the rounds it took part in, and sends nothing of it.
    plain = algorithms.fedavg()

    def summarize(key, trained, examples, private):
        update, _ = plain.summarize(key, trained, examples, ())
        return update, private + 1

    counting = plain._replace(
        summarize=summarize, link=algorithms.Link(init_client=lambda params: jnp.zeros((), int))
    )
    found = play(federated(counting, cohort=3), world, 10)
    taken = np.zeros(CLIENTS, int)
    for state, done in found:
        taken[np.asarray(done.cohort)] += 1
        np.testing.assert_array_equal(state.local, taken)
    expected = play(federated(cohort=3), world, 10)
    assert_same(found[-1][0].params, expected[-1][0].params, 1e-6)


def test_a_servers_optimizer_leaves_frozen_leaves_alone(world):
    mask = {"first": {"kernel": False}, "second": {"kernel": True}}
    model = fj.Model(apply, fj.likelihoods.categorical, mask=mask)
    adamw = optax.adamw(0.1, weight_decay=0.1)
    method = with_server_optimizer(algorithms.fedavg(), adamw)
    [(state, _)] = play(federated(method, model=model), world, 1)
    assert_same(state.params["first"], world[1]["first"], 0)
    assert np.any(state.params["second"]["kernel"] != world[1]["second"]["kernel"])


@pytest.mark.long
def test_the_proximal_term_holds_clients_back(world):
    def moved(mu):
        [(state, _)] = play(federated(algorithms.fedprox(mu)), world, 1)
        change = jax.tree.map(np.subtract, state.params, world[1])
        return sum(np.vdot(leaf, leaf) for leaf in jax.tree.leaves(change))

    assert moved(3.0) < moved(0.3) < moved(0.0)


def test_traffic_counts_bytes(world):
    federation, params = world
    size = 8 * (15 + 20)
    for name, expected in {
        "fedavg": (size, size),
        "fedfish": (size, 2 * size),
        "fednova": (size, size + 2 * 8),  # a number a leaf
        "scaffold": (2 * size, 2 * size),
        "scaffold_adam": (2 * size, 2 * size),
    }.items():
        assert federated(name).traffic(params, federation) == expected


@pytest.mark.slow
def test_the_barrier_of_a_single_client_is_zero(world):
    federation, _ = world
    for state, done in play(federated(cohort=1), world, 4):
        own = fj.clients.select(federation, done.cohort)
        barrier = fj.metrics.client_server_barrier(MODEL, state.params, done.trained.params, own)
        assert_same(tuple(barrier), (0.0, 0.0), 1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cohort": 7}, "cohort is 7, but the federation has 6"),
        ({"cohort": 0}, "cohort is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"clients_per_chunk": 9}, "clients_per_chunk is 9"),
    ],
)
def test_numbers_out_of_range_are_refused(world, change, message):
    with pytest.raises(ValueError, match=message):
        play(federated(**change), world)


def test_bad_input_is_refused_before_the_first_round(world):
    federation, params = world
    method, key = federated("adam"), jax.random.key(0)
    state = method.init(params, CLIENTS)
    run = partial(rounds.run, method, state, federation)
    with pytest.raises(ValueError, match="rounds is 0"):
        run(key=key, rounds=0)
    with pytest.raises(TypeError, match="not a typed key"):
        run(key=0, rounds=1)
    with pytest.raises(TypeError, match=r"server_optimizer is 0\.1"):
        with_server_optimizer(algorithms.fedavg(), 0.1)
    smaller = method.init({"first": params["first"]}, CLIENTS)
    with pytest.raises(ValueError, match=r"state.algorithm has leaves"):
        rounds.run(
            method, state._replace(algorithm=smaller.algorithm), federation, key=key, rounds=1
        )


def test_a_method_of_several_messages_is_no_round():
    method = algorithms.natural_gradient(MODEL)
    how = {"cohort": 1, "optimizer": SGD, "epochs": 1, "batch_size": 1}
    with pytest.raises(TypeError, match=r"sequence of 3; expected one.*to merging.exchange"):
        rounds.federated(MODEL, method, **how)


def test_a_state_of_another_number_of_clients_is_refused(world):
    federation, params = world
    method = federated("scaffold")
    state = method.init(params, CLIENTS + 1)
    with pytest.raises(ValueError, match=r"state.local has leaves .*\[7, .*\[6, "):
        rounds.run(method, state, federation, key=jax.random.key(0), rounds=1)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_params_that_are_not_finite_are_refused(world, value):
    federation, params = world
    kernel = np.array(params["second"]["kernel"])
    kernel[0, 0] = value
    params = params | {"second": {"kernel": jnp.asarray(kernel)}}
    method = federated()
    state = method.init(params, CLIENTS)
    with pytest.raises(ValueError, match="params are not finite"):
        rounds.run(method, state, federation, key=jax.random.key(0), rounds=1)
