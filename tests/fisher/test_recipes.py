"""Recipes: a network of any framework as the pair (apply, params) that this library takes.

`apply(params, inputs [B, ...])` returns outputs [B, C], and params is a pytree of floating arrays.
Keep the function: a second call with the same one does not compile again. All recipes below are
one network, and give the same Fisher information.
"""

from types import SimpleNamespace

import chex
import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fisherjax import Examples, Model, fisher, likelihoods


@pytest.fixture(scope="module")
def arrays():
    """Weights of a 6 x 6 x 1 image -> convolution -> dense network, and eight images."""
    draw = np.random.default_rng(0)
    shapes = {
        "conv/kernel": (3, 3, 1, 2),
        "conv/bias": (2,),
        "dense/kernel": (32, 3),
        "dense/bias": (3,),
    }
    weights = {
        name: jnp.asarray(draw.normal(size=s), jnp.float32) / 3 for name, s in shapes.items()
    }
    images = jnp.asarray(draw.normal(size=(8, 6, 6, 1)), jnp.float32)
    apply, params = bare_function(weights)
    arguments = Model(apply, likelihoods.categorical), params, Examples(images)
    factors, entries = fisher.kfac(*arguments).factors, fisher.diagonal(*arguments).entries
    return SimpleNamespace(weights=weights, images=images, factors=factors, entries=entries)


def bare_function(weights):
    """No framework: a dict of arrays and jax.numpy."""

    def apply(params, x):
        x = jax.lax.conv_general_dilated(
            x, params["conv"]["kernel"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + params["conv"]["bias"]).reshape(x.shape[0], -1)
        return x @ params["dense"]["kernel"] + params["dense"]["bias"]

    params = {
        "conv": {"kernel": weights["conv/kernel"], "bias": weights["conv/bias"]},
        "dense": {"kernel": weights["dense/kernel"], "bias": weights["dense/bias"]},
    }
    return apply, params


def flax_linen(weights):
    """Flax linen: `params` is what `init` returns under "params"."""

    class Network(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            x = flax.linen.relu(flax.linen.Conv(2, (3, 3), padding="VALID", name="conv")(x))
            return flax.linen.Dense(3, name="dense")(x.reshape(x.shape[0], -1))

    model = Network()

    def apply(params, x):
        return model.apply({"params": params}, x)

    _, params = bare_function(weights)  # or: model.init(key, x)["params"]
    return apply, params


def flax_nnx(weights):
    """Flax nnx: split the module into its graph and its state; the state is the params."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(1, 2, (3, 3), padding="VALID", rngs=rngs)
            self.dense = nnx.Linear(32, 3, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.conv(x))
            return self.dense(x.reshape(x.shape[0], -1))

    graph, state = nnx.split(Network(nnx.Rngs(0)))

    def apply(params, x):
        return nnx.merge(graph, params)(x)

    _, values = bare_function(weights)
    nnx.replace_by_pure_dict(state, values)  # to have the weights of the other recipes
    return apply, state


class Dense(eqx.Module):
    """A dense layer whose kernel is [inputs, outputs]; `eqx.nn.Linear` stores it transposed."""

    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.kernel + self.bias


class Convolution(eqx.Module):
    """A convolution with channels last; `eqx.nn.Conv2d` has them first."""

    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, self.kernel, (1, 1), "VALID", dimension_numbers=numbers)
        return y + self.bias


def equinox(weights):
    """Equinox: partition the module; write layers for a batch, kernels as K-FAC reads them."""

    class Network(eqx.Module):
        conv: Convolution
        dense: Dense
        activation: object = jax.nn.relu

        def __call__(self, x):
            x = self.activation(self.conv(x))
            return self.dense(x.reshape(x.shape[0], -1))

    model = Network(
        Convolution(weights["conv/kernel"], weights["conv/bias"]),
        Dense(weights["dense/kernel"], weights["dense/bias"]),
    )
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def apply(params, x):
        return eqx.combine(params, rest)(x)

    return apply, params


RECIPES = [bare_function, flax_linen, flax_nnx, equinox]


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_framework_gives_the_same_factors(arrays, recipe):
    apply, params = recipe(arrays.weights)
    for function in (apply, jax.jit(apply)):
        model = Model(function, likelihoods.categorical)
        found = fisher.kfac(model, params, Examples(arrays.images))
        assert [layer.shape for layer in found.layers] == [(3, 3, 1, 2), (32, 3)]
        # Every framework has names of its own for the layers; the order is the same.
        pair = [list(factors.values()) for factors in (found.factors, arrays.factors)]
        chex.assert_trees_all_close(*pair, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_equal_shapes(found.mv(params), params)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_framework_gets_the_diagonal_in_its_own_structure(arrays, recipe):
    apply, params = recipe(arrays.weights)
    model = Model(apply, likelihoods.categorical)
    entries = fisher.diagonal(model, params, Examples(arrays.images)).entries
    chex.assert_trees_all_equal_shapes(entries, params)
    by_shape = {leaf.shape: leaf for leaf in jax.tree.leaves(arrays.entries)}
    for leaf in jax.tree.leaves(entries):
        np.testing.assert_allclose(leaf, by_shape[leaf.shape], rtol=1e-4, atol=1e-6)


def test_equinox_layers_with_transposed_kernels_have_a_diagonal_and_no_factors(arrays):
    model = eqx.nn.MLP(4, 3, width_size=5, depth=1, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def apply(params, x):
        return jax.vmap(eqx.combine(params, rest))(x)

    x = arrays.images[:, 0, :4, 0]
    arguments = Model(apply, likelihoods.categorical), params, Examples(x)
    with pytest.raises(ValueError, match="'layers/0/weight': its use was not recognised"):
        fisher.kfac(*arguments)
    entries, full = (f(*arguments).diagonal() for f in (fisher.diagonal, fisher.full))
    chex.assert_trees_all_close(entries, full, rtol=1e-4, atol=1e-7)


def test_batch_statistics_stay_at_the_mean(arrays):
    """Networks with running statistics: all variables in one pytree, and no curvature for them."""

    class Network(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            x = flax.linen.Dense(5)(x)
            x = flax.linen.BatchNorm(use_running_average=True)(x)
            return flax.linen.Dense(3)(flax.linen.relu(x))

    model, x = Network(), arrays.images[:, 0, :4, 0]
    variables = model.init(jax.random.key(0), x)
    operator = fisher.kfac(
        Model(model.apply, likelihoods.categorical),
        variables,
        Examples(x),
        fallback=fisher.zero,
    )
    product = operator.mv(variables)
    assert (product["batch_stats"]["BatchNorm_0"]["var"] == 0).all()
    assert jnp.abs(product["params"]["Dense_1"]["kernel"]).max() > 0
