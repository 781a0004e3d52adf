"""Clients that are certain of all they saw: vanishing Fishers merge as a float64 solve says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

import fisherjax as fj
from fisherjax import algorithms, clients, fisher, merging


def apply(params, x):
    hidden = jax.nn.relu(x @ params["a"]["kernel"] + params["a"]["bias"])
    return hidden @ params["b"]["kernel"] + params["b"]["bias"]


MODEL = fj.Model(apply, fj.likelihoods.categorical)
SOLVER = fj.solvers.conjugate_gradients(1e-6)
METHODS = {
    "K-FAC": algorithms.fedfisher(MODEL, solver=SOLVER),
    "diagonal": algorithms.fedfisher(MODEL, fisher=fisher.diagonal, damping=0.1, solver=SOLVER),
    "undamped": algorithms.fedfisher(MODEL, fisher=fisher.diagonal),
    "Fisher merging": algorithms.fisher_merge(MODEL),
}


def initial(width):
    draw = np.random.default_rng(0).normal
    layers = {"a": (width, 32), "b": (32, 10)}
    return {
        name: {
            "kernel": jnp.asarray(draw(size=shape) / np.sqrt(shape[0]), jnp.float32),
            "bias": jnp.asarray(np.zeros(shape[1], np.float32)),
        }
        for name, shape in layers.items()
    }


def sure(inputs, targets, epochs):
    """Train ten clients with a class each, until their Fishers nearly vanish."""
    inputs = np.asarray(inputs, np.float32)
    partition = [np.flatnonzero(targets == label) for label in range(10)]
    federation = clients.federation((inputs, targets.astype(np.int32)), partition)
    start = initial(inputs.shape[1])
    how = {"key": jax.random.key(0), "optimizer": optax.sgd(0.1, 0.9)}
    trained = fj.training.train(MODEL, start, federation, **how, epochs=epochs, batch_size=32)
    return start, federation, trained


def check(request, name, start, federation, trained):
    method = METHODS[name]
    updates = merging.summarize(method, trained, federation, key=jax.random.key(0))
    scales = np.asarray(jax.jit(jax.vmap(lambda f: f.trace()))(updates.values["fisher"]))
    merged, _, info = merging.merge(method, start, updates, federation.weights)
    assert all(jax.tree.leaves(info.converged))
    # The same float32 uploads, solved in float64 from here on.
    uploads = jax.tree.map(np.asarray, (start, updates, federation.weights))
    request.getfixturevalue("x64")
    start, updates, weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), uploads)
    exact = merging.merge(method, start, updates, weights)[0]
    shares = np.asarray(weights) / np.sum(weights)
    mean = jax.tree.map(lambda leaf: np.tensordot(shares, leaf, 1), updates.values["params"])
    moved = 0
    for found, wanted, plain in zip(*map(jax.tree.leaves, (merged, exact, mean)), strict=True):
        size = np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3 * size)
        moved = max(moved, np.abs(wanted - plain).max() / size)
    assert moved > 0.1  # it is not the plain mean that agrees
    return scales


@pytest.fixture(scope="module")
def digits():
    inputs, targets = load_digits(return_X_y=True)
    return sure(inputs / 16, targets, epochs=40)


# Fisher merging has the other's diagonal Fishers.
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["K-FAC", pytest.param("diagonal", marks=pytest.mark.slow), "Fisher merging"],
)
def test_digits_with_one_class_a_client(request, digits, name):
    scales = check(request, name, *digits)
    assert scales.min() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_mnist_with_one_class_a_client(request, shared, name):
    train, _ = fj.datasets.load("mnist", shared / "data")
    inputs = np.asarray(train.inputs).reshape(len(train.targets), -1) / 255
    scales = check(request, name, *sure(inputs, np.asarray(train.targets), epochs=3))
    assert scales.min() < 1e-6
