"""The generator of DENSE: a dense layer and three convolutions that turn noise into images.

Zhang, Chen, Li, Lyu, Wu, Ding, Shen, Zhang, DENSE: data-free one-shot federated learning, NeurIPS
2022. All convolutions but the last are applied to an image whose pixels were doubled in height and
width. Here the image is not doubled: four smaller kernels compute the four pixels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fisherjax.typing import Array, Key

_LEAK, _EPSILON = 0.2, 1e-5


class Norm(NamedTuple):
    """Scale and shift of normalised channels, [channels] each."""

    scale: Array
    shift: Array


class Generator(NamedTuple):
    """Weights of a generator: dense [z, h w channels], kernels [3, 3, cin, cout] and norms."""

    dense: Array
    bias: Array
    norms: tuple[Norm, Norm, Norm]
    first: Array
    second: Array
    last: Array
    last_bias: Array


def init_generator(
    key: Key, noise: int, shape: tuple[int, int, int], width: int = 128
) -> Generator:
    """Draw the weights of a generator.

    Kernels are normal with deviation 0.02, scales normal around one with this deviation; biases and
    shifts are zero.

    Args:
        key: Random key.
        noise: Size z of the noise.
        shape: Shape (H, W, C) of the images; H and W are multiples of four.
        width: Channels of hidden layers, of which the last has half (default 128, as in the paper).

    Example:
        >>> made = init_generator(jax.random.key(0), 256, (28, 28, 1))
        >>> sum(leaf.size for leaf in jax.tree.leaves(made))
        1834305
    """
    rows, columns, channels = shape
    keys = iter(jax.random.split(key, 7))

    def normal(*size: int) -> Array:
        return 0.02 * jax.random.normal(next(keys), size)

    def norm(size: int) -> Norm:
        return Norm(1 + normal(size), jnp.zeros(size))

    a, b, c = width, width, width // 2
    pixels = rows // 4 * (columns // 4) * a
    return Generator(
        dense=normal(noise, pixels),
        bias=jnp.zeros(pixels),
        norms=(norm(a), norm(b), norm(c)),
        first=normal(3, 3, a, b),
        second=normal(3, 3, b, c),
        last=normal(3, 3, c, channels),
        last_bias=jnp.zeros(channels),
    )


def generate(generator: Generator, noise: Array, shape: tuple[int, int, int]) -> Array:
    """Generate images [B, H, W, C] with pixels from 0 to 1 from noise [B, z].

    Channels are normalised by their mean and variance over the batch.

    Example:
        >>> made = init_generator(jax.random.key(0), 16, (8, 8, 3))
        >>> generate(made, jnp.ones((2, 16)), (8, 8, 3)).shape
        (2, 8, 8, 3)
    """
    before, between, behind = generator.norms
    x = noise @ generator.dense + generator.bias
    x = x.reshape(len(x), shape[0] // 4, shape[1] // 4, -1)
    x = doubled_convolution(_normed(before, x), generator.first)
    x = jax.nn.leaky_relu(_normed(between, x), _LEAK)
    x = doubled_convolution(x, generator.second)
    x = jax.nn.leaky_relu(_normed(behind, x), _LEAK)
    return jax.nn.sigmoid(_convolved(x, generator.last, ((1, 1), (1, 1))) + generator.last_bias)


def doubled_convolution(images: Array, kernel: Array) -> Array:
    """Convolve images [B, H, W, cin] with doubled pixels and a kernel [3, 3, cin, cout].

    The result [B, 2H, 2W, cout] is that of repeating each pixel twice in height and width, and then
    a convolution with one zero on each side. Two of the three rows that the kernel covers are one
    row of the image: the last two for even output rows, the first two for odd ones. Thus a kernel
    of two rows, and likewise two columns, is enough: 4 products in place of 9.

    Example:
        >>> images, kernel = jnp.ones((1, 2, 2, 1)), jnp.ones((3, 3, 1, 1))
        >>> print(doubled_convolution(images, kernel)[0, 0, :, 0])
        [4. 6. 6. 4.]
    """
    batch, height, width, _ = images.shape
    even = jnp.stack([kernel[0], kernel[1] + kernel[2]])
    odd = jnp.stack([kernel[0] + kernel[1], kernel[2]])
    rows = []
    for row, half in enumerate((even, odd)):
        columns = []
        for column in range(2):
            two = (half[:, 0], half[:, 1] + half[:, 2])
            small = jnp.stack(two if column == 0 else (half[:, 0] + half[:, 1], half[:, 2]), axis=1)
            pads = ((1 - row, row), (1 - column, column))
            columns.append(_convolved(images, small, pads))
        rows.append(jnp.stack(columns, axis=3))
    # [B, H, 2, W, 2, cout]: the two rows and two columns of each pixel.
    return jnp.stack(rows, axis=2).reshape(batch, 2 * height, 2 * width, kernel.shape[-1])


def _convolved(images: Array, kernel: Array, pads: tuple[tuple[int, int], ...]) -> Array:
    """Convolve by moving products: with many inputs and few outputs, patches would be larger."""
    batch, height, width, inputs = images.shape
    rows, columns, _, outputs = kernel.shape
    products = images.reshape(-1, inputs) @ kernel.transpose(2, 0, 1, 3).reshape(inputs, -1)
    products = products.reshape(batch, height, width, rows, columns, outputs)
    products = jnp.pad(products, ((0, 0), *pads, (0, 0), (0, 0), (0, 0)))
    places = [(row, column) for row in range(rows) for column in range(columns)]
    return jnp.asarray(sum(products[:, i : i + height, j : j + width, i, j] for i, j in places))


def _normed(norm: Norm, x: Array) -> Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) * jax.lax.rsqrt(variance + _EPSILON) * norm.scale + norm.shift
