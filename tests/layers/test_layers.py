"""What the layers of a network are, and what must not be taken for one.

The law: the gradient of c^T z_n with respect to a layer's matrix V is sum_t a_nt g_nt^T, for each
example n and any c. A network that only looks as if it had a layer breaks it without an error.
"""

import functools
import re
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fisherjax import Examples, Model, fisher, likelihoods, nn
from fisherjax._layers import layer as layers
from fisherjax._layers import pairs, reading
from fisherjax._layers.views import MANY

NHWC = ("NHWC", "HWIO", "NHWC")


def lax_conv(x, kernel, layout=NHWC, padding="VALID", **settings):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), padding, dimension_numbers=layout, **settings
    )


def fast_conv(x, kernel):
    return nn.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=NHWC)


def flat(x):
    return jnp.tanh(x).reshape(x.shape[0], -1)


def ids(x):
    return (7 * jnp.abs(x)).astype(int) % 6


def normalized(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def states(x):
    return jnp.zeros((len(x), 3)), jnp.zeros((len(x), 3))


def lstm(p, state, x):
    """One step as flax's OptimizedLSTMCell computes it: one product for all gates."""
    c, h = state
    kernels, inputs, biases = (jnp.concatenate([p[k + g] for g in "ifgo"], -1) for k in "hkb")
    i, f, g, o = (
        a + b
        for a, b in zip(
            jnp.split(h @ kernels + biases.reshape(1, -1), 4, -1),
            jnp.split(x @ inputs, 4, -1),
            strict=True,
        )
    )
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def scores(x, bias):
    """Attention scores [B, heads, L, L] with a bias for each pair of positions, as in T5."""
    heads = x[:, :, : len(bias)].transpose(0, 2, 1)[..., None]
    return jnp.tanh(heads * (x @ x.swapaxes(1, 2))[:, None] + bias[None]).sum((1, 3))


# name: (apply(params, inputs), shapes of params, shape of inputs, the kernels that are layers)
B, L = 5, 5  # as many positions as examples, so that mistaking their axes goes unnoticed by shapes
DIFFERENCES = np.arange(L)[:, None] - np.arange(L) + L - 1
NETWORKS = {
    "dense": (lambda p, x: jnp.tanh(x @ p["w"]), {"w": (4, 3)}, (B, 4), ["w"]),
    "dense with bias": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
        {"w": (4, 3), "b": (3,)},
        (B, 4),
        ["w"],
    ),
    "products in the order of their sizes": (
        lambda p, x: jnp.einsum("bi,ij,jk->bk", x, p["w"], p["v"]),
        {"w": (8, 8), "v": (8, 8)},
        (B, 8),
        ["v", "w"],
    ),
    "rows outside of the table, clipped": (
        lambda p, x: jnp.tanh(jnp.take(p["e"], ids(x) - 1, axis=0, mode="clip")).sum(1),
        {"e": (3, 2)},
        (B, 4),
        ["e"],
    ),
    "positions outside of the table, clipped": (
        lambda p, x: jnp.tanh(x + jnp.take(p["t"], jnp.arange(L), axis=0, mode="clip")).sum(1),
        {"t": (L - 2, 4)},
        (B, L, 4),
        ["t"],
    ),
    "kernel that each example computes": (
        lambda p, x: jax.vmap(lambda row: jnp.convolve(row, row[:3] @ p["w"], "same"))(x),
        {"w": (3, 3)},
        (B, 6),
        ["w"],
    ),
    "stack of layers, one after the other": (
        lambda p, x: functools.reduce(lambda h, w: jnp.tanh(h @ w), p["w"], x),
        {"w": (2, 4, 4)},
        (B, 4),
        ["w[0]", "w[1]"],
    ),
    "kernel without entries": (
        lambda p, x: jnp.concatenate([x @ p["w"], x @ p["empty"]], 1),
        {"w": (4, 3), "empty": (4, 0)},
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
    "dense at each position": (
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
    "positions first": (
        lambda p, x: jnp.tanh(x.swapaxes(0, 1) @ p["w"]).sum(0),
        {"w": (4, 3)},
        (B, L, 4),
        ["w"],
    ),
    "one example at a time, transposed kernel": (
        lambda p, x: jax.vmap(lambda row: jnp.tanh(p["w"] @ row + p["b"]))(x),
        {"w": (3, 4), "b": (3,)},
        (B, 4),
        ["w"],
    ),
    "positions one at a time, transposed kernel": (
        lambda p, x: jax.vmap(jax.vmap(lambda row: jnp.tanh(p["w"] @ row + p["b"])))(x).sum(1),
        {"w": (3, 4), "b": (3,)},
        (B, L, 4),
        ["w"],
    ),
    "heads": (
        lambda p, x: jnp.einsum(
            "blhk,hko->blo", jnp.tanh(jnp.einsum("bli,ihk->blhk", x, p["q"]) + p["b"]), p["o"]
        ).sum(1),
        {"q": (4, 2, 3), "b": (2, 3), "o": (2, 3, 4)},
        (B, L, 4),
        ["o", "q"],
    ),
    "bias of heads in another order": (
        lambda p, x: jnp.tanh(jnp.einsum("bi,ihk->bhk", x, p["q"]) + p["b"].T).reshape(len(x), -1),
        {"q": (4, 2, 3), "b": (3, 2)},
        (B, 4),
        ["b", "q"],
    ),
    "cast": (
        lambda p, x: jnp.tanh(x.astype("float32") @ p["w"].astype("float32")).astype(float),
        {"w": (4, 3)},
        (B, 4),
        ["w"],
    ),
    "rematerialised": (
        jax.checkpoint(lambda p, x: jnp.tanh(x @ p["w"] + p["b"])),
        {"w": (4, 3), "b": (3,)},
        (B, 4),
        ["w"],
    ),
    "stack of layers": (
        lambda p, x: lax.scan(lambda h, q: (jnp.tanh(h @ q["w"] + q["b"]), None), x, p)[0],
        {"w": (3, 4, 4), "b": (3, 4)},
        (B, 4),
        ["w[0]", "w[1]", "w[2]"],
    ),
    "stack of layers, backwards": (
        lambda p, x: (lambda h, passed: h + passed.sum(0))(
            *lax.scan(lambda h, q: (jnp.tanh(h @ q), h), x, p["w"], reverse=True)
        ),
        {"w": (3, 4, 4)},
        (B, 4),
        ["w[0]", "w[1]", "w[2]"],
    ),
    "recurrent": (
        lambda p, x: lax.scan(
            lambda h, row: (jnp.tanh(row @ p["w"] + h @ p["v"]), None),
            jnp.zeros((len(x), 3)),
            x.swapaxes(0, 1),
        )[0],
        {"w": (4, 3), "v": (3, 3)},
        (B, L, 4),
        ["v", "w"],
    ),
    "embedding": (
        lambda p, x: jnp.tanh(p["e"][ids(x)] * x[..., None]).sum(1),
        {"e": (6, 4)},
        (B, L),
        ["e"],
    ),
    "embedding of one example at a time": (
        lambda p, x: jax.vmap(jax.vmap(lambda i: p["e"][i]))(ids(x)).sum(1),
        {"e": (6, 4)},
        (B, L),
        ["e"],
    ),
    "embedding that is the head too": (
        lambda p, x: jnp.tanh(p["e"][ids(x)]) @ p["e"].T,
        {"e": (6, 4)},
        (B, L),
        ["e", "e^T"],
    ),
    "positions": (
        lambda p, x: jnp.tanh(
            x + p["all"] + p["first"][:L] + p["some"][jnp.array([0, 2, 2, 1, 5])]
        ),
        {"all": (1, L, 4), "first": (L + 2, 4), "some": (6, 4)},
        (B, L, 4),
        ["all", "first", "some"],
    ),
    "token put first": (
        lambda p, x: jnp.tanh(
            jnp.concatenate([jnp.broadcast_to(p["c"], (len(x), 1, 4)), x], axis=1)
        ),
        {"c": (1, 1, 4)},
        (B, L, 4),
        ["c"],
    ),
    "LayerNorm": (
        lambda p, x: jnp.tanh(normalized(x) * p["s"] + p["b"]),
        {"s": (4,), "b": (4,)},
        (B, L, 4),
        ["s"],
    ),
    "RMSNorm": (lambda p, x: jnp.tanh(normalized(x) * p["s"]), {"s": (4,)}, (B, L, 4), ["s"]),
    "BatchNorm with running statistics": (
        lambda p, x: flat((x - p["m"]) * (lax.rsqrt(jnp.square(p["v"]) + 1) * p["s"]) + p["b"]),
        {"m": (4,), "v": (4,), "s": (4,), "b": (4,)},
        (B, 3, 3, 4),
        ["s"],
    ),
    "scale of one number": (lambda p, x: jnp.tanh(p["s"] * x), {"s": ()}, (B, 4), ["s"]),
    "dilated convolution": (
        lambda p, x: flat(lax_conv(x, p["k"], rhs_dilation=(2, 1)) + p["b"]),
        {"k": (2, 3, 2, 4), "b": (4,)},
        (B, 5, 6, 2),
        ["k"],
    ),
    "transposed convolution": (
        lambda p, x: flat(lax.conv_transpose(x, p["k"], (2, 2), "SAME")),
        {"k": (2, 3, 2, 4)},
        (B, 3, 4, 2),
        ["k"],
    ),
    "one-dimensional convolution": (
        lambda p, x: jnp.tanh(
            lax.conv_general_dilated(
                x, p["k"], (2,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
            )
        ),
        {"k": (3, 2, 4)},
        (B, 6, 2),
        ["k"],
    ),
    "channels first, strides and bias": (
        lambda p, x: jnp.tanh(
            lax.conv_general_dilated(x, p["k"], (2, 1), [(1, 0), (2, 1)]) + p["b"]
        ).reshape(len(x), -1),
        {"k": (4, 2, 3, 2), "b": (4, 1, 1)},
        (B, 2, 5, 6),
        ["k"],
    ),
    "jitted fast convolution": (
        jax.jit(lambda p, x: flat(fast_conv(x, p["k"]))),
        {"k": (3, 3, 2, 4)},
        (B, 5, 6, 2),
        ["k"],
    ),
    # From here on something is in the way of taking the matrix product for a layer.
    "heads merged in another order": (
        lambda p, x: jnp.tanh(x @ p["w"].swapaxes(1, 2).reshape(4, 6)),
        {"w": (4, 2, 3)},
        (B, 4),
        [],
    ),
    "bias of heads that were turned": (
        lambda p, x: jnp.tanh(jnp.einsum("bi,ihk->bkh", x, p["w"]).reshape(len(x), 6) + p["b"]),
        {"w": (4, 2, 3), "b": (6,)},
        (B, 4),
        ["b", "w"],
    ),
    "kernel repeated": (
        lambda p, x: jnp.tanh(x @ jnp.broadcast_to(p["w"], (4, 3))),
        {"w": (1, 3)},
        (B, 4),
        [],
    ),
    "table that is looked up, multiplied by, and both ways round": (
        lambda p, x: jnp.tanh(p["e"][ids(x)] @ p["e"]) @ p["e"].T,
        {"e": (6, 6)},
        (B, L),
        ["e", "e^T", "e^T^T"],
    ),
    "one and a scale": (lambda p, x: jnp.tanh((1 + p["s"]) * x), {"s": (4,)}, (B, 4), ["s"]),
    "scale and its square": (
        lambda p, x: jnp.tanh(p["s"] * (p["s"] * x)),
        {"s": (4,)},
        (B, 4),
        ["s"],
    ),
    "scale times itself": (lambda p, x: jnp.tanh((p["s"] * p["s"]) * x), {"s": (4,)}, (B, 4), []),
    "contracted over positions": (
        lambda p, x: jnp.tanh(jnp.einsum("bli,lo->bio", x, p["w"])).sum(1),
        {"w": (L, 3)},
        (B, L, L),
        ["w"],
    ),
    "kernel of two output axes": (
        lambda p, x: jnp.tensordot(x, p["w"], 1).reshape(x.shape[0], 6),
        {"w": (4, 2, 3)},
        (B, 4),
        ["w"],
    ),
    "kernel without output axis": (
        lambda p, x: (x @ p["w"])[:, None],
        {"w": (4,)},
        (B, 4),
        ["w"],
    ),
    "transposed kernel": (lambda p, x: x @ p["w"].T, {"w": (3, 4)}, (B, 4), ["w"]),
    "output also taken before the bias": (
        lambda p, x: (lambda h: jnp.tanh(jnp.concatenate([h + p["b"], h], 1)))(x @ p["w"]),
        {"w": (4, 3), "b": (3,)},
        (B, 4),
        ["b", "w"],
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
        ["k"],
    ),
    "shared kernel": (
        lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"],
        {"w": (4, 4)},
        (B, 4),
        ["w"],
    ),
    "shared bias": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] + p["b"],
        {"w": (4, 3), "v": (3, 3), "b": (3,)},
        (B, 4),
        ["b", "v", "w"],
    ),
    "bias along positions": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"][:, None]).sum(1),
        {"w": (4, L), "b": (L,)},
        (B, L, 4),
        ["b", "w"],
    ),
    "bias along rows of the image": (
        lambda p, x: flat(fast_conv(x, p["k"]) + p["b"][:, None, None]),
        {"k": (3, 3, 2, 3), "b": (3,)},
        (B, 5, 6, 2),
        ["b", "k"],
    ),
    "bias of one number": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["b"]),
        {"w": (4, 3), "b": (1,)},
        (B, 4),
        ["b", "w"],
    ),
    "channels first": (
        lambda p, x: flat(lax_conv(x, p["k"], ("NCHW", "OIHW", "NCHW"), padding="SAME")),
        {"k": (3, 3, 3, 3)},
        (B, 3, 3, 3),
        ["k"],
    ),
    "convolution of one example at a time": (
        lambda p, x: flat(jax.vmap(lambda image: fast_conv(image[None], p["k"])[0])(x)),
        {"k": (3, 3, 2, 4)},
        (B, 5, 6, 2),
        ["k"],
    ),
    "one score and many thresholds": (
        lambda p, x: jnp.tanh(x @ p["w"] + p["t"]),
        {"w": (4, 1), "t": (3,)},
        (B, 4),
        ["t", "w"],
    ),
    "one score squeezed, and thresholds": (
        lambda p, x: jnp.tanh(p["t"] + (x @ p["w"])[:, None]),
        {"w": (4,), "t": (3,)},
        (B, 4),
        ["t", "w"],
    ),
    "one score times gains plus thresholds": (
        lambda p, x: jnp.tanh((x @ p["w"]) * p["g"] + p["t"]),
        {"w": (4, 1), "g": (3,), "t": (3,)},
        (B, 4),
        ["g", "w"],
    ),
    "one vector for all positions, and a bias for each": (
        lambda p, x: jnp.tanh((x @ p["w"])[:, None] + p["b"]).sum(1),
        {"w": (4, 3), "b": (L, 3)},
        (B, 4),
        ["b", "w"],
    ),
    "scale times a number": (lambda p, x: jnp.tanh(x * (p["s"] * 2.0)), {"s": (4,)}, (B, 4), ["s"]),
    "number times one and a scale": (
        lambda p, x: jnp.tanh((0.5 * (1 + p["s"])) * normalized(x) + p["b"]),
        {"s": (4,), "b": (4,)},
        (B, L, 4),
        ["s"],
    ),
    "scale times a constant of fewer axes": (
        lambda p, x: jnp.tanh(x * (p["s"] * jnp.arange(1.0, 5.0))),
        {"s": (L, 4)},
        (B, L, 4),
        ["s"],
    ),
    "scale times a constant for each row": (
        lambda p, x: jnp.tanh(x * (p["s"] * jnp.arange(1.0, 6.0)[:, None])),
        {"s": (L, 4)},
        (B, L, 4),
        ["s"],
    ),
    "scale times a constant, turned": (
        lambda p, x: jnp.tanh(x * (p["s"] * jnp.arange(1.0, 6.0)).T),
        {"s": (4, L)},
        (B, L, 4),
        ["s"],
    ),
    "scale of one number times a number": (
        lambda p, x: jnp.tanh(x * (3 * p["s"])),
        {"s": ()},
        (B, 4),
        ["s"],
    ),
    "scale times a number of another leaf": (
        lambda p, x: jnp.tanh(x * (p["s"] * jnp.exp(p["t"]))),
        {"s": (4,), "t": (1,)},
        (B, 4),
        ["s"],
    ),
    "rows merged in Fortran's order": (
        lambda p, x: jnp.tanh(x @ p["w"].reshape(6, 3, order="F")),
        {"w": (2, 3, 3)},
        (B, 6),
        [],
    ),
    "outputs in Fortran's order": (
        lambda p, x: jnp.tanh((x @ p["w"]).reshape(len(x), 6) + p["b"].reshape(6, order="F")),
        {"w": (4, 6), "b": (2, 3)},
        (B, 4),
        ["w"],
    ),
    "scale times several numbers": (
        lambda p, x: jnp.tanh(x * (p["s"] * jnp.arange(1.0, 5.0))),
        {"s": ()},
        (B, 4),
        [],
    ),
    **{
        f"gain changed by {name}": (
            lambda p, x, change=change: jnp.tanh(x * change(p["s"])),
            {"s": (4,)},
            (B, 4),
            [],
        )
        for name, change in {
            "neg": jnp.negative,
            "division": lambda g: g / 3,
            "power": lambda g: g**2,
            "softplus": jax.nn.softplus,
            "two constants": lambda g: 2 * (g * jnp.arange(4.0)),
            "tiling": lambda g: jnp.tile(g[:2], 2),
        }.items()
    },
    **{
        f"kernel changed by {name}": (
            lambda p, x, change=change: jnp.tanh(x @ change(p["w"])),
            {"w": (4, 3)},
            (B, 4),
            [],
        )
        for name, change in {
            "mask": lambda w: w * jnp.tri(4, 3),
            "standardising": lambda w: (w - w.mean(0)) / w.std(0),
            "weight norm": lambda w: w / jnp.linalg.norm(w, axis=0),
        }.items()
    },
    # A matrix for each group of inputs.
    "grouped convolution with strides and a bias": (
        lambda p, x: flat(
            nn.conv_general_dilated(
                *(x, p["k"], (2, 1), "SAME"), dimension_numbers=NHWC, feature_group_count=2
            )
            + p["b"]
        ),
        {"k": (3, 2, 2, 6), "b": (6,)},
        (B, 5, 4, 4),
        ["k"],
    ),
    "depthwise convolution, channels first": (
        lambda p, x: flat(
            lax_conv(x, p["k"], ("NCHW", "OIHW", "NCHW"), "SAME", feature_group_count=3)
            + p["b"][:, None, None]
        ),
        {"k": (3, 1, 3, 3), "b": (3,)},
        (B, 3, 4, 5),
        ["k"],
    ),
    "dilated depthwise convolution with two outputs a channel": (
        lambda p, x: flat(
            lax.conv_general_dilated(
                *(x, p["k"], (1,), "SAME"),
                rhs_dilation=(2,),
                dimension_numbers=("NHC", "HIO", "NHC"),
                feature_group_count=3,
            )
        ),
        {"k": (3, 1, 6)},
        (B, 7, 3),
        ["k"],
    ),
    "stack of depthwise convolutions": (
        lambda p, x: lax.scan(
            lambda h, k: (jnp.tanh(lax_conv(h, k, padding="SAME", feature_group_count=2)), None),
            x,
            p["k"],
        )[0].reshape(len(x), -1),
        {"k": (2, 3, 3, 1, 2)},
        (B, 3, 4, 2),
        ["k[0]", "k[1]"],
    ),
    "a matrix for each group": (
        lambda p, x: jnp.tanh(jnp.einsum("blgi,gio->blgo", x, p["w"]) + p["b"]).reshape(len(x), -1),
        {"w": (3, 4, 2), "b": (3, 2)},
        (B, 2, 3, 4),
        ["w"],
    ),
    "a matrix for each group, groups behind outputs": (
        lambda p, x: jnp.tanh(jnp.einsum("bgi,iog->bgo", x, p["w"]) + p["b"]).reshape(len(x), -1),
        {"w": (4, 2, 3), "b": (3, 2)},
        (B, 3, 4),
        ["b", "w"],
    ),
    # Examples share an axis with positions.
    **{
        f"examples and positions in one axis, {name}": (apply, shapes, shape, kernels)
        for name, (apply, shapes, shape, kernels) in {
            "dense": (
                lambda p, x: jnp.tanh(x.reshape(-1, 4) @ p["w"] + p["b"]).reshape(-1, L, 3).sum(1),
                {"w": (4, 3), "b": (3,)},
                (B, L, 4),
                ["w"],
            ),
            "positions first": (
                lambda p, x: (
                    jnp.tanh(x.swapaxes(0, 1).reshape(-1, 4) @ p["w"]).reshape(L, -1, 3).sum(0)
                ),
                {"w": (4, 3)},
                (B, L, 4),
                ["w"],
            ),
            "normalised": (
                lambda p, x: jnp.tanh(normalized(x.reshape(-1, 4)) * p["s"] + p["b"]).reshape(
                    -1, L * 4
                ),
                {"s": (4,), "b": (4,)},
                (B, L, 4),
                ["s"],
            ),
            "looked up": (
                lambda p, x: jnp.tanh(p["e"][ids(x).ravel()]).reshape(*x.shape, 3).sum(1),
                {"e": (6, 3)},
                (B, L),
                ["e"],
            ),
            "images": (
                lambda p, x: flat(
                    (lax_conv(x.reshape(-1, 4, 4, 1), p["k"]) + p["b"]).reshape(len(x), -1)
                ),
                {"k": (3, 3, 1, 2), "b": (2,)},
                (B, 2, 4, 4, 1),
                ["k"],
            ),
        }.items()
    },
    # Kernels that are computed from several leaves.
    **{
        f"kernel computed, {name}": (apply, shapes, (B, 4), sorted(kernels))
        for name, (apply, shapes, kernels) in {
            "concatenated outputs": (
                lambda p, x: jnp.tanh(
                    x @ jnp.concatenate([p["v"], p["w"]], 1) + jnp.concatenate([p["b"], p["c"]])
                ),
                {"v": (4, 2), "w": (4, 3), "b": (2,), "c": (3,)},
                "vw",
            ),
            "concatenated inputs": (
                lambda p, x: jnp.tanh(jnp.concatenate([p["v"], p["w"]]).T @ x.T).T,
                {"v": (1, 3), "w": (3, 3)},
                "vw",
            ),
            "stacked": (
                lambda p, x: jnp.tanh(
                    jnp.einsum("bi,kio->bko", x, jnp.stack([p["v"], p["w"]]))
                ).sum(1),
                {"v": (4, 2), "w": (4, 2)},
                "vw",
            ),
            "an adapter beside a kernel": (
                lambda p, x: jnp.tanh(x @ p["w"] + 0.5 * ((x @ p["a"]) @ p["c"])),
                {"w": (4, 3), "a": (4, 2), "c": (2, 3)},
                "acw",
            ),
            "an adapter in a kernel": (
                lambda p, x: jnp.tanh(x @ (p["w"] + (p["a"] @ p["c"]) * 0.5)),
                {"w": (4, 3), "a": (4, 2), "c": (2, 3)},
                "acw",
            ),
            "an adapter in a fixed kernel, as PyTorch has it": (
                lambda p, x: jnp.tanh(x @ (jnp.ones((3, 4)) + 2.0 * (p["c"] @ p["a"])).T + p["b"]),
                {"a": (2, 4), "c": (3, 2), "b": (3,)},
                "abc",
            ),
            "three factors": (
                lambda p, x: jnp.tanh(((p["u"] @ p["v"] @ p["w"]).T @ x.T).T),
                {"u": (4, 2), "v": (2, 3), "w": (3, 5)},
                "uvw",
            ),
            "equalising": (
                lambda p, x: jnp.tanh(x @ (p["w"] * 0.5**0.5) + p["b"]),
                {"w": (4, 3), "b": (3,)},
                "w",
            ),
            "divided": (lambda p, x: jnp.tanh(x @ (p["w"] / 3)), {"w": (4, 3)}, "w"),
            "times a leaf": (
                lambda p, x: jnp.tanh(x @ (p["s"] * p["w"])),
                {"w": (4, 3), "s": ()},
                "sw",
            ),
            "two biases": (
                lambda p, x: jnp.tanh(x @ p["w"] + (p["b"] + p["c"])),
                {"w": (4, 3), "b": (3,), "c": (3,)},
                "wc",
            ),
        }.items()
    },
    "concatenated kernels of an LSTM": (
        lambda p, x: lax.scan(lambda s, x: (lstm(p, s, x), None), states(x), x.swapaxes(0, 1))[0][
            1
        ],
        {k + g: (3 if k == "h" else 2, 3) for g in "ifgo" for k in "hk"}
        | {f"b{g}": (3,) for g in "ifgo"},
        (B, 3, 2),
        sorted(k + g for g in "ifgo" for k in "hk"),
    ),
    "a branch for each example": (
        jax.vmap(
            lambda p, x: lax.cond(
                x[0] > 0, lambda x: jnp.tanh(x @ p["w"] + p["b"]), lambda x: x @ p["v"], x
            ),
            (None, 0),
        ),
        {"w": (4, 3), "b": (3,), "v": (4, 3)},
        (B, 4),
        ["v", "w"],
    ),
    # Tables that are added after a lookup by constants.
    **{
        f"table, {name}": (apply, shapes, (B, L, 4), sorted(shapes))
        for name, (apply, shapes) in {
            "by [1, L]": (
                lambda p, x: jnp.tanh(x + p["t"][jnp.arange(L)[None]]).sum(1),
                {"t": (L + 2, 4)},
            ),
            "by a slice": (
                lambda p, x: jnp.tanh(x + lax.dynamic_slice_in_dim(p["t"], 1, L)).sum(1),
                {"t": (L + 2, 4)},
            ),
            "by differences of positions": (
                lambda p, x: scores(x, p["t"][DIFFERENCES].transpose(2, 1, 0)),
                {"t": (2 * L - 1, 2)},
            ),
            "by differences in a line, one head": (
                lambda p, x: scores(
                    x, p["t"][DIFFERENCES.ravel()].reshape(L, L, -1).transpose(2, 0, 1)
                ),
                {"t": (2 * L - 1, 1)},
            ),
            "one row of it": (lambda p, x: jnp.tanh(x + p["t"][1]).sum(1), {"t": (3, 4)}),
            "with a row of another": (
                lambda p, x: jnp.tanh(x + (p["t"][:L] + p["u"][0])[None]).sum(1),
                {"t": (L + 1, 4), "u": (2, 4)},
            ),
            "two side by side": (
                lambda p, x: jnp.tanh(x + jnp.concatenate([p["t"], p["u"]])).sum(1),
                {"t": (2, 4), "u": (L - 2, 4)},
            ),
        }.items()
    },
}


