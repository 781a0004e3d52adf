"""Read the drawings of Omniglot, and resize images, as arrays of uint8."""

import io
import re
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

_ARCHIVES = "images_background_small1.zip", "images_background_small2.zip"
_NAME = re.compile(r"[^/]+/([^/]+)/character(\d+)/\d+_(\d+)\.png")
_ROWS = 4096  # images that are resized at once, so that only so many are in memory as floats


class Drawings(NamedTuple):
    """Images of characters, of which every person drew each character once.

    Attributes:
        images: uint8 [N, 105, 105], white strokes on black as in MNIST.
        labels: int32 [N], numbers of the characters, alphabet after alphabet.
        people: int32 [N], numbers from 1 to 20 of who drew them, people of one alphabet.
    """

    images: np.ndarray
    labels: np.ndarray
    people: np.ndarray


def omniglot(folder: Path, alphabets: tuple[str, ...] = ("Greek", "Latin")) -> Drawings:
    """Read alphabets of Omniglot's small background sets, 20 drawings of each character.

    Greek has 24 characters and Latin 26, so that there are 50 classes and 1,000 images.

    Args:
        folder: Folder of images_background_small1.zip and images_background_small2.zip; the first
            that has all alphabets is read.
        alphabets: Names of the alphabets.

    Raises:
        FileNotFoundError: If no archive in the folder has the alphabets.

    Source: Lake, Salakhutdinov, Tenenbaum, Human-level concept learning through probabilistic
        program induction, Science 2015.
    """
    from PIL import Image

    for path in (folder / name for name in _ARCHIVES):
        if not path.is_file():
            continue
        with zipfile.ZipFile(path) as archive:
            found = [x for x in map(_NAME.fullmatch, sorted(archive.namelist())) if x]
            if set(alphabets) - {x[1] for x in found}:
                continue
            chosen = sorted(
                (x for x in found if x[1] in alphabets), key=lambda x: alphabets.index(x[1])
            )
            characters = list(dict.fromkeys((x[1], x[2]) for x in chosen))
            drawn = [np.asarray(Image.open(io.BytesIO(archive.read(x[0])))) for x in chosen]
        labels = [characters.index((x[1], x[2])) for x in chosen]
        # A pixel of one bit is true where the paper is.
        images = np.where(np.stack(drawn), 0, 255).astype(np.uint8)
        return Drawings(images, np.int32(labels), np.int32([x[3] for x in chosen]))
    raise FileNotFoundError(
        f"{folder} has no {' or '.join(_ARCHIVES)} with {', '.join(alphabets)}: put Omniglot's "
        "small background sets there"
    )


def resized(images: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Resize images by linear interpolation, and repeat the channel of grey ones.

    An image that gets smaller is averaged over as many pixels as one stands for (antialiasing).

    Args:
        images: uint8 [N, H, W] or [N, H, W, C].
        shape: The new shape of an image, [H', W', C']. C' is C, or any number if C is 1.

    Returns:
        uint8 [N, H', W', C'].

    Example:
        >>> grey = np.array([[[0, 100], [200, 100]]], np.uint8)
        >>> resized(grey, (1, 4, 2))[0, 0].tolist()
        [[100, 100], [100, 100], [100, 100], [100, 100]]
        >>> resized(grey, (2, 4, 1))[0, 0, :, 0].tolist()
        [0, 25, 75, 100]
    """
    images = images if images.ndim == 4 else images[..., None]
    rows, columns = (_weights(n, m) for n, m in zip(images.shape[1:3], shape, strict=False))
    made = np.empty((len(images), *shape), np.uint8)
    for start in range(0, len(images), _ROWS):
        part = images[start : start + _ROWS].astype(np.float32)
        part = np.einsum("ih,nhwc,jw->nijc", rows, part, columns, optimize=True)
        # The channel of a grey image is repeated in the assignment.
        made[start : start + _ROWS] = np.clip(np.rint(part), 0, 255)
    return made


def _weights(old: int, new: int) -> np.ndarray:
    """Return the weights [new, old] of pixels along an axis, triangles that sum to one."""
    scale = old / new
    centres = (np.arange(new) + 0.5) * scale - 0.5
    distances = np.abs(np.arange(old) - centres[:, None]) / max(scale, 1)
    weights = np.maximum(1 - distances, 0)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)
