"""Leaves of normalisations are found by what the network computes, whatever their names."""

import functools
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fisherjax as fj
from fisherjax import networks, tree
from fisherjax.algorithms import normalizations

CATEGORICAL = fj.likelihoods.categorical
X = np.random.default_rng(0).normal(1, 2, size=(5, 6)).astype(np.float32)
IMAGES = np.random.default_rng(1).normal(1, 2, size=(4, 8, 8, 3)).astype(np.float32)


def drawn(params):
    """Draw positive numbers for every leaf, whatever its name."""
    source = np.random.default_rng(2)
    return jax.tree.map(lambda x: jnp.asarray(source.uniform(0.5, 2, jnp.shape(x))), params)


def centered(x):
    return x - x.mean(-1, keepdims=True)


def layer(x):
    return centered(x) * jax.lax.rsqrt(centered(x).var(-1, keepdims=True) + 1e-6)


def root_mean_square(x):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def grouped(x):
    groups = x.reshape(len(x), 2, -1)
    groups = groups - groups.mean(-1, keepdims=True)
    return (groups / (groups.std(-1, keepdims=True) + 1e-5)).reshape(x.shape)


def running(params, x):
    return (x - params["mean"]) / jnp.sqrt(params["var"] + 1e-5)


VECTORS = {name: np.ones(6, np.float32) for name in ("a", "b", "mean", "var", "raw")}
MATRICES = {name: np.ones((6, 6), np.float32) for name in ("w", "normal_head", "v")}
EVERY = VECTORS | MATRICES

# Functions of a dict of leaves: those that belong to a normalisation, and the outputs.
WRITTEN = {
    "layer": ({"a", "b"}, lambda p, x: layer(x @ p["w"]) * p["a"] + p["b"]),
    "fused": (
        {"a", "b"},
        lambda p, x: centered(x) * (p["a"] * jax.lax.rsqrt(x.var(-1))[:, None]) + p["b"],
    ),
    "division": ({"a", "b"}, lambda p, x: p["a"] * centered(x) / x.std(-1)[:, None] + p["b"]),
    "power": ({"a"}, lambda p, x: centered(x) * (x.var(-1) + 1e-6)[:, None] ** -0.5 * p["a"]),
    "root mean square": ({"a"}, lambda p, x: root_mean_square(x @ p["w"]) * (1 + p["a"])),
    "groups": ({"a", "b"}, lambda p, x: grouped(x @ p["w"]) * p["a"] + p["b"]),
    "running": ({"a", "b", "mean", "var"}, lambda p, x: running(p, x @ p["w"]) * p["a"] + p["b"]),
    "running, scale first": (
        {"a", "b", "mean", "var"},
        lambda p, x: (x - p["mean"]) * (p["a"] * jax.lax.rsqrt(p["var"])) + p["b"],
    ),
    "folded": (
        {"a", "b", "mean", "var"},
        lambda p, x: (
            x * (p["a"] / jnp.sqrt(p["var"])) + (p["b"] - p["mean"] * p["a"] / jnp.sqrt(p["var"]))
        ),
    ),
    "without an affine map": ({"mean", "var"}, lambda p, x: running(p, x) @ p["w"]),
    "a kernel called normal": ({"a"}, lambda p, x: (layer(x) * p["a"]) @ p["normal_head"]),
    "a softplus of the scale": ({"raw"}, lambda p, x: layer(x) * jax.nn.softplus(p["raw"])),
    "a scale before": (set(), lambda p, x: layer(x * p["a"]) @ p["w"]),
    "a scale before, one after": ({"b"}, lambda p, x: layer(x * p["a"]) * p["b"]),
    "a layer's own scale before": (
        {"b", "mean", "var"},
        lambda p, x: running(p, (x @ p["w"]) * p["a"]) * p["b"],
    ),
    "scale of a layer after": ({"a"}, lambda p, x: (layer(x) * p["a"]) * p["b"]),
    "weights normalised": (
        set(),
        lambda p, x: x @ (p["a"] * p["w"] / jnp.sqrt((p["w"] ** 2).sum(0))),
    ),
    "products normalised by weights": (
        set(),
        lambda p, x: (x @ p["w"]) * (p["a"] / jnp.sqrt((p["w"] ** 2).sum(0))) + p["b"],
    ),
    "a root of a number": (set(), lambda p, x: x @ p["w"] * p["a"] / jnp.sqrt(6.0) + p["b"]),
    "a root of each entry": (set(), lambda p, x: x / jnp.sqrt(jnp.abs(x) + 1) * p["a"] + p["b"]),
    "a softmax": (set(), lambda p, x: jax.nn.softmax(x @ p["w"]) * p["a"] + p["b"]),
    "of another value": (set(), lambda p, x: (x @ p["w"]) / x.std(-1)[:, None] * p["a"]),
    "through a nonlinearity": (set(), lambda p, x: jax.nn.relu(layer(x)) * p["a"] + p["b"]),
    "a product between": (set(), lambda p, x: (layer(x) @ p["w"]) * p["a"] + p["b"]),
    "scaled by data": (set(), lambda p, x: layer(x) * (x @ p["w"]) + p["b"]),
    "gate of a normalised value": ({"a"}, lambda p, x: (layer(x) * p["a"]) * (x @ p["w"])),
    "a learned epsilon": (
        {"a", "raw"},
        lambda p, x: x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + p["raw"][0]) * p["a"],
    ),
    "unit vectors": (
        {"a"},
        lambda p, x: x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-6) * p["a"],
    ),
    "slope of a nonlinearity": (
        {"b"},
        lambda p, x: jnp.where(x > 0, x, p["a"] * x) + 0 * layer(x) * p["b"],
    ),
    "by an einsum": ({"a"}, lambda p, x: jnp.einsum("bi,i->bi", layer(x), p["a"]) @ p["w"]),
    "an outer product": (set(), lambda p, x: jnp.einsum("bi,j->bij", layer(x), p["a"]).sum(1)),
    "a kept deviation": (
        {"a", "mean", "raw"},
        lambda p, x: (x @ p["w"] - p["mean"]) / p["raw"] * p["a"],
    ),
    "a number for each channel": (
        set(),
        lambda p, x: (x @ p["w"]) / jnp.sqrt(jnp.arange(6.0) + 1) * p["a"] + p["b"],
    ),
    "statistics that are constants": (
        {"a", "b"},
        lambda p, x: (
            (x @ p["w"] - np.arange(6.0)) / jnp.sqrt(jnp.arange(6.0) + 1) * p["a"] + p["b"]
        ),
    ),
    "a concatenation": (
        set(),
        lambda p, x: jnp.concatenate([layer(x @ p["w"]), x @ p["w"]], -1) * jnp.tile(p["a"], 2),
    ),
    "chosen by the data": (
        set(),
        lambda p, x: jnp.take_along_axis(layer(x), jnp.argsort(x), axis=-1) * p["a"] + p["b"],
    ),
    "a residual": ({"a", "b"}, lambda p, x: x + (layer(x @ p["w"]) * p["a"] + p["b"])),
    "a shift after a residual": ({"a"}, lambda p, x: x + layer(x @ p["w"]) * p["a"] + p["b"]),
}


