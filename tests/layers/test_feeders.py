"""Which layers feed which, in networks of every shape."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import fisherjax as fj
from fisherjax import fisher
from fisherjax._layers.layer import matrix
from fisherjax._layers.pairs import check_output_layer, output_layer, trace
from fisherjax.files.uploads import values
from fisherjax.fisher.operators import Template


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


def body(p, x):
    return jnp.tanh(x @ p["a"])


def head(p, x):
    return body(p, x) @ p["V"] + p["v"]


def then(change):
    return lambda p, x: change(head(p, x))


HEAD = {"a": (4, 6), "V": (6, 3), "v": (3,)}
BESIDE = HEAD | {"U": (6, 3), "w": (4, 3)}
SEQUENCE = (6, 4)
# What leaves the values of a layer's outputs as they are.
KEPT = {
    "plain": (head, HEAD, ()),
    "sequence": (head, HEAD, SEQUENCE[:1]),
    "no bias": (lambda p, x: body(p, x) @ p["V"], HEAD, ()),
    "flattened and back": (then(lambda z: z.reshape(-1).reshape(-1, 3)), HEAD, ()),
    "positions split": (then(lambda z: z.reshape(len(z), 2, 3, 3)), HEAD, (6,)),
    "positions merged": (then(lambda z: z.reshape(len(z), 6, 3)), HEAD, (2, 3)),
    "transposed twice": (then(lambda z: z.T.T), HEAD, ()),
    "order F to the same shape": (
        then(lambda z: z.reshape(z.shape, order="F")),
        HEAD,
        (6,),
    ),
    "positions first": (
        lambda p, x: (body(p, x.swapaxes(0, 1)) @ p["V"] + p["v"]).swapaxes(0, 1),
        HEAD,
        (6,),
    ),
    "a position squeezed": (lambda p, x: head(p, x[:, None])[:, 0], HEAD, ()),
    "cast": (then(lambda z: z.astype(jnp.float16).astype(jnp.float32)), HEAD, (), 2e-2),
    "named": (lambda p, x: checkpoint_name(body(p, x) @ p["V"], "z") + p["v"], HEAD, ()),
    "barrier": (then(jax.lax.optimization_barrier), HEAD, ()),
    "rematerialised": (jax.checkpoint(head), HEAD, ()),
    "one example at a time": (
        lambda p, x: jax.vmap(lambda row: p["V"].T @ jnp.tanh(p["a"].T @ row) + p["v"])(x),
        HEAD,
        (),
    ),
}
# What the output is besides, or instead.
CHANGED = {
    "de-normalised": (then(lambda z: 10 * z + 50), HEAD, "a product"),
    "offset": (then(lambda z: z - jnp.arange(3.0)), HEAD, "sub"),
    "softplus": (then(jax.nn.softplus), HEAD, "softplus"),
    "softmax": (then(jax.nn.softmax), HEAD, "softmax"),
    "tanh": (then(jnp.tanh), HEAD, "tanh"),
    "clipped": (then(lambda z: jnp.clip(z, -1, 1)), HEAD, "max"),
    "temperature": (then(lambda z: z / 0.7), HEAD, "temperature"),
    "learned temperature": (
        lambda p, x: head(p, x) * p["s"],
        HEAD | {"s": ()},
        "a product",
    ),
    "skip": (lambda p, x: x[..., :3] + head(p, x), HEAD, "skip"),
    "residual": (lambda p, x: (lambda h: h[..., :3] + h @ p["V"])(body(p, x)), HEAD, "skip"),
    "wide and deep": (lambda p, x: x @ p["w"] + head(p, x), BESIDE, "another branch"),
    "mean of two heads": (
        lambda p, x: (head(p, x) + body(p, x) @ p["U"]) / 2,
        BESIDE,
        "another branch",
    ),
    "head used twice": (lambda p, x: head(p, x) - head(p, -x), HEAD, "sub"),
    "head used before": (
        lambda p, x: jnp.tanh(x @ p["V"]) @ p["V"],
        {"V": (4, 4)},
        "more than once",
    ),
    "tied": (
        lambda p, x: jnp.tanh(p["V"][jnp.round(x[..., 0]).astype(int) % 6]) @ p["V"].T,
        {"V": (6, 3)},
        "more than once",
    ),
    "bias used before": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["v"]) @ p["V"] + p["v"],
        {"w": (4, 3), "V": (3, 3), "v": (3,)},
        "a sum",
    ),
    "two biases": (lambda p, x: head(p, x) + p["s"], HEAD | {"s": (3,)}, "a sum"),
    "one score and thresholds": (
        lambda p, x: x @ p["w"] + p["t"],
        {"w": (4, 1), "t": (3,)},
        "a sum",
    ),
    "concatenated": (
        lambda p, x: jnp.concatenate([head(p, x), x], -1),
        HEAD,
        "concatenate",
    ),
    "permuted": (then(lambda z: z[..., np.array([2, 0, 1])]), HEAD, "permutation"),
    "reversed": (then(lambda z: z[..., ::-1]), HEAD, "rev"),
    "masked classes": (then(lambda z: jnp.where(jnp.arange(3) > 0, z, -1e9)), HEAD, "select_n"),
    "rounded": (then(lambda z: z.astype(int).astype(float)), HEAD, "convert_element_type"),
    "repeated": (
        then(lambda z: jnp.broadcast_to(z[:, None], (len(z), 2, 3))),
        HEAD,
        "repeated",
    ),
    "rearranged": (then(lambda z: z.reshape(len(z), 3, 1)), HEAD, "3 outputs"),
    "one position's mean": (lambda p, x: head(p, x[:, None]).mean(1), HEAD, "mean over axes"),
}
OF_SEQUENCES = {
    "mean over positions": (then(lambda z: z.mean(1)), "mean over axes"),
    "last position": (then(lambda z: z[:, -1]), "slice"),
    "positions reversed": (then(lambda z: z[:, ::-1]), "rev"),
    "another order": (
        then(lambda z: z.reshape(len(z), 18, order="F").reshape(len(z), 6, 3)),
        "changes its outputs",
    ),
}


def drawn(shapes, seed=0):
    source = np.random.default_rng(seed)
    return {n: jnp.asarray(source.normal(size=s), jnp.float32) for n, s in shapes.items()}


@pytest.mark.parametrize("name", KEPT)
def test_the_outputs_of_the_layer_that_is_found_are_its_inputs_times_its_matrix(name):
    """The promise by itself, position by position: z = [a; 1] V."""
    apply, shapes, positions, *rounding = KEPT[name]
    params, places = drawn(shapes), []

    @jax.jit
    def both(params, x):
        seen = trace(apply, params, x)
        places.append(output_layer(seen))
        layer, inputs = seen.layers[places[0]], seen.activations[places[0]]
        value = matrix(layer, Template.of(params).by_name(params))
        return inputs @ value, apply(params, x)

    x = drawn({"x": (5, *positions, 4)}, 1)["x"]
    found, z = both(params, x)
    check_output_layer(apply, params, x)
    assert z.shape[-1] == 3
    np.testing.assert_allclose(found, z.reshape(found.shape), atol=max([1e-5, *rounding]))


@pytest.mark.parametrize("name", [*CHANGED, *OF_SEQUENCES])
def test_what_is_not_the_output_of_a_layer_is_refused_and_said(name):
    if name in CHANGED:
        apply, shapes, said = CHANGED[name]
        x = jnp.ones((5, 4))
    else:
        (apply, said), shapes, x = OF_SEQUENCES[name], HEAD, jnp.ones((5, *SEQUENCE))
    for check in (
        lambda p, x: output_layer(trace(apply, p, x)),
        lambda p, x: check_output_layer(apply, p, x),
    ):
        with pytest.raises(ValueError, match=rf"not a dense layer.*{said}.*normalise the targets"):
            jax.eval_shape(check, drawn(shapes), x)
