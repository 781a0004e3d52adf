"""Calibration by drawn features: what is drawn, what is tuned, and what clients show."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, likelihoods, merging
from fisherjax.algorithms.base import WeightedSum
from fisherjax.algorithms.exchanges._head_sums import head_mean
from fisherjax.algorithms.exchanges.ccvr import _drawn

KEY = jax.random.key(0)


def relu(params, x):
    return jax.nn.relu(x @ params["a"]) @ params["b"] + params["c"]


def linear(params, x):
    return x @ params["b"] + params["c"]


@pytest.fixture
def world():
    """Three classes of unequal shares around means of their own, and clients that hold one each."""
    source = np.random.default_rng(0)
    y = np.repeat([0, 1, 2], [300, 200, 100]).astype(np.int32)
    means = np.array([[2.0, 0, 0, 1], [0, 2, 0, 1], [0, 0, 2, 1]])
    spread = np.array([[0.5, 0.2, 0, 0], [0, 0.5, 0, 0], [0, 0, 0.4, 0.3], [0, 0, 0, 0.2]])
    x = (means[y] + source.normal(size=(600, 4)) @ spread).astype(np.float32)
    params = {
        "a": np.float32(source.normal(size=(4, 6))),
        "b": np.float32(source.normal(size=(6, 3)) / 3),
        "c": np.zeros(3, np.float32),
    }
    return params, x, y, np.split(np.arange(600), [300, 500])


LINEAR = {"b": np.ones((4, 3), np.float32), "c": np.zeros(3, np.float32)}


@partial(jax.jit, static_argnums=2)
def drawn(key, sums, draws):
    return _drawn(key, WeightedSum(sums, jnp.ones(())), draws)


@partial(jax.jit, static_argnums=0)
def mean_of(method, values, weights):
    return head_mean(method.reduce(values, weights))


def sums(apply, params, x, y, partition):
    method = algorithms.ccvr(fj.Model(apply, likelihoods.categorical))
    federation = fj.clients.federation((x, y), partition)
    [message] = merging.messages(method, params, federation, key=KEY)
    return mean_of(method, message.sent.values, federation.weights)


@pytest.mark.long
def test_draws_have_the_classes_shares_means_and_common_covariance(world):
    _, x, y, partition = world
    given = sums(linear, LINEAR, x, y, partition)
    features, labels = jax.device_get(drawn(KEY, given, 200_000))
    assert (features[:, -1] == 1).all()
    centred = np.zeros_like(features[:, :-1])
    for label, share in enumerate([1 / 2, 1 / 3, 1 / 6]):
        own = np.asarray(features[labels == label, :-1])
        assert len(own) / 200_000 == pytest.approx(share, abs=0.005)
        np.testing.assert_allclose(own.mean(0), x[y == label].mean(0), atol=0.02)
        centred[labels == label] = own - own.mean(0)
    within = np.mean([np.outer(d, d) for d in x - np.stack([x[y == c].mean(0) for c in y])], 0)
    np.testing.assert_allclose(centred.T @ centred / 200_000, within, atol=0.01)


@pytest.mark.long
def test_draws_are_clipped_behind_a_relu_only(world):
    params, x, y, partition = world
    behind = sums(relu, params, x, y, partition)
    assert behind.negative == 0
    assert drawn(KEY, behind, 1000)[0].min() == 0
    before = sums(linear, LINEAR, x, y, partition)
    assert before.negative > 0
    assert drawn(KEY, before, 1000)[0].min() < 0


def test_it_makes_a_bad_classifier_good_and_touches_nothing_else(world):
    params, x, y, partition = world
    model = fj.Model(relu, likelihoods.categorical)
    federation = fj.clients.federation((x, y), partition)
    before = fj.metrics.accuracy(model, params, fj.Examples(x, y))
    method = algorithms.ccvr(model)
    merged, _, tuned = merging.exchange(method, params, federation, key=KEY)
    after = fj.metrics.accuracy(model, merged, fj.Examples(x, y))
    assert after > max(0.9, before)
    assert tuned.after < tuned.before
    chex.assert_trees_all_equal(merged["a"], params["a"])
    again, _, _ = merging.exchange(method, params, federation, key=KEY)
    chex.assert_trees_all_equal(again, merged)
    other, _, _ = merging.exchange(method, params, federation, key=jax.random.key(1))
    assert not np.array_equal(other["b"], merged["b"])


def test_the_head_takes_the_steps_of_all_epochs(world):
    params, x, y, partition = world
    federation = fj.clients.federation((x, y), partition)
    by_one = optax.stateless(lambda updates, _: jax.tree.map(jnp.ones_like, updates))

    def steps(epochs):
        model = fj.Model(relu, likelihoods.categorical)
        method = algorithms.ccvr(model, optimizer=by_one, epochs=epochs)
        merged, *_ = merging.exchange(method, params, federation, key=KEY)
        return (merged["b"] - params["b"]).round(3)

    once = steps(1)
    assert np.unique(once).item() >= 1
    np.testing.assert_allclose(steps(3), 3 * once)


def test_it_does_not_depend_on_the_split(world):
    params, x, y, partition = world
    model = fj.Model(relu, likelihoods.categorical)
    found = [
        merging.exchange(
            algorithms.ccvr(model), params, fj.clients.federation((x, y), split), key=KEY
        )[0]
        for split in (partition, [np.arange(600)])
    ]
    # The roots of a matrix of small eigenvalues magnify rounding.
    chex.assert_trees_all_close(*found, atol=2e-2)


def test_an_analytic_head_takes_the_same_upload(world):
    params, x, y, partition = world
    model = fj.Model(relu, likelihoods.categorical)
    federation = fj.clients.federation((x, y), partition)
    head, tuned = algorithms.analytic_head(model), algorithms.ccvr(model)
    [message] = merging.messages(head, params, federation, key=KEY)
    merged, _, _ = merging.merge(tuned, params, message.sent, federation.weights, key=KEY)
    chex.assert_trees_all_equal(merged, merging.exchange(tuned, params, federation, key=KEY)[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"draws": 0}, "draws is 0"),
        ({"epochs": 0}, "epochs is 0"),
        ({"optimizer": 3}, "optimizer is"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_examples": 0}, "max_examples is 0"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        algorithms.ccvr(fj.Model(linear, likelihoods.categorical), **options)


def test_another_likelihood_is_refused():
    with pytest.raises(ValueError, match="categorical"):
        algorithms.ccvr(fj.Model(linear, likelihoods.gaussian))


@pytest.mark.parametrize("link", [jax.nn.softmax, jax.nn.tanh, lambda z: z / 2, lambda z: -z])
def test_outputs_that_are_not_those_of_the_layer_are_refused(world, link):
    _, x, y, partition = world
    with pytest.raises(ValueError, match="The last layer of this network is not a dense layer"):
        sums(lambda p, x: link(linear(p, x)), LINEAR, x, y, partition)
