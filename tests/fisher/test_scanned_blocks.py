"""K-FAC and the diagonal of a network that scans its blocks: same numbers, a small program."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj

D, T, HEADS, CLASSES = 4, 3, 2, 5
BLOCK = {
    **{"s": (D,), "t": (D,), "q": (D, HEADS, D), "k": (D, HEADS, D), "v": (D, HEADS, D)},
    **{"o": (HEADS, D, D), "w": (D, 6), "b": (6,), "u": (6, D)},
}
OTHERS = {"embedding": (7, D), "places": (T, D), "head": (D, CLASSES)}


def _normalized(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 0.1)


def _dense(h, p):
    return h + jax.nn.relu(h @ p["w"] + p["b"]) @ p["u"]


def _transformer_block(h, p):
    normal = _normalized(h) * p["s"] + p["t"]
    q, k, v = (jnp.einsum("btd,dhk->bthk", normal, p[name]) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k))
    heads = jnp.einsum("bhts,bshk->bthk", weights, v)
    return _dense(h + jnp.einsum("bthk,hkd->btd", heads, p["o"]), p)


def _scan(block, h, blocks):
    return jax.lax.scan(lambda h, p: (block(h, p), None), h, blocks)[0]


def _loop(block, h, blocks):
    for number in range(len(blocks["w"])):
        h = block(h, jax.tree.map(lambda leaf: leaf[number], blocks))  # noqa: B023
    return h


def _residual(run, params, x):
    return run(_dense, x, params["blocks"]) @ params["head"]


def _transformer(run, params, x):
    h = params["embedding"][x] + params["places"]
    return _normalized(run(_transformer_block, h, params["blocks"])) @ params["head"]


def _params(count, names=tuple(BLOCK), others=tuple(OTHERS)):
    draw = np.random.default_rng(0).normal
    blocks = {name: draw(size=(count, *BLOCK[name])) / 2 for name in names}
    return {"blocks": blocks} | {name: draw(size=OTHERS[name]) / 2 for name in others}


def _check(apply, params, examples, structure, **options):
    """Compare a network whose blocks are scanned with one that Python unrolls."""
    mask = options.pop("mask", None)
    params, settings = jax.tree.map(jnp.asarray, params), options.pop("model", {})
    found, expected = (
        structure(
            fj.Model(partial(apply, run), fj.likelihoods.categorical, mask=mask, **settings),
            params,
            examples,
            **options,
        )
        for run in (_scan, _loop)
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    chex.assert_trees_all_close(found, expected, rtol=1e-12, atol=1e-14)


DENSE = _params(3, ("w", "b", "u"), ("head",))
N = 7
ROWS = fj.Examples(
    np.random.default_rng(1).normal(size=(N, D)),
    np.arange(N) % CLASSES,
    weights=np.arange(1.0, N + 1),
)
TOKENS = fj.Examples(np.arange(N * T).reshape(N, T) % 6, np.arange(N * T).reshape(N, T) % CLASSES)

STRUCTURES = pytest.mark.parametrize("structure", [fj.fisher.kfac, fj.fisher.diagonal])


@pytest.mark.parametrize("rows", [1, N])
def test_kfac_of_scanned_blocks_is_that_of_unrolled_ones(rows, x64):
    examples = jax.tree.map(lambda leaf: leaf[:rows], ROWS)
    _check(_residual, DENSE, examples, fj.fisher.kfac, kind=fj.fisher.true, batch_size=3)


@pytest.mark.long
@STRUCTURES
@pytest.mark.parametrize("kind", [fj.fisher.sampled, fj.fisher.empirical], ids=lambda k: k.__name__)
def test_every_kind_has_the_numbers_of_unrolled_blocks(structure, kind, x64):
    options = {"key": jax.random.key(0), "batch_size": 3, "max_examples": 5}
    _check(_residual, DENSE, ROWS, structure, kind=kind, **options)


def _counted(tokens):
    return tokens > 0


@pytest.mark.long
@pytest.mark.parametrize("sharing", [fj.fisher.expand, fj.fisher.reduce], ids=["expand", "reduce"])
def test_the_factors_of_a_transformer_that_scans_its_blocks(sharing, x64):
    """With norms, attention and padding, whose blocks are two."""
    options = {"sharing": sharing, "model": {"positions": _counted}, "key": jax.random.key(0)}
    _check(_transformer, _params(2), TOKENS, fj.fisher.kfac, **options)


@pytest.mark.slow
def test_the_diagonal_of_a_transformer_that_scans_its_blocks(x64):
    options = {"model": {"positions": _counted}, "key": jax.random.key(0)}
    _check(_transformer, _params(2), TOKENS, fj.fisher.diagonal, **options)


@pytest.mark.long
def test_a_stack_that_is_frozen_has_no_factors(x64):
    mask = jax.tree.map(lambda _: True, DENSE)
    mask["blocks"]["u"] = False
    _check(_residual, DENSE, ROWS, fj.fisher.kfac, kind=fj.fisher.empirical, mask=mask)


def _program(structure, count):
    """Return the program of a pass over a network with so many blocks, before it is compiled."""
    model = fj.Model(partial(_transformer, _scan), fj.likelihoods.categorical)
    pass_over = partial(structure, model, kind=fj.fisher.empirical)
    return jax.jit(pass_over).lower(_params(count), TOKENS)


@STRUCTURES
def test_the_program_of_a_pass_does_not_grow_with_the_blocks(structure):
    """But for the cut of the factors of K-FAC: each block has its own."""
    few, many = (_program(structure, count).as_text().count("\n") for count in (12, 24))
    blocks = 12 * 3 * 2 * len(BLOCK) * (structure is fj.fisher.kfac)
    assert few <= many <= min(1.5 * few, few + blocks)


@pytest.mark.slow
@STRUCTURES
def test_the_instructions_of_a_pass_do_not_grow_with_the_blocks(structure, monkeypatch):
    was = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        few, many = (
            _program(structure, count).compile().as_text().count(" = ") for count in (12, 24)
        )
    finally:
        jax.config.update("jax_disable_most_optimizations", was)
    assert many <= 1.5 * few