def nested(apply):
    """Let every leaf have a parent of its own, so that none goes with a neighbour."""
    return lambda p, x: apply({name: own["leaf"] for name, own in p.items()}, x)


@pytest.mark.parametrize("name", WRITTEN)
def test_leaves_are_found_by_what_is_computed(name):
    expected, apply = WRITTEN[name]
    params = {leaf: {"leaf": value} for leaf, value in EVERY.items()}
    found = normalizations(fj.Model(nested(apply), CATEGORICAL), params, X)
    assert {leaf.removesuffix("/leaf") for leaf in found} == expected


def multiplied(name, **moments):
    """The derivative by the scale, the value that it multiplies: a check that reads no equation."""
    _, apply = WRITTEN[name]
    params = drawn(EVERY) | moments
    ones = {"a": jnp.ones(6)}
    return jax.jvp(lambda own: apply(params | own, X), ({"a": params["a"]},), (ones,))[1]


# The shape in which the last axis is what is normalised.
@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, (5, 6)) for name in ("layer", "fused", "division", "power")] + [("groups", (5, 2, 3))],
)
def test_what_a_scale_multiplies_has_variance_one_at_any_params(name, shape):
    value = multiplied(name).reshape(shape)
    np.testing.assert_allclose(value.mean(-1), 0, atol=1e-5)
    np.testing.assert_allclose(value.var(-1), 1, rtol=1e-3)


