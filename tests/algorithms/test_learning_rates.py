"""Clients' learning rates over rounds: a factor of the round multiplies the optimiser's steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, rounds

MODEL = fj.Model(lambda w, x: jnp.tanh(x @ w), fj.likelihoods.gaussian)
START = jnp.zeros((3, 2))
HOW = {"cohort": 2, "epochs": 2, "batch_size": 2}
FAST, SLOW = (optax.sgd(rate, 0.9) for rate in (0.2, 0.1))


def constant(number):
    return 0.5 + 0 * number


def halving(number):
    return jnp.exp2(-number)


@pytest.fixture(scope="module")
def federation():
    random = np.random.default_rng(0)
    data = random.normal(size=(12, 3)).astype("f4"), random.normal(size=(12, 2)).astype("f4")
    return fj.clients.federation(data, np.array_split(np.arange(12), 3))


def last(algorithm, federation, optimizer, **how):
    method = rounds.federated(MODEL, algorithm, optimizer=optimizer, **HOW)
    state = method.init(START, federation)
    if how:
        state = state._replace(algorithm=state.algorithm._replace(**how))
    going = rounds.run(method, state, federation, key=jax.random.key(1), rounds=3)
    return [state.params for state, _ in going][-1]


@pytest.mark.long
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "scaffold", "fedfish_last_epoch"])
def test_half_the_steps_of_twice_the_rate_are_those_of_the_rate(federation, name):
    plain = algorithms.make(name, MODEL)
    scheduled = algorithms.with_learning_rates(plain, constant)
    found = last(scheduled, federation, FAST)
    np.testing.assert_allclose(found, last(plain, federation, SLOW), rtol=2e-5, atol=1e-7)


@pytest.mark.long
def test_each_round_has_the_factor_of_its_number(federation):
    method = algorithms.with_learning_rates(algorithms.fedavg(), halving)
    whole = last(method, federation, FAST)
    # By hand: a round after the other, each with an optimiser of its own rate.
    plain, params = algorithms.fedavg(), START
    for number in range(3):
        own = rounds.federated(MODEL, plain, optimizer=optax.sgd(0.2 / 2**number, 0.9), **HOW)
        state = own.init(params, federation)._replace(number=jnp.asarray(number, jnp.int32))
        state, _ = next(rounds.run(own, state, federation, key=jax.random.key(1), rounds=1))
        params = state.params
    np.testing.assert_allclose(whole, params, rtol=2e-5, atol=1e-7)


@pytest.mark.long
def test_the_scale_of_the_state_is_another_learning_rate(federation):
    method = algorithms.with_learning_rates(algorithms.fedavg(), constant)
    whole = last(method, federation, FAST, scale=jnp.float32(2))
    plain = last(algorithms.fedavg(), federation, FAST)
    np.testing.assert_allclose(whole, plain, rtol=2e-5, atol=1e-7)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(TypeError, match=r"schedule is 0\.1"):
        algorithms.with_learning_rates(algorithms.fedavg(), 0.1)


@pytest.mark.parametrize("value", [jnp.ones(1), jnp.ones(2), 1j])
def test_a_factor_is_one_real_number(federation, value):
    """An array of factors would multiply each coordinate by another one."""
    method = algorithms.with_learning_rates(algorithms.fedavg(), lambda number: value)
    with pytest.raises(ValueError, match=r"schedule returned .*\]; expected one real number"):
        last(method, federation, FAST)
