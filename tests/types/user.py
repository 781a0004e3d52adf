"""A script as users write it: a type checker has nothing to say against it.

It is not run here; what it does is tested elsewhere, and shown in the documentation.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj

fj.devices.one_per_core()

# Data of NumPy, split over clients in several ways.
images = np.zeros((60, 8, 8, 1), np.uint8)
labels = np.zeros(60, np.int32)
data = fj.Examples(images, labels)
train, test = fj.datasets.load("digits")
federation = fj.clients.federation((images, labels), [[0, 1, 2], [3, 4]])
federation = fj.clients.federation((images, labels), [np.arange(30), np.arange(30, 60)])
federation = fj.clients.federation(train, np.split(np.arange(1435), 5))
cohort = fj.clients.select(federation, [0, 2])
sizes: jax.Array = fj.clients.shard(cohort).sizes

# A network of flax, and one of the user's own.
module = fj.networks.LeNet()
normalize = fj.datasets.normalizer(train)
params = fj.networks.init(module, jax.random.key(0), images[:1], normalize=normalize)
model = fj.networks.model(module, params, fj.likelihoods.categorical, normalize=normalize)
linear = fj.Model(lambda w, x: x @ w["dense"], fj.likelihoods.categorical)
flaxen = fj.Model(lambda p, x: module.apply({"params": p}, x), fj.likelihoods.categorical)
outputs = model.apply(params, normalize(test.inputs))
loss = model.likelihood.negative_log_likelihood(outputs, test.targets).mean()
masked = model._replace(mask=jax.tree.map(lambda _: True, params))

# Training, and a merge whose report is known.
trained = fj.training.train(
    model,
    params,
    federation,
    key=jax.random.key(1),
    optimizer=optax.sgd(0.05, momentum=0.9),
    epochs=2,
    batch_size=32,
)
last_loss = float(trained.loss[:, -1].mean())
solver = fj.solvers.conjugate_gradients(tolerance=1e-5)
method = fj.algorithms.fedfisher(model, damping=0.5, kind=fj.fisher.sampled, solver=solver)
method = fj.algorithms.fedfisher(model, kind=partial(fj.fisher.sampled, num_samples=2))
updates = fj.merging.summarize(method, trained, federation, key=jax.random.key(2))
merged, state, info = fj.merging.merge(method, params, updates, federation.weights)
merged, state, info = fj.merging.merge(method, params, updates, [1.0, 2.0, 3, 4, 5])
print(info.residual, info.converged, info.covered)
print(fj.metrics.accuracy(model, merged, fj.Examples(test.inputs, test.targets)))

# Other methods report something else, or nothing.
head, _, ridge = fj.merging.exchange(
    fj.algorithms.analytic_head(model), merged, federation, key=jax.random.key(3)
)
print(ridge.ridge)
_, _, step = fj.merging.exchange(
    fj.algorithms.natural_gradient(model), merged, federation, key=jax.random.key(3)
)
print(step.scale, step.held)
steps = fj.algorithms.natural_gradient(model)
for exchange in (fj.algorithms.analytic_head(model), steps, steps):
    head, _, report = fj.merging.exchange(exchange, head, federation, key=jax.random.key(3))
for plain in (fj.algorithms.fedavg(), fj.algorithms.otfusion(model), fj.algorithms.ties()):
    merged, _, report = fj.merging.merge(plain, params, updates)


def error_of(damping: jax.Array) -> jax.Array:
    """Differentiate a merge by its damping, which is traced."""
    traced = fj.algorithms.fedfisher(model, damping=damping)
    found, _, _ = fj.merging.merge(traced, params, updates)
    return fj.metrics.accuracy(model, found, data)


slope = jax.grad(error_of)(jnp.array(0.1))
small = fj.compression.compressed(method, fj.compression.quantized(8))
_, _, info = fj.merging.merge(small, params, updates)
print(info.iterations)
secret = fj.privacy.private(fj.algorithms.fedavg(), clip=1.0, noise_multiplier=1.0)
_, _, ledger = fj.merging.merge(secret, params, updates, key=jax.random.key(4))
print(ledger.sensitivity, fj.privacy.epsilon(ledger, delta=1e-5))

# Curvature by itself, and the quadratic that the server solves.
one = fj.fisher.kfac(linear, {"dense": jnp.zeros((3, 2))}, fj.Examples(np.eye(3)))
product = one.mv({"dense": jnp.ones((3, 2))})
stacked = jax.tree.map(lambda leaf: leaf[None], one)
problem = fj.quadratic.quadratic(stacked, product, jnp.ones(1), damping=0.1)
solution = fj.solvers.gradient_descent(steps=10)(problem)
print(solution.params, solution.info.status)

# Rounds.
experiment = fj.rounds.federated(
    model,
    fj.algorithms.fedprox(mu=0.1),
    cohort=2,
    optimizer=optax.sgd(0.05),
    epochs=1,
    batch_size=32,
)
rounds = fj.rounds.run(
    experiment, experiment.init(params, federation), federation, key=jax.random.key(5), rounds=2
)
for now, played in rounds:
    if played.diverged.any():
        warnings.warn(f"Round {played.number}: {played.loss}", stacklevel=1)
    print(now.params, experiment.traffic(now.params, federation).up)
