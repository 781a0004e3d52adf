"""Kernels that are chosen for each example, as `jax.vmap` of a `lax.cond` on the example does.

The law: such a network has the factors of the same network with `jnp.where` between the outputs of
its branches. A kernel of which each example has a copy is never read as a table.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fisherjax import Examples, Model, fisher, likelihoods

SHAPES = {"a": (3, 4), "ab": (4,), "b": (3, 4), "bb": (4,), "h": (4, 2)}


def draw(shapes, seed=0):
    source = np.random.default_rng(seed)
    return {name: jnp.asarray(source.normal(size=shape)) for name, shape in shapes.items()}


def is_first(x):
    return x.sum() > 0


def first(p, x):
    return jnp.tanh(x @ p["a"] + p["ab"])


def second(p, x):
    return jnp.sin(x @ p["b"] + p["bb"])


def branches(p, x):
    found = lax.cond(is_first(x), lambda x: first(p, x), lambda x: second(p, x), x)
    return found @ p["h"]


def branches_by_where(p, x):
    return jnp.where(is_first(x), first(p, x), second(p, x)) @ p["h"]


def kernels(p, x):
    pairs = (p["a"], p["ab"]), (p["b"], p["bb"])
    kernel, bias = lax.cond(is_first(x), lambda: pairs[0], lambda: pairs[1])
    return jnp.tanh(x @ kernel + bias) @ p["h"]


def kernels_of_batch(p, x):
    condition = (x.sum(-1) > 0)[:, None, None]
    kernel = jnp.where(condition, p["a"], p["b"])
    bias = jnp.where(condition[:, 0], p["ab"], p["bb"])
    return jnp.tanh(jnp.einsum("bi,bio->bo", x, kernel) + bias) @ p["h"]


def kernels_by_where(p, x):
    sums = x @ p["a"] + p["ab"], x @ p["b"] + p["bb"]
    return jnp.tanh(jnp.where(is_first(x), *sums)) @ p["h"]


def transposed(p, x):
    found = lax.cond(
        is_first(x), lambda x: jnp.tanh(p["a"].T @ x + p["ab"]), lambda x: second(p, x), x
    )
    return found @ p["h"]


def nested(p, x):
    def inner(x):
        return lax.cond(x[0] > 0, lambda x: first(p, x), lambda x: second(p, x), x)

    return lax.cond(is_first(x), inner, lambda x: jnp.append(x, 1.0), x) @ p["h"]


def nested_by_where(p, x):
    inner = jnp.where(x[0] > 0, first(p, x), second(p, x))
    return jnp.where(is_first(x), inner, jnp.append(x, 1.0)) @ p["h"]


def deep(p, x):
    def both(x):
        return first(p, x) @ p["h"]

    return lax.cond(is_first(x), both, lambda x: second(p, x)[:2], x)


def deep_by_where(p, x):
    return jnp.where(is_first(x), first(p, x) @ p["h"], second(p, x)[:2])


def mapped(apply):
    return jax.vmap(apply, (None, 0))


def repeated(p, x):
    kernel = jnp.broadcast_to(p["a"], (len(x), 3, 4))
    hidden = jnp.tanh(jnp.einsum("bi,bio->bo", x, kernel) + p["ab"])
    return (hidden + second(p, x)) @ p["h"]


CHOICES = {
    "branches": (mapped(branches), mapped(branches_by_where)),
    "branches at positions": (mapped(branches), mapped(branches_by_where)),
    "kernels": (mapped(kernels), mapped(kernels_by_where)),
    "kernels of a batch": (kernels_of_batch, mapped(kernels_by_where)),
    "transposed": (mapped(transposed), mapped(branches_by_where)),
    "nested": (mapped(nested), mapped(nested_by_where)),
    "several layers of one branch": (mapped(deep), mapped(deep_by_where)),
    "repeated only": (repeated, lambda p, x: (first(p, x) + second(p, x)) @ p["h"]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_between_branches_has_the_factors_of_jnp_where(x64, name):
    shape = (7, 5, 3) if name.endswith("positions") else (7, 3)
    params, x = draw(SHAPES), draw({"x": shape}, 1)["x"]
    found, expected = (
        fisher.kfac(Model(apply, likelihoods.gaussian), params, Examples(x), kind=fisher.true)
        for apply in CHOICES[name]
    )
    assert found.factors.keys() == {"a", "b", "h"} == expected.factors.keys()
    chex.assert_trees_all_close(found.factors, expected.factors, rtol=1e-10, atol=1e-12)


def test_a_kernel_that_gets_no_gradient_at_some_examples_has_those_of_the_others(x64):
    """The inputs keep their gradients: the layer before has those of all examples."""

    def apply(params, x):
        hidden = jnp.tanh(x @ params["a"])
        condition = (x.sum(-1) > 0)[:, None, None]
        kernel = jnp.where(condition, lax.stop_gradient(params["h"]), params["h"])
        return jnp.einsum("bi,bio->bo", hidden, kernel)

    params, x = draw({"a": (3, 4), "h": (4, 2)}), draw({"x": (7, 3)}, 1)["x"]
    arguments = Model(apply, likelihoods.gaussian), params, Examples(x)
    found = fisher.kfac(*arguments)
    expected = fisher.diagonal(*arguments).entries
    number = (x.sum(-1) <= 0).sum()
    assert 0 < number < 7
    # The gradient with respect to two unit-variance outputs is one for each, or none.
    chex.assert_trees_all_close(
        found.factors["h"]["output"], number / 7 * jnp.eye(2), rtol=1e-12, atol=1e-12
    )
    plain = Model(lambda p, x: jnp.tanh(x @ p["a"]) @ p["h"], likelihoods.gaussian)
    every = fisher.kfac(plain, params, Examples(x))
    chex.assert_trees_all_close(found.factors["a"], every.factors["a"], rtol=1e-12)
    chex.assert_trees_all_close(
        expected["a"], fisher.diagonal(plain, params, Examples(x)).entries["a"], rtol=1e-12
    )


def convolution(p, x):
    def convolve(x, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        x = x.reshape(1, 1, 3, 1)
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=layout
        ).ravel()

    found = lax.cond(
        is_first(x), lambda x: convolve(x, p["k"]), lambda x: convolve(x, p["l"]) ** 2, x
    )
    return found @ p["h"]


def lookup(p, x):
    row = jnp.int32(jnp.abs(x[0] * 7)) % 2
    found = lax.cond(is_first(x), lambda i: p["k"][i], lambda i: p["l"][i] ** 2, row)
    return found @ p["h"]


def thinned(p, x):
    """Leave out connections of each example, and mix two kernels."""
    copies = (jnp.broadcast_to(p[name], (len(x), *p[name].shape)) for name in "kl")
    kernel = sum(c * jnp.cos(x)[:, :, None] for c in copies)
    return jnp.einsum("bi,bio->bo", x, kernel) @ p["h"]


COPIES = {
    "a convolution": (mapped(convolution), (1, 2, 1, 2), (4, 2)),
    "a lookup": (mapped(lookup), (2, 3), (3, 2)),
    "kernels that are multiplied": (thinned, (3, 4), (4, 2)),
}


@pytest.mark.parametrize("name", COPIES)
def test_other_kernels_with_a_copy_for_each_example_belong_to_no_layer(x64, name):
    apply, shape, last = COPIES[name]
    params = draw({"k": shape, "l": shape, "h": last})
    arguments = Model(apply, likelihoods.gaussian), params, Examples(draw({"x": (7, 3)}, 1)["x"])
    with pytest.raises(ValueError, match=r"'k', 'l': each example has a copy.*jnp\.where"):
        fisher.kfac(*arguments)
    found = fisher.kfac(*arguments, fallback=fisher.diagonal)
    assert found.factors.keys() == {"h"}
    full = fisher.full(*arguments).diagonal()
    chex.assert_trees_all_close(found.entries["k"], full["k"], rtol=1e-9, atol=1e-12)


def test_learned_queries_are_a_table(x64):
    def apply(params, x):
        queries = jnp.broadcast_to(params["queries"], (len(x), 5, 4))
        keys = x @ params["keys"]
        scores = jnp.einsum("bqd,btd->bqt", queries @ params["h"], keys)
        return (jax.nn.softmax(scores) @ keys).sum(1)

    params = draw({"queries": (5, 4), "keys": (3, 4), "h": (4, 4)})
    x = draw({"x": (7, 6, 3)}, 1)["x"]
    found = fisher.kfac(Model(apply, likelihoods.gaussian), params, Examples(x))
    assert {layer.kernel: layer.form for layer in found.layers} == {
        "queries": "table",
        "keys": "product",
        "h": "product",
    }