def draw(shapes, seed):
    source = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(source.normal(size=shape)),
        shapes,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )


FORMS = [
    "heads",
    "stack of layers",
    "recurrent",
    "shared kernel",
    "embedding that is the head too",
    "positions",
    "BatchNorm with running statistics",
    "channels first, strides and bias",
    "one score and many thresholds",
    "one score times gains plus thresholds",
    "scale times a number",
    "scale times a constant for each row",
    "scale times several numbers",
    "kernel changed by weight norm",
]
OFTEN = FORMS[:2] + FORMS[4:5] + FORMS[6:]
# One example is traced as two of it are, whatever the layers.
ALONE = [(n, 1) if n in FORMS else pytest.param(n, 1, marks=pytest.mark.slow) for n in NETWORKS]


@pytest.mark.parametrize(("name", "examples"), [(n, B) for n in NETWORKS] + ALONE)
def test_gradients_are_sums_of_activations_times_tangents(x64, name, examples):
    apply, shapes, (_, *input_shape), expected = NETWORKS[name]
    input_shape = (examples, *input_shape)
    params, x = draw(shapes, 0), draw(input_shape, 1)
    z = jax.eval_shape(apply, params, x)
    cotangent = np.cos(np.arange(z.size)).reshape(z.shape)
    found, left = [], []

    @jax.jit
    def both_ways(params, x):
        seen = pairs.trace(apply, params, x)
        found[:], left[:] = seen.layers, seen.uncovered
        tangents = seen.pullback(cotangent)

        def scalar(params, example, c):
            return jnp.vdot(apply(params, example[None])[0], c)

        gradients = jax.vmap(jax.grad(scalar), (None, 0, 0))(params, x, cotangent)
        expected = {name: gradients[name] for name in gradients.keys() - set(left)}
        found_ones = {n: g.reshape(-1, *shapes[n]) for n, g in summed(seen, tangents).items()}
        return (seen.outputs, found_ones), (apply(params, x), expected)

    chex.assert_trees_all_close(*both_ways(params, x), rtol=1e-10, atol=1e-12)
    assert sorted(layer.kernel for layer in found) == expected
    covered = {leaf for layer in found for leaf in (layer.leaf, layer.bias) if leaf}
    assert sorted([*covered, *left]) == sorted(shapes)  # covered or not, and never both


