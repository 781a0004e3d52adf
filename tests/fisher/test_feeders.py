"""Which layers feed which, in networks of every shape."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from fisherjax import fisher
from fisherjax.files import values
from fisherjax.fisher.trace import trace


def square(*names):
    return {name: np.eye(3, dtype=np.float32) for name in names}


def chain(p, x):
    return jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["c"]


def skip(p, x):
    stem = jax.nn.relu(x @ p["a"])
    return (stem + jax.nn.relu(stem @ p["b"]) @ p["c"]) @ p["d"]


def two_skips(p, x):
    stem = x @ p["a"]
    block = stem + jnp.tanh(stem @ p["b"])
    return (block + jnp.tanh(block @ p["c"])) @ p["d"]


def projected(p, x):
    stem = jnp.tanh(x @ p["a"])
    return (stem @ p["b"] + jnp.tanh(stem @ p["c"])) @ p["d"]


def side_by_side(p, x):
    return jnp.concatenate([x @ p["a"], jnp.tanh(x @ p["b"])], axis=1)[:, 1:4] @ p["c"]


def normalised(p, x):
    """Scales and shifts are between layers."""
    stem = x @ p["a"] * p["s"] + p["t"]
    return (stem + jnp.tanh(stem @ p["b"])) @ p["c"]


def gated(p, x):
    return (jax.nn.sigmoid(x @ p["a"]) * (x @ p["b"])) @ p["c"]


def again(p, x):
    """The second time `b` takes what it made itself, which is no layer before it."""
    return jnp.tanh(jnp.tanh(jnp.tanh(x @ p["a"]) @ p["b"]) @ p["b"]) @ p["c"]


NETWORKS = {
    chain: (square("a", "b", "c"), None),
    skip: (square(*"abcd"), {"a": "", "b": "a", "c": "b", "d": "ac"}),
    two_skips: (square(*"abcd"), {"a": "", "b": "a", "c": "ab", "d": "abc"}),
    projected: (square(*"abcd"), {"a": "", "b": "a", "c": "a", "d": "bc"}),
    side_by_side: (square("a", "b", "c"), {"a": "", "b": "", "c": "ab"}),
    normalised: (
        square("a", "b", "c") | {"s": np.ones(3, np.float32), "t": np.zeros(3, np.float32)},
        {"a": "", "s": "", "b": "a", "c": "ab"},
    ),
    gated: (square("a", "b", "c"), {"a": "", "b": "", "c": "ab"}),
    again: (square("a", "b", "c"), None),
}


def traced(network, params, inputs):
    """Trace a network: what feeds what is known before anything is computed."""
    seen = []
    jax.eval_shape(lambda p, x: seen.append(trace(network, p, x)), params, inputs)
    return seen[0]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.__name__)
@pytest.mark.parametrize("batch", [1, 4])
def test_a_layer_is_fed_by_whose_outputs_reach_it_without_another_layer(network, batch):
    params, expected = NETWORKS[network]
    seen = traced(jax.jit(network), params, np.ones((batch, 3), np.float32))
    if expected is None:
        assert seen.feeders is None
    else:
        found = zip(seen.layers, seen.feeders, strict=True)
        assert {layer.kernel: "".join(own) for layer, own in found} == expected


def begun(network, inputs):
    """Params of a network of whatever numbers: what feeds what does not depend on them."""
    shapes = jax.eval_shape(lambda: fj.networks.init(network, jax.random.key(0), inputs))
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)


def operator_of(model, params, *data, **options):
    """Trace K-FAC, which says of its layers what feeds them."""
    return jax.eval_shape(lambda p: fisher.kfac(model, p, fj.Examples(*data), **options), params)


def test_convolutions_with_pooling_and_reshapes_are_a_chain():
    network = fj.networks.LeNet()
    images = np.ones((2, 28, 28, 1), np.float32)
    params = begun(network, images)
    assert traced(fj.networks.apply_fn(network), params, images).feeders is None


@pytest.mark.long
def test_of_a_transformer_attention_and_tables_feed_what_takes_the_stream():
    network = fj.networks.Transformer(num_classes=7, context=5)
    tokens = np.random.default_rng(0).integers(0, 7, (6, 5)).astype(np.int32)
    model = fj.Model(fj.networks.apply_fn(network), fj.likelihoods.categorical)
    operator = operator_of(model, begun(network, tokens), tokens, tokens, key=jax.random.key(1))
    names = [layer.kernel for layer in operator.layers]
    own = dict(zip(names, operator.feeders, strict=True))
    products = [layer.kernel for layer in operator.layers if layer.form == "product"]
    tables = [layer.kernel for layer in operator.layers if layer.form == "table"]
    first, *_, last = products
    assert set(own[first]) == set(tables)
    assert set(tables) < set(own[last])  # the stream goes by all blocks
    assert {own[table] for table in tables} == {()}


def test_blocks_of_some_leaves_keep_what_feeds_them():
    params, _ = NETWORKS[skip]
    model = fj.Model(skip, fj.likelihoods.gaussian)
    operator = fisher.kfac(model, params, fj.Examples(np.ones((4, 3), np.float32)))
    kept = operator.select(("d", "b"))
    assert [layer.kernel for layer in kept.layers] == ["b", "d"]
    assert kept.feeders == (("a",), ("a", "c"))


def test_a_leaf_that_is_embedding_and_head_is_one_layer():
    def tied(p, tokens):
        stream = p["e"][tokens]
        stream = stream + jnp.tanh(stream @ p["w"])
        return jnp.tanh(stream @ p["e"].T) @ p["o"]

    params = {"e": np.ones((5, 3)), "w": np.eye(3), "o": np.ones((5, 2))}
    params = jax.tree.map(np.float32, params)
    model, tokens = fj.Model(tied, fj.likelihoods.categorical), np.zeros((4, 2), np.int32)
    operator = operator_of(model, params, tokens, tokens, key=jax.random.key(0))
    own = dict(zip((x.kernel for x in operator.layers), operator.feeders, strict=True))
    assert own == {"e": (), "w": ("e",), "o": ("e",)}


def test_files_hold_what_feeds_what_and_old_ones_do_not(tmp_path):
    params, _ = NETWORKS[skip]
    model = fj.Model(skip, fj.likelihoods.gaussian)
    operator = fisher.kfac(model, params, fj.Examples(np.ones((4, 3), np.float32)))
    assert operator.feeders == ((), ("a",), ("b",), ("a", "c"))
    update = fj.algorithms.Update({"params": params, "fisher": operator}, "params and fisher")
    path = tmp_path / "one.safetensors"
    fj.files.save_update(path, update, algorithm="fedfisher_kfac", client="ann", examples=3)
    assert fj.files.load_update(path)[0].values["fisher"].feeders == operator.feeders
    arrays = {}
    description = values.encode(values.flat(update.values), "", arrays)
    chain = dataclasses.replace(operator, feeders=None)
    del description["dict"]["fisher"]["static"]["feeders"]
    assert values.encode(chain, "fisher", {}) == description["dict"]["fisher"]
    old = values.decode(path, description, arrays.__getitem__)["fisher"]
    assert old.feeders is None
    assert old.layers == operator.layers
