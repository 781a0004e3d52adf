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


def equinox(weights):
    """Equinox: partition the module, and map it over the examples of a batch."""

    class Network(eqx.Module):
        conv: eqx.nn.Conv2d
        dense: eqx.nn.Linear

        def __call__(self, x):
            # One image, channels first in equinox; the others have them last.
            h = jax.nn.relu(self.conv(x.transpose(2, 0, 1)))
            return self.dense(h.transpose(1, 2, 0).ravel())

    keys = jax.random.split(jax.random.key(0))
    model = Network(eqx.nn.Conv2d(1, 2, 3, key=keys[0]), eqx.nn.Linear(32, 3, key=keys[1]))
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def apply(params, x):
        return jax.vmap(eqx.combine(params, rest))(x)

    # Only to have the weights of the other recipes: kernels are [outputs, inputs, height, width].
    own = (
        weights["conv/kernel"].transpose(3, 2, 0, 1),
        weights["conv/bias"][:, None, None],
        weights["dense/kernel"].T,
        weights["dense/bias"],
    )
    return apply, jax.tree.unflatten(jax.tree.structure(params), own)


RECIPES = [bare_function, flax_linen, flax_nnx, equinox]


@pytest.mark.long
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_framework_gives_the_same_factors(arrays, recipe):
    apply, params = recipe(arrays.weights)
    for function in (apply, jax.jit(apply)):
        model = Model(function, likelihoods.categorical)
        found = fisher.kfac(model, params, Examples(arrays.images))
        assert [(layer.rows, layer.columns) for layer in found.layers] == [(9, 2), (32, 3)]
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
    # In whatever order a framework has the axes.
    by_size = {leaf.size: np.sort(leaf.ravel()) for leaf in jax.tree.leaves(arrays.entries)}
    for leaf in jax.tree.leaves(entries):
        np.testing.assert_allclose(np.sort(leaf.ravel()), by_size[leaf.size], rtol=1e-4, atol=1e-6)


@pytest.mark.long
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
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(product["batch_stats"]))
    assert jnp.abs(product["params"]["Dense_1"]["kernel"]).max() > 0