def summed(seen, tangents):
    """Gradients of each example by leaf: sums over positions and over uses of one leaf."""
    gradients = {}
    # Layers come as they are used, the slices of a stack in their places.
    every = zip(seen.layers, seen.activations, tangents, strict=True)
    for layer, a, g in sorted(every, key=lambda one: one[0].index):
        if layer.form == "table":
            a = jax.nn.one_hot(a, layer.rows, dtype=g.dtype)
        value = g if layer.form == "scale" else jnp.einsum("nt...a,nt...o->n...ao", a, g)
        for name, leaf in jax.vmap(partial(layers.unpack, layer))(value).items():
            if layer.index:
                gradients.setdefault(name, []).append(leaf)
            else:
                gradients[name] = gradients.get(name, 0) + leaf
    return {n: jnp.stack(g, 1) if isinstance(g, list) else g for n, g in gradients.items()}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in FORMS]
)
def test_the_diagonal_of_any_form_of_layer_is_that_of_the_full_matrix(x64, name):
    apply, shapes, input_shape, _ = NETWORKS[name]
    examples = Examples(draw(input_shape, 1))
    arguments = Model(apply, likelihoods.gaussian), draw(shapes, 0), examples
    entries, full = (
        f(*arguments, kind=fisher.true).diagonal() for f in (fisher.diagonal, fisher.full)
    )
    chex.assert_trees_all_close(entries, full, rtol=1e-9, atol=1e-12)


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
    (activations,) = jax.jit(lambda p, x: pairs.trace(apply, p, x).activations)(params, x)
    assert activations.shape == (B, 3 * 4, 3 * 3 * 2 + 1)
    assert (np.asarray(activations)[..., -1] == 1).all()
    layer = layers.Layer("k", "b", (3, 3, 2, 4))
    assert (layers.matrix(layer, params)[-1] == params["b"]).all()


