"""Clients own what the partition says, and mapping over them does not depend on the chunk."""

import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, training, tree

ROWS = [np.array([3, 1, 0]), np.array([], int), np.array([8]), np.array([4, 2, 5, 7, 6])]


@pytest.fixture
def data():
    inputs = np.arange(9 * 4, dtype=np.uint8).reshape(9, 2, 2, 1)
    return inputs, np.arange(9) % 3


@pytest.fixture
def federation(data):
    return clients.federation(data, ROWS)


def counted(examples):
    rows = jnp.arange(len(examples.inputs)) if examples.indices is None else examples.indices
    weights = np.ones(len(rows)) if examples.weights is None else np.asarray(examples.weights)
    return sorted(np.asarray(rows)[weights > 0].tolist())


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("client", range(4))
def test_what_is_held_out_and_what_is_not_are_all_of_a_client(federation, client, every):
    own = clients.view(federation, client)
    others, held = clients.hold_out(own, every)
    assert sorted(counted(others) + counted(held)) == counted(own)
    assert len(counted(held)) == len(counted(own)) // every
    # It depends on nothing but places: again, the same.
    assert counted(clients.hold_out(own, every)[1]) == counted(held)


# Who owns what.


def test_every_client_views_its_own_examples(data, federation):
    assert federation.num_clients == len(ROWS)
    for client, rows in enumerate(ROWS):
        view = clients.view(federation, client)
        own = np.asarray(view.indices)[np.asarray(view.weights) == 1]
        np.testing.assert_array_equal(own, rows)
        np.testing.assert_array_equal(view.inputs[own], data[0][rows])
        assert view.weights.sum() == len(rows)


def test_weights_are_the_shares_of_the_examples(x64, data):
    weights = clients.federation(data, ROWS).weights
    np.testing.assert_allclose(weights, [3 / 9, 0, 1 / 9, 5 / 9], rtol=1e-15)


def test_images_stay_bytes_and_only_integers_are_padded(data, federation):
    assert federation.inputs.dtype == np.uint8
    assert federation.inputs.shape == data[0].shape
    assert federation.indices.shape == (4, 5)


def test_a_data_set_and_a_pair_give_the_same_federation(data, federation):
    named = types.SimpleNamespace(inputs=data[0], targets=data[1])
    for given in (named, fj.Examples(*data), fj.Examples(*map(jnp.asarray, data))):
        chex.assert_trees_all_equal(clients.federation(given, ROWS), federation)


def test_a_whole_data_set_is_one_clients_view(data):
    view = fj.Examples(*map(jnp.asarray, data))
    alone = clients.view(clients.federation(data, [np.arange(9)]), 0)
    (number, batch), (same_number, same) = (clients.minibatches(e, 4) for e in (view, alone))
    assert number == same_number == 3
    for step in range(3):
        chex.assert_trees_all_equal(batch(step), same(step))


def test_selected_clients_keep_their_rows_and_their_ids(federation):
    some = clients.select(federation, [3, 0])
    assert some.inputs is federation.inputs
    np.testing.assert_array_equal(clients.ids(some), [3, 0])
    for place, client in enumerate((3, 0)):
        chex.assert_trees_all_equal(clients.view(some, place), clients.view(federation, client))
    np.testing.assert_array_equal(clients.ids(clients.select(some, [1])), [0])
    np.testing.assert_array_equal(clients.ids(some._replace(ids=None)), [0, 1])
    traced = jax.jit(clients.select)(federation, jnp.array([3, 0]))
    chex.assert_trees_all_equal(traced, some)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ([], r"clients are \[\]; expected at least one of 0 to 3"),
        ([4], r"clients are \[4\]; expected at least one of 0 to 3"),
        ([-1, 0], r"clients are \[-1, 0\]"),
        ([2, 2], "each only once"),
        ([[0]], "at least one of"),
    ],
)
def test_a_selection_that_does_not_fit_is_refused(federation, chosen, words):
    with pytest.raises(ValueError, match=words):
        clients.select(federation, chosen)


