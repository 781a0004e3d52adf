"""The server's own optimiser, around any way to merge."""

import dataclasses

import chex
import jax
import numpy as np
import optax
import pytest

from fisherjax import algorithms, merging

FEDAVG = algorithms.fedavg()
WITH = algorithms.with_server_optimizer
DESCENT = optax.sgd(1.0)
BASE = optax.sgd(0.1)  # one, as programs are known by it


def sent(models):
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    return algorithms.Update({"params": stacked}, FEDAVG.kind)


@pytest.mark.parametrize("name", ["fedavg", "fednova", "scaffold", "fedfisher_kfac"])
def test_descent_at_rate_one_is_the_algorithm_itself(regression, draw, name):
    method, start = algorithms.make(name, regression.model), draw(0)
    federation = regression.federation
    wrapped = WITH(method, DESCENT)
    assert wrapped.kind == method.kind
    trained = regression.train(start, wrapped.optimizer(BASE))
    updates = merging.summarize(wrapped, trained, federation, key=jax.random.key(0))
    merged, kept, info = merging.merge(wrapped, start, updates, federation.weights)
    expected, state, same_info = merging.merge(method, start, updates, federation.weights)
    chex.assert_trees_all_close(merged, expected, rtol=1e-12, atol=1e-12)
    chex.assert_trees_all_equal(kept.algorithm, state)
    chex.assert_trees_all_equal(info, same_info)


def test_adam_is_that_of_the_paper_from_merge_to_merge(x64, draw):
    """FedOpt's pseudo-gradient through Adam, written out; the state goes on."""
    rate, b1, b2, eps = 0.1, 0.9, 0.99, 1e-3
    method = WITH(FEDAVG, optax.adam(rate, b1, b2, eps))
    params, state = draw(0), None
    w = {name: np.asarray(leaf) for name, leaf in params.items()}
    m, v = ({name: np.zeros_like(leaf) for name, leaf in w.items()} for _ in range(2))
    for step in (1, 2, 3):
        models = [draw(10 * step + client) for client in range(2)]
        params, state, _ = merging.merge(method, params, sent(models), [1, 3], state=state)
        for name in w:
            merged = 0.25 * np.asarray(models[0][name]) + 0.75 * np.asarray(models[1][name])
            g = w[name] - merged
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g**2
            m_hat, v_hat = m[name] / (1 - b1**step), v[name] / (1 - b2**step)
            w[name] = w[name] - rate * m_hat / (np.sqrt(v_hat) + eps)
        chex.assert_trees_all_close(params, w, rtol=1e-11, atol=1e-12)


def test_frozen_leaves_stay_and_statistics_take_the_mean(draw):
    adam, start, updates = optax.adamw(0.1, weight_decay=0.1), draw(0), sent([draw(1), draw(2)])
    mean, *_ = merging.merge(FEDAVG, start, updates)
    whole, *_ = merging.merge(WITH(FEDAVG, adam), start, updates)
    params = updates.values["params"]
    alone = dataclasses.replace(updates, values={"params": {"w": params["w"], "b": None}})
    for told, expected in (
        ({"frozen": ("b",)}, start["b"]),
        ({"statistics": {"b": params["b"]}}, mean["b"]),
    ):
        found, *_ = merging.merge(WITH(FEDAVG, adam), start, dataclasses.replace(alone, **told))
        np.testing.assert_allclose(found["b"], expected, rtol=1e-6)
        np.testing.assert_allclose(found["w"], whole["w"], rtol=1e-5)
    assert np.abs(np.subtract(whole["b"], mean["b"])).max() > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_structure_and_dtype_are_those_of_params(draw, dtype):
    given = jax.device_get((draw(0), [draw(1)]))
    start, models = jax.tree.map(lambda leaf: leaf.astype(dtype), given)
    merged, *_ = merging.merge(WITH(FEDAVG, optax.adam(0.1)), start, sent(models))
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, start)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_small_changes_of_half_precision_are_squared_in_float32(dtype):
    """In float16 the square of 1e-4 is zero, and so is Adam's epsilon."""
    start, change = np.zeros(2), np.array([1e-4, -1e-3])
    found, expected = (
        merging.merge(WITH(FEDAVG, optax.adam(0.1)), start.astype(x), sent([change.astype(x)]))[0]
        for x in (dtype, "float32")
    )
    np.testing.assert_allclose(np.float32(found), expected, rtol=1e-2)


def test_equal_arguments_give_the_same_object_and_bad_ones_are_refused():
    assert WITH(FEDAVG, DESCENT) is WITH(FEDAVG, optimizer=DESCENT)
    with pytest.raises(TypeError, match=r"server_optimizer is 0\.1"):
        WITH(FEDAVG, 0.1)
