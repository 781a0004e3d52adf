"""FedFish weighs clients by their squared batch gradients, coordinate by coordinate."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj

GAUSSIAN = fj.likelihoods.gaussian
SIZES = (5, 8, 2)


def apply(params, inputs):
    return jnp.tanh(inputs @ params["w"])


@pytest.fixture
def world(x64):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(sum(SIZES), 3))
    inputs[:, 2] = 0.0  # nobody has any information about the last row of w
    targets = random.normal(size=(len(inputs), 2))
    federation = fj.clients.federation(
        (inputs, targets), np.split(np.arange(len(inputs)), np.cumsum(SIZES)[:-1])
    )
    stacked = {"w": jnp.asarray(random.normal(size=(3, 3, 2)))}
    return federation, stacked


def squares_by_hand(params, inputs, targets, batch_size):
    """Add up squared gradients of the mean loss, batch by batch."""
    total = np.zeros((3, 2))
    for first in range(0, len(inputs), batch_size):
        x, y = inputs[first : first + batch_size], targets[first : first + batch_size]
        out = np.tanh(x @ params)
        total += (x.T @ ((out - y) * (1 - out**2)) / len(x)) ** 2
    return total


def summarize(world, key, **options):
    federation, stacked = world
    method = fj.aggregation.fedfish(apply, GAUSSIAN, **options)
    return method, fj.clients.summarize(method, stacked, federation, key=key)


def test_the_merge_is_the_mean_weighted_by_sums_of_squared_gradients(world, key):
    federation, stacked = world
    method, updates = summarize(world, key, batch_size=1)
    merged, _ = fj.aggregation.merge(method, {"w": stacked["w"][0]}, updates, federation.weights)
    inputs, targets = np.asarray(federation.inputs), np.asarray(federation.targets)
    ends = np.cumsum(SIZES)
    fishers = [
        squares_by_hand(stacked["w"][i], inputs[end - n : end], targets[end - n : end], 1)
        for i, (n, end) in enumerate(zip(SIZES, ends, strict=True))
    ]
    np.testing.assert_allclose(updates["fisher"].entries["w"], fishers, rtol=1e-10)
    weights = np.array(SIZES)[:, None, None] * np.array(fishers)
    expected = (weights * stacked["w"])[:, :2].sum(0) / weights[:, :2].sum(0)
    np.testing.assert_allclose(merged["w"][:2], expected, rtol=1e-10)


def test_parameters_that_no_client_used_take_the_weighted_mean(world, key):
    federation, stacked = world
    method, updates = summarize(world, key, batch_size=2)
    merged, _ = fj.aggregation.merge(method, {"w": stacked["w"][0]}, updates, federation.weights)
    mean = np.average(stacked["w"], axis=0, weights=SIZES)
    np.testing.assert_allclose(merged["w"][2], mean[2], rtol=1e-12)
    assert np.abs(merged["w"][:2] - mean[:2]).max() > 1e-3


def test_equal_fishers_give_federated_averaging(world, key):
    federation, stacked = world
    method, updates = summarize(world, key, batch_size=2)
    entries = {"w": jnp.broadcast_to(updates["fisher"].entries["w"][:1] + 1e-3, (3, 3, 2))}
    updates = updates | {"fisher": fj.fisher.Diagonal(entries)}
    start = {"w": stacked["w"][0]}
    merged, _ = fj.aggregation.merge(method, start, updates, federation.weights)
    average, _ = fj.aggregation.merge(
        fj.aggregation.fedavg(), start, {"params": stacked}, federation.weights
    )
    np.testing.assert_allclose(merged["w"], average["w"], rtol=1e-13)


@pytest.mark.parametrize("batch_size", [1, 8])  # sums that the order of examples cannot change
@pytest.mark.parametrize("epoch_by_epoch", [False, True])
def test_at_rest_the_last_epoch_and_the_pass_of_its_own_agree(
    world, key, batch_size, epoch_by_epoch
):
    federation, stacked = world
    start = {"w": stacked["w"][0]}
    models = fj.training.train(
        apply,
        GAUSSIAN,
        start,
        federation,
        key=key,
        optimizer=optax.sgd(0.0),
        epochs=3,
        batch_size=batch_size,
        squared_gradients=True,
        progress=(lambda *_: None) if epoch_by_epoch else None,
    )
    methods = [
        fj.aggregation.fedfish(apply, GAUSSIAN, batch_size=batch_size, last_epoch=last)
        for last in (True, False)
    ]
    one, other = (fj.clients.summarize(m, models, federation, key=key) for m in methods)
    np.testing.assert_allclose(one["fisher"].entries["w"], other["fisher"].entries["w"], rtol=1e-10)


def test_only_the_last_epoch_counts(world, key):
    federation, stacked = world

    def train(epochs, start):
        return fj.training.train(
            apply,
            GAUSSIAN,
            start,
            federation,
            key=key,
            optimizer=optax.sgd(0.1),
            epochs=epochs,
            batch_size=8,  # one step an epoch: the square is of the gradient at its start
            squared_gradients=True,
        )

    start = {"w": stacked["w"][0]}
    before = train(1, start).params["w"]
    after = train(2, start)
    ends = np.cumsum(SIZES)
    for i, (n, end) in enumerate(zip(SIZES, ends, strict=True)):
        rows = slice(end - n, end)
        expected = squares_by_hand(
            before[i], np.asarray(federation.inputs[rows]), np.asarray(federation.targets[rows]), 8
        )
        np.testing.assert_allclose(after.squared_gradients["w"][i], expected, rtol=1e-10)


def test_the_average_is_the_sum_over_the_number_of_minibatches(world, key):
    _, total = summarize(world, key, batch_size=2)
    _, mean = summarize(world, key, batch_size=2, average=True)
    batches = np.array([3, 4, 1])[:, None, None]
    np.testing.assert_allclose(
        total["fisher"].entries["w"], batches * mean["fisher"].entries["w"], rtol=1e-12
    )


def test_squares_of_small_models_are_kept_in_float32(key):
    method = fj.aggregation.fedfish(apply, GAUSSIAN, batch_size=1)
    data = fj.clients.examples(jnp.ones((2, 1), jnp.bfloat16), jnp.ones((2, 1), jnp.bfloat16))
    update = method.summarize(key, {"w": jnp.zeros((1, 1), jnp.bfloat16)}, data, None)
    assert update["fisher"].entries["w"].dtype == jnp.float32


def test_what_is_missing_or_out_of_range_is_said(world, key):
    federation, stacked = world
    method = fj.aggregation.fedfish(apply, GAUSSIAN, batch_size=2, last_epoch=True)
    with pytest.raises(ValueError, match="squared_gradients=True"):
        fj.clients.summarize(method, stacked, federation, key=key)
    with pytest.raises(ValueError, match="batch_size is 0"):
        fj.aggregation.fedfish(apply, GAUSSIAN, batch_size=0)
    with pytest.raises(ValueError, match="floor is -1"):
        fj.aggregation.fedfish(apply, GAUSSIAN, batch_size=1, floor=-1.0)
