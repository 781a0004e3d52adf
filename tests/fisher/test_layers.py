"""What the layers of a network are, and what must not be taken for one.

The law: the gradient of c^T z_n with respect to a layer's matrix V is sum_t a_nt g_nt^T, for each
example n and any c. A network that only looks as if it had a layer breaks it without an error.
"""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fisherjax import nn
from fisherjax.fisher import layers

NHWC = ("NHWC", "HWIO", "NHWC")


def lax_conv(x, kernel, layout=NHWC, padding="VALID", **settings):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), padding, dimension_numbers=layout, **settings
    )


def fast_conv(x, kernel):
    return nn.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=NHWC)


def flat(x):
    return jnp.tanh(x).reshape(x.shape[0], -1)


def normalized(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


# name: (apply(params, inputs), shapes of params, shape of inputs, the kernels that are layers)
B, L = 5, 5  # as many positions as examples, so that mistaking their axes goes unnoticed by shapes
NETWORKS = {
    "dense": (lambda p, x: jnp.tanh(x @ p["w"]), {"w": (4, 3)}, (B, 4), ["w"]),
    "dense with bias": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
        {"w": (4, 3), "b": (3,)},
        (B, 4),
        ["w"],
    ),
    "jitted inside": (
        lambda p, x: jax.jit(lambda w, x: jax.nn.relu(x @ w))(p["w"], x) @ p["v"],
        {"w": (4, 3), "v": (3, 2)},
        (B, 4),
        ["v", "w"],
    ),
    "residual": (
        lambda p, x: x + jnp.tanh(x @ p["w"] + p["b"]) @ p["v"],
        {"w": (4, 4), "b": (4,), "v": (4, 4)},
        (B, 4),
        ["v", "w"],
    ),
    "one example at a time": (
        lambda p, x: jax.vmap(lambda row: jnp.tanh(row @ p["w"] + p["b"]))(x),
        {"w": (4, 3), "b": (3,)},
        (B, 4),
        ["w"],
    ),
    "positions": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]).sum(1),
        {"w": (4, 3), "b": (3,)},
        (B, L, 4),
        ["w"],
    ),
    "lax convolution": (
        lambda p, x: flat(lax_conv(x, p["k"]) + p["b"]),
        {"k": (3, 3, 2, 4), "b": (4,)},
        (B, 5, 6, 2),
        ["k"],
    ),
    "fast convolution": (
        lambda p, x: flat(fast_conv(x, p["k"]) + p["b"]),
        {"k": (3, 3, 2, 4), "b": (4,)},
        (B, 5, 6, 2),
        ["k"],
    ),
    # From here on something is in the way of taking the matrix product for a layer.
    "positions first": (
        lambda p, x: jnp.tanh(x.swapaxes(0, 1) @ p["w"]).sum(0),
        {"w": (4, 3)},
        (B, L, 4),
        [],
    ),
    "examples and positions in one axis": (
        lambda p, x: jnp.tanh(x.reshape(-1, 4) @ p["w"]).reshape(-1, L, 3).sum(1),
        {"w": (4, 3)},
        (B, L, 4),
        [],
    ),
    "contracted over positions": (
        lambda p, x: jnp.tanh(jnp.einsum("bli,lo->bio", x, p["w"])).sum(1),
        {"w": (L, 3)},
        (B, L, L),
        [],
    ),
    "kernel of two output axes": (
        lambda p, x: jnp.tensordot(x, p["w"], 1).reshape(x.shape[0], 6),
        {"w": (4, 2, 3)},
        (B, 4),
        [],
    ),
    "kernel without output axis": (
        lambda p, x: (x @ p["w"])[:, None],
        {"w": (4,)},
        (B, 4),
        [],
    ),
    "transposed kernel": (lambda p, x: x @ p["w"].T, {"w": (3, 4)}, (B, 4), []),
    "output also taken before the bias": (
        lambda p, x: (lambda h: jnp.tanh(jnp.concatenate([h + p["b"], h], 1)))(x @ p["w"]),
        {"w": (4, 3), "b": (3,)},
        (B, 4),
        [],
    ),
    "kernel also used elsewhere": (
        lambda p, x: jnp.tanh(x @ p["w"]) + p["w"].sum(),
        {"w": (4, 3)},
        (B, 4),
        [],
    ),
    "fast convolution's kernel also used elsewhere": (
        lambda p, x: flat(fast_conv(x, p["k"]) + p["k"].sum()),
        {"k": (3, 3, 2, 4)},
        (B, 5, 6, 2),
        [],
    ),
    "fast convolution twice": (
        lambda p, x: flat(fast_conv(x, p["k"]) * fast_conv(2 * x, p["k"])),
        {"k": (3, 3, 2, 4)},
        (B, 5, 6, 2),
        [],
    ),
    "shared kernel": (
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"],
        {"w": (4, 4)},
        (B, 4),
        [],
    ),
    "shared bias": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["b"],
        {"w": (4, 3), "v": (3, 3), "b": (3,)},
        (B, 4),
        ["v", "w"],
    ),
    "bias along positions": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"][:, None]).sum(1),
        {"w": (4, L), "b": (L,)},
        (B, L, 4),
        [],
    ),
    "bias along rows of the image": (
        lambda p, x: flat(fast_conv(x, p["k"]) + p["b"][:, None, None]),
        {"k": (3, 3, 2, 3), "b": (3,)},
        (B, 5, 6, 2),
        ["k"],
    ),
    "bias of one number": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
        {"w": (4, 3), "b": (1,)},
        (B, 4),
        [],
    ),
    "channels first": (
        lambda p, x: flat(lax_conv(x, p["k"], ("NCHW", "OIHW", "NCHW"), padding="SAME")),
        {"k": (3, 3, 3, 3)},
        (B, 3, 3, 3),
        [],
    ),
    "convolution of one example at a time": (
        lambda p, x: flat(jax.vmap(lambda image: fast_conv(image[None], p["k"])[0])(x)),
        {"k": (3, 3, 2, 4)},
        (B, 5, 6, 2),
        [],
    ),
    "images of a sequence": (
        lambda p, x: flat(lax_conv(x.reshape(-1, 4, 4, 1), p["k"]).reshape(len(x), -1)),
        {"k": (3, 3, 1, 2)},
        (B, 2, 4, 4, 1),
        [],
    ),
}