MIXING = {
    "BatchNorm in training mode": lambda p, x: (x @ p["w"] - (x @ p["w"]).mean(0)) / x.std(0)[:3],
    "products of examples": lambda p, x: x @ x.T @ (x @ p["w"]),
    "running sums": lambda p, x: jnp.cumsum(x, 0) @ p["w"],
    "running maxima": lambda p, x: lax.cummax(x @ p["w"], 0, reverse=True),
    "reversed": lambda p, x: x[::-1] @ p["w"],
    "sorted": lambda p, x: jnp.sort(x @ p["w"], 0),
    "shifted": lambda p, x: jnp.concatenate([x[1:], x[:1]]) @ p["w"],
    "attention over examples": lambda p, x: jax.nn.softmax(x @ x.T) @ x @ p["w"],
    "pooled": lambda p, x: lax.reduce_window(x, 0.0, lax.add, (2, 1), (1, 1), "SAME") @ p["w"],
    "recurrent": lambda p, x: lax.scan(lambda h, row: (h + row, h), x[0], x)[1] @ p["w"],
    "dropout": lambda p, x: (x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)) @ p["w"],
    "groups of rows": lambda p, x: lax.ragged_dot(
        x, p["w"][None].repeat(2, 0), jnp.array([2, len(x) - 2])
    ),
}


