"""Natural-gradient exchanges against dense formulas on all data in one place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import algorithms, fisher, likelihoods, merging
from fisherjax.fisher.operators import ravel

KEY = jax.random.key(0)
# In tens, so that the same examples are held aside however they are split.
SPLITS = [np.arange(40)], np.split(np.arange(40), [10, 30])
DAMPING = (1.0, 0.1)


def apply(params, x):
    hidden = jnp.tanh(x @ params["z"]["kernel"] + params["z"]["bias"])
    return jnp.tanh(hidden @ params["b"]) @ params["a"] + params["c"]


@pytest.fixture
def world(x64):
    source = np.random.default_rng(0)
    params = {
        "z": {"kernel": jnp.asarray(source.normal(size=(3, 5))), "bias": jnp.ones(5) / 3},
        "b": jnp.asarray(source.normal(size=(5, 2))),
        "a": jnp.asarray(source.normal(size=(2, 3))),
        "c": jnp.zeros(3),
    }
    return params, source.normal(size=(40, 3)), source.integers(0, 3, 40).astype(np.int32)


def exchanged(model, params, data, partition=SPLITS[0], **options):
    federation = fj.clients.federation(data, partition)
    method = algorithms.natural_gradient(model, **{"kind": fisher.true} | options)
    return merging.exchange(method, params, federation, key=KEY)


@pytest.mark.parametrize("partition", SPLITS, ids=len)
def test_a_step_is_the_least_of_the_exact_quadratic_in_what_it_spans(world, partition):
    params, x, labels = world
    model = fj.Model(apply, likelihoods.categorical)
    options = {"damping": DAMPING, "scales": (1.0,)}
    moved, _, info = exchanged(model, params, (x, labels), partition, **options)
    used, y = np.arange(40) % 10 != 9, np.eye(3)[labels]

    def outputs(params):
        return apply(params, x[used])

    def loss(params, rows):
        return ((apply(params, x[rows]) - y[rows]) ** 2).sum(1).mean() / 2

    # Directions of K-FAC with factored damping, from its own factors.
    squared = fj.Model(apply, likelihoods.gaussian)
    own = fisher.kfac(squared, params, fj.Examples(x[used]), kind=fisher.true)
    gradient = jax.grad(loss)(params, used)
    head = {"a": 0, "c": 0}
    directions = [
        own.inverse({k: damping * v for k, v in own.block_means().items()}).mv(gradient)
        | {name: jnp.zeros_like(params[name]) for name in head}
        for damping in DAMPING
    ]
    pushed = [jax.jvp(outputs, (params,), (d,))[1] for d in directions]
    lengths = [np.sqrt((p**2).sum(1).mean()) for p in pushed]
    columns = [np.ravel(p / length) for p, length in zip(pushed, lengths, strict=True)]
    # And of the head every entry.
    hidden = jnp.tanh(jnp.tanh(x @ params["z"]["kernel"] + params["z"]["bias"]) @ params["b"])
    inputs = np.column_stack([hidden[used], np.ones(36)])
    columns += [np.ravel(np.outer(a, row)) for a in inputs.T for row in np.eye(3)]
    map_ = np.stack(columns, 1)
    quadratic, slope = map_.T @ map_ / 36, map_.T @ np.ravel(outputs(params) - y[used]) / 36
    ridge = 1e-3 * (inputs**2).sum() / 36 / 3
    value = np.concatenate([params["a"], params["c"][None]]).ravel()
    damped = quadratic + np.diag([0] * 2 + [ridge] * 9)
    pull = slope + np.concatenate([np.zeros(2), ridge * value])
    # The ridge of the coefficients is in units of the curvature that the head leaves them.
    left = damped[:2, :2] - damped[:2, 2:] @ np.linalg.solve(damped[2:, 2:], damped[2:, :2])
    damped[:2, :2] += 1e-3 * np.trace(left) / 2 * np.eye(2)
    found = -np.linalg.solve(damped, pull)

    for name in ("z", "b"):
        pairs = zip(found[:2] / lengths, directions, strict=True)
        change = sum(c * ravel(d[name]) for c, d in pairs)
        difference = jax.tree.map(jnp.subtract, moved[name], params[name])
        np.testing.assert_allclose(ravel(difference), change, rtol=1e-6, atol=1e-9)
    new = np.concatenate([moved["a"], moved["c"][None]]).ravel()
    np.testing.assert_allclose(new - value, found[2:], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(info.loss, loss(params, used))
    predicted = info.loss + slope @ found + found @ quadratic @ found / 2
    np.testing.assert_allclose(info.predicted, predicted)
    np.testing.assert_allclose(info.held, [loss(moved, ~used), loss(params, ~used)])


def test_of_a_linear_model_it_is_ridge_regression(x64):
    source = np.random.default_rng(1)
    x, y = source.normal(size=(30, 3)), source.normal(size=(30, 2))
    model = fj.Model(lambda params, x: x @ params, likelihoods.gaussian)
    moved, _, info = exchanged(model, jnp.ones((3, 2)), (x, y), [range(30)], scales=(1.0,))
    used = np.arange(30) % 10 != 9
    moment = x[used].T @ x[used] / 27
    ridge = 1e-3 * np.trace(moment) / 3 * np.eye(3)
    expected = np.linalg.solve(moment + ridge, x[used].T @ y[used] / 27)
    if info.scale:
        np.testing.assert_allclose(moved, expected, rtol=1e-10)
    residual = ((x[used] @ expected - y[used]) ** 2).sum(1).mean() / 2
    np.testing.assert_allclose(info.predicted, residual, rtol=1e-10)


def test_examples_held_aside_decide_how_far_to_go(world):
    """The step is the same; where the model is right already nobody moves."""
    params, x, _ = world
    model, y = fj.Model(apply, likelihoods.gaussian), np.array(jnp.sin(4 * x))
    scales = (1.0, 0.5, 0.25)
    _, _, info = exchanged(model, params, (x, y), scales=scales)
    assert info.held.shape == (4,)
    assert info.scale == (*scales, 0.0)[int(np.argmin(info.held))]
    y[9::10] = apply(params, x[9::10])
    stayed, _, info = exchanged(model, params, (x, y), scales=scales)
    assert info.scale == 0
    chex.assert_trees_all_equal(stayed, params)


def test_few_examples_hold_none_aside_and_a_whole_step_is_taken(world):
    params, x, labels = world
    model = fj.Model(apply, likelihoods.categorical)
    moved, _, info = exchanged(model, params, (x[:9], labels[:9]), [range(9)])
    assert info.scale == 1
    assert not np.array_equal(moved["b"], params["b"])


def test_exchanges_follow_the_head_to_a_smaller_loss(world):
    params, x, _ = world
    model = fj.Model(apply, likelihoods.categorical)
    labels = np.argmax(np.tanh(x[:, [1, 2, 0]]) - x, 1)
    federation = fj.clients.federation((x, labels), SPLITS[1])
    params = merging.exchange(algorithms.analytic_head(model), params, federation, key=KEY)[0]
    losses, method = [], algorithms.natural_gradient(model)
    for _ in range(4):
        params, state, info = merging.exchange(method, params, federation, key=KEY)
        losses.append(float(info.loss))
        assert state == ()
        # The same examples are held aside each time, and never fare worse.
        assert info.held.min() <= info.held[-1]
    assert losses[-1] < 0.8 * losses[0]


def test_each_message_adds_up_over_clients(world):
    """Groups of clients may be streamed, masked, and added in any order."""
    params, x, labels = world
    model = fj.Model(apply, likelihoods.categorical)
    federation = fj.clients.federation((x, labels), SPLITS[1])
    method = algorithms.natural_gradient(model)
    played = list(merging.messages(method, params, federation, key=KEY))
    assert [m.sent.kind for m in played] == ["slopes", "products", "losses"]
    state, following = None, method
    for message in played:
        values = message.sent.values
        parts = [
            (jax.tree.map(lambda v, i=i: v[i : i + 1], values), federation.weights[i : i + 1])
            for i in range(3)
        ]
        chunks = [(algorithms.Update(v, following.kind), w) for v, w in parts]
        streamed = merging.merge_stream(following, params, chunks, state=state)
        chex.assert_trees_all_close(streamed[0], message.params, rtol=1e-9)
        state, following = message.state, following.then
    assert following is None


def test_layers_of_a_stack_move_and_what_no_layer_covers_stays():
    def stacked(params, x):
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["stack"])[0]
        return (x * jnp.exp(params["odd"])) @ params["head"]

    source = np.random.default_rng(2)
    params = {"stack": source.normal(size=(2, 3, 3)), "odd": np.ones(()), "head": np.eye(3)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    x = source.normal(size=(40, 3)).astype(np.float32)
    model = fj.Model(stacked, likelihoods.gaussian)
    moved, _, info = exchanged(model, params, (x, np.sin(x)))
    assert info.scale > 0
    assert float(moved["odd"]) == 1
    assert (moved["stack"] != params["stack"]).any((1, 2)).all()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"damping": ()}, "damping is empty"),
        ({"damping": (0.0,)}, "damping is 0.0"),
        ({"damping": 1.0}, "damping is a float; expected a tuple"),
        ({"scales": (1.0, -1.0)}, "scales is -1.0"),
        ({"kind": 2}, "kind is 2"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_examples": 0}, "max_examples is 0"),
    ],
)
def test_bad_options_are_refused(options, match):
    model = fj.Model(jnp.matmul, likelihoods.gaussian)
    with pytest.raises((ValueError, TypeError), match=match):
        algorithms.natural_gradient(model, **options)


def test_a_network_without_a_head_of_its_own_is_refused():
    model = fj.Model(lambda w, x: x @ (w @ w), likelihoods.gaussian)
    data = np.ones((20, 3), np.float32), np.ones((20, 3), np.float32)
    with pytest.raises(ValueError, match="The last layer of this network is no"):
        exchanged(model, jnp.eye(3), data, [range(20)])
