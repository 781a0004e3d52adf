"""FedNova undoes what different numbers of steps do to the average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fisherjax import aggregation, clients, likelihoods, training, tree

SIZES = (7, 3, 0, 12)
SHARES = np.array(SIZES) / sum(SIZES)


def draw(seed):
    source = np.random.default_rng(seed)
    return {"w": jnp.asarray(source.normal(size=(3, 2))), "b": jnp.asarray(source.normal(size=2))}


@pytest.fixture
def federation(x64):
    source = np.random.default_rng(0)
    data = source.normal(size=(22, 3)), source.normal(size=(22, 2))
    return clients.federation(data, np.split(np.arange(22), np.cumsum(SIZES)[:-1]))


def updates_of(method, models, federation, start):
    return clients.summarize(method, models, federation, key=jax.random.key(0), global_params=start)


def assert_close(left, right, tolerance=1e-12):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), left, right
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_a_constant_gradient_moves_all_clients_equally_far_for_one_step(federation, momentum):
    """What momentum makes of tau steps along one direction is a_i of them."""
    start, gradient = draw(0), draw(1)
    optimizer = optax.sgd(0.1, momentum)
    method = aggregation.fednova(epochs=2, batch_size=2, momentum=momentum)
    models = []
    for size in SIZES:
        params, state = start, optimizer.init(start)
        for _ in range(2 * -(-size // 2)):
            updates, state = optimizer.update(gradient, state)
            params = optax.apply_updates(params, updates)
        models.append(params)
    updates = updates_of(method, models, federation, start)
    for i in (0, 1, 3):
        change = jax.tree.map(lambda leaf, i=i: leaf[i], updates["change"])
        assert_close(change, jax.tree.map(lambda g: -0.1 * g, gradient), 1e-11)


def test_steps_are_those_that_training_takes(federation):
    start = draw(0)
    models = training.train(
        lambda params, x: x @ params["w"] + params["b"],
        likelihoods.gaussian,
        start,
        federation,
        key=jax.random.key(0),
        optimizer=optax.sgd(0.01),
        epochs=3,
        batch_size=4,
    )
    updates = updates_of(aggregation.fednova(epochs=3, batch_size=4), models, federation, start)
    np.testing.assert_array_equal(updates["steps"], models.steps)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_merging_is_the_papers_equation(federation, momentum):
    start, models = draw(9), [draw(seed) for seed in range(4)]
    method = aggregation.fednova(epochs=2, batch_size=2, momentum=momentum)
    updates = updates_of(method, models, federation, start)
    merged, _ = aggregation.merge(method, start, updates, federation.weights)
    lengths = []
    for size in SIZES:
        tau = 2 * -(-size // 2)
        lengths.append(sum(sum(momentum**s for s in range(t)) for t in range(1, tau + 1)))
    mean_length = SHARES @ lengths
    for name in start:
        direction = sum(
            p * (start[name] - w[name]) / a
            for p, a, w in zip(SHARES, lengths, models, strict=True)
            if a
        )
        assert_close(merged[name], start[name] - mean_length * direction)


def test_equal_steps_make_it_federated_averaging(x64):
    source = np.random.default_rng(0)
    data = source.normal(size=(21, 3)), source.normal(size=(21, 2))
    federation = clients.federation(data, [np.arange(7), np.arange(7, 15), np.arange(15, 21)])
    start, models = draw(9), [draw(seed) for seed in range(3)]
    method = aggregation.fednova(epochs=5, batch_size=4, momentum=0.9)
    updates = updates_of(method, models, federation, start)
    assert len(set(updates["steps"].tolist())) == 1 < len(set(federation.sizes.tolist()))
    merged, _ = aggregation.merge(method, start, updates, federation.weights)
    average, _ = aggregation.merge(
        aggregation.fedavg(), start, {"params": tree.stack(models)}, federation.weights
    )
    assert_close(merged, average)


def test_updates_of_groups_add_up(federation):
    start, models = draw(9), [draw(seed) for seed in range(4)]
    method = aggregation.fednova(epochs=2, batch_size=2, momentum=0.9)
    updates = updates_of(method, models, federation, start)
    chunks = [
        (jax.tree.map(lambda leaf, rows=rows: leaf[np.array(rows)], updates), SHARES[rows])
        for rows in ([2, 0], [3, 1])
    ]
    streamed, _ = aggregation.merge_stream(method, start, chunks)
    assert_close(streamed, aggregation.merge(method, start, updates, SHARES)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs is 0; expected 1 or more"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"momentum": 1.0}, "momentum is 1.0; expected 0 <= momentum < 1"),
        ({"momentum": -0.1}, "momentum is -0.1"),
    ],
)
def test_bad_numbers_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        aggregation.fednova(**({"epochs": 1, "batch_size": 1} | options))


def test_the_start_is_needed():
    method = aggregation.fednova(epochs=1, batch_size=1)
    data = clients.examples(np.zeros((2, 3)), np.zeros((2, 2)))
    with pytest.raises(ValueError, match="pass global_params"):
        method.summarize(None, draw(0), data, None)
