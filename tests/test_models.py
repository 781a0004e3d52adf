"""The networks have the papers' sizes and initialisation, and are what their names say."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fisherjax import models

NHWC = ("NHWC", "HWIO", "NHWC")


def count(params):
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    ("model", "shape", "size"),
    [
        (models.LeNet(), (28, 28, 1), 44_190),
        (models.SimpleCNNMNIST(), (28, 28, 1), 44_426),
        (models.SimpleCNN(), (32, 32, 3), 62_006),
        (models.CNN(), (32, 32, 3), 939_616),
        (models.MLP((254, 64), use_bias=True), (28, 28, 1), 216_360),
        (models.MLP(), (64,), 64 * 64 + 64 * 64 + 64 * 10),
    ],
)
def test_parameter_counts_are_the_papers(key, model, shape, size):
    assert count(models.init(model, key, np.zeros((1, *shape)))) == size


@pytest.mark.parametrize("model", [models.LeNet(use_bias=True), models.MLP((50,), use_bias=True)])
def test_parameters_are_uniform_within_one_over_the_root_of_fan_in(key, model):
    params = models.init(model, key, np.zeros((1, 28, 28, 1)))
    for layer in params.values():
        kernel, bias = layer["kernel"], layer["bias"]
        bound = (kernel.size // kernel.shape[-1]) ** -0.5
        assert abs(kernel).max() <= bound
        assert abs(bias).max() <= bound
        assert bias.std() > 0.3 * bound
        # A uniform variable's standard deviation is bound / sqrt(3), give or take the sampling.
        np.testing.assert_allclose(kernel.std(), bound / 3**0.5, rtol=2 / kernel.size**0.5)


@pytest.mark.parametrize("model", [models.LeNet(use_bias=True), models.CNN(num_classes=7)])
def test_the_convolutional_networks_compute_what_they_say(x64, key, model):
    images = jax.random.normal(key, (3, 28, 28, 2), float)
    params = models.init(model, key, images)
    outputs = jax.jit(models.apply_fn(model))(params, images)
    assert outputs.shape == (3, model.num_classes)
    np.testing.assert_allclose(outputs, jax.jit(plain)(params, images), rtol=1e-11)


def plain(params, hidden):
    for name in ("conv1", "conv2"):
        hidden = lax.conv_general_dilated(
            hidden, params[name]["kernel"], (1, 1), "VALID", dimension_numbers=NHWC
        )
        hidden = flax.linen.relu(hidden + params[name].get("bias", 0))
        hidden = flax.linen.max_pool(hidden, (2, 2), (2, 2))
    hidden = hidden.reshape(hidden.shape[0], -1)
    for name in ("dense1", "dense2", "dense3"):
        hidden = hidden @ params[name]["kernel"] + params[name].get("bias", 0)
        hidden = flax.linen.relu(hidden) if name != "dense3" else hidden
    return hidden


def test_initialisation_reads_shapes_only_and_its_key(key):
    model = models.MLP((5,))
    images = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1)
    params = models.init(model, key, images)
    same = models.init(model, key, np.zeros((7, 16), np.float32))
    other = models.init(model, jax.random.key(1), images)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    assert not np.array_equal(params["dense1"]["kernel"], other["dense1"]["kernel"])


def test_parameters_take_the_default_precision(x64, key):
    params = models.init(models.MLP(), key, np.zeros((1, 8), np.float32))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float64")}


def test_normalisation_happens_in_apply(key):
    images = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28, 1)
    model = models.MLP()
    params = models.init(model, key, images)

    def normalize(x):
        return x.astype(jnp.float32) / 255 - 0.5

    raw = jax.jit(models.apply_fn(model, normalize))(params, images)
    normalised = jax.jit(models.apply_fn(model))(params, normalize(images))
    np.testing.assert_allclose(raw, normalised, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32, jnp.float64])
def test_parameters_are_never_cast(x64, key, dtype):
    # A cast between parameter and product would hide the layer from K-FAC.
    model = models.MLP((4,))
    params = jax.tree.map(lambda x: x.astype(dtype), models.init(model, key, np.zeros((1, 8))))
    outputs = models.apply_fn(model)(params, np.ones((2, 8), np.float32))
    assert outputs.dtype == dtype
    jaxpr = jax.make_jaxpr(models.apply_fn(model))(params, np.ones((2, 8), np.float32))
    converted = [e.invars[0] for e in jaxpr.eqns if e.primitive.name == "convert_element_type"]
    assert not set(map(id, converted)) & set(map(id, jaxpr.jaxpr.invars[:-1]))


def test_empty_batches_pass(key):
    images = np.zeros((0, 28, 28, 1), np.float32)
    for model in (models.LeNet(), models.MLP()):
        params = models.init(model, key, images)
        assert models.apply_fn(model)(params, images).shape == (0, 10)


@pytest.mark.parametrize("shape", [(1, 8, 8, 1), (1, 784)])
def test_images_that_do_not_fit_are_refused(key, shape):
    with pytest.raises(ValueError, match=r"LeNet got inputs of shape .* expected images .* MLP"):
        models.init(models.LeNet(), key, np.zeros(shape))


def test_a_model_with_running_statistics_is_refused(key):
    with pytest.raises(ValueError, match=r"batch_stats.*apply_train"):
        models.init(flax.linen.BatchNorm(use_running_average=False), key, np.zeros((2, 3)))
