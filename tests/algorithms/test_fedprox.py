"""FedProx pulls clients back to where they started, through the optimiser alone."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms

MU, RATE, MOMENTUM = 0.7, 0.1, 0.9
BASE = optax.sgd(RATE, MOMENTUM)
WHOLE = {"epochs": 3, "batch_size": 12}  # one step an epoch


def test_three_momentum_steps_are_those_of_the_formula(x64, draw):
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


@pytest.mark.long
def test_training_minimises_the_loss_plus_the_pull_and_reports_the_loss_alone(regression, draw):
    start = draw(0)
    trained = regression.train(start, algorithms.fedprox(MU).optimizer(BASE), **WHOLE)
    for client in (0, 1, 3):
        start = jax.device_get(start)
        w, velocity, losses = start, jax.tree.map(np.zeros_like, start), []
        for _ in range(3):
            loss, gradient = regression.loss_and_gradient(w, *regression.own(client))
            losses.append(loss)
            gradient = jax.device_get(gradient)
            pulled = jax.tree.map(lambda g, w, c: g + MU * (w - c), gradient, w, start)
            velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, pulled)
            w = jax.tree.map(lambda w, v: w - RATE * v, w, velocity)
        found = jax.tree.map(lambda leaf, client=client: np.asarray(leaf)[client], trained.params)
        chex.assert_trees_all_close(found, w, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(trained.loss[client], losses, rtol=1e-11)
    assert trained.extras == ()


@pytest.mark.long
def test_without_pull_it_is_federated_averaging_bit_for_bit(regression, draw):
    one, other = (
        regression.train(draw(0), method.optimizer(BASE), **WHOLE)
        for method in (algorithms.fedprox(0.0), algorithms.fedavg())
    )
    chex.assert_trees_all_equal(one.params, other.params)


@pytest.mark.long
def test_a_stronger_pull_keeps_clients_nearer(regression, draw):
    start = draw(0)

    def moved(mu):
        trained = regression.train(start, algorithms.fedprox(mu).optimizer(BASE), **WHOLE)
        change = jax.tree.map(np.subtract, *jax.device_get((trained.params, start)))
        return fj.tree.inner(change, change)

    assert moved(3.0) < moved(0.3) < moved(0.0)


def test_in_later_rounds_the_pull_is_to_that_rounds_model(regression, draw):
    fedprox, key = algorithms.fedprox(MU), jax.random.key(0)
    experiment = fj.rounds.federated(regression.model, fedprox, cohort=4, optimizer=BASE, **WHOLE)
    state, federation = experiment.init(draw(0), 4), regression.federation
    (first, _), (_, done) = fj.rounds.run(experiment, state, federation, key=key, rounds=2)
    second = {"key": jax.random.fold_in(key, 1)} | WHOLE
    again = regression.train(first.params, fedprox.optimizer(BASE), **second)
    chex.assert_trees_all_close(done.trained.params, again.params, rtol=1e-12, atol=1e-12)


@pytest.mark.long
def test_leaves_that_are_not_trained_are_not_pulled(regression, draw):
    """A statistic that drifts away does not enter the norm that gradients are clipped to."""
    plain = regression.model.apply

    def apply(params, x):
        return plain(params["trained"], x)

    def apply_train(params, x, key, weights):
        return apply(params, x), params | {"statistic": params["statistic"] + 100.0}

    mask = {"trained": {"w": True, "b": True}, "statistic": False}
    model = fj.Model(apply, fj.likelihoods.gaussian, apply_train, mask)
    start = {"trained": draw(0), "statistic": jnp.zeros(())}
    clipped = optax.chain(optax.clip_by_global_norm(0.5), BASE)
    optimizer = algorithms.fedprox(MU).optimizer(clipped)
    trained = regression._replace(model=model).train(start, optimizer, **WHOLE)
    drifted = [300.0, 300.0, 0.0, 300.0]  # the empty client takes no steps
    np.testing.assert_array_equal(trained.models["statistic"], drifted)
    alone = regression.train(start["trained"], optimizer, **WHOLE)
    chex.assert_trees_all_close(trained.params["trained"], alone.params, rtol=1e-12, atol=1e-12)
    # And one that nothing moves stays where it was.
    world = regression._replace(model=model._replace(apply_train=None))
    still = world.train(start, optimizer, **WHOLE)
    np.testing.assert_array_equal(still.models["statistic"], [0.0] * 4)


@pytest.mark.parametrize("mu", [-1.0, float("nan"), float("inf")])
def test_a_pull_is_finite_and_not_negative(mu):
    with pytest.raises(ValueError, match=r"mu is .*; expected a finite number, zero or more"):
        algorithms.fedprox(mu)
