"""Outlier images made by corrupting inputs (FedOV)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fisherjax.fisher.operators import PRECISION
from fisherjax.typing import Array, Key

# Ranges of the share of the image's area, and of height over width, of stretched and erased parts.
_STRETCHED, _STRETCHED_SHAPE = (0.1, 0.33), (3 / 4, 4 / 3)
_ERASED, _ERASED_SHAPE = (0.33, 0.5), (0.3, 3.3)
_DEVIATIONS = (10.0, 100.0)
_RADII, _ACROSS = 5, 3  # radii of the blur are below: 1 to 4 pixels along it, 0 to 2 across
_SMALLEST = 6


def make_outliers(key: Key, images: Array) -> Array:
    """Corrupt each image in one of five ways, drawn at random for each.

        x' = d(x),   P(d) = 1/7, 1/7, 1/7, 2/7, 2/7

    where d stretches a part of 10 to 33 % to the whole image; blurs, much more in one direction
    than in the other; erases a rectangle of 33 to 50 %; copies a half over another part, or swaps
    the halves; or rotates a block of the left half and the one beside it by 90, 180 or 270 degrees.
    Values stay in the range of the image and zero, the value of erased pixels.

    Args:
        key: Key of all random choices.
        images: Floats [B, H, W, channels], where H = W is even and at least 6.

    Returns:
        Images of the same shape and dtype.

    Raises:
        ValueError: If the images have another shape.
        TypeError: If they are not floats.

    Example:
        >>> jax.jit(make_outliers)(jax.random.key(0), jnp.ones((5, 8, 8, 1))).shape
        (5, 8, 8, 1)

    Source: Diao, Li, He, Towards addressing label skews in one-shot federated learning, ICLR 2023,
        and its code. Deviations: for a copy, all pairs of offsets that differ by at least
        half of a half are equally likely; an erased rectangle is drawn among those that fit into
        the image, instead of drawing until one fits.
    """
    _check(images)
    return jax.vmap(_outlier)(jax.random.split(key, images.shape[0]), images)


def _check(images: Array) -> None:
    shape = images.shape
    if images.ndim != 4 or shape[1] != shape[2] or shape[1] % 2 or shape[1] < _SMALLEST:
        raise ValueError(
            f"images have shape {shape}; expected [B, H, W, channels] with H = W, even for their "
            f"halves, at least {_SMALLEST}. Pad or resize them first."
        )
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise TypeError(
            f"images have dtype {images.dtype}; expected floats. Scale stored pixels first, by "
            "datasets.normalizer(dataset) for instance."
        )


def _outlier(key: Key, image: Array) -> Array:
    which, how = jax.random.split(key)
    # Under vmap, all five are computed; together they cost less than a layer.
    ways: list[Callable[[Key, Array], Array]] = [_stretched, _blurred, _erased]
    ways += 2 * [_cut, _rotated]
    return jax.lax.switch(jax.random.randint(which, (), 0, len(ways)), ways, how, image)


def _stretched(key: Key, image: Array) -> Array:
    (height, width), start = _rectangle(key, len(image), _STRETCHED, _STRETCHED_SHAPE)

    def positions(length: Array, first: Array) -> Array:
        # Centres of pixels in units of the part's pixels, clipped to its outermost ones.
        place = (jnp.arange(len(image)) + 0.5) * length / len(image) - 0.5
        return first + jnp.clip(place, 0, length - 1)

    def between(position: Array) -> Array:
        away = jnp.abs(position[:, None] - jnp.arange(len(image)))
        return jnp.maximum(1 - away, 0)

    rows, columns = between(positions(height, start[0])), between(positions(width, start[1]))
    return _resampled(image, rows, columns)


def _blurred(key: Key, image: Array) -> Array:
    one, other, turn, deviation = jax.random.split(key, 4)
    radii = jnp.array(
        [jax.random.randint(one, (), 1, _RADII), jax.random.randint(other, (), 0, _ACROSS)]
    )
    radii = jnp.where(jax.random.bernoulli(turn), radii[::-1], radii)
    deviation = jax.random.uniform(deviation, (), minval=_DEVIATIONS[0], maxval=_DEVIATIONS[1])
    last, steps = len(image) - 1, jnp.arange(1 - _RADII, _RADII)
    # The image is reflected at its outermost pixels.
    places = last - jnp.abs(last - jnp.abs(jnp.arange(len(image))[:, None] + steps))
    spread = jax.nn.one_hot(places, len(image))

    def mixing(radius: Array) -> Array:
        shares = jnp.exp(-0.5 * jnp.square(steps / deviation)) * (jnp.abs(steps) <= radius)
        return jnp.einsum("t,itj->ij", shares / shares.sum(), spread, precision=PRECISION)

    return _resampled(image, mixing(radii[0]), mixing(radii[1]))


def _resampled(image: Array, rows: Array, columns: Array) -> Array:
    """Multiply an image by a matrix along its rows, and by another along its columns."""
    found = jnp.einsum("ih,hwc,jw->ijc", rows, image, columns, precision=PRECISION)
    return found.astype(image.dtype)


def _erased(key: Key, image: Array) -> Array:
    sizes, starts = _rectangle(key, len(image), _ERASED, _ERASED_SHAPE)
    place = jnp.arange(len(image))
    inside = (place >= starts[:, None]) & (place < (starts + sizes)[:, None])
    return jnp.where((inside[0][:, None] & inside[1])[..., None], 0, image)


def _rectangle(
    key: Key, side: int, areas: tuple[float, float], shapes: tuple[float, float]
) -> tuple[Array, Array]:
    """Draw the height and width of a rectangle in an image, and its first row and column."""
    area_key, shape_key, start_key = jax.random.split(key, 3)
    area = jax.random.uniform(area_key, (), minval=areas[0], maxval=areas[1])
    # Neither side exceeds that of the image.
    low, high = jnp.maximum(shapes[0], area), jnp.minimum(shapes[1], 1 / area)
    shape = jnp.exp(jax.random.uniform(shape_key, (), minval=jnp.log(low), maxval=jnp.log(high)))
    sizes = jnp.round(side * jnp.sqrt(area * jnp.array([shape, 1 / shape]))).astype(int)
    return sizes, jax.random.randint(start_key, (2,), 0, side - sizes + 1)


def _cut(key: Key, image: Array) -> Array:
    pair_key, swap_key, turn_key = jax.random.split(key, 3)
    side, half = len(image), len(image) // 2
    # First rows of the target and of the copied half.
    pairs = jnp.array([(a, b) for a in range(half) for b in range(half) if 2 * abs(a - b) >= half])
    to, source = pairs[jax.random.randint(pair_key, (), 0, len(pairs))]
    index = jnp.arange(side)
    copied = jnp.where((index >= to) & (index < to + half), index - to + source, index)
    swapped = jax.random.bernoulli(swap_key, 1 / 3)
    moved = jnp.where(swapped, (index + half) % side, copied)
    of_rows = jax.random.bernoulli(turn_key)
    rows, columns = jnp.where(of_rows, moved, index), jnp.where(of_rows, index, moved)
    return image[rows[:, None], columns]


def _rotated(key: Key, image: Array) -> Array:
    top_key, turn_key = jax.random.split(key)
    half = len(image) // 2
    top = jax.random.randint(top_key, (), 0, half)
    band = jax.lax.dynamic_slice_in_dim(image, top, half)
    blocks = band[:, :half], band[:, half:]
    turned = [
        jnp.concatenate([jnp.rot90(block, turns) for block in blocks], axis=1)
        for turns in (1, 2, 3)
    ]
    band = jnp.stack(turned)[jax.random.randint(turn_key, (), 0, len(turned))]
    return jax.lax.dynamic_update_slice_in_dim(image, band, top, axis=0)