def with_noise(p, x):
    def noise(i):
        return jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (4,))

    return (x + jax.vmap(noise)(jnp.arange(len(x)))) @ p["w"]


PLACES = {
    "a number": lambda p, x: jnp.tanh(x + jnp.arange(len(x))[:, None]) @ p["w"],
    "a feature": lambda p, x: jnp.append(x[:, 1:], jnp.arange(len(x))[:, None] * 1.0, 1) @ p["w"],
    "a choice": lambda p, x: jnp.where(jnp.arange(len(x))[:, None] % 2 == 0, x, 0) @ p["w"],
    "a row of params": lambda p, x: x @ p["w"] + p["w"].at[jnp.arange(len(x))].get(mode="clip"),
    "noise": with_noise,
    "the index of a mapped axis": jax.vmap(
        lambda p, x: (x + lax.axis_index("batch")) @ p["w"], (None, 0), axis_name="batch"
    ),
}
STRUCTURES = [
    fisher.diagonal,
    fisher.kfac,
    fisher.full,
    partial(fisher.vector_product, vector=None),
]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", MIXING)
def test_examples_that_depend_on_each_other_are_refused(name, structure):
    params = {"w": jnp.ones((4, 3))}
    options = {"vector": params} if isinstance(structure, partial) else {}
    model, x = Model(MIXING[name], likelihoods.gaussian), jnp.ones((B, 4))
    with pytest.raises(ValueError, match=r"over all examples.*running statistics"):
        structure(model, params, Examples(x), **options)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", PLACES)
