"""Use an installed fisherjax as somebody would who has nothing else: train, summarize, merge."""

import sys

import jax
import numpy as np
import optax

import fisherjax as fj

assert "site-packages" in fj.__file__, f"{fj.__file__} is the checkout, not what was installed"

inputs = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
targets = (inputs @ np.arange(12.0).reshape(4, 3) % 7).argmax(1)
clients = fj.clients.federation((inputs, targets), np.array_split(np.argsort(targets), 3))
network = fj.networks.MLP(features=(8,), num_classes=3)
model = fj.Model(fj.networks.apply_fn(network), fj.likelihoods.categorical)
params = fj.networks.init(network, jax.random.key(0), inputs)
how = {"optimizer": optax.sgd(0.1), "epochs": 5, "batch_size": 10}
trained = fj.training.train(model, params, clients, key=jax.random.key(1), **how)
examples = fj.Examples(inputs, targets)
for algorithm in (fj.algorithms.fedavg(), fj.algorithms.fedfisher(model)):
    updates = fj.merging.summarize(algorithm, trained, clients, key=jax.random.key(2))
    merged, _, _ = fj.merging.merge(algorithm, params, updates, clients.weights)
    accuracy = float(fj.metrics.accuracy(model, merged, examples))
    print(f"fisherjax {fj.__version__}, Python {sys.version.split()[0]}: {accuracy:.3f}")
    assert 0.3 < accuracy <= 1
