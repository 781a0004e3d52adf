"""SCAFFOLD against its pseudocode, and what it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fisherjax import aggregation, clients, likelihoods, training

SIZES = (7, 3, 0, 12)
RATE, EPOCHS, BATCH = 0.05, 2, 12
OPTIMIZER = optax.sgd(RATE)


def apply(params, x):
    return x @ params["w"] + params["b"]


@pytest.fixture
def start(x64):
    source = np.random.default_rng(1)
    return {"w": jnp.asarray(source.normal(size=(3, 2))), "b": jnp.asarray(source.normal(size=2))}


@pytest.fixture
def federation(x64):
    source = np.random.default_rng(0)
    data = source.normal(size=(22, 3)), source.normal(size=(22, 2))
    return clients.federation(data, np.split(np.arange(22), np.cumsum(SIZES)[:-1]))


def trained(params, federation, correction, epochs=EPOCHS, batch_size=BATCH):
    return training.train(
        apply,
        likelihoods.gaussian,
        params,
        federation,
        key=jax.random.key(0),
        optimizer=OPTIMIZER,
        epochs=epochs,
        batch_size=batch_size,
        correction=correction,
    )


def one_round(method, params, state, federation, **settings):
    models = trained(params, federation, state.correction, **settings)
    updates = clients.summarize(method, models, federation, key=jax.random.key(0))
    merged, state, _ = method.finish((updates, federation.weights), params, state)
    return merged, state


def test_three_rounds_are_those_of_the_pseudocode(start, federation):
    """Written with gradients and the learning rate, client by client."""
    method = aggregation.scaffold(4, epochs=EPOCHS, batch_size=BATCH)
    params, state = start, method.init(start)
    rows = np.split(np.arange(22), np.cumsum(SIZES)[:-1])

    @jax.jit
    def gradient(params, x, y):
        loss = likelihoods.gaussian.negative_log_likelihood
        return jax.grad(lambda params: loss(apply(params, x), y).mean())(params)

    def combine(*terms):
        """Add up (factor, params) pairs."""
        return jax.tree.map(
            lambda *leaves: sum(f * x for (f, _), x in zip(terms, leaves, strict=True)),
            *(tree for _, tree in terms),
        )

    zeros = jax.tree.map(jnp.zeros_like, start)
    expected, c, own = start, zeros, [zeros] * 4
    for _ in range(3):
        ends, changes = [], []
        for i in range(4):
            x, y = federation.inputs[rows[i]], federation.targets[rows[i]]
            w = expected
            for _ in range(EPOCHS if SIZES[i] else 0):  # one batch an epoch
                w = combine((1, w), (-RATE, gradient(w, x, y)), (-RATE, c), (RATE, own[i]))
            ends.append(w)
            if SIZES[i]:
                k = EPOCHS * RATE
                new = combine((1, own[i]), (-1, c), (1 / k, expected), (-1 / k, w))
                changes.append(combine((1, new), (-1, own[i])))
                own[i] = new
        expected = combine(*zip(np.array(SIZES) / 22, ends, strict=True))
        c = combine((1, c), *((1 / 4, change) for change in changes))
        params, state = one_round(method, params, state, federation)
        for left, right in ((params, expected), (state.server, combine((RATE, c)))):
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), left, right
            )


def test_the_first_round_is_federated_averaging_bit_for_bit(start, federation):
    settings = {"epochs": 3, "batch_size": 2}
    method = aggregation.scaffold(4, **settings)
    merged, state = one_round(method, start, method.init(start), federation, **settings)
    models = trained(start, federation, None, **settings)
    average, _ = aggregation.merge(
        aggregation.fedavg(), start, {"params": models.params}, federation.weights
    )
    jax.tree.map(np.testing.assert_array_equal, merged, average)
    updates = clients.summarize(method, models, federation, key=jax.random.key(0))
    np.testing.assert_array_equal(updates["steps"], models.steps)
    by_merge, _ = aggregation.merge(method, start, updates, federation.weights)
    jax.tree.map(np.testing.assert_array_equal, by_merge, average)
    # Later rounds are not.
    merged, _ = one_round(method, merged, state, federation, **settings)
    models = trained(average, federation, None, **settings)
    average, _ = aggregation.merge(
        aggregation.fedavg(), average, {"params": models.params}, federation.weights
    )
    assert jnp.abs(merged["w"] - average["w"]).max() > 1e-3


def test_many_local_steps_still_lead_to_the_optimum_of_all(x64):
    """Clients differ in curvature, which leads federated averaging astray."""
    curvature, centre = np.array([1.0, 9.0]), np.array([[1.0, -1.0]])
    root = np.sqrt(curvature)[:, None]
    federation = clients.federation((root, root * centre.T), [np.array([0]), np.array([1])])
    optimum = (curvature * centre[0]).sum() / curvature.sum()
    method, params = aggregation.scaffold(2, epochs=10, batch_size=1), {"w": jnp.zeros((1, 1))}

    def linear(params, x):
        return x @ params["w"]

    def local(params, correction):
        return training.train(
            linear,
            likelihoods.gaussian,
            params,
            federation,
            key=jax.random.key(0),
            optimizer=OPTIMIZER,
            epochs=10,
            batch_size=1,
            correction=correction,
        ).params

    averaged, state = params, method.init(params)
    for _ in range(60):
        updates = {"params": local(params, state.correction), "steps": jnp.array([10, 10])}
        params, state, _ = method.finish((updates, jnp.array([0.5, 0.5])), params, state)
        averaged = jax.tree.map(lambda x: x.mean(0), local(averaged, None))
    np.testing.assert_allclose(params["w"], optimum, rtol=1e-6)
    assert abs(averaged["w"].item() - optimum) > 0.1


def test_who_sits_out_keeps_its_control_and_counts_in_the_mean(start, federation):
    method = aggregation.scaffold(4, epochs=EPOCHS, batch_size=BATCH)
    _, before = one_round(method, start, method.init(start), federation)
    updates = {
        "params": jax.tree.map(lambda leaf: jnp.stack([leaf + 1, leaf, leaf, leaf]), start),
        "steps": jnp.array([2, 0, 0, 0]),
    }
    merged, after, _ = method.finish((updates, jnp.array([1.0, 0, 0, 0])), start, before)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b + 1), merged, start)
    for name in start:
        np.testing.assert_array_equal(after.clients[name][1:], before.clients[name][1:])
        change = after.clients[name][0] - before.clients[name][0]
        np.testing.assert_allclose(change, -before.server[name] - 1 / 2, rtol=1e-12)
        server = after.server[name] - before.server[name]
        np.testing.assert_allclose(server, change / 4, rtol=1e-10)


def test_every_client_is_expected(start):
    method = aggregation.scaffold(3, epochs=1, batch_size=1)
    updates = {"params": jax.tree.map(lambda x: jnp.stack([x, x]), start), "steps": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"There are 2 updates; expected one of each of 3 clients"):
        aggregation.merge(method, start, updates)


@pytest.mark.parametrize("fault", ["num_clients", "epochs", "batch_size"])
def test_numbers_below_one_are_refused(fault):
    with pytest.raises(ValueError, match=f"{fault} is 0; expected 1 or more"):
        aggregation.scaffold(**({"num_clients": 1, "epochs": 1, "batch_size": 1} | {fault: 0}))
