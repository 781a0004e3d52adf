"""Clients own what the partition says, and mapping over them does not depend on the chunk."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import clients, tree

ROWS = [np.array([3, 1, 0]), np.array([], int), np.array([8]), np.array([4, 2, 5, 7, 6])]


@pytest.fixture
def data():
    inputs = np.arange(9 * 4, dtype=np.uint8).reshape(9, 2, 2, 1)
    return inputs, np.arange(9) % 3


@pytest.fixture
def federation(data):
    return clients.federation(data, ROWS)


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
    jax.tree.map(np.testing.assert_array_equal, clients.federation(named, ROWS), federation)


def test_a_whole_data_set_is_one_clients_view(data):
    view = clients.examples(*data)
    alone = clients.view(clients.federation(data, [np.arange(9)]), 0)
    jax.tree.map(np.testing.assert_array_equal, view, alone)


def summary(key, params, examples, global_params):
    start = 0 if global_params is None else global_params["w"].sum()
    share = (examples.weights * examples.targets[examples.indices]).sum()
    return {"draw": jax.random.normal(key), "mean": params["w"].mean() + start + share}


AGGREGATOR = types.SimpleNamespace(summarize=summary)


@pytest.fixture
def models():
    return [{"w": jnp.full(2, float(client))} for client in range(len(ROWS))]


@pytest.mark.parametrize("chunk", [1, 2, 4, None])
def test_updates_are_each_clients_own_summary(federation, models, key, chunk):
    start = {"w": jnp.ones(2)}
    settings = {"key": key, "global_params": start, "clients_per_chunk": chunk}
    updates = clients.summarize(AGGREGATOR, models, federation, **settings)
    assert len(np.unique(updates["draw"])) == len(ROWS)
    for client, params in enumerate(models):
        client_key = jax.random.fold_in(jax.random.fold_in(key, clients.SUMMARIZE), client)
        alone = summary(client_key, params, clients.view(federation, client), start)
        for name, value in alone.items():
            np.testing.assert_allclose(updates[name][client], value, rtol=1e-6)


def test_lists_stacks_and_local_models_give_the_same_updates(federation, models, key):
    stacked = tree.stack(models)
    local = clients.LocalModels(stacked, jnp.zeros((4, 1)), jnp.zeros(4, int))
    first, *others = (
        clients.summarize(AGGREGATOR, given, federation, key=key)
        for given in (models, stacked, local)
    )
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_a_second_call_compiles_nothing(federation, models, key, compilations):
    other_key = jax.random.fold_in(key, 1)
    clients.summarize(AGGREGATOR, models, federation, key=key)
    with compilations() as count:
        clients.summarize(AGGREGATOR, models, federation, key=other_key)
    assert count() == 0


def test_spreading_over_no_devices_or_unevenly_is_refused(federation):
    with pytest.raises(ValueError, match="no devices"):
        clients.shard(federation, [])
    three = jax.devices()[:1] * 3
    with pytest.raises(ValueError, match=r"4 clients .* evenly over 3 devices. Use 1 or 2"):
        clients.shard(federation, three)


def test_models_that_are_not_as_many_as_the_clients_are_refused(federation, models, key):
    with pytest.raises(ValueError, match=r"'w'.*\(3, 2\).*4 clients"):
        clients.summarize(AGGREGATOR, models[:3], federation, key=key)


def test_integer_models_are_refused(federation, models, key):
    models = jax.tree.map(lambda x: x.astype(int), models)
    with pytest.raises(TypeError, match="'w'"):
        clients.summarize(AGGREGATOR, models, federation, key=key)


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
        clients.examples(data[0], np.array(1))


@pytest.mark.parametrize("chunk", [0, -1, 1.5, "all", 5])
def test_a_chunk_that_is_no_number_of_clients_is_refused(federation, models, key, chunk):
    with pytest.raises(ValueError, match=r"clients_per_chunk is .* to 4 \(all at once\)"):
        clients.summarize(AGGREGATOR, models, federation, key=key, clients_per_chunk=chunk)
