"""Give each client a hand of its own: images with its slant, stroke and scale, drawn by key."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

from fisherjax.typing import Array, Key

SLANT, SCALE = 0.6, 1.3
"""Largest shear, in columns a row, and largest scale; the least scale is its inverse."""


class Hand(NamedTuple):
    """How a client writes, numbers or arrays of numbers.

    Attributes:
        slant: Shear to the right, in columns a row.
        scale: Size of a digit, 1 for that of the data.
        stroke: From -1, eroded by a pixel, to 1, dilated by a pixel.
    """

    slant: Array
    scale: Array
    stroke: Array


def draw(key: Key, number: int) -> Hand:
    """Draw the hands of a number of clients, uniform in slant, log scale and stroke.

    Example:
        >>> hands = draw(jax.random.key(0), 5)
        >>> hands.slant.shape, bool((abs(hands.stroke) <= 1).all())
        ((5,), True)
    """
    slant, scale, stroke = jax.random.uniform(key, (3, number), minval=-1, maxval=1)
    return Hand(SLANT * slant, SCALE**scale, stroke)


def write(hand: Hand, image: Array) -> Array:
    """Return an image [H, W, 1] of numbers from 0 to 255 as a hand writes it."""
    grey = image[..., 0].astype(float)
    around = jnp.stack([jnp.roll(grey, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)])
    thick = jnp.where(hand.stroke > 0, around.max(0), around.min(0))
    grey = grey + jnp.abs(hand.stroke) * (thick - grey)
    rows, columns = (np.arange(n) - (n - 1) / 2 for n in grey.shape)
    y, x = jnp.meshgrid(rows, columns, indexing="ij")
    # Where a pixel of the new image comes from: above the middle a slant moves ink to the right.
    where = y / hand.scale, (x + hand.slant * y) / hand.scale
    middle = [(n - 1) / 2 for n in grey.shape]
    found = map_coordinates(grey, [a + b for a, b in zip(where, middle, strict=True)], order=1)
    return jnp.rint(jnp.clip(found, 0, 255)).astype(jnp.uint8)[..., None]


def written(images: np.ndarray, rows: Sequence[np.ndarray], hands: Hand) -> np.ndarray:
    """Return uint8 images [N, H, W, 1], those of each client in its hand."""
    made = images.copy()
    for client, own in enumerate(rows):
        made[own] = _written(jax.tree.map(lambda x, c=client: x[c], hands), images[own])
    return made


def _written(hand: Hand, images: np.ndarray, length: int = 512) -> np.ndarray:
    # Chunks of one length, so that all clients share a program.
    parts = []
    for first in range(0, len(images), length):
        part = images[first : first + length]
        padded = np.pad(part, ((0, length - len(part)), (0, 0), (0, 0), (0, 0)))
        parts.append(np.asarray(_chunk(hand, padded))[: len(part)])
    return np.concatenate(parts) if parts else images


@jax.jit
def _chunk(hand: Hand, images: Array) -> Array:
    return jax.vmap(partial(write, hand))(images)
