"""Models that nobody here wrote, as their frameworks' examples write them: no leaf is left out."""

from functools import partial

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fisherjax._layers import loops, pairs

KEYS = jax.random.split(jax.random.key(0), 8)


class FlaxCNN(nn.Module):
    """The network of flax's MNIST example."""

    @nn.compact
    def __call__(self, x):
        x = nn.avg_pool(nn.relu(nn.Conv(32, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(256)(x.reshape((x.shape[0], -1))))
        return nn.Dense(10)(x)


def haiku_cnn(x):
    """Haiku's layers, which repeat each bias for every example before they add it."""
    x = hk.max_pool(jax.nn.relu(hk.Conv2D(4, 3)(x)), (2, 2, 1), (2, 2, 1), "VALID")
    return hk.Linear(10)(hk.Flatten()(x))


class EquinoxCNN(eqx.Module):
    """The network of equinox's MNIST example."""

    layers: list

    def __init__(self, keys):
        self.layers = [
            eqx.nn.Conv2d(1, 3, kernel_size=4, key=keys[0]),
            eqx.nn.MaxPool2d(kernel_size=2),
            jax.nn.relu,
            jnp.ravel,
            eqx.nn.Linear(1728, 512, key=keys[1]),
            jax.nn.sigmoid,
            eqx.nn.Linear(512, 64, key=keys[2]),
            jax.nn.relu,
            eqx.nn.Linear(64, 10, key=keys[3]),
            jax.nn.log_softmax,
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class EquinoxTransformer(eqx.Module):
    """A block of equinox's own layers on tokens."""

    embedding: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    last: eqx.nn.RMSNorm

    def __init__(self, keys):
        self.embedding = eqx.nn.Embedding(11, 8, key=keys[0])
        self.norm = eqx.nn.LayerNorm(8)
        self.attention = eqx.nn.MultiheadAttention(
            2, 8, use_query_bias=True, use_output_bias=True, key=keys[1]
        )
        self.mlp = eqx.nn.MLP(8, 8, 16, 1, key=keys[2])
        self.last = eqx.nn.RMSNorm(8)

    def __call__(self, tokens):
        h = jax.vmap(self.embedding)(tokens)
        normed = jax.vmap(self.norm)(h)
        h = h + self.attention(normed, normed, normed)
        return jax.vmap(self.last)(h + jax.vmap(self.mlp)(h)) @ self.embedding.weight.T


class EncoderBlock(nn.Module):
    """Attention and two dense layers; `scan` hands it a carry."""

    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, h, mask=None):
        normed = nn.LayerNorm(dtype=self.dtype)(h)
        h = h + nn.MultiHeadDotProductAttention(2, dtype=self.dtype)(normed, mask=mask)
        inner = nn.gelu(nn.Dense(16, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(h)))
        return h + nn.Dense(8, dtype=self.dtype)(inner), None


class GPT(nn.Module):
    """A decoder whose embedding is its head too; its blocks one by one, or one stack of them."""

    scanned: bool
    dtype: type = jnp.float32

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(11, 8, dtype=self.dtype)
        h = embed(tokens) + nn.Embed(9, 8, dtype=self.dtype)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        if self.scanned:
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            stack = nn.scan(nn.remat(EncoderBlock), length=3, in_axes=nn.broadcast, **axes)
            h, _ = stack(self.dtype)(h, mask)
        else:
            for _ in range(2):
                h, _ = EncoderBlock(self.dtype)(h, mask)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(h)).astype(jnp.float32)


class ViT(nn.Module):
    """Patches, a class token, learned positions."""

    @nn.compact
    def __call__(self, x):
        h = nn.Conv(8, (4, 4), (4, 4), padding="VALID")(x).reshape(x.shape[0], -1, 8)
        token = self.param("cls", nn.initializers.zeros, (1, 1, 8))
        h = jnp.concatenate([jnp.tile(token, (len(h), 1, 1)), h], axis=1)
        h = h + self.param("positions", nn.initializers.normal(), (1, h.shape[1], 8))
        for _ in range(2):
            h, _ = EncoderBlock()(h)
        return nn.Dense(10)(nn.LayerNorm()(h)[:, 0])


class ResNet18(nn.Module):
    """Stages of two blocks of two convolutions, each with BatchNorm."""

    norm: type = partial(nn.BatchNorm, use_running_average=True)

    @nn.compact
    def __call__(self, x):
        conv = partial(nn.Conv, use_bias=False)
        x = nn.relu(self.norm()(conv(4, (3, 3))(x)))
        for stage in range(4):
            for block in range(2):
                strides = (2, 2) if stage and not block else (1, 1)
                y = nn.relu(self.norm()(conv(4 * 2**stage, (3, 3), strides)(x)))
                y = self.norm()(conv(4 * 2**stage, (3, 3))(y))
                if x.shape != y.shape:
                    x = self.norm()(conv(4 * 2**stage, (1, 1), strides)(x))
                x = nn.relu(x + y)
        return nn.Dense(10)(x.mean((1, 2)))


class NnxBlock(nnx.Module):
    """Attention and a layer of flax's newer kind."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.head = nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, tokens):
        h = self.embed(tokens)
        return self.head(h + self.attention(self.norm(h)))


def linen(module):
    def build(x):
        variables = jax.eval_shape(module.init, KEYS[0], x)
        params = variables.pop("params")
        rest = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), variables)
        return lambda p, x: module.apply({"params": p, **rest}, x), params

    return build


def equinox(make):
    def build(x):
        params, rest = eqx.partition(make(KEYS), eqx.is_inexact_array)
        return lambda p, x: jax.vmap(eqx.combine(p, rest))(x), params

    return build


def newer(make):
    def build(x):
        graph, params, rest = nnx.split(make(nnx.Rngs(0)), nnx.Param, ...)
        return lambda p, x: nnx.merge(graph, p, rest)(x), params

    return build


def haiku(function):
    def build(x):
        network = hk.without_apply_rng(hk.transform(function))
        return network.apply, jax.eval_shape(network.init, KEYS[0], x)

    return build


IMAGES, TOKENS = jnp.ones((2, 28, 28, 1)), jnp.zeros((2, 7), int)
MODELS = {
    "flax's MNIST CNN": (linen(FlaxCNN()), IMAGES),
    "equinox's MNIST CNN": (equinox(EquinoxCNN), IMAGES.transpose(0, 3, 1, 2)),
    "equinox's MLP": (equinox(lambda keys: eqx.nn.MLP(4, 3, 5, 2, key=keys[0])), jnp.ones((2, 4))),
    "equinox's transformer": (equinox(EquinoxTransformer), TOKENS),
    "GPT": (linen(GPT(scanned=False)), TOKENS),
    "GPT of a stack of rematerialised blocks": (linen(GPT(scanned=True)), TOKENS),
    "GPT in bfloat16": (linen(GPT(scanned=False, dtype=jnp.bfloat16)), TOKENS),
    "ViT": (linen(ViT()), IMAGES),
    "ResNet-18 with BatchNorm": (linen(ResNet18()), IMAGES),
    "ResNet-18 with GroupNorm": (linen(ResNet18(partial(nn.GroupNorm, 2))), IMAGES),
    "nnx attention": (newer(NnxBlock), TOKENS),
    "haiku's CNN": (haiku(haiku_cnn), IMAGES),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_leaf_is_uncovered(name):
    build, x = MODELS[name]
    apply, params = build(x)
    found = {}

    def run(params, x):
        seen = pairs.trace(apply, params, x)
        found.update(uncovered=seen.uncovered, layers=seen.layers)
        return seen.pullback(seen.outputs)

    jax.eval_shape(run, params, x)
    assert found["uncovered"] == {}
    # Each leaf once: as a kernel, or as a bias.
    parts = {(m.leaf, m.index) for m in found["layers"]} | {
        (m.bias, m.index) for m in found["layers"] if m.bias
    }
    names = {leaf for leaf, _ in parts}
    assert len(names) == len(jax.tree.leaves(params))


class EquinoxStack(eqx.Module):
    """Blocks whose leaves `filter_vmap` stacks."""

    blocks: eqx.nn.MLP

    def __init__(self, keys):
        self.blocks = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 4, 8, 1, key=key))(keys[:3])

    def __call__(self, x):
        leaves, rest = eqx.partition(self.blocks, eqx.is_array)
        return jax.lax.scan(lambda h, block: (h + eqx.combine(block, rest)(h), None), x, leaves)[0]


def haiku_stack(x):
    return hk.experimental.layer_stack(3)(lambda h: h + hk.Linear(4)(jax.nn.relu(h)))(x)


STACKED = {
    "flax": MODELS["GPT of a stack of rematerialised blocks"],
    "equinox": (equinox(EquinoxStack), jnp.ones((2, 4))),
    "haiku": (haiku(haiku_stack), jnp.ones((2, 4))),
}


@pytest.mark.long
@pytest.mark.parametrize("name", STACKED)
def test_the_loop_over_the_blocks_of_a_library_is_kept(name):
    build, x = STACKED[name]
    apply, params = build(x)
    found = []

    def run(params, x):
        found.append(loops.trace(apply, params, x))
        return found[0].outputs

    jax.eval_shape(run, params, x)
    assert len(found[0].stacks) > 0
    assert found[0].uncovered == {}


def test_a_bias_repeated_for_each_example_belongs_to_its_layer():
    apply, params = haiku(haiku_cnn)(IMAGES)
    found = []

    def run(params, x):
        seen = pairs.trace(apply, params, x)
        found.extend(seen.layers)
        return seen.outputs

    jax.eval_shape(run, params, IMAGES)
    assert [layer.bias for layer in found] == ["conv2_d/b", "linear/b"]


@pytest.mark.long
def test_the_uncovered_leaves_of_batchnorm_are_its_running_statistics():
    module = ResNet18()
    variables = jax.eval_shape(module.init, KEYS[0], IMAGES)
    found = {}

    def run(variables, x):
        found.update(pairs.trace(module.apply, variables, x).uncovered)

    jax.eval_shape(run, variables, IMAGES)
    assert {name.split("/")[0] for name in found} == {"batch_stats"}
    assert len(found) == len(jax.tree.leaves(variables["batch_stats"]))