def draw(shapes, seed):
    source = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(source.normal(size=shape)),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_are_sums_of_activations_times_tangents(x64, name):
    apply, shapes, input_shape, expected = NETWORKS[name]
    params, x = draw(shapes, 0), draw(input_shape, 1)
    z = jax.eval_shape(apply, params, x)
    cotangent = np.cos(np.arange(z.size)).reshape(z.shape)
    found, covered = [], []

    @jax.jit
    def both_ways(params, x):
        seen = layers.trace(apply, params, x)
        found[:] = seen.layers
        covered[:] = [leaf for layer in found for leaf in (layer.kernel, layer.bias) if leaf]
        covered[:] = sorted([*covered, *seen.uncovered])
        pairs = zip(seen.activations, seen.pullback(cotangent), strict=True)
        products = [jnp.einsum("nta,nto->nao", a, g) for a, g in pairs]

        def scalar(params, example, c):
            return jnp.vdot(apply(params, example[None])[0], c)

        gradients = jax.vmap(jax.grad(scalar), (None, 0, 0))(params, x, cotangent)
        stacked = [jax.vmap(partial(layers.matrix, layer))(gradients) for layer in found]
        return (seen.outputs, products), (apply(params, x), stacked)

    chex.assert_trees_all_close(*both_ways(params, x), rtol=1e-10, atol=1e-12)
    assert sorted(layer.kernel for layer in found) == expected
    assert covered == sorted(shapes)  # each leaf in one layer, or uncovered, and never in both


@pytest.mark.parametrize("shape", [(4, 3), (2, 5, 3, 4)])
@pytest.mark.parametrize("bias", [None, "b"])
def test_unpacking_a_layers_matrix_gives_its_leaves_back(shape, bias):
    layer = layers.Layer("k", bias, shape)
    leaves = draw({"k": shape} | ({"b": shape[-1:]} if bias else {}), 0)
    value = layers.matrix(layer, leaves)
    assert value.shape == (np.prod(shape[:-1]) + (bias is not None), shape[-1])
    back = layers.unpack(layer, value)
    chex.assert_trees_all_equal(back, leaves)


def test_the_bias_is_the_last_row_and_its_activation_is_one():
    apply, shapes, input_shape, _ = NETWORKS["fast convolution"]
    params, x = draw(shapes, 0), draw(input_shape, 1)
    (activations,) = jax.jit(lambda p, x: layers.trace(apply, p, x).activations)(params, x)
    assert activations.shape == (B, 3 * 4, 3 * 3 * 2 + 1)
    assert (activations[..., -1] == 1).all()
    layer = layers.Layer("k", "b", (3, 3, 2, 4))
    assert (layers.matrix(layer, params)[-1] == params["b"]).all()


def test_examples_that_depend_on_each_other_are_refused():
    def apply(params, x):
        h = x @ params["w"]
        return (h - h.mean(0)) / h.std(0)  # batch normalisation in training mode

    with pytest.raises(ValueError, match=r"BatchNorm in training mode.*running statistics"):
        jax.eval_shape(partial(layers.trace, apply), {"w": jnp.ones((4, 3))}, jnp.ones((B, 4)))


def test_a_network_that_cannot_be_read_is_refused():
    def apply(params, x):
        return lax.while_loop(lambda h: h[0, 0] < 9, lambda h: h @ params["w"], x)

    with pytest.raises(layers.LayersNotFoundError, match=r"could not be found.*fisher\.diagonal"):
        jax.eval_shape(partial(layers.trace, apply), {"w": jnp.eye(4)}, jnp.ones((B, 4)))