def test_outputs_that_depend_on_the_place_in_the_batch_are_refused(name, structure):
    params = {"w": jnp.ones((4, 3))}
    options = {"vector": params} if isinstance(structure, partial) else {}
    model, x = Model(PLACES[name], likelihoods.gaussian), jnp.ones((B, 4))
    with pytest.raises(ValueError, match=r"place in the batch \(\w+.*with the inputs"):
        structure(model, params, Examples(x), **options)


PIECES = {
    "pieces of the batch": (
        lambda p, x: lax.map(lambda row: row @ p["w"][0], x, batch_size=2),
        r"test_layers\.py.*jax\.lax\.map.*jax\.vmap",
    ),
    "one example after the other": (
        lambda p, x: lax.map(lambda row: row @ p["w"][0], x),
        r"jax\.vmap.*but jax\.lax\.map",
    ),
    "rows by their expert": (
        lambda p, x: lax.ragged_dot(
            x[jnp.argsort(x[:, 0])], p["w"], jnp.bincount(jnp.int32(x[:, 0]), length=2)
        ),
        r"In place of jax\.lax\.ragged_dot.*jnp\.einsum",
    ),
}


@pytest.mark.parametrize("name", PIECES)
def test_a_batch_that_is_divided_is_refused_with_a_way_out(name):
    apply, message = PIECES[name]
    model, params = Model(apply, likelihoods.gaussian), {"w": jnp.ones((2, 4, 3))}
    with pytest.raises(ValueError, match=message):
        fisher.kfac(model, params, Examples(jnp.ones((B, 4))))


