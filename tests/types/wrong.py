"""A script of which every line that ends in a rule's name is an error of that rule, and no other.

It is not run: `tests/test_types.py` compares what a type checker finds with these comments.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj

key = jax.random.key(0)
model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
params = jnp.zeros((3, 1))
federation = fj.clients.federation((np.eye(3), np.ones((3, 1))), [[0], [1, 2]])
method = fj.algorithms.fedfisher(model)
updates = fj.merging.summarize(method, [params, params], federation, key=key)

# Options of factories, which are cached.
fj.algorithms.fedfisher(model, dampng=0.1)  # reportCallIssue
fj.algorithms.fedfisher(model, damping="0.1")  # reportArgumentType
fj.algorithms.fedfisher(model, solver=fj.solvers.conjugate_gradients)  # reportArgumentType
fj.algorithms.fedfisher(model, solver="cg")  # reportArgumentType
fj.algorithms.fedfisher()  # reportCallIssue
fj.algorithms.fedlpa(model, kind="empirical")  # reportArgumentType
fj.algorithms.fedprox(nu=0.1)  # reportCallIssue
fj.solvers.conjugate_gradients(tol=1e-4)  # reportCallIssue
fj.solvers.gradient_descent(steps="many")  # reportArgumentType
fj.compression.quantized(bits=8.5)  # reportArgumentType
fj.networks.apply_fn(fj.networks.LeNet(), normalise=None)  # reportCallIssue
fj.privacy.dp_sgd(model, clip=1.0)  # reportCallIssue

# Names.
fj.networks.NoSuch  # reportAttributeAccessIssue
fj.no_such_module  # reportAttributeAccessIssue
fj.algorithms.fedfischer(model)  # reportAttributeAccessIssue
fj.Examples(np.eye(3)).labels  # reportAttributeAccessIssue

# What is returned.
merged, state, info = fj.merging.merge(method, params, updates)
info.no_such_field  # reportAttributeAccessIssue
_, _, head = fj.merging.exchange(fj.algorithms.analytic_head(model), params, federation, key=key)
head.residual  # reportAttributeAccessIssue
_, _, small = fj.merging.merge(
    fj.compression.compressed(method, fj.compression.quantized(8)), params, updates
)
small.no_such_field  # reportAttributeAccessIssue
_, _, nothing = fj.merging.merge(fj.algorithms.fedavg(), params, updates)
nothing.residual  # reportAttributeAccessIssue
experiment = fj.rounds.federated(
    model, method, cohort=2, optimizer=optax.sgd(0.1), epochs=1, batch_size=2
)
start = experiment.init(params, 2)
for after, played in fj.rounds.run(experiment, start, federation, key=key, rounds=1):
    played.info.no_such_field  # reportAttributeAccessIssue
    after.parameters  # reportAttributeAccessIssue

# Compiled functions.
fj._core.linalg.no_such_solve(params)  # reportAttributeAccessIssue
fj.personalization.halve(federation)  # reportCallIssue
fj.personalization.halve(params, key)  # reportArgumentType

# Arguments.
fj.Examples(targets=np.ones(3))  # reportCallIssue
fj.Model(lambda w, x: x @ w, "gaussian")  # reportArgumentType
fj.clients.federation((np.eye(3), np.ones(3)), 5)  # reportArgumentType
fj.training.train(model, params, federation, key=key, optimizer=optax.sgd(0.1))  # reportCallIssue
fj.merging.merge(method, params, updates, weights="equal")  # reportArgumentType
