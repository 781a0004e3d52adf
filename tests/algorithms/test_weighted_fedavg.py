"""A model for each client, the mean of the models of clients like it."""

import chex
import jax
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, rounds, training
from fisherjax.algorithms import keep_local, weighted_fedavg

SIZES = (7, 1, 0, 9, 5)


def apply(params, x):
    hidden = jax.nn.relu(x @ params["body"]["kernel"] + params["body"]["bias"])
    return hidden @ params["head"]["kernel"] + params["head"]["bias"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)
HOW = {"optimizer": optax.sgd(0.1), "epochs": 2, "batch_size": 3}


@pytest.fixture
def world(x64):
    """Five clients of three classes, one without examples, one with a class of its own."""
    source = np.random.default_rng(0)
    x, y = source.normal(size=(22, 4)), source.integers(0, 2, 22)
    y[-5:] = 2  # nobody but the last has it
    federation = clients.federation((x, y), np.split(np.arange(22), np.cumsum(SIZES)[:-1]))
    shapes = {"kernel": (4, 6), "bias": (6,)}, {"kernel": (6, 3), "bias": (3,)}
    body, head = ({name: source.normal(size=shape) for name, shape in of.items()} for of in shapes)
    return federation, {"body": body, "head": head}


def merged(federation, start, **options):
    trained = training.train(MODEL, start, federation, key=jax.random.key(0), **HOW)
    method = weighted_fedavg(MODEL, **options)
    updates = merging.summarize(method, trained, federation, key=jax.random.key(0))
    found = merging.merge(method, start, updates, federation.weights)
    # On the host: each eager operation on another place or shape would be another program.
    return jax.device_get(trained), updates, *jax.device_get(found)


def present():
    return np.flatnonzero(SIZES)


@pytest.mark.long
def test_prototypes_are_the_mean_features_of_each_class(world):
    federation, start = world
    trained, updates, *_ = merged(federation, start, batch_size=2)
    federation, bodies = jax.device_get((federation, trained.params["body"]))
    prototypes = np.asarray(updates.values["prototypes"])
    for client, size in enumerate(SIZES):
        rows = federation.indices[client, :size]
        features = federation.inputs[rows] @ bodies["kernel"][client] + bodies["bias"][client]
        for label in range(3):
            own = np.maximum(features, 0)[federation.targets[rows] == label]
            expected = own.mean(0) if len(own) else np.zeros(6)
            found = prototypes[client, label]
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_everybody_gets_the_mean_by_likeness(world):
    """Written out, of those who have examples; who has none is like nobody and gets the mean."""
    federation, start = world
    tau = 0.3
    trained, updates, params, own, weights = merged(federation, start, temperature=tau)
    p = np.asarray(updates.values["prototypes"]).reshape(5, -1)
    for k in range(5):
        cosines = [
            p[k] @ p[j] / (np.linalg.norm(p[k]) * np.linalg.norm(p[j])) if SIZES[k] else 0.0
            for j in present()
        ]
        s = np.exp(np.array(cosines) / tau)
        s = s / s.sum()
        np.testing.assert_allclose(weights[k, present()], s, rtol=1e-9)
        terms = [jax.tree.map(lambda x, j=j: x[j], trained.params) for j in present()]
        expected = jax.tree.map(
            lambda *x, s=s: sum(a * b for a, b in zip(s, x, strict=True)), *terms
        )
        chex.assert_trees_all_close(jax.tree.map(lambda x, k=k: x[k], own), expected, rtol=1e-9)
    average = algorithms.fedavg()
    updates = merging.summarize(average, trained, federation, key=jax.random.key(0))
    expected = merging.merge(average, start, updates, federation.weights)[0]
    chex.assert_trees_all_close(params, expected, rtol=1e-9)


def test_a_large_temperature_is_the_plain_mean_and_a_small_one_everyone_alone(world):
    federation, start = world
    trained, _, _, mean, _ = merged(federation, start, temperature=1e9)
    plain = jax.tree.map(lambda x: x[present()].mean(0), trained.params)
    expected = jax.tree.map(lambda x: np.broadcast_to(x, (5, *x.shape)), plain)
    chex.assert_trees_all_close(mean, expected, rtol=1e-7)
    trained, _, _, alone, _ = merged(federation, start, temperature=1e-9)
    for got, expected in zip(jax.tree.leaves(alone), jax.tree.leaves(trained.params), strict=True):
        np.testing.assert_allclose(got[present()], expected[present()], rtol=1e-9)


def test_a_permutation_of_clients_permutes_the_models(world):
    federation, start = world
    order = np.array([3, 0, 4, 1, 2])
    trained = training.train(MODEL, start, federation, key=jax.random.key(0), **HOW)
    method = weighted_fedavg(MODEL, temperature=0.2)
    updates = merging.summarize(method, trained, federation, key=jax.random.key(0))
    _, own, _ = merging.merge(method, start, updates, federation.weights)
    permuted = jax.tree.map(lambda x: np.asarray(x)[order], updates)
    _, found, _ = merging.merge(method, start, permuted, np.asarray(federation.weights)[order])
    chex.assert_trees_all_close(found, jax.tree.map(lambda x: np.asarray(x)[order], own), rtol=1e-9)


@pytest.mark.long
def test_clients_go_on_from_their_own_models_and_who_sits_out_keeps_its_own(world):
    federation, start = world
    experiment = rounds.federated(MODEL, weighted_fedavg(MODEL, temperature=0.1), cohort=2, **HOW)
    state = experiment.init(start, 5)
    for _ in range(3):
        before = jax.device_get(experiment.models(state, 5))
        state, done = experiment.round(state, federation, jax.random.key(0))
        after = jax.device_get(experiment.models(state, 5))
        cohort = np.asarray(done.cohort)
        chex.assert_trees_all_equal(
            done.trained.start, jax.tree.map(lambda x, c=cohort: x[c], before)
        )
        out = np.setdiff1d(np.arange(5), cohort)
        chex.assert_trees_all_equal(
            *(jax.tree.map(lambda x, o=out: x[o], y) for y in (before, after))
        )


@pytest.mark.long
def test_with_private_leaves_only_shared_ones_are_averaged(world):
    federation, start = world
    method = keep_local(weighted_fedavg(MODEL, temperature=0.1), lambda n: n.startswith("body"))
    experiment = rounds.federated(MODEL, method, cohort=5, **HOW)
    state, done = experiment.round(experiment.init(start, 5), federation, jax.random.key(0))
    own = experiment.models(state, 5)
    chex.assert_trees_all_equal(own["body"], done.trained.params["body"])
    shares = np.asarray(done.info)[:, present()]
    expected = jax.tree.map(
        lambda x: np.tensordot(shares, np.asarray(x)[present()], 1), done.trained.params["head"]
    )
    chex.assert_trees_all_close(own["head"], expected, rtol=1e-9)
    # The head goes down; it and a prototype of each class go up.
    sent = experiment.traffic(start, federation)
    assert sent == (8 * (6 * 3 + 3), 8 * (6 * 3 + 3 + 3 * 6))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        weighted_fedavg(MODEL, temperature=temperature)


def test_it_is_no_exchange_without_training(world):
    federation, start = world
    with pytest.raises(ValueError, match="a model for each client"):
        merging.exchange(weighted_fedavg(MODEL), start, federation, key=jax.random.key(0))
