"""Federated averaging of everything that params hold, running statistics among them."""

import flax.linen
import jax
import numpy as np
import optax

from fisherjax import aggregation, clients, likelihoods, training


class Normalised(flax.linen.Module):
    """Batch normalisation in front of a dense layer."""

    @flax.linen.compact
    def __call__(self, x, train=False):
        x = flax.linen.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return flax.linen.Dense(2)(x)


def test_running_statistics_are_trained_by_nobody_and_averaged_like_weights(key):
    source = np.random.default_rng(0)
    inputs = source.normal(size=(30, 3)).astype(np.float32) + np.arange(30)[:, None] / 10
    data = inputs, source.integers(0, 2, 30)
    parts = [np.arange(10), np.arange(10, 30)]
    model = Normalised()
    variables = model.init(key, data[0][:1])

    def apply_train(variables, x, key):
        z, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
        return z, variables | new

    models = training.train(
        model.apply,
        likelihoods.categorical,
        variables,
        clients.federation(data, parts),
        key=key,
        optimizer=optax.sgd(0.1),
        epochs=3,
        batch_size=30,
        mask={
            "params": jax.tree.map(lambda _: True, variables["params"]),
            "batch_stats": jax.tree.map(lambda _: False, variables["batch_stats"]),
        },
        apply_train=apply_train,
    )
    means = models.params["batch_stats"]["BatchNorm_0"]["mean"]
    kept = 1 - 0.9**3  # of the constant mean of the only batch, after three steps
    for own, rows in zip(means, parts, strict=True):
        np.testing.assert_allclose(own, kept * inputs[rows].mean(0), rtol=1e-4, atol=1e-4)
    merged, _ = aggregation.merge(
        aggregation.fedavg(), variables, {"params": models.params}, [10, 20]
    )
    expected = jax.tree.map(lambda x: (x[0] + 2 * x[1]) / 3, models.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), merged, expected)
    mean = merged["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, kept * inputs.mean(0), rtol=1e-4, atol=1e-4)