def test_kernels_that_are_all_computed_and_chosen_are_the_way_out_of_ragged_products(x64):
    def apply(params, x):
        group = jax.nn.one_hot((x[:, 0] > 0).astype(int), 2)
        return jnp.einsum("bi,gio,bg->bo", x, params["w"], group)

    params, x = draw({"w": (2, 4, 3)}, 0), draw((B, 4), 1)
    found = fisher.kfac(Model(apply, likelihoods.gaussian), params, Examples(x))
    # The inputs of this layer are the features of an example, in the rows of its group.
    group = jax.nn.one_hot((x[:, 0] > 0).astype(int), 2)
    features = jnp.einsum("bi,bg->bgi", x, group).reshape(B, -1)
    chex.assert_trees_all_close(found.factors["w"]["input"], features.T @ features / B)


def test_what_only_looks_like_mixing_is_not_refused():
    def apply(params, x):
        h = jnp.cumsum(x[..., ::-1], 1) @ params["w"]  # along the features
        h = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, 2 * s[1]), (0, h))[1]
        h = h + jax.random.normal(jax.random.key(0), (3,))  # the same for every example
        rows = jnp.arange(len(x))
        h = h + lax.map(lambda row: x[row].sum(), rows)[:, None]
        h = h + jax.nn.one_hot(jnp.argmax(x, 1), 3) * jnp.arange(3)  # places of features
        h = h + jax.ops.segment_sum(jnp.concatenate([h, h]), jnp.tile(rows, 2), len(x))
        h = h + jnp.take_along_axis(h, jnp.argsort(h, 1), 1)
        return h.at[rows, 0].add(h[rows, 1]) + lax.map(lambda row: row.sum(), x)[:, None]

    params, x = {"w": jnp.ones((4, 3))}, jnp.ones((B, 4))
    jax.eval_shape(partial(reading.check_examples, apply), params, x)


