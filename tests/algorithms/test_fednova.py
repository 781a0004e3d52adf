"""FedNova undoes what different numbers of steps do to the average."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging

SIZES = np.array([7, 3, 0, 12])
STEPS = 2 * -(-SIZES // 2)  # two epochs of minibatches of two
RATE = 0.1
FEDNOVA = algorithms.fednova()
sgd = functools.cache(optax.sgd)  # one optimiser for a rate and a momentum, one program


@pytest.fixture
def train(regression, draw):
    """Train by FedNova's optimiser from the same start."""

    def train(base, world=regression, **options):
        return world.train(draw(9), FEDNOVA.optimizer(base), **options)

    return train


@pytest.fixture
def summarize(regression):
    def summarize(trained, method=FEDNOVA, world=regression):
        return merging.summarize(method, trained, world.federation, key=jax.random.key(0))

    return summarize


def length_of(tau, rho):
    """Give a_i of the paper, section 4.1, by its formula."""
    return RATE * (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)


def assert_close(left, right, tolerance=1e-12):
    chex.assert_trees_all_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_measured_lengths_are_the_papers_formula_for_momentum(train, summarize, momentum):
    trained = train(sgd(RATE, momentum))
    np.testing.assert_array_equal(trained.steps, STEPS)
    for lengths in summarize(trained).values["length"].values():
        np.testing.assert_allclose(lengths, length_of(STEPS, momentum), rtol=1e-11)


@pytest.mark.long
def test_any_other_optimiser_is_measured_likewise(train, summarize):
    """A schedule: the sum of its rates. Adam: what it does to a gradient of one."""
    rates = optax.linear_schedule(0.3, 0.0, 20)
    lengths, *_ = summarize(train(optax.sgd(rates))).values["length"].values()
    expected = [sum(float(rates(step)) for step in range(tau)) for tau in STEPS]
    np.testing.assert_allclose(lengths, expected, rtol=1e-6)
    lengths, *_ = summarize(train(optax.adam(RATE))).values["length"].values()
    np.testing.assert_allclose(lengths, RATE * STEPS, rtol=1e-6)


def test_measuring_changes_no_step(regression, train, draw):
    base = sgd(RATE, 0.9)
    chex.assert_trees_all_equal(train(base).params, regression.train(draw(9), base).params)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_a_constant_gradient_moves_all_clients_equally_far_for_one_step(
    regression, train, summarize, draw, momentum
):
    """What momentum makes of tau steps along one direction is a_i of them."""
    gradient = draw(1)

    def along(params, x):
        return jnp.zeros((x.shape[0], 2)) + fj.tree.inner(params, gradient)

    slope = fj.likelihoods.gaussian._replace(negative_log_likelihood=lambda z, y: z[:, 0])
    world = regression._replace(model=fj.Model(along, slope))
    trained = train(sgd(RATE, momentum), world)
    change = summarize(trained).values["change"]
    for name, leaf in gradient.items():
        expected = -np.where(SIZES.reshape(-1, *(1,) * leaf.ndim) > 0, leaf, 0.0)
        assert_close(change[name], expected, 1e-11)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_merging_is_the_papers_equation(regression, train, summarize, draw, momentum):
    start, trained = draw(9), train(sgd(RATE, momentum))
    merged, _, _ = merging.merge(FEDNOVA, start, summarize(trained), SIZES)
    shares, lengths = SIZES / SIZES.sum(), length_of(STEPS, momentum)
    start, params = jax.device_get((start, trained.params))
    for name in start:
        direction = sum(
            p * (start[name] - w) / a
            for p, a, w in zip(shares, lengths, params[name], strict=True)
            if a
        )
        assert_close(merged[name], start[name] - shares @ lengths * direction)


@pytest.mark.long
def test_equal_steps_make_it_federated_averaging(regression, train, summarize, draw):
    data = regression.federation.inputs[:21], regression.federation.targets[:21]
    partition = np.split(np.arange(21), [7, 15])
    world = regression._replace(federation=clients.federation(data, partition))
    trained = train(sgd(RATE, 0.9), world, epochs=5, batch_size=4)
    assert len(set(trained.steps.tolist())) == 1
    merged, average = (
        merging.merge(method, draw(9), summarize(trained, method, world), [7, 8, 6])[0]
        for method in (FEDNOVA, algorithms.fedavg())
    )
    assert_close(merged, average)


@pytest.mark.parametrize("lacking", [{"extras": ()}, {"start": None}])
def test_its_optimiser_and_the_start_are_needed(train, summarize, lacking):
    trained = train(sgd(RATE, 0.0))
    with pytest.raises(ValueError, match=r"FedNova needs .*optimizer=algorithm\.optimizer\(base\)"):
        summarize(trained._replace(**lacking))
