"""A network that scans its blocks has the layers and the numbers of one that Python unrolls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fisherjax import Examples, Model, fisher, likelihoods
from fisherjax._layers import loops, pairs

pytestmark = pytest.mark.usefixtures("wide")

L, D, B = 3, 4, 5


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape) / 2


def dense(h, p):
    return jnp.tanh(h @ p["w"] + p["b"])


def normalized(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 0.1)


def conv(h, kernel, groups=1):
    layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
    return lax.conv_general_dilated(h, kernel, (1, 1), "SAME", **layout)


def ids(x):
    return (7 * jnp.abs(x)).astype(int) % 6


def blocks(step, **options):
    """Return a network of blocks `step(h, p)` only."""
    return lambda p, x: lax.scan(lambda h, q: (step(h, q), None), x, p, **options)[0]


DENSE = {"w": draw(0, L, D, D), "b": draw(1, L, D)}
KERNEL = {"w": DENSE["w"]}
VECTORS, IMAGES, SEQUENCES = draw(2, B, D), draw(2, B, 4, 4, 2), draw(2, B, L, D)


class Case(NamedTuple):
    """A network: `apply(params, x)`."""

    apply: Callable
    params: Any
    x: np.ndarray = VECTORS


def carrying(step, start):
    """Return a network whose blocks `step((h, c), p)` carry another value than activations."""
    return lambda p, x: lax.scan(lambda c, q: (step(c, q), None), (x, start(x)), p)[0][0]


def two_stacks(p, x):
    h = blocks(dense)(p["s"], x @ p["in"])
    return blocks(lambda h, q: jnp.sin(h @ q))(p["t"], h) @ p["out"]


KEPT = {
    "remat in jit": Case(blocks(jax.checkpoint(jax.jit(dense))), DENSE),
    "backwards, with results": Case(
        lambda p, x: (lambda h, passed: h + passed.sum(0))(
            *lax.scan(lambda h, q: (dense(h, q), h), x, p, reverse=True)
        ),
        DENSE,
    ),
    "unrolled by jax": Case(blocks(dense, unroll=3), DENSE),
    "results that nothing needs": Case(
        lambda p, x: lax.scan(lambda h, q: (dense(h, q), (h.mean(), q["w"].sum())), x, p)[0], DENSE
    ),
    "a sum of params that nothing needs": Case(
        carrying(lambda c, q: (dense(c[0], q), c[1] + q["w"].sum()), lambda x: 0.0), DENSE
    ),
    "a counter": Case(
        carrying(lambda c, q: (dense(c[0], q) * (1 + c[1]), c[1] + 1), lambda x: 0.0), DENSE
    ),
    "activations of the block before": Case(
        carrying(lambda c, q: (dense(c[0], q) + c[1], c[0]), jnp.zeros_like), DENSE
    ),
    "keys and constants of each block": Case(
        lambda p, x: lax.scan(
            lambda h, q: (dense(h, q[0]) + x * q[1] + jax.random.normal(q[2], (D,)), None),
            x,
            (p, jnp.arange(1.0, L + 1), jax.random.split(jax.random.key(0), L)),
        )[0],
        DENSE,
    ),
    "a position for each block": Case(
        lambda p, x: lax.scan(
            lambda h, q: (dense(h + q[1], q[0]), None),
            jnp.zeros((len(x), D)),
            (p, x.swapaxes(0, 1)),
        )[0],
        DENSE,
        SEQUENCES,
    ),
    "two stacks between layers": Case(
        two_stacks, {"in": draw(3, D, D), "s": DENSE, "t": draw(4, 2, D, D), "out": draw(5, D, 2)}
    ),
    "beside another branch": Case(
        lambda p, x: blocks(dense)(p["s"], x) + jnp.tanh(x @ p["z"]),
        {"s": DENSE, "z": draw(5, D, D)},
    ),
    "a block of one example": Case(
        lambda p, x: jax.vmap(lambda row: blocks(lambda h, q: jnp.tanh(q["w"] @ h))(p, row))(x),
        KERNEL,
    ),
    "rounded and transposed outside": Case(
        lambda p, x: blocks(lambda h, q: jnp.tanh(h @ q))(
            lax.reduce_precision(p["w"], 11, 52).transpose(0, 2, 1), x
        ),
        KERNEL,
    ),
    "a norm": Case(
        blocks(lambda h, q: h + (normalized(h) * (1 + q["s"]) + q["t"]) @ q["w"]),
        {"s": draw(3, L, D), "t": draw(4, L, D), **KERNEL},
    ),
    "embeddings and positions": Case(
        blocks(lambda h, q: jnp.tanh((h + q["e"][ids(h[..., 0])] + q["p"]) @ q["w"])),
        {"e": draw(3, L, 6, D), "p": draw(4, L, L, D), **KERNEL},
        SEQUENCES,
    ),
    "convolutions": Case(
        lambda p, x: blocks(lambda h, q: jnp.tanh(conv(h, q["k"]) + q["b"]))(p, x).mean((1, 2)),
        {"k": draw(3, L, 3, 3, 2, 2), "b": draw(4, L, 2)},
        IMAGES,
    ),
    "a matrix used twice": Case(
        blocks(lambda h, q: jnp.tanh(jnp.tanh(h @ q["w"]) @ q["w"])), KERNEL
    ),
    "adapters of frozen matrices": Case(
        lambda p, x: lax.scan(
            lambda h, q: (jnp.tanh(h @ q[1] + h @ q[0]["a"] @ q[0]["b"]), None), x, (p, DENSE["w"])
        )[0],
        {"a": draw(3, L, D, 2), "b": draw(4, L, 2, D)},
    ),
    "a branch": Case(
        lambda p, x: lax.scan(
            lambda h, q: (lax.cond(q[1] > 0, jnp.tanh, jnp.sin, h @ q[0]["w"]), None),
            x,
            (p, jnp.arange(L)),
        )[0],
        KERNEL,
    ),
    "grouped convolutions": Case(
        lambda p, x: blocks(lambda h, q: jnp.tanh(conv(h, q["k"], 2)))(p, x).mean((1, 2)),
        {"k": draw(3, L, 3, 3, 1, 2)},
        IMAGES,
    ),
}

UNROLLED = {
    "stacked along another axis": Case(
        lambda p, x: blocks(lambda h, q: jnp.tanh(h @ q))(p["w"].swapaxes(0, 1), x),
        {"w": draw(0, D, L, D)},
    ),
    "a part of a stack": Case(
        lambda p, x: blocks(dense)(jax.tree.map(lambda v: v[1:], p), x @ p["w"][0] + p["b"][0]),
        DENSE,
    ),
    "one stack twice": Case(lambda p, x: blocks(dense)(p, blocks(dense)(p, x)), DENSE),
    "a stack in a loop": Case(
        lambda p, x: lax.fori_loop(0, 2, lambda _, h: blocks(dense)(p, h), x), DENSE
    ),
    "a stack that is an output too": Case(lambda p, x: blocks(dense)(p, x) + p["b"].sum(), DENSE),
    "a matrix and its transpose": Case(
        blocks(lambda h, q: jnp.tanh(jnp.tanh(h @ q["w"]) @ q["w"].T)), KERNEL
    ),
    "a matrix that all blocks share": Case(
        lambda p, x: blocks(lambda h, q: jnp.tanh(h @ q["w"]) @ p["v"])({"w": p["w"]}, x),
        {"v": draw(3, D, D), **KERNEL},
    ),
    "carried params": Case(
        carrying(lambda c, q: (jnp.tanh(c[0] @ q["w"]) + c[1], c[1] + q["w"].sum()), lambda x: 0.0),
        KERNEL,
    ),
    "a start from params": Case(
        lambda p, x: lax.scan(
            lambda c, q: ((jnp.tanh(c[0] @ q + c[1]), c[1]), None), (x, p["t"]), p["w"]
        )[0][0],
        {"t": draw(3, D), **KERNEL},
    ),
    "results of params": Case(
        lambda p, x: (lambda h, squares: h + squares.sum((0, 1)))(
            *lax.scan(lambda h, q: (jnp.tanh(h @ q), q**2), x, p["w"])
        ),
        KERNEL,
    ),
    "one block": Case(blocks(dense), jax.tree.map(lambda v: v[:1], DENSE)),
    "stacks of stacks": Case(
        blocks(lambda h, q: blocks(dense)(q, h)), {"w": draw(3, L, 2, D, D), "b": draw(4, L, 2, D)}
    ),
}


def both(case):
    """Return the layers in both traces, by shapes only."""
    found = []

    def run(params, x):
        found.extend(trace(case.apply, params, x) for trace in (loops.trace, pairs.trace))
        return x

    jax.eval_shape(run, case.params, case.x)
    return found


@pytest.mark.parametrize("name", KEPT)
def test_a_loop_over_blocks_has_the_layers_of_an_unrolled_network(name):
    kept, unrolled = both(KEPT[name])
    assert kept.stacks
    assert len(kept.layers) < len(kept.blocks)
    assert kept.blocks == unrolled.layers
    assert kept.feeders == unrolled.feeders
    assert kept.uncovered == unrolled.uncovered


@pytest.mark.parametrize("name", UNROLLED)
def test_a_loop_that_one_block_does_not_describe_is_unrolled(name):
    found, unrolled = both(UNROLLED[name])
    assert not found.stacks
    assert not found.blocks
    for field in ("layers", "feeders", "last", "uncovered", "locations"):
        assert getattr(found, field) == getattr(unrolled, field)


@pytest.mark.long
@pytest.mark.parametrize("name", KEPT)
def test_the_diagonal_of_blocks_is_the_mean_of_the_squares_of_gradients(name):
    apply, params, x = KEPT[name]

    def loss(params, x, y):
        return 0.5 * ((apply(params, x[None])[0] - y) ** 2).sum()

    params = jax.tree.map(jnp.asarray, params)
    targets = draw(9, *jax.eval_shape(apply, params, x).shape)
    gradients = jax.jit(jax.vmap(jax.grad(loss), (None, 0, 0)))(params, x, targets)
    expected = jax.tree.map(lambda g: (g**2).mean(0), gradients)
    examples = Examples(jnp.asarray(x), targets)
    found = fisher.diagonal(
        Model(apply, likelihoods.gaussian), params, examples, kind=fisher.empirical
    )
    chex.assert_trees_all_close(found.entries, expected, rtol=1e-12, atol=1e-14)
