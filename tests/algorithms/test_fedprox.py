"""FedProx pulls clients back to where they started, through the optimiser alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, training

MU, RATE, MOMENTUM = 0.7, 0.1, 0.9
SIZES = (5, 8)


def apply(params, x):
    return x @ params["w"] + params["b"]


MODEL = fj.Model(apply, fj.likelihoods.gaussian)
BASE = optax.sgd(RATE, MOMENTUM)


def draw(seed):
    source = np.random.default_rng(seed)
    return {"w": jnp.asarray(source.normal(size=(3, 2))), "b": jnp.asarray(source.normal(size=2))}


@pytest.fixture
def federation(x64):
    source = np.random.default_rng(0)
    data = source.normal(size=(13, 3)), source.normal(size=(13, 2))
    return clients.federation(data, np.split(np.arange(13), [SIZES[0]]))


def train(federation, start, optimizer, model=MODEL, key=0, epochs=3):
    return training.train(
        model,
        start,
        federation,
        key=key if isinstance(key, jax.Array) else jax.random.key(key),
        optimizer=optimizer,
        epochs=epochs,
        batch_size=max(SIZES),  # one step an epoch
    )


def own(federation, client):
    rows = np.asarray(federation.indices[client, : SIZES[client]])
    return federation.inputs[rows], federation.targets[rows]


@jax.jit
def gradient_of(params, x, y):
    loss = fj.likelihoods.gaussian.negative_log_likelihood
    return jax.grad(lambda params: loss(apply(params, x), y).mean())(params)


def test_three_momentum_steps_are_those_of_the_formula(x64):
    start, w = draw(0), draw(1)
    optimizer = algorithms.fedprox(MU).optimizer(BASE)
    state, expected, velocity = optimizer.init(w), w, jax.tree.map(jnp.zeros_like, w)
    for seed in (2, 3, 4):
        gradient = draw(seed)
        step, state = optimizer.update(gradient, state, w, start=start, extras=(), last_epoch=False)
        w = optax.apply_updates(w, step)
        for name in expected:
            pulled = gradient[name] + MU * (expected[name] - start[name])
            velocity[name] = MOMENTUM * velocity[name] + pulled
            expected[name] = expected[name] - RATE * velocity[name]
        chex.assert_trees_all_close(w, expected, rtol=1e-13, atol=1e-13)


def test_training_minimises_the_loss_plus_the_pull_and_reports_the_loss_alone(federation):
    start = draw(0)
    trained = train(federation, start, algorithms.fedprox(MU).optimizer(BASE))
    for client in range(2):
        x, y = own(federation, client)
        w, velocity, losses = start, jax.tree.map(jnp.zeros_like, start), []
        for _ in range(3):
            losses.append(0.5 * jnp.square(apply(w, x) - y).sum(1).mean())
            pulled = jax.tree.map(lambda g, w, c: g + MU * (w - c), gradient_of(w, x, y), w, start)
            velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, pulled)
            w = jax.tree.map(lambda w, v: w - RATE * v, w, velocity)
        found = jax.tree.map(lambda leaf, client=client: leaf[client], trained.params)
        chex.assert_trees_all_close(found, w, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(trained.loss[client], losses, rtol=1e-11)
    assert trained.extras == ()


def test_without_pull_it_is_federated_averaging_bit_for_bit(federation):
    one = train(federation, draw(0), algorithms.fedprox(0.0).optimizer(BASE))
    other = train(federation, draw(0), algorithms.fedavg().optimizer(BASE))
    chex.assert_trees_all_equal(one.params, other.params)


def test_a_stronger_pull_keeps_clients_nearer(federation):
    start = draw(0)

    def moved(mu):
        trained = train(federation, start, algorithms.fedprox(mu).optimizer(BASE))
        change = jax.tree.map(jnp.subtract, trained.params, start)
        return fj.tree.inner(change, change)

    assert moved(3.0) < moved(0.3) < moved(0.0)


def test_in_later_rounds_the_pull_is_to_that_rounds_model(federation):
    fedprox = algorithms.fedprox(MU)
    experiment = fj.rounds.federated(
        MODEL, fedprox, cohort=2, optimizer=BASE, epochs=3, batch_size=max(SIZES)
    )
    key, state = jax.random.key(0), experiment.init(draw(0), 2)
    (first, _), (_, done) = fj.rounds.run(experiment, state, federation, key=key, rounds=2)
    again = train(federation, first.params, fedprox.optimizer(BASE), key=jax.random.fold_in(key, 1))
    chex.assert_trees_all_close(done.trained.params, again.params, rtol=1e-12, atol=1e-12)


def test_leaves_that_are_not_trained_are_not_pulled(federation):
    """A statistic that drifts away does not enter the norm that gradients are clipped to."""

    def apply_train(params, x, key, weights):
        z = apply(params["trained"], x)
        return z, params | {"statistic": params["statistic"] + 100.0}

    mask = {"trained": {"w": True, "b": True}, "statistic": False}
    model = fj.Model(
        lambda params, x: apply(params["trained"], x), fj.likelihoods.gaussian, apply_train, mask
    )
    start = {"trained": draw(0), "statistic": jnp.zeros(())}
    clipped = optax.chain(optax.clip_by_global_norm(0.5), BASE)
    optimizer = algorithms.fedprox(MU).optimizer(clipped)
    trained = train(federation, start, optimizer, model)
    np.testing.assert_array_equal(trained.params["statistic"], [300.0, 300.0])
    alone = train(federation, start["trained"], optimizer)
    chex.assert_trees_all_close(trained.params["trained"], alone.params, rtol=1e-12, atol=1e-12)
    # And one that nothing moves stays where it was.
    still = train(federation, start, optimizer, model._replace(apply_train=None))
    np.testing.assert_array_equal(still.params["statistic"], [0.0, 0.0])


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf")])
def test_a_pull_is_finite_and_not_negative(mu):
    with pytest.raises(ValueError, match=r"mu is .*; expected a finite number, zero or more"):
        algorithms.fedprox(mu)
