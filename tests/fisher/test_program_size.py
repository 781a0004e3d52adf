"""The programs of Fisher passes are small beside that of a gradient, since compiling costs them."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest

import fisherjax as fj
from fisherjax.fisher import _passes

SIZES = [64, 64, 64, 10]
PARAMS = [(jnp.full((a, b), 0.1), jnp.zeros(b)) for a, b in itertools.pairwise(SIZES)]
EXAMPLES = fj.Examples(jnp.ones((200, 64)), jnp.arange(200) % 10)


def _mlp(params, x):
    *hidden, (kernel, bias) = params
    for a, b in hidden:
        x = jax.nn.relu(x @ a + b)
    return x @ kernel + bias


MODEL = fj.Model(_mlp, fj.likelihoods.categorical)


def _gradient(params, x, y):
    def loss(params):
        return optax.softmax_cross_entropy_with_integer_labels(_mlp(params, x), y).mean()

    return jax.grad(loss)(params)


def _draw(key, step, z):
    # The keys of a minibatch and of a label, and the labels: programs of JAX itself.
    key = jax.random.fold_in(jax.random.fold_in(key, step), 0)
    return jax.random.categorical(key, z)


def _lowered(structure, kind, monkeypatch):
    """Return the program of a pass as the library compiles it."""
    found, compiled = [], _passes._mean

    def keep(*arguments):
        found.append(compiled.lower(*arguments))
        return compiled(*arguments)

    monkeypatch.setattr(_passes, "_mean", keep)
    key = jax.random.key(0) if kind is fj.fisher.sampled else None
    structure(MODEL, PARAMS, EXAMPLES, kind=kind, key=key)
    return found[0]


def _lines(lowered):
    return lowered.as_text().count("\n")


def _fusions(lowered):
    return lowered.compile().as_text().count(" fusion(")


STRUCTURES = pytest.mark.parametrize("structure", [fj.fisher.kfac, fj.fisher.diagonal])
KINDS = pytest.mark.parametrize(
    "kind", [fj.fisher.true, fj.fisher.sampled, fj.fisher.empirical], ids=lambda k: k.__name__
)


@STRUCTURES
@KINDS
@pytest.mark.long
def test_a_pass_lowers_to_at_most_three_gradients(structure, kind, monkeypatch):
    gradient = jax.jit(_gradient).lower(PARAMS, EXAMPLES.inputs[:64], EXAMPLES.targets[:64])
    draw = jax.jit(_draw).lower(jax.random.key(0), 1, jnp.ones((64, 10)))
    drawn = _lines(draw) if kind is fj.fisher.sampled else 0
    assert _lines(_lowered(structure, kind, monkeypatch)) <= 3 * _lines(gradient) + drawn


@STRUCTURES
@KINDS
@pytest.mark.slow
def test_a_pass_compiles_to_at_most_three_gradients(structure, kind, monkeypatch):
    was = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        gradient = jax.jit(_gradient).lower(PARAMS, EXAMPLES.inputs[:64], EXAMPLES.targets[:64])
        most = 3 * _fusions(gradient)
        assert _fusions(_lowered(structure, kind, monkeypatch)) <= most
    finally:
        jax.config.update("jax_disable_most_optimizations", was)


@pytest.mark.parametrize("count", [1, 3])
def test_sampled_labels_have_the_keys_of_a_split(count):
    key, z = jax.random.key(3), jax.random.normal(jax.random.key(4), (5, 4))
    kind = partial(fj.fisher.sampled, num_samples=count)
    columns = kind(fj.likelihoods.categorical, z, None, key)
    for one, column in zip(jax.random.split(key, count), columns, strict=True):
        labels = jax.random.categorical(one, z)
        score = jax.nn.softmax(z) - jax.nn.one_hot(labels, 4)
        assert jnp.allclose(column, score / count**0.5, atol=1e-6)
