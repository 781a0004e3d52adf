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


MODEL = fj.Model(apply, likelihoods.categorical)
SQUARED = fj.Model(apply, likelihoods.gaussian)


@jax.jit
def half_square(params, x, y):
    return ((apply(params, x) - y) ** 2).sum(1).mean() / 2


@jax.jit
def change(params, way, x):
    return jax.jvp(lambda w: apply(w, x), (params,), (way,))[1]


outputs, flat, slope_of = jax.jit(apply), jax.jit(ravel), jax.jit(jax.grad(half_square))
means_of = jax.jit(fisher.Kronecker.block_means)


@jax.jit
def against(own, damping, gradient):
    """Apply the inverse of a damped operator."""
    return jax.tree.map(jnp.negative, own.inverse(damping).mv(gradient))


@pytest.fixture
def world(x64):
    source = np.random.default_rng(0)
    params = {
        "z": {"kernel": source.normal(size=(3, 5)), "bias": np.ones(5) / 3},
        "b": source.normal(size=(5, 2)),
        "a": source.normal(size=(2, 3)),
        "c": np.zeros(3),
    }
    x = source.normal(size=(40, 3))
    return params, x, np.argmax(x, 1).astype(np.int32)


def exchanged(model, params, data, partition=SPLITS[0], **options):
    federation = fj.clients.federation(data, partition)
    method = algorithms.natural_gradient(model, **{"kind": fisher.true} | options)
    return merging.exchange(method, params, federation, key=KEY)


def best(ways, params, x, y, used):
    """Minimise the loss of held-out examples over the span of ways, scaled to length one."""

    def changed(way, rows):
        return np.asarray(change(params, way, x[rows]))

    lengths = [np.sqrt((changed(way, used) ** 2).sum(1).mean()) for way in ways]
    pushed = [changed(way, ~used) / length for way, length in zip(ways, lengths, strict=True)]
    columns = np.stack([p.ravel() for p in pushed], 1)
    slope = columns.T @ np.ravel(np.asarray(outputs(params, x[~used])) - y[~used]) / 4
    curvature = columns.T @ columns / 4
    damped = curvature + 1e-2 * np.trace(curvature) / len(ways) * np.eye(len(ways))
    share = -np.linalg.solve(damped, slope)
    ways = [np.asarray(flat(way)) for way in ways]
    expected = np.asarray(flat(params)) + sum(
        c / length * way for c, length, way in zip(share, lengths, ways, strict=True)
    )
    return expected, slope @ share + share @ curvature @ share / 2


