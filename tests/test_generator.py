"""The generator of images: what its convolutions compute, and how large it is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fisherjax import nn

KEY = jax.random.key(0)


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 2, 3), (1, 7, 5, 2)])
@pytest.mark.parametrize("outputs", [1, 4])
def test_a_doubled_convolution_is_one_of_the_doubled_image(shape, outputs):
    images, kernel = normal(*shape), normal(3, 3, shape[-1], outputs)

    @jax.jit
    def both(images, kernel):
        doubled = jnp.repeat(jnp.repeat(images, 2, axis=1), 2, axis=2)
        layout = ("NHWC", "HWIO", "NHWC")
        expected = jax.lax.conv_general_dilated(
            doubled, kernel, (1, 1), ((1, 1), (1, 1)), dimension_numbers=layout
        )
        return nn.doubled_convolution(images, kernel), expected

    np.testing.assert_allclose(*both(images, kernel), atol=1e-5)


def test_a_generator_has_as_many_weights_as_the_papers_say():
    def size(shape, **width):
        made = jax.eval_shape(lambda key: nn.init_generator(key, 256, shape, **width), KEY)
        return sum(leaf.size for leaf in jax.tree.leaves(made))

    assert size((28, 28, 1)) == 1_834_305
    assert size((32, 32, 3)) == 2_328_899
    # A dense layer with biases, two kernels, the last with its bias, three norms.
    narrow = 257 * 7 * 7 * 8 + 9 * 8 * 8 + 9 * 8 * 4 + 9 * 4 + 1 + 2 * (8 + 8 + 4)
    assert size((28, 28, 1), width=8) == narrow


@pytest.mark.long
def test_images_lie_between_black_and_white_and_depend_on_all_noise_of_a_batch():
    shape = (8, 12, 3)
    made = jax.jit(partial(nn.init_generator, noise=16, shape=shape))(KEY)
    noise = 10 * normal(5, 16)
    generate = jax.jit(partial(nn.generate, shape=shape))
    images = np.asarray(generate(made, noise))
    assert images.shape == (5, *shape)
    assert 0 < images.min() < images.max() < 1
    # Normalised by the batch: neither the scale nor the shift of all channels matters.
    moved = made._replace(dense=3 * made.dense, bias=made.bias + 1)
    np.testing.assert_allclose(generate(moved, noise), images, atol=1e-4)
