"""Metrics are counts of right answers, whatever the minibatch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import metrics


def apply(params, x):
    return jnp.tanh(x @ params["w"])


@pytest.fixture(scope="module")
def world():
    source = np.random.default_rng(0)
    models = {"w": source.normal(size=(3, 4, 5)).astype(np.float32)}
    return models, source.normal(size=(17, 4)).astype(np.float32), source.integers(0, 5, 17)


def by_hand(outputs, y):
    return float(np.mean(np.argmax(outputs, -1) == y))


@pytest.mark.parametrize("batch_size", [1, 5, 17, 500])
def test_logits_are_those_of_the_network_for_any_minibatch(world, batch_size):
    models, x, _ = world
    params = {"w": models["w"][0]}
    outputs = metrics.logits(apply, params, x, batch_size=batch_size)
    np.testing.assert_allclose(outputs, np.tanh(x @ params["w"]), atol=1e-5)


def test_accuracies_are_shares_of_right_answers(world):
    models, x, y = world
    outputs = [np.tanh(x @ w) for w in models["w"]]
    for w, own in zip(models["w"], outputs, strict=True):
        assert metrics.accuracy(apply, {"w": w}, x, y, batch_size=5) == pytest.approx(
            by_hand(own, y)
        )
    local = metrics.local_accuracies(apply, models, x, y, batch_size=5)
    np.testing.assert_allclose(local, [by_hand(own, y) for own in outputs], rtol=1e-6)
    weights = jnp.array([0.5, 0.2, 0.3])
    ensemble = metrics.ensemble_accuracy(apply, models, weights, x, y, batch_size=5)
    mean = sum(p * own for p, own in zip(np.asarray(weights), outputs, strict=True))
    assert ensemble == pytest.approx(by_hand(mean, y))


def test_an_ensemble_of_one_model_is_that_model(world):
    models, x, y = world
    for client, weights in enumerate(np.eye(3)):
        single = metrics.accuracy(apply, {"w": models["w"][client]}, x, y)
        assert metrics.ensemble_accuracy(apply, models, weights, x, y) == single


def test_positions_of_a_sequence_all_count():
    def copy(params, x):
        return x * params

    x = jax.nn.one_hot(jnp.array([[0, 1], [2, 2]]), 3)
    assert metrics.accuracy(copy, jnp.ones(()), x, jnp.array([[0, 1], [2, 0]])) == 0.75


def test_second_calls_compile_nothing(world, compilations):
    models, x, y = world
    one, weights = {"w": models["w"][0]}, jnp.ones(3) / 3
    others = {"w": models["w"][::-1].copy()}

    def everything(one, models):
        metrics.accuracy(apply, one, x, y)
        metrics.local_accuracies(apply, models, x, y)
        metrics.ensemble_accuracy(apply, models, weights, x, y)

    everything(one, models)
    with compilations() as count:
        everything({"w": models["w"][1]}, others)
    assert count() == 0


BAD = {
    "column of targets": (
        dict(targets=np.zeros((17, 1), int)),
        r"\(17, 1\) and the outputs \(17, 5\)",
    ),
    "one-hot targets": (dict(targets=np.zeros((17, 5))), "one class label"),
    "number of targets": (dict(targets=np.zeros(16, int)), r"\(16,\)"),
    "no inputs": (dict(inputs=np.ones((0, 4)), targets=np.zeros(0, int)), "no inputs"),
    "batch size": (dict(batch_size=0), "batch_size is 0"),
}


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_refused(world, fault):
    models, x, y = world
    change, words = BAD[fault]
    arguments = {"inputs": x, "targets": y} | change
    with pytest.raises(ValueError, match=words):
        metrics.accuracy(apply, {"w": models["w"][0]}, **arguments)
    with pytest.raises(ValueError, match=words):
        metrics.local_accuracies(apply, models, **arguments)


def test_an_ensemble_needs_one_weight_a_model(world):
    models, x, y = world
    with pytest.raises(ValueError, match=r"weights has shape \(2,\); expected \(3,\)"):
        metrics.ensemble_accuracy(apply, models, np.ones(2), x, y)
