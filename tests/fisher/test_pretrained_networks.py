"""Networks of the structure of MiniLM, EfficientNet-lite0 and torchvision's ResNet-18, but small.

They are written as a reader of checkpoints writes them: a table of leaves by name, and jnp. K-FAC
covers all that is trained, and the diagonal is that of gradients of single examples.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fisherjax as fj
from fisherjax._layers import loops

R = np.random.default_rng(0)
B, L, WIDTH, HEADS, WORDS = 3, 5, 4, 2, 11


def leaf(*shape):
    return R.normal(size=shape) / 2


def dense(p, name, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def layer_norm(p, name, x):
    x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-12)
    return x * p[f"{name}.weight"] + p[f"{name}.bias"]


def bert(p, tokens, *, flat=False):
    """Post-norm blocks, learned positions and token types, mean over the tokens that count."""
    counts = tokens > 0
    table = p["position"][jnp.arange(tokens.shape[1])[None]] + p["type"][0]
    h = layer_norm(p, "norm", p["word"][tokens] + table)

    def merged(x):
        return x.reshape(-1, WIDTH) if flat else x

    def heads(x):
        return x.reshape(*tokens.shape, HEADS, -1)

    h = merged(h)
    q, k, v = (heads(dense(p, name, h)) for name in ("query", "key", "value"))
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / np.sqrt(WIDTH // HEADS)
    weights = jax.nn.softmax(jnp.where(counts[:, None, None], scores, -1e9))
    mixed = jnp.einsum("bhlm,bmhd->blhd", weights, v).reshape(h.shape)
    h = layer_norm(p, "norm1", h + dense(p, "output", mixed))
    inner = jax.nn.gelu(dense(p, "up", h), approximate=False)
    h = layer_norm(p, "norm2", h + dense(p, "down", inner)).reshape(*tokens.shape, WIDTH)
    pooled = jnp.where(counts[..., None], h, 0).sum(1) / jnp.maximum(counts.sum(1), 1)[:, None]
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True) @ p["head"]


def bert_leaves():
    sizes = {"query": (4, 4), "key": (4, 4), "value": (4, 4), "output": (4, 4)}
    sizes |= {"up": (8, 4), "down": (4, 8)}
    norms = dict.fromkeys(("norm", "norm1", "norm2"), (4,))
    pairs = {f"{n}.weight": leaf(*s) for n, s in (sizes | norms).items()}
    pairs |= {f"{n}.bias": leaf(s[0]) for n, s in (sizes | norms).items()}
    tables = {"word": leaf(WORDS, 4), "position": leaf(9, 4), "type": leaf(2, 4)}
    return pairs | tables | {"head": leaf(4, 2)}


BASE = bert_leaves()


def adapted(p, tokens):
    """The same network with adapters on the queries and values of fixed kernels."""
    changed = {}
    for name in ("query", "value"):
        change = 2.0 * (p[f"{name}.b"] @ p[f"{name}.a"])
        changed[f"{name}.weight"] = BASE[f"{name}.weight"] + change
    fixed = jax.tree.map(jnp.asarray, BASE)
    return bert(fixed | changed | {"head": p["head"]}, tokens)


def adapters():
    sizes = {"query.a": (2, 4), "query.b": (4, 2), "value.a": (2, 4), "value.b": (4, 2)}
    return {n: leaf(*s) for n, s in sizes.items()} | {"head": leaf(4, 2)}


def conv(p, name, x, stride=1, groups=1):
    """A convolution of PyTorch's layout, with padding as PyTorch has it."""
    kernel = p[f"{name}.weight"]
    pad = kernel.shape[-1] // 2
    how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    kernel, pads = kernel.transpose(2, 3, 1, 0), ((pad, pad), (pad, pad))
    return fj.nn.conv_general_dilated(x, kernel, (stride, stride), pads, **how)


def batch_norm(p, name, x):
    scale = p[f"{name}.weight"] * lax.rsqrt(p[f"{name}.running_var"] + 1e-5)
    return (x - p[f"{name}.running_mean"]) * scale + p[f"{name}.bias"]


def efficient(p, x):
    """A stem, two inverted bottlenecks of which one has a skip, a head."""

    def relu6(h):
        return jnp.clip(h, 0, 6)

    h = relu6(batch_norm(p, "n0", conv(p, "c0", x, 2)))
    for block, stride in (("b1", 1), ("b2", 2)):
        inner = relu6(batch_norm(p, f"{block}n1", conv(p, f"{block}c1", h)))
        deep = conv(p, f"{block}c2", inner, stride, groups=inner.shape[-1])
        inner = relu6(batch_norm(p, f"{block}n2", deep))
        inner = batch_norm(p, f"{block}n3", conv(p, f"{block}c3", inner))
        h = h + inner if inner.shape == h.shape else inner
    return h.mean((1, 2)) @ p["fc.weight"].T + p["fc.bias"]


