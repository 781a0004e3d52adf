"""Data sets as arrays or text, and what prepares images.

Images stay uint8 until a batch is used: `normalizer` makes the function that scales them,
`crop_and_flip` the one that also augments them, both for the device.
"""

from fisherjax.datasets.images import crop_and_flip, normalizer
from fisherjax.datasets.reading import NAMES, Dataset, load, load_text

__all__ = [
    "NAMES",
    "Dataset",
    "crop_and_flip",
    "load",
    "load_text",
    "normalizer",
]