@pytest.mark.parametrize(("name", "size"), [("root mean square", 6), ("unit vectors", 1)])
def test_what_a_scale_multiplies_has_squares_of_one_sum_at_any_params(name, size):
    np.testing.assert_allclose((multiplied(name) ** 2).sum(1), size, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "hidden"),
    [
        ("running", lambda params: X @ params["w"]),
        ("running, scale first", lambda params: X),
        ("folded", lambda params: X),
    ],
    ids=["running", "running, scale first", "folded"],
)
def test_what_a_scale_multiplies_has_variance_one_at_the_moments_of_its_examples(name, hidden):
    values = hidden(drawn(EVERY))
    value = multiplied(name, mean=values.mean(0), var=values.var(0))
    np.testing.assert_allclose(value.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(value.var(0), 1, rtol=1e-3)


class Block(nn.Module):
    """A residual block whose shortcut has a BatchNorm, as torchvision's."""

    @nn.compact
    def __call__(self, x, train=False):
        norm = lambda name: nn.BatchNorm(not train, name=name)  # noqa: E731
        hidden = nn.Conv(4, (3, 3), strides=2, name="conv1")(x)
        hidden = nn.relu(norm("first")(hidden))
        hidden = norm("post_ln")(nn.Conv(4, (3, 3), name="conv2")(hidden))
        short = nn.Conv(4, (1, 1), strides=2, use_bias=False, name="downsample_0")(x)
        hidden = nn.relu(hidden + norm("downsample_1")(short))
        return nn.Dense(3, name="normal_head")(hidden.mean((1, 2)))


class Blocks(nn.Module):
    """A transformer's layer and others, with names that say nothing."""

    @nn.compact
    def __call__(self, x):
        tokens = nn.Dense(8, name="bn_embed")(x.reshape(len(x), 8, -1))
        tokens += self.param("normal_positions", nn.initializers.ones, (8, 8))
        own = nn.LayerNorm(name="post")(tokens)
        tokens += nn.MultiHeadDotProductAttention(2, name="attention")(own)
        tokens += nn.Dense(8, name="inner")(nn.RMSNorm(name="second")(tokens))
        tokens = nn.GroupNorm(2, name="third")(tokens)
        tokens = nn.WeightNorm(nn.Dense(8, name="plain"))(tokens)
        gamma = self.param("scale", nn.initializers.ones, (8,))
        tokens = nn.InstanceNorm(name="fourth")(tokens + gamma * nn.Dense(8)(tokens))
        return nn.Dense(3, name="normal_head")(tokens.mean(1))


def test_a_residual_network_of_flax(key):
    start = networks.init(Block(), key, IMAGES)
    model = networks.model(Block(), start, CATEGORICAL)
    kept = {f"params/{n}/{leaf}" for n in NORMS for leaf in ("scale", "bias")}
    kept |= {name for name in tree.names(start) if name.startswith("moments")}
    assert normalizations(model, start, IMAGES) == kept
    # Only the mask says that statistics of 0.2 are none of the trained leaves; equations, too.
    shapes = jax.eval_shape(lambda: start)
    assert normalizations(model, shapes, jax.ShapeDtypeStruct(IMAGES.shape, "uint8")) == kept


NORMS = ("first", "post_ln", "downsample_1")


@pytest.mark.long
def test_layers_of_flax_whose_names_say_nothing(key):
    params = nn.unbox(Blocks().init(key, IMAGES)["params"])
    model = fj.Model(lambda p, x: Blocks().apply({"params": p}, x), CATEGORICAL)
    kept = {f"{n}/{leaf}" for n in ("post", "third", "fourth") for leaf in ("scale", "bias")}
    # Keys and queries of attention are not normalised here; their scale is a number.
    assert normalizations(model, params, IMAGES) == kept | {"second/scale"}


def test_numbered_layers_of_nnx():
    layers = (
        *(nnx.Linear(6, 6, rngs=nnx.Rngs(0)), nnx.BatchNorm(6, rngs=nnx.Rngs(0))),
        *(jax.nn.relu, nnx.Linear(6, 6, rngs=nnx.Rngs(1)), nnx.LayerNorm(6, rngs=nnx.Rngs(0))),
    )
    module = nnx.Sequential(*layers)
    module.eval()
    graph, state, rest = nnx.split(module, nnx.Param, ...)
    model = fj.Model(lambda p, x: nnx.merge(graph, p, rest)(x), CATEGORICAL)
    found = {name.removesuffix("/value") for name in normalizations(model, state, X)}
    assert found == {f"layers/{i}/{leaf}" for i in (1, 4) for leaf in ("scale", "bias")}
    # With the statistics among the params.
    graph, state = nnx.split(module)
    model = fj.Model(lambda p, x: nnx.merge(graph, p)(x), CATEGORICAL)
    found = {name.removesuffix("/value") for name in normalizations(model, state, X)}
    assert found >= {f"layers/1/{leaf}" for leaf in ("scale", "bias", "mean", "var")}


def test_names_of_torch_and_what_is_not_used():
    size = np.ones(6, np.float32)
    norm = {"weight": size, "bias": size, "running_mean": size, "running_var": size}
    norm |= {"num_batches_tracked": np.float32(3)}
    params = {
        "conv1": {"weight": np.ones((6, 6))},
        "downsample": {"0": {"weight": np.ones((6, 6))}},
    }
    params["downsample"]["1"], params["bn1"] = dict(norm), dict(norm)
    params["normal_head"] = {"weight": np.ones((3, 6)), "bias": np.ones(3)}

    def normed(p, x):
        return (x - p["running_mean"]) / jnp.sqrt(p["running_var"] + 1e-5) * p["weight"] + p["bias"]

    def apply(p, x):
        hidden = jax.nn.relu(normed(p["bn1"], x @ p["conv1"]["weight"].T))
        hidden += normed(p["downsample"]["1"], x @ p["downsample"]["0"]["weight"].T)
        return hidden @ p["normal_head"]["weight"].T + p["normal_head"]["bias"]

    found = normalizations(fj.Model(apply, CATEGORICAL), params, X)
    assert found == {f"{n}/{leaf}" for n in ("bn1", "downsample/1") for leaf in norm}


def test_layers_of_equinox():
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 4)
    layers = [
        *(eqx.nn.Linear(6, 6, key=keys[0]), eqx.nn.LayerNorm(6)),
        *(eqx.nn.Linear(6, 6, key=keys[1]), eqx.nn.RMSNorm(6)),
        *(eqx.nn.Linear(6, 6, key=keys[2]), eqx.nn.GroupNorm(2, 6)),
        *(eqx.nn.PReLU(), eqx.nn.Linear(6, 3, key=keys[3])),
    ]

    def network(layers, x):
        return functools.reduce(lambda hidden, own: own(hidden), layers, x)

    params, static = eqx.partition(layers, eqx.is_inexact_array)
    apply = lambda p, x: jax.vmap(partial(network, eqx.combine(p, static)))(x)  # noqa: E731
    found = normalizations(fj.Model(apply, CATEGORICAL), params, X)
    assert found == {f"{i}/{leaf}" for i in (1, 3, 5) for leaf in ("weight", "bias")}