def resnet(p, x):
    """Basic blocks, one with a projection; max pooling behind the stem."""
    h = jax.nn.relu(batch_norm(p, "n0", conv(p, "c0", x, 2)))
    h = lax.reduce_window(h, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for block, stride in (("b1", 1), ("b2", 2)):
        inner = jax.nn.relu(batch_norm(p, f"{block}n1", conv(p, f"{block}c1", h, stride)))
        inner = batch_norm(p, f"{block}n2", conv(p, f"{block}c2", inner))
        skip = batch_norm(p, f"{block}n3", conv(p, f"{block}c3", h, 2)) if stride > 1 else h
        h = jax.nn.relu(inner + skip)
    return h.mean((1, 2)) @ p["fc.weight"].T + p["fc.bias"]


def of_convolutions(kernels, last):
    leaves = {
        "c0.weight": leaf(*kernels.pop("c0")),
        "fc.weight": leaf(3, last),
        "fc.bias": leaf(3),
    }
    norms = {"n0": leaves["c0.weight"].shape[0]}
    for name, shape in kernels.items():
        leaves[f"{name}.weight"] = leaf(*shape)
        norms[name.replace("c", "n")] = shape[0]
    for name, size in norms.items():
        leaves |= {f"{name}.{x}": leaf(size) for x in ("weight", "bias", "running_mean")}
        leaves[f"{name}.running_var"] = 1 + leaf(size) ** 2
    return leaves


BLOCKS = {
    "c0": (4, 3, 3, 3),
    **{"b1c1": (8, 4, 1, 1), "b1c2": (8, 1, 3, 3), "b1c3": (4, 8, 1, 1)},
    **{"b2c1": (8, 4, 1, 1), "b2c2": (8, 1, 5, 5), "b2c3": (6, 8, 1, 1)},
}
BASIC = {
    "c0": (4, 3, 7, 7),
    **{"b1c1": (4, 4, 3, 3), "b1c2": (4, 4, 3, 3)},
    **{"b2c1": (6, 4, 3, 3), "b2c2": (6, 6, 3, 3), "b2c3": (6, 4, 1, 1)},
}
TOKENS = np.where(np.arange(L) < np.array([[5], [2], [4]]), R.integers(1, WORDS, (B, L)), 0)
IMAGES = R.normal(size=(B, 8, 8, 3))
NETWORKS = {
    "MiniLM": (bert, bert_leaves, TOKENS),
    "MiniLM with batch and time in one axis": (
        lambda p, x: bert(p, x, flat=True),
        bert_leaves,
        TOKENS,
    ),
    "MiniLM with adapters": (adapted, adapters, TOKENS),
    "EfficientNet-lite0": (efficient, lambda: of_convolutions(dict(BLOCKS), 6), IMAGES),
    "ResNet-18": (resnet, lambda: of_convolutions(dict(BASIC), 6), IMAGES),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_leaf_that_is_trained_is_left_out(x64, name):
    apply, leaves, x = NETWORKS[name]
    params, found = leaves(), {}

    def run(params, x):
        seen = loops.trace(apply, params, x)
        found.update(uncovered=seen.uncovered, layers=seen.layers)
        return seen.outputs

    jax.eval_shape(run, params, x)
    assert set(found["uncovered"]) == {n for n in params if "running" in n}
    # Every bias belongs to the layer before it.
    biases = {layer.bias for layer in found["layers"]}
    assert {n for n in params if n.endswith(".bias")} <= biases


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_diagonal_is_that_of_gradients_of_single_examples(x64, name):
    apply, leaves, x = NETWORKS[name]
    params = leaves()
    rest = {n: p for n, p in params.items() if "running" in n}
    trained = {n: p for n, p in params.items() if n not in rest}
    model = fj.Model(lambda p, x: apply(rest | p, x), fj.likelihoods.gaussian)
    found = fj.fisher.diagonal(model, trained, fj.Examples(x), batch_size=2).entries

    def outputs(p, one):
        return model.apply(p, one[None])[0]

    jacobians = jax.vmap(jax.jacrev(outputs), (None, 0))(trained, jnp.asarray(x))
    for entry, j in jacobians.items():
        expected = np.square(j).sum(1).mean(0)
        np.testing.assert_allclose(found[entry], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_padding_and_merged_axes_leave_no_trace(x64):
    """Sentences are padded by two more tokens, and batch and time share an axis, or do not."""
    params = bert_leaves()
    longer, found = np.pad(TOKENS, ((0, 0), (0, 2))), []
    for flat, tokens in ((False, TOKENS), (True, longer)):
        model = fj.Model(
            lambda p, x, flat=flat: bert(p, x, flat=flat),
            fj.likelihoods.gaussian,
            positions=lambda x: x > 0,
        )
        found.append(fj.fisher.kfac(model, params, fj.Examples(jnp.asarray(tokens))))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12),
        *((one.factors, one.entries) for one in found),
    )