def test_a_network_that_cannot_be_read_is_refused():
    def apply(params, x):
        return x.reshape(B, 4) @ params["w"]  # needs just B examples

    with pytest.raises(reading.LayersNotFoundError, match=r"could not be found.*fisher\.diagonal"):
        jax.eval_shape(partial(pairs.trace, apply), {"w": jnp.eye(4)}, jnp.ones((B, 4)))


def test_as_many_features_as_examples_of_the_trace_are_no_examples():
    def apply(params, x):
        return x @ params["w"].T

    x = jnp.asarray(np.random.default_rng(0).normal(size=(B, MANY)), jnp.float32)
    [layer] = reading.network_of(apply, {"w": jnp.ones((3, MANY))}, x)[1]
    assert (layer.layer.form, layer.layer.outputs, layer.layer.rows) == ("product", (0,), MANY)


def test_what_apply_raises_for_the_inputs_themselves_is_raised_as_it_is():
    def apply(params, x):
        raise KeyError("no such leaf")

    for check in (pairs.trace, pairs.check_output_layer, reading.check_examples):
        with pytest.raises(KeyError, match="no such leaf"):
            jax.eval_shape(partial(check, apply), {"w": jnp.eye(4)}, jnp.ones((B, 4)))


def test_a_network_that_treats_other_numbers_of_examples_otherwise_is_refused():
    def apply(params, x):
        return x @ params["w"] if len(x) > B else jnp.tanh(x) @ params["w"]

    with pytest.raises(
        reading.LayersNotFoundError, match=rf"for {B} examples than for.*every example alike"
    ):
        jax.eval_shape(partial(pairs.trace, apply), {"w": jnp.eye(4)}, jnp.ones((B, 4)))


@pytest.mark.parametrize(("leaf", "other"), [((2, 3, 3), "w[1]"), ((3, 3), "w^T")])
def test_a_leaf_with_the_name_of_a_part_of_another_is_refused(leaf, other):
    def apply(params, x):
        first, second = params["w"] if len(leaf) > 2 else (params["w"], params["w"].T)
        return jnp.tanh(jnp.tanh(x @ first) @ second) @ params[other]

    params = {"w": jnp.ones(leaf), other: jnp.ones((3, 3))}
    with pytest.raises(ValueError, match=f"Two layers are called '{re.escape(other)}'.*Rename"):
        jax.eval_shape(partial(pairs.trace, apply), params, jnp.ones((B, 3)))


def test_layers_come_in_the_order_in_which_they_are_used(x64):
    """Whatever their names: the keys of a pytree are in alphabetical order."""

    def apply(params, x):
        hidden = jnp.tanh(x @ params["z"] + params["bias"])
        return jnp.tanh(hidden @ params["b"]) @ params["a"] + hidden @ params["c"]

    params = draw({"z": (4, 3), "bias": (3,), "b": (3, 3), "a": (3, 2), "c": (3, 2)}, 0)
    seen = []
    jax.eval_shape(
        lambda p, x: seen.extend(pairs.trace(apply, p, x).layers), params, np.ones((5, 4))
    )
    assert [layer.kernel for layer in seen] == ["z", "b", "a", "c"]
