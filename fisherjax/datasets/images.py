"""Normalise and augment images on the device."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.datasets.reading import Dataset
from fisherjax.typing import AnyArray, Array, Key


def normalizer(dataset: Dataset) -> Callable[[AnyArray], Array]:
    """Make the function that normalises stored pixels for a network.

        normalize(x) = (x / scale - mean) / std

    Integer x [..., channels] becomes float32. Floating x is returned unchanged, because it has been
    normalised before. Data sets with equal constants get the same function object.

    Raises:
        ValueError: If the scale or a deviation is not positive, or the lengths of mean and std
            differ.

    Example:
        >>> import fisherjax as fj
        >>> train, _ = fj.datasets.load("digits")
        >>> print(normalizer(train)(train.inputs).max())
        1.0
    """
    scale = float(dataset.scale)
    mean, std = (tuple(map(float, values)) for values in (dataset.mean, dataset.std))
    if len(mean) != len(std) or not all(math.isfinite(x) and x > 0 for x in (scale, *std)):
        raise ValueError(
            f"cannot normalise {dataset.name!r} with scale {scale}, mean {mean}, std {std}: pass "
            "one mean and one std per channel, with scale and stds above 0"
        )
    return _normalizer(scale, mean, std)


@functools.cache
def _normalizer(scale, mean, std):
    mean, std = np.float32(mean), np.float32(std)

    def normalize(x: AnyArray) -> Array:
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"inputs have dtype {x.dtype}, expected stored pixels (integers)")
        # As many axes as x, because JAX may be configured to refuse implicit broadcasts.
        per_channel = (1,) * (x.ndim - 1) + (-1,)
        x = x.astype(jnp.float32) / np.float32(scale)
        return (x - mean.reshape(per_channel)) / std.reshape(per_channel)

    return normalize


@cached
def crop_and_flip(normalize: Callable[[Array], Array], padding: int = 4, mode: str = "constant"):
    """Make a function that crops and mirrors images at random, the usual augmentation of CIFAR-10.

    Each image is normalised, padded on all sides, cropped to its size at a random place, and
    mirrored left to right with probability one half.

    Args:
        normalize: Function of `normalizer`.
        padding: Pixels of the border on each side (default 4).
        mode: Content of the border: "constant" is zeros, "reflect" the image mirrored at its
            outermost pixels, which needs a padding below the image's height and width.

    Returns:
        `augment(key, images)`, which maps stored images [B, H, W, channels] to normalised ones,
        with independent draws for each image; the same object for equal arguments.

    Raises:
        ValueError: If the padding is negative or no integer, or the mode is unknown.

    Example:
        >>> import fisherjax as fj
        >>> train, _ = fj.datasets.load("digits")
        >>> augment = crop_and_flip(normalizer(train), padding=1)
        >>> augment(jax.random.key(0), train.inputs[:2]).shape
        (2, 8, 8, 1)

    Source: mode "constant": Jhunjhunwala, Wang, Joshi, "FedFisher", AISTATS 2024 (code), which
    draws once for a whole minibatch; drawing for each image is usual and augments more. Mode
    "reflect": Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos", ICDE 2022 (code).
    """
    checks.count("padding", padding, 0)
    checks.one_of("mode", mode, ("constant", "reflect"))

    def augment(key: Key, images: Array) -> Array:
        if images.ndim != 4:
            raise ValueError(f"images have shape {images.shape}, expected [B, H, W, channels]")
        batch, height, width, _ = images.shape
        if mode == "reflect" and padding >= min(height, width):
            raise ValueError(
                f"images of shape {images.shape} cannot be reflected by padding={padding}: it must "
                "be below their height and width"
            )
        offset_key, flip_key = jax.random.split(key)
        down, right = jax.random.randint(offset_key, (2, batch, 1), -padding, padding + 1)
        flipped = jax.random.bernoulli(flip_key, 0.5, (batch, 1))
        # For each pixel of the result: its row [B, H, 1] and column [B, 1, W] in the original.
        # Places outside the original are border. The padded image is never stored.
        rows = (jnp.arange(height)[None] + down)[:, :, None]
        columns = jnp.arange(width)[None]
        columns = (jnp.where(flipped, width - 1 - columns, columns) + right)[:, None, :]
        if mode == "reflect":
            rows, columns = _reflected(rows, height), _reflected(columns, width)
        # One gather of the stored bytes; slicing padded floats image by image is 20 times slower.
        image = jnp.arange(batch)[:, None, None]
        cropped = images[image, rows.clip(0, height - 1), columns.clip(0, width - 1)]
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        # The border is set after normalisation: it holds zeros of the normalised image, not black.
        return jnp.where(inside[..., None], normalize(cropped), 0)

    return augment


def _reflected(places: Array, size: int) -> Array:
    """Fold places outside 0 to size - 1 back inside, without repeating the edge."""
    return size - 1 - jnp.abs(size - 1 - jnp.abs(places))
