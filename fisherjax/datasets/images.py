"""What prepares images on the device: scaling and augmentation.

Images stay uint8 until a batch is used: `normalizer` makes the function that scales them,
`crop_and_flip` the one that also augments them.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core.caching import cached
from fisherjax.datasets.reading import Dataset
from fisherjax.typing import Array, Key


def normalizer(dataset: Dataset) -> Callable[[Array], Array]:
    """Make the function that turns stored pixels into what a network is trained on.

        normalize(x) = (x / scale - mean) / std

    Integer x [..., channels] becomes float32; floating x passes unchanged, as it has been
    normalised before. Equal constants of a data set give the same function object.

    Raises:
        ValueError: If the constants cannot normalise (a zero deviation, differing lengths).

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
            f"cannot normalise {dataset.name!r} with scale {scale}, mean {mean}, std {std}: give "
            "one mean and one std per channel, scale and stds above 0"
        )
    return _normalizer(scale, mean, std)


@functools.cache
def _normalizer(scale, mean, std):
    mean, std = np.float32(mean), np.float32(std)

    def normalize(x):
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"inputs have dtype {x.dtype}, expected stored pixels (integers)")
        # As many axes as x: JAX can be told to refuse anything else.
        per_channel = (1,) * (x.ndim - 1) + (-1,)
        x = x.astype(jnp.float32) / np.float32(scale)
        return (x - mean.reshape(per_channel)) / std.reshape(per_channel)

    return normalize


@cached
def crop_and_flip(normalize: Callable[[Array], Array], padding: int = 4, mode: str = "constant"):
    """Make the augmentation of the CIFAR experiments: a random crop and a random mirror image.

    Each image is normalised, padded on all sides by `padding` pixels, cut to its old size at a
    random place and mirrored left to right in half of the cases. The border holds zeros, or with
    mode "reflect" the image mirrored at its outermost pixels, which needs a padding below its size.

    Returns:
        `augment(key, images)` from stored images [B, H, W, channels] to normalised ones, every
        image with draws of its own; the same object for the same arguments.

    Raises:
        ValueError: If the padding or the mode is something else.

    Example:
        >>> import fisherjax as fj
        >>> train, _ = fj.datasets.load("digits")
        >>> augment = crop_and_flip(normalizer(train), padding=1)
        >>> augment(jax.random.key(0), train.inputs[:2]).shape
        (2, 8, 8, 1)

    Source: with zeros Jhunjhunwala, Wang, Joshi, "FedFisher", AISTATS 2024 (code). It draws once
    for a whole minibatch; drawing for each image is the usual form and augments more. With
    reflection Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos", ICDE 2022 (code).
    """
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise ValueError(f"padding is {padding!r}, expected a whole number of pixels from 0 up")
    if mode not in ("constant", "reflect"):
        raise ValueError(f"mode is {mode!r}, expected 'constant' or 'reflect'")

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
        # For each pixel of the result the row [B, H, 1] and column [B, 1, W] of the original that
        # it shows; outside of the original it shows the border. The padded image is never made.
        rows = (jnp.arange(height)[None] + down)[:, :, None]
        columns = jnp.arange(width)[None]
        columns = (jnp.where(flipped, width - 1 - columns, columns) + right)[:, None, :]
        if mode == "reflect":
            rows, columns = _reflected(rows, height), _reflected(columns, width)
        # One gather of the stored bytes: slicing padded floats image by image took 20 times longer.
        image = jnp.arange(batch)[:, None, None]
        cropped = images[image, rows.clip(0, height - 1), columns.clip(0, width - 1)]
        inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        # After normalisation: the border is zeros of what the network sees, not black.
        return jnp.where(inside[..., None], normalize(cropped), 0)

    return augment


def _reflected(places: Array, size: int) -> Array:
    """Fold places outside 0 to size - 1 back inside, without repeating the edge."""
    return size - 1 - jnp.abs(size - 1 - jnp.abs(places))
