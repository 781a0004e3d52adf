"""OTFusion, and which units of a network belong together."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from jax.tree_util import Partial

import fisherjax as fj
from fisherjax._layers.graph import wiring
from fisherjax.algorithms import Update, otfusion

IMAGES = np.random.default_rng(0).normal(size=(6, 16, 16, 3)).astype(np.float32)


class Block(flax.linen.Module):
    """Two convolutions beside a skip, or a shortcut where the number of channels changes."""

    channels: int
    strides: tuple = (1, 1)

    @flax.linen.compact
    def __call__(self, x):
        conv = flax.linen.Conv
        y = flax.linen.relu(conv(self.channels, (3, 3), self.strides, use_bias=False)(x))
        y = conv(self.channels, (3, 3), use_bias=False)(y)
        if x.shape[-1] != self.channels:
            x = conv(self.channels, (1, 1), self.strides, use_bias=False)(x)
        return flax.linen.relu(x + y)


class ResNet(flax.linen.Module):
    """A stem, a block with a skip, one with a shortcut, one with a skip, and a dense layer."""

    @flax.linen.compact
    def __call__(self, x):
        x = flax.linen.relu(flax.linen.Conv(4, (3, 3), use_bias=False)(x))
        x = Block(8)(Block(8, (2, 2))(Block(4)(x)))
        x = flax.linen.avg_pool(x, (4, 4), (4, 4)).reshape(len(x), -1)
        return flax.linen.Dense(5, use_bias=False)(x)


def channels_first(params, x):
    """[C, H, W] and kernels [outputs, inputs], as in PyTorch, with biases."""
    x = x.transpose(0, 3, 1, 2)
    x = jax.lax.conv_general_dilated(x, params["conv"], (2, 2), "VALID")
    x = jax.nn.gelu(x + params["shift"][:, None, None])
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense"].T + params["bias"])
    return x @ params["head"].T


NETWORKS = {
    "ResNet": ResNet(),
    "LeNet": fj.networks.LeNet(use_bias=True),
    "MLP": fj.networks.MLP((7, 6), use_bias=True),
    "channels first": None,
}


def network(name):
    """Give apply, and params that are drawn."""
    module = NETWORKS[name]
    if module is not None:
        # Drawn here: biases and kernels of flax would be zero, or equal.
        shapes = jax.eval_shape(lambda: fj.networks.init(module, jax.random.key(0), IMAGES))
        apply = fj.networks.apply_fn(module)
    else:
        shape = {"conv": (5, 3, 4, 4), "shift": (5,), "dense": (6, 245), "bias": (6,)}
        shapes = {k: jax.ShapeDtypeStruct(v, np.float32) for k, v in shape.items()}
        shapes["head"] = jax.ShapeDtypeStruct((4, 6), np.float32)
        apply = channels_first
    source = np.random.default_rng(1)
    return apply, jax.tree.map(lambda x: source.normal(size=x.shape).astype(x.dtype), shapes)


def moved(found, params, orders):
    """Change the order of the units of each layer, and of what takes them, leaf by leaf."""
    template = fj.fisher.operators.Template.of(params)
    values, matrix = {}, fj._layers.layer.matrix
    # In one piece: by itself each operation is another program.
    whole = jax.jit(lambda leaves: [matrix(layer, leaves) for layer in found.layers])
    matrices = jax.device_get(whole(template.by_name(params)))
    for place, (layer, value) in enumerate(zip(found.layers, matrices, strict=True)):
        for source in found.sources[place][:1]:
            outer, inner = found.spans[place]
            rows = np.arange(layer.rows).reshape(outer, -1, inner)[:, orders[source]].ravel()
            value = np.concatenate([value[rows], value[layer.rows :]])
        values[layer.kernel] = value[:, orders[place]]
    return template.restore(
        jax.jit(lambda values: fj._layers.layer.assemble(found.layers, values))(values)
    )


def orders_of(found, source):
    """Draw an order of the units of each layer; one for layers whose units are added."""
    same = {source: places[0] for places in found.sources for source in places}
    orders = {}
    for place, layer in enumerate(found.layers):
        orders[place] = source.permutation(layer.columns)
        if place == len(found.layers) - 1:
            orders[place] = np.arange(layer.columns)
    return {place: orders[same.get(place, place)] for place in orders}


def orders_of_stages(found, source):
    """Draw one order for all layers of a stage, because skip connections add their outputs."""
    orders = {place: np.arange(layer.columns) for place, layer in enumerate(found.layers)}
    stage = source.permutation(4), source.permutation(8)
    for place, layer in enumerate(found.layers[:-1]):
        inner = "Block" in layer.kernel and layer.kernel.endswith("Conv_0/kernel")
        one_of_stage = stage[layer.columns == 8]
        orders[place] = source.permutation(layer.columns) if inner else one_of_stage
    return orders


# The residual network has all that LeNet has, and more.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "draw_orders"),
    [
        ("ResNet", orders_of_stages),
        pytest.param("LeNet", orders_of, marks=pytest.mark.slow),
        ("MLP", orders_of),
        ("channels first", orders_of),
    ],
)
def test_a_network_with_its_units_elsewhere_is_the_same_network(name, draw_orders):
    apply, params = network(name)
    found = wiring(apply, params, IMAGES)
    orders = draw_orders(found, np.random.default_rng(2))
    other, run = moved(found, params, orders), jax.jit(apply)
    expected = run(params, IMAGES)
    np.testing.assert_allclose(run(other, IMAGES), expected, rtol=1e-3, atol=1e-2)
    changes = jax.tree.map(lambda a, b: np.abs(a - np.asarray(b)).max(), params, other)
    assert max(jax.tree.leaves(changes)) > 1

    # So matching undoes it, and the mean of both is the network that both are.
    merged, info = merge(apply, [params, other])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), merged, params)
    for place, layer in enumerate(found.layers):
        undone = np.asarray(info.transports[layer.kernel][1])
        np.testing.assert_array_equal(undone.argmax(1), orders[place])
    # Whoever comes first: the function is the same.
    merged, _ = merge(apply, [other, params])
    np.testing.assert_allclose(run(merged, IMAGES), expected, rtol=1e-3, atol=1e-2)


def test_branches_that_are_added_feed_what_follows_but_not_a_skip():
    apply, params = network("ResNet")
    found = wiring(apply, params, IMAGES)
    places = {layer.kernel.removesuffix("/kernel"): n for n, layer in enumerate(found.layers)}
    names = {n: name for name, n in places.items()}
    fed = {names[n]: {names[s] for s in sources} for n, sources in enumerate(found.sources)}
    assert fed == {
        "Conv_0": set(),
        # With a skip, from the stem; after it the last convolution alone counts.
        "Block_2/Conv_0": {"Conv_0"},
        "Block_2/Conv_1": {"Block_2/Conv_0"},
        # With a shortcut.
        "Block_1/Conv_0": {"Block_2/Conv_1"},
        "Block_1/Conv_1": {"Block_1/Conv_0"},
        "Block_1/Conv_2": {"Block_2/Conv_1"},
        "Block_0/Conv_0": {"Block_1/Conv_1", "Block_1/Conv_2"},
        "Block_0/Conv_1": {"Block_0/Conv_0"},
        "Dense_0": {"Block_0/Conv_1"},
    }
    spans = [found.spans[places[name]] for name in ("Conv_0", "Block_1/Conv_2", "Dense_0")]
    assert spans == [(0, 0), (1, 1), (4, 1)]


def merge(apply, models, weights=None, **options):
    method = otfusion(fj.Model(apply, fj.likelihoods.categorical), **options)
    values = {
        "params": jax.tree.map(lambda *x: np.stack(x), *models),
        "wiring": wiring(apply, models[0], IMAGES),
    }
    merged, _, info = fj.merging.merge(method, models[0], Update(values, method.kind), weights)
    return merged, info


def dense(params, x):
    return jax.nn.relu(x.reshape(len(x), -1)[:, :9] @ params["a"]) @ params["b"]


def draw_dense(seed):
    source = np.random.default_rng(seed)
    shapes = {"a": (9, 8), "b": (8, 3)}
    return {k: source.normal(size=v).astype(np.float32) for k, v in shapes.items()}


def test_assignments_are_those_of_scipy_and_layers_their_mean():
    models, weights = [draw_dense(seed) for seed in range(3)], np.array([0.5, 0.2, 0.3])
    merged, info = merge(dense, models, weights)
    first, last = weights[0] * models[0]["a"], weights[0] * models[0]["b"]
    for i in (1, 2):
        gaps = models[i]["a"].T[:, None] - models[0]["a"].T[None]
        rows, columns = scipy.optimize.linear_sum_assignment((gaps**2).sum(-1))
        expected = np.zeros((8, 8))
        expected[rows, columns] = 1
        np.testing.assert_array_equal(info.transports["a"][i], expected)
        np.testing.assert_array_equal(info.transports["b"][i], np.eye(3))
        first = first + weights[i] * models[i]["a"] @ expected
        last = last + weights[i] * expected.T @ models[i]["b"]
    np.testing.assert_allclose(merged["a"], first, atol=1e-5)
    np.testing.assert_allclose(merged["b"], last, atol=1e-5)


def transported(models, weights, correction, past_correction, fix_last_layer):
    """The authors' programs in NumPy: the pivot is what others are moved to, and added as it is.

    Layers are [inputs, outputs]; clients were drawn far apart, so that assignments are unique.
    """
    names = list(models[0])
    merged = {name: weights[0] * models[0][name].astype(float) for name in names}
    for weight, own in zip(weights[1:], models[1:], strict=True):
        before = np.eye(len(own[names[0]]))
        for name in names:
            moved = before.T @ own[name]
            if fix_last_layer and name == names[-1]:
                merged[name] += weight * moved
                break
            gaps = ((moved.T[:, None] - models[0][name].T[None]) ** 2).sum(-1)
            rows, columns = scipy.optimize.linear_sum_assignment(gaps)
            plan = np.zeros(gaps.shape)
            plan[rows, columns] = 1 if correction else 1 / len(gaps)
            merged[name] += weight * (moved if past_correction else own[name]) @ plan
            before = plan
    return merged


@pytest.mark.long
@pytest.mark.parametrize("fix_last_layer", [True, False])
@pytest.mark.parametrize("past_correction", [True, False])
@pytest.mark.parametrize("correction", [True, False])
def test_options_are_those_of_the_authors_code(correction, past_correction, fix_last_layer):
    source = np.random.default_rng(4)
    shapes = {"a": (9, 8), "b": (8, 7), "c": (7, 3)}
    models = [
        {k: source.normal(size=v).astype(np.float32) for k, v in shapes.items()} for _ in range(3)
    ]

    def apply(params, x):
        x = jax.nn.relu(x.reshape(len(x), -1)[:, :9] @ params["a"])
        return jax.nn.relu(x @ params["b"]) @ params["c"]

    how = (correction, past_correction, fix_last_layer)
    options = dict(zip(("correction", "past_correction", "fix_last_layer"), how, strict=True))
    merged, _ = merge(apply, models, [0.5, 0.2, 0.3], **options)
    expected = transported(models, [0.5, 0.2, 0.3], *how)
    for name in shapes:
        np.testing.assert_allclose(merged[name], expected[name], atol=2e-6)


@pytest.mark.long
def test_options_move_outputs_or_leave_them():
    models = [draw_dense(0), draw_dense(1)]
    order = [2, 0, 1]
    other = models[0] | {"b": models[0]["b"][:, order]}
    free, _ = merge(dense, [models[0], other], fix_last_layer=False)
    np.testing.assert_allclose(free["b"], models[0]["b"], atol=1e-6)
    fixed, _ = merge(dense, [models[0], other])
    np.testing.assert_allclose(fixed["b"], (models[0]["b"] + other["b"]) / 2, atol=1e-6)
    # One client alone is the pivot: it comes back whatever is asked for.
    for correction in (True, False):
        alone, _ = merge(dense, models, [1, 0], correction=correction, fix_last_layer=False)
        for name, leaf in models[0].items():
            np.testing.assert_allclose(alone[name], leaf, atol=1e-6)


def nearness(params, goal, scale):
    return -scale * sum(jnp.abs(params[name] - goal[name]).sum() for name in goal)


@pytest.mark.long
def test_a_score_chooses_the_first_of_the_best_of_four():
    models, weights = [draw_dense(seed) for seed in range(3)], [0.5, 0.2, 0.3]
    pairs = [(True, True), (True, False), (False, True), (False, False)]
    ways = [
        merge(dense, models, weights, correction=correction, past_correction=past)
        for correction, past in pairs
    ]
    for goal, transported in ways:
        score = Partial(nearness, goal=goal, scale=1.0)
        merged, info = merge(dense, models, weights, score=score)
        for name, leaf in goal.items():
            np.testing.assert_allclose(merged[name], leaf, atol=1e-6)
            np.testing.assert_allclose(info.transports[name], transported.transports[name])
        expected = [nearness(own, goal, 1.0) for own, _ in ways]
        np.testing.assert_allclose(info.scores, expected, atol=1e-4)
    for scale in (0.0, jnp.nan):  # all are equal, or none is a number
        merged, _ = merge(dense, models, weights, score=Partial(nearness, goal=goal, scale=scale))
        np.testing.assert_allclose(merged["a"], ways[0][0]["a"], atol=1e-6)
    assert ways[0][1].scores is None


@pytest.mark.long
def test_a_score_that_is_not_a_number_is_passed_over():
    models = [draw_dense(seed) for seed in range(2)]
    whole, _ = merge(dense, models)
    shrunk, _ = merge(dense, models, correction=False)

    def score(params):  # the first two are alike in this layer, and so are the others
        return jnp.where(jnp.allclose(params["a"], whole["a"], atol=1e-4), jnp.nan, -1.0)

    merged, _ = merge(dense, models, score=score)
    np.testing.assert_allclose(merged["a"], shrunk["a"], atol=1e-6)


def test_a_score_and_what_it_would_choose_contradict_each_other():
    model = fj.Model(dense, fj.likelihoods.categorical)
    for option in ("correction", "past_correction"):
        with pytest.raises(ValueError, match=rf"\b{option} (is )?False"):
            otfusion(model, score=jnp.sum, **{option: False})
    with pytest.raises(TypeError, match="score is 1"):
        otfusion(model, score=1)


@pytest.mark.long
def test_inputs_move_by_the_mean_of_the_branches_transports():
    def apply(params, x):
        x = x.reshape(len(x), -1)[:, :9]
        return jnp.tanh(x @ params["p"] + x @ params["q"]) @ params["z"]

    one = {"p": draw_dense(0)["a"], "q": draw_dense(1)["a"], "z": draw_dense(0)["b"]}
    source = np.random.default_rng(3)
    orders = source.permutation(8), source.permutation(8)
    other = one | {"p": one["p"][:, orders[0]], "q": one["q"][:, orders[1]]}
    merged, _ = merge(apply, [one, other])
    moved = [np.empty_like(one["z"]) for _ in orders]
    for place, order in zip(moved, orders, strict=True):
        place[order] = one["z"]
    expected = (one["z"] + sum(moved) / 2) / 2
    np.testing.assert_allclose(merged["z"], expected, atol=1e-5)
    np.testing.assert_allclose(merged["p"], one["p"], atol=1e-5)


def test_units_of_the_first_client_stay_even_where_rounding_cannot_tell_them_apart():
    model = draw_dense(0) | {"a": 100 + 1e-4 * draw_dense(0)["a"]}
    _, info = merge(dense, [model, draw_dense(1)])
    np.testing.assert_array_equal(info.transports["a"][0], np.eye(8))


def test_the_first_client_that_counts_keeps_its_units():
    models = [draw_dense(seed) for seed in range(3)]
    merged, info = merge(dense, models, [0, 1, 1])
    np.testing.assert_array_equal(info.transports["a"][1], np.eye(8))
    expected, _ = merge(dense, models[1:])
    np.testing.assert_allclose(merged["a"], expected["a"], atol=1e-6)


W = {"a": np.ones((5, 4)), "b": np.ones((4, 4)), "c": np.ones((4, 2))}
BAD = {
    "softmax": (lambda w, x: jax.nn.softmax(x @ w["a"], 1) @ w["b"] @ w["c"], "runs over several"),
    "norm": (
        lambda w, x: (lambda h: h - h.mean(1, keepdims=True))(x @ w["a"]) @ w["b"] @ w["c"],
        "reduce_sum runs over several of them",
    ),
    "skip": (lambda w, x: (x @ w["a"] + x[:, :4]) @ w["b"] @ w["c"], "the network's inputs"),
    "reversed": (
        lambda w, x: (lambda h: h + h[:, ::-1])(x @ w["a"]) @ w["b"] @ w["c"],
        "add joins units of different places",
    ),
    "sorted": (lambda w, x: jnp.sort(x @ w["a"], 1) @ w["b"] @ w["c"], "sort is applied to them"),
    "order": (lambda w, x: (x @ w["a"])[:, ::-1] @ w["b"] @ w["c"], "in an order other than"),
    # At the second place the first unit stands for all.
    "places": (
        lambda w, x: (
            (lambda h: jnp.stack([h, jnp.concatenate([h[:, :1]] * 4, 1)], 1) @ w["b"])(
                x @ w["a"]
            ).sum(1)
            @ w["c"]
        ),
        "or in another order at each location",
    ),
    "twice": (lambda w, x: x @ w["a"] @ w["b"] @ w["b"] @ w["c"], "'b': it is used more than once"),
    "side by side": (
        lambda w, x: (
            (lambda h: jnp.concatenate([h[:, :2], (h @ w["b"])[:, :2]], 1))(x @ w["a"]) @ w["c"]
        ),
        "concatenate puts units of several layers side by",
    ),
    "scale": (lambda w, x: x @ w["a"] @ w["b"] * w["c"][:, 0] @ w["c"], "'c': "),
}


@pytest.mark.parametrize("name", BAD)
def test_what_mixes_units_is_refused_by_name(name):
    apply, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        wiring(apply, W, np.ones((3, 5)))


def test_batch_norm_and_options_that_are_none_are_refused():
    module = fj.networks.NormedCNN()
    shapes = jax.eval_shape(lambda: fj.networks.init(module, jax.random.key(0), IMAGES))
    params = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    with pytest.raises(ValueError, match="a scale, as of BatchNorm"):
        wiring(fj.networks.apply_fn(module), params, IMAGES)
    with pytest.raises(TypeError, match="correction is a str; expected True or False"):
        otfusion(fj.Model(dense, fj.likelihoods.categorical), correction="yes")


def test_a_layer_that_clients_keep_is_refused():
    models = [draw_dense(0), draw_dense(1)]
    method = fj.algorithms.keep_local(
        otfusion(fj.Model(dense, fj.likelihoods.categorical)), lambda name: name == "b"
    )
    values = {"params": {"a": np.ones((2, 9, 8))}, "wiring": wiring(dense, models[0], IMAGES)}
    with pytest.raises(ValueError, match=r"Clients keep \['b'\], which take units"):
        fj.merging.merge(method, models[0], Update(values, method.kind))