def test_layers_of_haiku():
    hk = pytest.importorskip("haiku")

    def network(x, is_training=False):
        hidden = hk.Linear(6, name="batch_norm_like")(x)
        hidden = hk.BatchNorm(True, True, 0.9, name="first")(hidden, is_training)
        hidden = hk.LayerNorm(-1, True, True, name="second")(hk.Linear(6)(hidden))
        return hk.Linear(3, name="layer_norm_head")(hk.RMSNorm(-1, name="third")(hidden))

    transformed = hk.without_apply_rng(hk.transform_with_state(network))
    params, state = transformed.init(jax.random.key(0), X, True)
    params = hk.data_structures.to_mutable_dict(params)
    model = fj.Model(lambda p, x: transformed.apply(p, state, x)[0], CATEGORICAL)
    kept = {f"{n}/{leaf}" for n in ("first", "second") for leaf in ("scale", "offset")}
    assert normalizations(model, params, X) == kept | {"third/scale"}


@pytest.mark.long
def test_layers_in_a_loop(key):
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(6, name="norm")(nn.LayerNorm(name="inner")(x))), None

    class Loop(nn.Module):
        @nn.compact
        def __call__(self, x):
            split = {"params": True}
            each = nn.scan(Layer, {"params": 0}, split_rngs=split, length=3)(name="layers")
            return each(x, None)[0]

    params = Loop().init(key, X)["params"]
    model = fj.Model(lambda p, x: Loop().apply({"params": p}, x), CATEGORICAL)
    assert normalizations(model, params, X) == {"layers/inner/scale", "layers/inner/bias"}


def test_what_cannot_be_read_is_refused():
    @jax.custom_vjp
    def fused(x, scale):
        return layer(x) * scale

    fused.defvjp(lambda x, a: (layer(x) * a, a), lambda a, g: (g * a, g.sum(0)))
    params = {"w": np.ones((6, 6), np.float32), "scale": np.ones(6, np.float32)}
    model = fj.Model(lambda p, x: fused(x @ p["w"], p["scale"]), CATEGORICAL)
    with pytest.raises(ValueError, match=r"\['scale'\] next to a root inside.*where=lambda"):
        normalizations(model, params, X)
    with pytest.raises(TypeError, match="Model"):
        normalizations(model.apply, params, X)
    with pytest.raises(ValueError, match="apply failed on inputs"):
        normalizations(model, params, X[:, :3])
