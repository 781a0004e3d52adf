"""Federated averaging of everything that params hold, running statistics among them."""

import dataclasses

import chex
import flax.linen
import jax
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, training


class Normalised(flax.linen.Module):
    """Batch normalisation in front of a dense layer."""

    @flax.linen.compact
    def __call__(self, x, train=False):
        x = flax.linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return flax.linen.Dense(2)(x)


@pytest.mark.long
def test_running_statistics_are_trained_by_nobody_and_averaged_like_weights(key):
    source = np.random.default_rng(0)
    inputs = source.normal(size=(30, 3)).astype(np.float32) + np.arange(30)[:, None] / 10
    data = inputs, source.integers(0, 2, 30)
    parts = [np.arange(10), np.arange(10, 30)]
    network = Normalised()
    variables = network.init(key, data[0][:1])

    def apply_train(variables, x, key, weights):
        z, new = network.apply(variables, x, train=True, mutable=["batch_stats"])
        return z, variables | new

    mask = {
        "params": jax.tree.map(lambda _: True, variables["params"]),
        "batch_stats": jax.tree.map(lambda _: False, variables["batch_stats"]),
    }
    model = fj.Model(network.apply, fj.likelihoods.categorical, apply_train, mask)
    federation, fedavg = clients.federation(data, parts), algorithms.fedavg()
    trained = training.train(
        model,
        variables,
        federation,
        key=key,
        optimizer=fedavg.optimizer(optax.sgd(0.1)),
        epochs=3,
        batch_size=30,
    )
    means = trained.statistics["batch_stats"]["BatchNorm_0"]["mean"]
    kept = 1 - 0.9**3  # of the constant mean of the only batch, after three steps
    for own, rows in zip(means, parts, strict=True):
        np.testing.assert_allclose(own, kept * inputs[rows].mean(0), rtol=1e-4, atol=1e-4)
    updates = merging.summarize(fedavg, trained, federation, key=key)
    # A mean of variances is not the mixture's; means are.
    place = "batch_stats/BatchNorm_0"
    with pytest.raises(ValueError, match=f"'{place}/var' stands beside '{place}/mean'"):
        merging.merge(fedavg, variables, updates, [10, 20])
    told = {"statistics": {f"{place}/mean": means}, "frozen": (f"{place}/var",)}
    updates = dataclasses.replace(updates, **told)
    merged, state, info = merging.merge(fedavg, variables, updates, [10, 20])
    assert state == info == ()
    expected = jax.tree.map(lambda x: (x[0] + 2 * x[1]) / 3, trained.params["params"])
    chex.assert_trees_all_equal_shapes_and_dtypes(merged, variables)
    chex.assert_trees_all_close(merged["params"], expected, atol=1e-6)
    stays = variables["batch_stats"]["BatchNorm_0"]["var"]
    np.testing.assert_array_equal(merged["batch_stats"]["BatchNorm_0"]["var"], stays)
    mean = merged["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, kept * inputs.mean(0), rtol=1e-4, atol=1e-4)
