"""Mapping over clients does not depend on the chunk, and waits as long as the arithmetic says."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

import fisherjax as fj
from fisherjax import devices, parallel


@pytest.mark.parametrize("sizes", [None, [3, 0, 1, 5, 3]])
@pytest.mark.parametrize(
    "chunk", [1, 2, 5, *(pytest.param(other, marks=pytest.mark.slow) for other in (3, 4))]
)
def test_the_chunk_changes_nothing(key, chunk, sizes):
    x = np.arange(10, dtype=np.float32).reshape(5, 2)
    stacked = {"x": jnp.asarray(x), "key": jax.random.split(key, 5)}

    def function(client):
        return {"y": client["x"].sum() + jax.random.normal(client["key"])}

    alone = jax.jit(function)
    expected = [alone({"x": x[i], "key": stacked["key"][i]})["y"] for i in range(5)]
    sizes = None if sizes is None else jnp.array(sizes)
    mapped = parallel.map_clients(function, stacked, sizes=sizes, clients_per_chunk=chunk)
    np.testing.assert_allclose(mapped["y"], expected, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 5, 7])
def test_idle_are_the_steps_that_a_chunk_waits_for_its_largest_client(chunk):
    """Counted by running: each client adds up its own steps, each chunk those that it computed."""
    steps = np.random.default_rng(0).integers(0, 20, 7)
    rounds = []

    def function(client):
        jax.debug.callback(rounds.append, client, ordered=False)
        return client

    parallel.map_clients(
        function, jnp.asarray(steps), sizes=jnp.asarray(steps), clients_per_chunk=chunk
    )
    jax.effects_barrier()
    # Whatever their order, lanes of one chunk are of neighbouring sizes: cut the sorted calls.
    computed = np.sort(np.array(rounds)).reshape(-1, len(rounds) // -(-7 // chunk))
    expected = 1 - steps.sum() / (computed.max(1) * computed.shape[1]).sum()
    assert parallel.idle_share(steps, chunk) == pytest.approx(expected)


def test_without_steps_nobody_waits():
    assert parallel.idle_share([0, 0, 0], 2) == 0


def test_results_of_a_chunk_are_written_in_place():
    """The stacked results exist once: nothing of their size is needed to bring them in order."""

    def grow(size):
        return jnp.full(10_000, size)

    def run(sizes):
        return parallel.map_clients(grow, sizes, sizes=sizes, clients_per_chunk=2)

    memory = jax.jit(run).lower(jnp.arange(64.0)).compile().memory_analysis()
    assert memory.output_size_in_bytes >= 64 * 40_000
    assert memory.temp_size_in_bytes < 10 * 40_000


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("number", [1, 4, 7])
def test_work_is_divided_nearly_as_well_as_it_can_be(number, num_devices):
    """Within the bound of Graham 1969 for any steps; found by trying every way."""
    for seed in range(5):
        steps = np.random.default_rng(seed).integers(1, 50, number)
        ways = itertools.product(range(num_devices), repeat=number)
        best = min(np.bincount(way, steps, num_devices).max() for way in ways)
        idle = parallel.idle_share(steps, 1, num_devices)
        longest = steps.sum() / (num_devices * (1 - idle))
        assert best - 1e-3 <= longest <= (4 / 3 - 1 / (3 * num_devices)) * best + 1e-3


def test_work_is_divided_in_float64_too(x64):
    assert parallel.idle_share([3, 2, 1], num_devices=2) == 0


def test_results_come_in_the_clients_order_where_there_is_no_mesh():
    places = jnp.array([2, 0, 1])
    ordered = parallel.in_order(parallel.Spread(jnp.array([5.0, 6.0, 7.0]), places), mesh=None)
    assert ordered.tolist() == [7.0, 5.0, 6.0]


@pytest.mark.parametrize("words", [(), ("its own reason",)])
def test_what_jax_cannot_divide_is_said_in_words(words):
    """JAX refuses mapped convolutions inside `shard_map` by an error without a message."""

    def refused(x):
        raise NotImplementedError(*words)

    one = devices.client_mesh(jax.devices()[:1])
    expected = words[0] if words else "on each of 1 devices: .* Compute on one"
    with pytest.raises(NotImplementedError, match=expected):
        parallel.spread_clients(refused, jnp.ones(1), mesh=one)


@pytest.mark.parametrize("step", ["training", "summaries"])
def test_gradients_of_other_devices_are_not_added_up_over_clients(step, key):
    """Inside `jax.shard_map`, JAX adds up gradients of what all devices have in common."""
    model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
    clients = fj.clients.federation((np.ones((4, 3)), np.ones((4, 2))), [[0, 1], [2, 3]])
    how = {"epochs": 1, "batch_size": 2, "optimizer": optax.sgd(0.1), "key": key}
    start = jnp.ones((3, 2))

    def train(start, clients):
        return fj.training.train(model, start, clients, **how)

    def summarize(trained, clients):
        return fj.merging.summarize(fj.algorithms.fedfisher(model), trained, clients, key=key)

    run, of = (train, start) if step == "training" else (summarize, train(start, clients))
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("d")), "out_specs": PartitionSpec()}
    with pytest.raises(ValueError, match=r"axis 'd'.*add up.*check_vma=False"):
        jax.eval_shape(jax.shard_map(run, mesh=mesh, **specs), of, clients)
    jax.eval_shape(jax.shard_map(run, mesh=mesh, **specs, check_vma=False), of, clients)
