"""FedNova undoes what different numbers of steps do to the average."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, training

SIZES = (7, 3, 0, 12)
SHARES = np.array(SIZES) / sum(SIZES)
EPOCHS, BATCH, RATE = 2, 2, 0.1
STEPS = np.array([EPOCHS * -(-size // BATCH) for size in SIZES])
FEDNOVA = algorithms.fednova()


def apply(params, x):
    return x @ params["w"] + params["b"]


MODEL = fj.Model(apply, fj.likelihoods.gaussian)


def draw(seed):
    source = np.random.default_rng(seed)
    return {"w": jnp.asarray(source.normal(size=(3, 2))), "b": jnp.asarray(source.normal(size=2))}


@pytest.fixture
def federation(x64):
    source = np.random.default_rng(0)
    data = source.normal(size=(22, 3)), source.normal(size=(22, 2))
    return clients.federation(data, np.split(np.arange(22), np.cumsum(SIZES)[:-1]))


def train(federation, start, base, model=MODEL, epochs=EPOCHS, batch_size=BATCH):
    return training.train(
        model,
        start,
        federation,
        key=jax.random.key(0),
        optimizer=FEDNOVA.optimizer(base),
        epochs=epochs,
        batch_size=batch_size,
    )


def summarize(trained, federation):
    return merging.summarize(FEDNOVA, trained, federation, key=jax.random.key(0)).values


def length_of(tau, rho):
    """Give a_i of the paper, section 4.1, by its formula."""
    return RATE * (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)


def assert_close(left, right, tolerance=1e-12):
    chex.assert_trees_all_close(left, right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_measured_lengths_are_the_papers_formula_for_momentum(federation, momentum):
    trained = train(federation, draw(0), optax.sgd(RATE, momentum))
    np.testing.assert_array_equal(trained.steps, STEPS)
    lengths = summarize(trained, federation)["length"]
    np.testing.assert_allclose(lengths, length_of(STEPS, momentum), rtol=1e-11)


def test_any_other_optimiser_is_measured_likewise(federation):
    """A schedule: the sum of its rates. Adam: what it does to a gradient of one."""
    rates = optax.linear_schedule(0.3, 0.0, 20)
    lengths = summarize(train(federation, draw(0), optax.sgd(rates)), federation)["length"]
    expected = [sum(float(rates(step)) for step in range(tau)) for tau in STEPS]
    np.testing.assert_allclose(lengths, expected, rtol=1e-6)
    lengths = summarize(train(federation, draw(0), optax.adam(RATE)), federation)["length"]
    np.testing.assert_allclose(lengths, RATE * STEPS, rtol=1e-6)


def test_measuring_changes_no_step(federation):
    base = optax.sgd(RATE, 0.9)
    options = {"key": jax.random.key(0), "epochs": EPOCHS, "batch_size": BATCH}
    plain = training.train(MODEL, draw(0), federation, optimizer=base, **options)
    chex.assert_trees_all_equal(train(federation, draw(0), base).params, plain.params)


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_a_constant_gradient_moves_all_clients_equally_far_for_one_step(federation, momentum):
    """What momentum makes of tau steps along one direction is a_i of them."""
    gradient = draw(1)

    def along(params, x):
        return jnp.zeros((x.shape[0], 2)) + fj.tree.inner(params, gradient)

    slope = fj.likelihoods.gaussian._replace(negative_log_likelihood=lambda z, y: z[:, 0])
    trained = train(federation, draw(0), optax.sgd(RATE, momentum), fj.Model(along, slope))
    change = summarize(trained, federation)["change"]
    for i in (0, 1, 3):
        own = jax.tree.map(lambda leaf, i=i: leaf[i], change)
        assert_close(own, jax.tree.map(jnp.negative, gradient), 1e-11)
    assert_close(jax.tree.map(lambda leaf: leaf[2], change), jax.tree.map(jnp.zeros_like, gradient))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_merging_is_the_papers_equation(federation, momentum):
    start = draw(9)
    trained = train(federation, start, optax.sgd(RATE, momentum))
    updates = merging.summarize(FEDNOVA, trained, federation, key=jax.random.key(0))
    merged, _, _ = merging.merge(FEDNOVA, start, updates, federation.weights)
    lengths = length_of(STEPS, momentum)
    for name in start:
        direction = sum(
            p * (start[name] - w) / a
            for p, a, w in zip(SHARES, lengths, trained.params[name], strict=True)
            if a
        )
        assert_close(merged[name], start[name] - SHARES @ lengths * direction)


def test_equal_steps_make_it_federated_averaging(x64):
    source = np.random.default_rng(0)
    data = source.normal(size=(21, 3)), source.normal(size=(21, 2))
    federation = clients.federation(data, [np.arange(7), np.arange(7, 15), np.arange(15, 21)])
    start = draw(9)
    trained = train(federation, start, optax.sgd(RATE, 0.9), epochs=5, batch_size=4)
    assert len(set(trained.steps.tolist())) == 1 < len(set(federation.sizes.tolist()))
    merged, average = (
        merging.merge(
            method,
            start,
            merging.summarize(method, trained, federation, key=jax.random.key(0)),
            federation.weights,
        )[0]
        for method in (FEDNOVA, algorithms.fedavg())
    )
    assert_close(merged, average)


@pytest.mark.parametrize("missing", ["its optimiser", "the start"])
def test_its_optimiser_and_the_start_are_needed(federation, missing):
    trained = train(federation, draw(0), optax.sgd(RATE))
    lacking = {"extras": ()} if missing == "its optimiser" else {"start": None}
    with pytest.raises(ValueError, match=r"FedNova needs .*optimizer=algorithm\.optimizer\(base\)"):
        summarize(trained._replace(**lacking), federation)
