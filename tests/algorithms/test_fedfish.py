"""FedFish weighs clients by their squared batch gradients, coordinate by coordinate."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fisherjax as fj
from fisherjax import algorithms, clients, merging, training

SIZES = (5, 8, 2)
ENDS = np.cumsum(SIZES)


def apply(params, inputs):
    return jnp.tanh(inputs @ params["w"])


MODEL = fj.Model(apply, fj.likelihoods.gaussian)
sgd = cache(optax.sgd)  # one optimiser for a rate, one program


@pytest.fixture
def world(x64):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(sum(SIZES), 3))
    inputs[:, 2] = 0.0  # nobody has any information about the last row of w
    targets = random.normal(size=(len(inputs), 2))
    federation = clients.federation(
        (inputs, targets), np.split(np.arange(len(inputs)), np.cumsum(SIZES)[:-1])
    )
    stacked = {"w": jnp.asarray(random.normal(size=(3, 3, 2)))}
    return federation, stacked


def square_by_hand(params, inputs, targets):
    """Square the gradient of a minibatch's mean loss."""
    out = np.tanh(inputs @ params)
    return (inputs.T @ ((out - targets) * (1 - out**2)) / len(inputs)) ** 2


def squares_by_hand(params, inputs, targets, batch_size):
    """Add up squared gradients of the mean loss, batch by batch."""
    cuts = range(batch_size, len(inputs), batch_size)
    batches = zip(np.split(inputs, cuts), np.split(targets, cuts), strict=True)
    return sum(square_by_hand(params, x, y) for x, y in batches)


def own(federation, client):
    """Give the inputs and targets of one client."""
    rows = slice(ENDS[client] - SIZES[client], ENDS[client])
    return np.asarray(federation.inputs)[rows], np.asarray(federation.targets)[rows]


def summarize(world, key, **options):
    federation, stacked = world
    method = algorithms.fedfish(MODEL, **options)
    trained = training.Trained(stacked)
    return method, merging.summarize(method, trained, federation, key=key)


def train(method, world, key, rate, epochs, batch_size, start=None, **how):
    federation, stacked = world
    return training.train(
        MODEL,
        {"w": stacked["w"][0]} if start is None else start,
        federation,
        key=key,
        optimizer=method.optimizer(sgd(rate)),
        epochs=epochs,
        batch_size=batch_size,
        **how,
    )


def squares_of(updates):
    return updates.values["fisher"].entries["w"]


@pytest.mark.long
def test_the_merge_is_the_mean_weighted_by_sums_of_squared_gradients(world, key):
    federation, stacked = world
    method, updates = summarize(world, key, batch_size=1)
    merged, _, _ = merging.merge(method, {"w": stacked["w"][0]}, updates, federation.weights)
    fishers = [squares_by_hand(stacked["w"][i], *own(federation, i), 1) for i in range(3)]
    np.testing.assert_allclose(squares_of(updates), fishers, rtol=1e-10)
    weights = np.array(SIZES)[:, None, None] * np.array(fishers)
    expected = (weights * stacked["w"])[:, :2].sum(0) / weights[:, :2].sum(0)
    np.testing.assert_allclose(merged["w"][:2], expected, rtol=1e-10)


def test_parameters_that_no_client_used_take_the_weighted_mean(world, key):
    federation, stacked = world
    method, updates = summarize(world, key, batch_size=2)
    merged, _, _ = merging.merge(method, {"w": stacked["w"][0]}, updates, federation.weights)
    mean = np.average(stacked["w"], axis=0, weights=SIZES)
    np.testing.assert_allclose(merged["w"][2], mean[2], rtol=1e-12)
    assert np.abs(merged["w"][:2] - mean[:2]).max() > 1e-3


def test_equal_fishers_give_federated_averaging(world, key):
    federation, stacked = world
    method, updates = summarize(world, key, batch_size=2)
    entries = {"w": jnp.broadcast_to(squares_of(updates)[:1] + 1e-3, (3, 3, 2))}
    values = updates.values | {"fisher": fj.fisher.Diagonal(entries)}
    start = {"w": stacked["w"][0]}
    updates = algorithms.Update(values, method.kind)
    merged, _, _ = merging.merge(method, start, updates, federation.weights)
    fedavg = algorithms.fedavg()
    models = algorithms.Update({"params": stacked}, fedavg.kind)
    average, _, _ = merging.merge(fedavg, start, models, federation.weights)
    np.testing.assert_allclose(merged["w"], average["w"], rtol=1e-13)


@pytest.mark.parametrize("batch_size", [1, 8])  # sums that the order of examples cannot change
@pytest.mark.parametrize("epoch_by_epoch", [False, True])
def test_at_rest_the_last_epoch_and_the_pass_of_its_own_agree(
    world, key, batch_size, epoch_by_epoch
):
    one, other = (
        algorithms.fedfish(MODEL, batch_size=batch_size, last_epoch=last) for last in (True, False)
    )
    how = {"progress": (lambda *_: None) if epoch_by_epoch else None}
    trained = train(one, world, key, 0.0, 3, batch_size, **how)
    last, alone = (
        squares_of(merging.summarize(m, trained, world[0], key=key)) for m in (one, other)
    )
    np.testing.assert_allclose(last, alone, rtol=1e-10)


def test_only_the_last_epoch_counts(world, key):
    federation, _ = world
    method = algorithms.fedfish(MODEL, last_epoch=True)
    # One step an epoch: the square is of the gradient at its start.
    before = train(method, world, key, 0.1, 1, 8).params["w"]
    after = train(method, world, key, 0.1, 2, 8)
    updates = merging.summarize(method, after, federation, key=key)
    for client in range(3):
        expected = squares_by_hand(before[client], *own(federation, client), 8)
        np.testing.assert_allclose(after.extras["w"][client], expected, rtol=1e-10)
        np.testing.assert_allclose(squares_of(updates)[client], expected, rtol=1e-10)