# Minibatches.


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5, 9])
def test_minibatches_are_the_own_examples_in_order_and_nobody_elses(data, federation, batch_size):
    for client, rows in enumerate(ROWS):
        number, batch = clients.minibatches(clients.view(federation, client), batch_size)
        assert number == -(-len(rows) // batch_size) == clients.num_batches(len(rows), batch_size)
        found = []
        for step in range(int(number)):
            inputs, targets, weights = batch(step)
            assert len(inputs) == min(batch_size, 5)
            counts = np.asarray(weights) == 1
            assert set(weights[~counts].tolist()) <= {0.0}
            found.append((inputs[counts], targets[counts]))
            own = {data[0][row].tobytes() for row in rows}
            assert {np.asarray(x).tobytes() for x in inputs} <= own
        if found:
            inputs, targets = (np.concatenate(column) for column in zip(*found, strict=True))
            np.testing.assert_array_equal(inputs, data[0][rows])
            np.testing.assert_array_equal(targets, data[1][rows])


# What they send.


def summary(key, trained, examples, private):
    start = 0 if trained.start is None else trained.start["w"].sum()
    share = (examples.weights * examples.targets[examples.indices]).sum()
    mean = trained.params["w"].mean() + start + share
    return {"draw": jax.random.normal(key), "mean": mean}, private


DRAWING = algorithms.Algorithm(summary, aggregate=None, kind="draws")


@pytest.fixture
def models():
    return [{"w": jnp.full(2, float(client))} for client in range(len(ROWS))]


def summarize(models, federation, key, **options):
    return merging.summarize(DRAWING, models, federation, key=key, **options)


@pytest.mark.parametrize("chunk", [1, 2, 4, None])
@pytest.mark.parametrize(
    ("start", "own"),
    [
        (None, lambda start, client: start),
        ({"w": np.ones(2, np.float32)}, lambda start, client: start),
        (
            {"w": np.ones((4, 2), np.float32) * np.arange(4)[:, None]},
            lambda start, client: {"w": start["w"][client]},
        ),
    ],
    ids=["None", "common", "own"],
)
def test_updates_are_each_clients_own_summary(federation, models, key, chunk, start, own):
    trained = training.Trained(tree.stack(models), start)
    updates = summarize(trained, federation, key, clients_per_chunk=chunk)
    assert updates.kind == "draws"
    assert len(np.unique(updates.values["draw"])) == len(ROWS)
    for client, params in enumerate(models):
        client_key = jax.random.fold_in(jax.random.fold_in(key, clients.SUMMARIZE), client)
        alone = training.Trained(params, own(start, client))
        values, _ = summary(client_key, alone, clients.view(federation, client), ())
        for name, value in values.items():
            np.testing.assert_allclose(updates.values[name][client], value, rtol=1e-6)


def test_a_selected_client_sends_what_it_sends_among_the_others(federation, models, key):
    everybody = summarize(models, federation, key)
    some = summarize([models[2], models[0]], clients.select(federation, [2, 0]), key)
    chosen = jax.tree.map(lambda leaf: leaf[np.array([2, 0])], everybody)
    chex.assert_trees_all_equal(some, chosen)


def test_lists_stacks_and_trained_models_give_the_same_updates(federation, models, key):
    stacked = tree.stack(models)
    local = training.Trained(stacked, None, jnp.zeros(4, int), jnp.zeros((4, 1)))
    first, *others = (
        summarize(given, federation, key)
        for given in (models, tuple(models), training.Trained(stacked), local)
    )
    for other in others:
        chex.assert_trees_all_equal(first, other)


def test_a_second_call_compiles_nothing(federation, models, key, compilations):
    other_key = jax.random.fold_in(key, 1)
    summarize(models, federation, key)
    with compilations() as count:
        summarize(models, federation, other_key)
    assert count() == 0


FLAT = fj.Model(lambda w, x: x.reshape(len(x), -1) / 36 @ w["w"], fj.likelihoods.categorical)
ALIKE = {
    "kfac": [
        algorithms.fedfisher(FLAT),
        algorithms.fedfisher(FLAT, damping=0.1, centre="start"),
        algorithms.fedfisher_sequential(FLAT),
        algorithms.fedfisher_sketched(FLAT, terms=2),
    ],
    "diagonal": [
        algorithms.fisher_merge(FLAT),
        algorithms.fedfisher(FLAT, fisher=fj.fisher.diagonal, damping=3.0),
    ],
    "empirical": [
        algorithms.fedlpa(FLAT),
        algorithms.fedlpa(FLAT, damping=0.5, solver=algorithms.expectation_approximation()),
    ],
    "grams": [algorithms.regmean(FLAT), algorithms.regmean(FLAT, shrink=0.5, centre="sum")],
    "squares": [algorithms.fedfish(FLAT), algorithms.fedfish(FLAT, damping=1.0)],
    "params": [algorithms.fedavg(), algorithms.fedprox(), algorithms.task_arithmetic(scaling=0.3)],
    "changes": [algorithms.ties(), algorithms.ties(scaling=0.5)],
}
"""Methods that differ in the server's half only."""


@pytest.mark.parametrize("name", ALIKE)
def test_methods_that_send_the_same_share_a_program(federation, key, compilations, name):
    models = [{"w": jnp.full((4, 3), client / 10)} for client in range(len(ROWS))]
    trained = training.Trained(tree.stack(models), models[0])
    first, *others = ALIKE[name]
    sent = merging.summarize(first, trained, federation, key=key)
    with compilations() as count:
        found = [merging.summarize(own, trained, federation, key=key) for own in others]
    assert count() == 0
    for own, update in zip(others, found, strict=True):
        chex.assert_trees_all_equal(update, sent)
        assert (update.kind, own.kind) == (sent.kind, first.kind)


# What is refused.


def test_spreading_over_no_devices_or_one_twice_is_refused(federation):
    with pytest.raises(ValueError, match="no devices"):
        clients.shard(federation, [])
    with pytest.raises(ValueError, match="twice"):
        clients.shard(federation, jax.devices()[:1] * 2)


def test_models_that_are_not_as_many_as_the_clients_are_refused(federation, models, key):
    with pytest.raises(ValueError, match=r"'w'.*\(3, 2\).*4 clients"):
        summarize(models[:3], federation, key)


def test_integer_models_are_refused(federation, models, key):
    models = jax.tree.map(lambda x: x.astype(int), models)
    with pytest.raises(TypeError, match="'w'"):
        summarize(models, federation, key)


def test_models_algorithms_federations_and_keys_that_are_none_are_refused(federation, models, key):
    with pytest.raises(TypeError, match="trained is a dict; expected what"):
        summarize(tree.stack(models), federation, key)
    with pytest.raises(TypeError, match="federation is a tuple"):
        summarize(models, (1, 2), key)
    with pytest.raises(TypeError, match="algorithm is a function"):
        merging.summarize(summary, models, federation, key=key)
    with pytest.raises(TypeError, match="not a typed key"):
        summarize(models, federation, jax.random.PRNGKey(0))


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([np.array([0, 9])], ValueError, "client 0 run from 0 to 9; expected 0 to 8"),
        ([np.array([0]), np.array([-1])], ValueError, "client 1 run from -1"),
        ([np.array([0.0])], TypeError, "dtype float64; expected integers"),
        ([np.ones(9, bool)], TypeError, "flatnonzero"),
        ([np.array([[0]])], ValueError, "one dimension"),
        ([np.array([], int)], ValueError, "no example to any of its 1 clients"),
        ([], ValueError, "no example to any of its 0 clients"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(data, rows, error, message):
    with pytest.raises(error, match=message):
        clients.federation(data, rows)


def test_inputs_and_targets_of_different_lengths_are_refused(data):
    with pytest.raises(ValueError, match=r"\(9, 2, 2, 1\) and targets \(8,\)"):
        clients.federation((data[0], data[1][:8]), ROWS)
    with pytest.raises(ValueError, match="one row for each example"):
        clients.federation((data[0], np.array(1)), ROWS)


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "all", 5])
def test_a_chunk_that_is_no_number_of_clients_is_refused(federation, models, key, chunk):
    with pytest.raises(ValueError, match=r"clients_per_chunk is .* to 4 \(all at once\)"):
        summarize(models, federation, key, clients_per_chunk=chunk)
