"""Personalisation trains on one half of a client's data at most, and tests on the other."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax.personalization import halve, personalize

SIZES = (9, 0, 4, 1)
CATEGORICAL = fj.likelihoods.categorical


def apply(params, inputs):
    return inputs @ params


MODEL = fj.Model(apply, CATEGORICAL)
SGD = optax.sgd(0.5)


@pytest.fixture
def federation():
    random = np.random.default_rng(0)
    number = sum(SIZES)
    data = random.normal(size=(number, 3)).astype(np.float32), random.integers(0, 2, number)
    rows = np.split(random.permutation(number), np.cumsum(SIZES)[:-1])
    return fj.clients.federation(data, rows)


def rows_of(federation, client):
    return np.asarray(federation.indices)[client, : federation.sizes[client]].tolist()


def run(federation, key, **options):
    settings = {"optimizer": SGD, "epochs": 2, "batch_size": 2} | options
    return personalize(MODEL, np.zeros((3, 2), np.float32), federation, key=key, **settings)


def test_halves_are_disjoint_and_complete_and_random(federation, key):
    first, second = halve(federation, key)
    assert first.sizes.tolist() == [4, 0, 2, 0]
    for client in range(4):
        mine = rows_of(first, client) + rows_of(second, client)
        assert sorted(mine) == sorted(rows_of(federation, client))
    other, _ = halve(federation, jax.random.key(1))
    assert sorted(rows_of(first, 0)) != sorted(rows_of(other, 0))


@pytest.mark.long
def test_every_fraction_is_tested_on_the_same_half(federation, key):
    _, test = halve(federation, key)
    nothing, some, more = run(federation, key)
    plain = fj.metrics.performance(MODEL, jnp.zeros((3, 2)), test)
    jax.tree.map(np.testing.assert_array_equal, nothing, plain)
    for found in (nothing, some, more):
        assert found.sizes.tolist() == test.sizes.tolist()


def test_tuning_is_training_on_so_many_examples_of_the_first_half(federation, key):
    first, test = halve(federation, key)
    [found] = run(federation, key, fractions=(0.25,))
    part = first._replace(sizes=jnp.array([2, 0, 1, 0]))
    models = fj.training.train(
        MODEL,
        jnp.zeros((3, 2)),
        part,
        key=key,
        optimizer=SGD,
        epochs=2,
        batch_size=2,
    )
    expected = fj.metrics.performance(MODEL, models.models, test, stacked=True)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)
    assert found.loss[0] != np.log(2.0)


@pytest.mark.long
def test_what_the_mask_freezes_is_part_of_every_tuned_model(federation, key):
    base = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    frozen = fj.Model(
        lambda w, x: x @ w["base"] @ w["head"], CATEGORICAL, mask={"base": False, "head": True}
    )
    how = {"key": key, "fractions": (0.25, 0.5), "optimizer": SGD, "epochs": 2, "batch_size": 2}
    start = {"base": base, "head": np.zeros((3, 2), np.float32)}
    # The same as a head on inputs that went through the base.
    before = federation._replace(inputs=federation.inputs @ base)
    for found, expected in zip(
        personalize(frozen, start, federation, **how),
        personalize(MODEL, start["head"], before, **how),
        strict=True,
    ):
        np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)


def test_a_client_without_data_to_tune_on_keeps_the_model(federation, key):
    nothing, _, more = run(federation, key)
    assert more.loss[3] == nothing.loss[3]


def test_a_fraction_that_would_test_on_what_it_trained_on_is_refused(federation, key):
    with pytest.raises(ValueError, match=r"A fraction is 0\.6"):
        run(federation, key, fractions=(0.6,))


@pytest.mark.parametrize(
    ("clients", "message"),
    [([], r"clients are \[\]"), ([4], r"clients are \[4\]"), ([1, 1], "each only once")],
)
def test_a_selection_of_nobody_or_of_strangers_is_refused(federation, clients, message):
    with pytest.raises(ValueError, match=message):
        fj.clients.select(federation, clients)


def test_a_selection_is_the_clients_in_its_order(federation):
    some = fj.clients.select(federation, [2, 0])
    assert [rows_of(some, 0), rows_of(some, 1)] == [rows_of(federation, 2), rows_of(federation, 0)]
    assert some.inputs is federation.inputs
