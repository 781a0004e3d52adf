"""The diagonal Fisher is the diagonal of the full one, for layers and for every other leaf."""

import chex
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from fisherjax import Examples, Model, fisher, likelihoods, nn


class Images(flax.linen.Module):
    """A native and an injected convolution, with and without bias, normalisation, dense layers."""

    @flax.linen.compact
    def __call__(self, x):
        conv = {"param_dtype": float, "strides": (2, 1)}
        x = flax.linen.Conv(3, (3, 2), **conv)(x)
        x = flax.linen.LayerNorm(param_dtype=float)(flax.linen.relu(x))
        fast = nn.conv_general_dilated
        x = flax.linen.Conv(2, (2, 2), use_bias=False, conv_general_dilated=fast, **conv)(x)
        x = flax.linen.Conv(2, (1, 2), conv_general_dilated=fast, param_dtype=float)(
            nn.max_pool(x, 1)
        )
        return flax.linen.Dense(3, param_dtype=float)(jnp.tanh(x).reshape(x.shape[0], -1))


def words(params, x):
    """An embedding that is shared with the output, a scale, and a checkpointed dense layer."""
    h = params["embedding"][x] * params["scale"]
    h = jax.checkpoint(lambda w, h: jnp.tanh(h @ w))(params["kernel"], h).mean(1)
    return h @ params["embedding"].T


def wide(params, x):
    return jnp.tanh(x @ params["kernel"] + params["bias"])


def of_images(draw):
    model, x = Images(), jnp.asarray(draw.normal(size=(4, 6, 6, 2)))
    params = jax.tree.map(
        lambda leaf: jnp.asarray(draw.normal(size=leaf.shape)),
        jax.eval_shape(model.init, jax.random.key(0), x)["params"],
    )
    return (lambda params, x: model.apply({"params": params}, x)), params, x


def of_words(draw):
    shapes = {"embedding": (5, 3), "kernel": (3, 3), "scale": ()}
    params = {name: jnp.asarray(draw.normal(size=shape)) for name, shape in shapes.items()}
    return words, params, jnp.asarray(draw.integers(0, 5, (4, 6)))


def of_many_outputs(draw):
    params = {"kernel": jnp.asarray(draw.normal(size=(2, 40))), "bias": jnp.ones(40)}
    return wide, params, jnp.asarray(draw.normal(size=(4, 2)))


@pytest.fixture
def network(request, x64, sequence):
    made = {"images": of_images, "words": of_words, "40 outputs": of_many_outputs}
    made["sequence"] = lambda draw: sequence
    return made[request.param](np.random.default_rng(0))


@pytest.mark.long
@pytest.mark.parametrize(
    ("network", "name"),
    [
        ("images", "categorical"),
        ("words", "categorical"),
        ("40 outputs", "bernoulli"),
        ("sequence", "categorical"),
    ],
    indirect=["network"],
)
def test_diagonal_is_the_diagonal_of_the_full_fisher(network, oracle, name):
    apply, params, x = network
    likelihood = getattr(likelihoods, name)
    arguments = Model(apply, likelihood), params, Examples(x)
    entries = fisher.diagonal(*arguments, kind=fisher.true, batch_size=3).entries
    chex.assert_trees_all_equal_shapes(entries, params)
    columns = jax.jit(lambda params, x: likelihood.factor(apply(params, x)))(params, x)
    expected = np.diagonal(oracle(apply, params, x, columns))
    np.testing.assert_allclose(ravel_pytree(entries)[0], expected, rtol=1e-10, atol=1e-14)


@pytest.mark.long
@pytest.mark.parametrize("kind", [fisher.sampled, fisher.empirical])
def test_kinds_mean_the_same_for_the_diagonal_and_the_full_fisher(mlp, targets_for, key, kind):
    apply, params, x = mlp
    y = targets_for("categorical", apply(params, x))
    arguments = Model(apply, likelihoods.categorical), params, Examples(x, y)
    options = {"kind": kind, "key": key, "batch_size": 4}
    diagonal = fisher.diagonal(*arguments, **options)
    full = fisher.full(*arguments, **options)
    chex.assert_trees_all_close(diagonal.entries, full.diagonal(), rtol=1e-10, atol=1e-14)


@pytest.mark.long
def test_minibatch_means_are_never_squared(mlp):
    """Two examples whose gradients cancel still carry information."""
    params, x = {"kernel": mlp.params["first"]["kernel"]}, mlp.inputs
    mirrored = np.concatenate([x[:1], -x[:1]])

    def odd(params, x):  # f(-x) = -f(x): gradients of opposite sign, squares that agree
        return jnp.tanh(x @ params["kernel"])

    model = Model(odd, likelihoods.gaussian)
    both = fisher.diagonal(model, params, Examples(mirrored)).entries["kernel"]
    alone = fisher.diagonal(model, params, Examples(x[:1])).entries["kernel"]
    assert both.min() > 0
    np.testing.assert_allclose(both, alone, rtol=1e-10, atol=1e-14)