@pytest.mark.long
@pytest.mark.parametrize("partition", SPLITS, ids=len)
def test_the_step_is_the_least_on_examples_held_aside_of_what_it_spans(world, partition):
    params, x, labels = world
    y = np.eye(3)[labels]
    options = {"damping": DAMPING, "scales": (1.0,)}
    moved, _, info = exchanged(MODEL, params, (x, labels), partition, **options)
    used = np.arange(40) % 10 != 9

    def loss(params, rows):
        return half_square(params, x[rows], y[rows])

    # Directions of K-FAC with factored damping, from its own factors.
    own = fisher.kfac(SQUARED, params, fj.Examples(x[used]), kind=fisher.true)
    gradient, means = slope_of(params, x[used], y[used]), jax.device_get(means_of(own))
    zero = {name: np.zeros_like(params[name]) for name in ("a", "c")}
    directions = [
        against(own, {k: d * v for k, v in means.items()}, gradient) | zero for d in DAMPING
    ]

    def changed(way, rows):
        return np.asarray(change(params, way, x[rows]))

    # For each of them, and for none, the head by ridge regression.
    hidden = np.tanh(np.tanh(x @ params["z"]["kernel"] + params["z"]["bias"]) @ params["b"])
    inputs = np.column_stack([hidden[used], np.ones(36)])
    moment = inputs.T @ inputs / 36
    ridge = 1e-2 * np.trace(moment) / 3 * np.eye(3)
    value = np.concatenate([params["a"], params["c"][None]])
    residual = np.asarray(outputs(params, x[used])) - y[used]
    sides = [inputs.T @ changed(d, used) / 36 for d in directions]
    sides.append(inputs.T @ residual / 36 + ridge @ value)
    heads = [-np.linalg.solve(moment + ridge, side) for side in sides]
    heads = [{"a": u[:2], "c": u[2]} for u in heads]
    still = jax.tree.map(np.zeros_like, params)
    ways = [*directions, *(d | u for d, u in zip([*directions, still], heads, strict=True))]
    expected, predicted = best(ways, params, x, y, used)
    assert info.scale == 1
    np.testing.assert_allclose(flat(moved), expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(info.predicted, predicted)
    np.testing.assert_allclose(info.loss, loss(params, used))
    np.testing.assert_allclose(info.held, [loss(moved, ~used), loss(params, ~used)])


@pytest.mark.long
@pytest.mark.parametrize("frozen", [("a", "c"), ("a",), ("c",)], ids="+".join)
def test_with_a_frozen_head_it_is_the_least_of_what_the_directions_span(world, frozen):
    """The directions include the trained leaves of the head, which is not solved for."""
    params, x, labels = world
    y, used = np.eye(3)[labels], np.arange(40) % 10 != 9
    mask = jax.tree.map(lambda _: True, params) | dict.fromkeys(frozen, False)
    model = fj.Model(apply, likelihoods.categorical, mask=mask)
    squared = fj.Model(apply, likelihoods.gaussian, mask=mask)
    federation = fj.clients.federation((x, labels), SPLITS[1])
    method = algorithms.natural_gradient(model, damping=DAMPING, scales=(1.0,), kind=fisher.true)
    _, second, last = merging.messages(method, params, federation, key=KEY)
    for products in second.sent.values["products"].values():
        assert products.head is None
    own = fisher.kfac(squared, params, fj.Examples(x[used]), kind=fisher.true)
    gradient = slope_of(params, x[used], y[used]) | dict.fromkeys(frozen)
    means, still = jax.device_get(means_of(own)), jax.tree.map(np.zeros_like, params)
    ways = []
    for damping in DAMPING:
        way = against(own, {k: damping * v for k, v in means.items()}, gradient)
        ways.append(still | {name: leaf for name, leaf in way.items() if leaf is not None})
    expected, predicted = best(ways, params, x, y, used)
    assert last.info.scale == 1
    np.testing.assert_allclose(flat(last.params), expected, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(last.info.predicted, predicted)
    for name in frozen:
        assert np.asarray(last.params[name]).tobytes() == params[name].tobytes()


@pytest.mark.long
def test_of_a_linear_model_it_goes_to_the_ridge_regression(x64):
    """The quadratic is the loss itself, so that what is promised comes true."""
    source = np.random.default_rng(1)
    x = source.normal(size=(200, 3))
    y = x @ source.normal(size=(3, 2)) + source.normal(size=(200, 2)) / 10
    model, start = fj.Model(lambda params, x: x @ params, likelihoods.gaussian), np.ones((3, 2))
    moved, _, info = exchanged(model, start, (x, y), [range(200)], scales=(1.0,))
    used = np.arange(200) % 10 != 9
    moment = x[used].T @ x[used] / 180
    ridge = 1e-2 * np.trace(moment) / 3 * np.eye(3)
    way = np.linalg.solve(moment + ridge, x[used].T @ y[used] / 180) - start
    moved = np.asarray(moved)
    share = np.vdot(moved - start, way) / np.vdot(way, way)
    np.testing.assert_allclose(moved, start + share * way, rtol=1e-9)
    assert abs(share - 1) < 0.05
    np.testing.assert_allclose(info.held[0] - info.held[1], info.predicted)


@pytest.mark.long
def test_examples_held_aside_decide_how_far_to_go(world):
    params, x, _ = world
    y = np.sin(4 * x)
    scales = (1.0, 0.5, 0.25)
    _, _, info = exchanged(SQUARED, params, (x, y), scales=scales)
    assert info.held.shape == (4,)
    assert info.scale == (*scales, 0.0)[int(np.argmin(info.held))]
    # Where the model is right for them already, nobody moves, whatever the others say.
    y[9::10] = outputs(params, x[9::10])
    stayed, _, info = exchanged(SQUARED, params, (x, y), scales=scales)
    chex.assert_trees_all_close(stayed, params, rtol=1e-9, atol=1e-12)


@pytest.mark.long
def test_few_examples_hold_none_aside_and_a_whole_step_is_taken(world):
    params, x, labels = world
    moved, _, info = exchanged(MODEL, params, (x[:9], labels[:9]), [range(9)])
    assert info.scale == 1
    assert not np.array_equal(moved["b"], params["b"])


@pytest.mark.long
def test_exchanges_follow_the_head_to_a_smaller_loss(world):
    params, _, _ = world
    x = np.random.default_rng(3).normal(size=(400, 3))
    labels = np.argmax(np.tanh(x[:, [1, 2, 0]]) - x, 1)
    federation = fj.clients.federation((x, labels), np.split(np.arange(400), [100, 130]))
    params = merging.exchange(algorithms.analytic_head(MODEL), params, federation, key=KEY)[0]
    losses, method = [], algorithms.natural_gradient(MODEL)
    for _ in range(4):
        params, state, info = merging.exchange(method, params, federation, key=KEY)
        losses.append(float(info.loss))
        assert state == ()
        # The same examples are held aside each time, and never fare worse.
        assert info.held.min() <= info.held[-1]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.long
def test_each_message_adds_up_over_clients(world):
    """Groups of clients may be streamed, masked, and added in any order."""
    params, x, labels = world
    federation = fj.clients.federation((x, labels), SPLITS[1])
    method = algorithms.natural_gradient(MODEL)
    played = list(merging.messages(method, params, federation, key=KEY))
    assert [m.sent.kind for m in played] == ["slopes", "products", "losses"]
    state, weights = None, np.asarray(federation.weights)
    for following, message in zip(method, played, strict=True):
        values = message.sent.values
        parts = [
            (jax.tree.map(lambda v, i=i: np.asarray(v)[i : i + 1], values), weights[i : i + 1])
            for i in range(3)
        ]
        chunks = [(algorithms.Update(v, following.kind), w) for v, w in parts]
        streamed = merging.merge_stream(following, params, chunks, state=state)
        chex.assert_trees_all_close(streamed[0], message.params, rtol=1e-9)
        state = message.state


@pytest.mark.long
def test_many_models_exchange_at_once_and_clients_side_by_side(world):
    """A table's seeds are one program."""
    params, x, labels = world
    federation = fj.clients.federation((x, labels), SPLITS[1])
    method = algorithms.natural_gradient(MODEL)

    def exchange(params, **how):
        return merging.exchange(method, params, federation, key=KEY, **how)[0]

    other = jax.tree.map(lambda w: w + 0.1, params)
    both = jax.jit(jax.vmap(exchange))(jax.tree.map(lambda *w: np.stack(w), params, other))
    for number, start in enumerate((params, other)):
        own = jax.tree.map(lambda w, i=number: np.asarray(w)[i], both)
        alone = exchange(start, clients_per_chunk=3)
        chex.assert_trees_all_close(own, alone, rtol=1e-7)


@pytest.mark.long
def test_layers_of_a_stack_move_and_what_no_layer_covers_stays():
    def stacked(params, x):
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["stack"])[0]
        return (x * jnp.exp(params["odd"])) @ params["head"]

    source = np.random.default_rng(2)
    params = {"stack": source.normal(size=(2, 3, 3)), "odd": np.ones(()), "head": np.eye(3)}
    params = jax.tree.map(np.float32, params)
    x = source.normal(size=(40, 3)).astype(np.float32)
    model = fj.Model(stacked, likelihoods.gaussian)
    moved, _, info = exchanged(model, params, (x, np.sin(x)))
    assert info.scale > 0
    assert float(moved["odd"]) == 1
    assert (np.asarray(moved["stack"]) != params["stack"]).any((1, 2)).all()


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
    with pytest.raises(ValueError, match="The last layer of this network is not"):
        exchanged(model, jnp.eye(3), data, [range(20)])


@pytest.mark.parametrize("change", [lambda z: 10 * z + 50, jax.nn.softplus, lambda z: z[:, ::-1]])
def test_outputs_that_are_not_those_of_a_layer_are_refused_before_anything_is_sent(change):
    model = fj.Model(lambda w, x: change(x @ w), likelihoods.gaussian)
    data = np.ones((20, 3), np.float32), np.ones((20, 3), np.float32)
    federation = fj.clients.federation(data, [range(20)])
    played = merging.messages(algorithms.natural_gradient(model), jnp.eye(3), federation, key=KEY)
    with pytest.raises(ValueError, match=r"not a dense layer.*normalise the targets"):
        next(iter(played))