@pytest.mark.long
def test_the_last_epochs_squares_are_those_of_a_loop_by_hand(world, key):
    """Of every minibatch as it comes, while momentum moves the weights."""
    federation, stacked = world
    method = algorithms.fedfish(MODEL, last_epoch=True)
    rate, momentum, epochs, batch_size = 0.2, 0.9, 2, 2
    trained = training.train(
        MODEL,
        {"w": stacked["w"][0]},
        federation,
        key=key,
        optimizer=method.optimizer(optax.sgd(rate, momentum)),
        epochs=epochs,
        batch_size=batch_size,
    )
    for client in range(3):
        w, velocity = np.asarray(stacked["w"][0]), 0
        own_key = clients.client_key(key, clients.TRAIN, client)
        for epoch in range(epochs):
            shuffle_key, _ = jax.random.split(jax.random.fold_in(own_key, epoch))
            mixed = clients.shuffled(shuffle_key, clients.view(federation, client))
            rows = np.asarray(mixed.indices)[: SIZES[client]]
            squares = 0
            for batch in np.split(rows, range(batch_size, len(rows), batch_size)):
                x, y = (np.asarray(a)[batch] for a in (federation.inputs, federation.targets))
                out = np.tanh(x @ w)
                gradient = x.T @ ((out - y) * (1 - out**2)) / len(batch)
                squares = squares + gradient**2
                velocity = gradient + momentum * velocity
                w = w - rate * velocity
        np.testing.assert_allclose(trained.params["w"][client], w, rtol=1e-10)
        np.testing.assert_allclose(trained.extras["w"][client], squares, rtol=1e-9)


@pytest.mark.long
def test_watching_the_squares_changes_no_step(world, key):
    watched, plain = (algorithms.fedfish(MODEL, last_epoch=last) for last in (True, False))
    one, other = (train(method, world, key, 0.1, 2, 2) for method in (watched, plain))
    np.testing.assert_array_equal(one.params["w"], other.params["w"])
    assert other.extras == ()


def test_the_average_is_the_sum_over_the_number_of_minibatches(world, key):
    _, total = summarize(world, key, batch_size=2)
    _, mean = summarize(world, key, batch_size=2, average=True)
    assert mean.kind != total.kind
    batches = np.array([3, 4, 1])[:, None, None]
    np.testing.assert_allclose(squares_of(total), batches * squares_of(mean), rtol=1e-12)


@pytest.mark.long
def test_squares_of_small_models_are_kept_in_float32(key):
    method = algorithms.fedfish(MODEL, batch_size=1)
    data = fj.Examples(jnp.ones((2, 1), jnp.bfloat16), jnp.ones((2, 1), jnp.bfloat16))
    trained = training.Trained({"w": jnp.zeros((1, 1), jnp.bfloat16)})
    values, private = method.summarize(key, trained, data, ())
    assert squares_of(algorithms.Update(values, "")).dtype == jnp.float32
    assert private == ()


@pytest.mark.long
def test_what_is_missing_or_out_of_range_is_said(world, key):
    federation, stacked = world
    method = algorithms.fedfish(MODEL, batch_size=2, last_epoch=True)
    with pytest.raises(ValueError, match=r"last epoch.*optimizer=algorithm.optimizer\(base\)"):
        merging.summarize(method, training.Trained(stacked), federation, key=key)
    with pytest.raises(ValueError, match="batch_size is 0"):
        algorithms.fedfish(MODEL, batch_size=0)
    with pytest.raises(ValueError, match="floor is -1"):
        algorithms.fedfish(MODEL, batch_size=1, floor=-1.0)


@pytest.mark.parametrize("average", [False, True])
def test_the_empirical_fisher_is_the_squares_of_minibatches_of_one_example(world, key, average):
    how = {"batch_size": 1, "average": average}
    _, squares = summarize(world, key, **how)
    method, fishers = summarize(world, key, kind=fj.fisher.empirical, **how)
    np.testing.assert_allclose(squares_of(fishers), squares_of(squares), rtol=1e-10)
    assert fishers.kind == method.kind != squares.kind


def test_damping_goes_from_fedfish_to_federated_averaging(world, key):
    federation, stacked = world
    mean = np.average(stacked["w"], axis=0, weights=SIZES)
    _, updates = summarize(world, key, batch_size=2)
    distances = []
    for damping in (0.0, 1.0, 1e8):
        method = algorithms.fedfish(MODEL, batch_size=2, damping=damping)
        merged, _, _ = merging.merge(method, {"w": stacked["w"][0]}, updates, federation.weights)
        distances.append(np.abs(merged["w"] - mean).max())
    assert distances[0] > distances[1] > 100 * distances[2]


def test_squares_of_the_last_epoch_have_no_other_kind():
    with pytest.raises(ValueError, match="last_epoch is True and kind is true"):
        algorithms.fedfish(MODEL, last_epoch=True, kind=fj.fisher.true)


def test_a_damping_may_be_an_array_also_within_a_compiled_merge(world, key):
    federation, stacked = world
    _, updates = summarize(world, key, batch_size=2)

    def merged(damping):
        method = algorithms.fedfish(MODEL, batch_size=2, damping=damping)
        return merging.merge(method, {"w": stacked["w"][0]}, updates, federation.weights)[0]

    known = jnp.array(0.5)
    chex.assert_trees_all_close(jax.jit(lambda: merged(known))(), merged(0.5), rtol=1e-6)
