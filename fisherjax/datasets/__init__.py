"""Read data sets as arrays or text, and normalise and augment images.

Images stay uint8 in memory until a batch is used. Two functions of a batch run on the device:
`normalizer` makes one that scales images, `crop_and_flip` one that also augments them.
"""

from fisherjax.datasets.images import crop_and_flip, normalizer
from fisherjax.datasets.reading import NAMES, Dataset, load, load_text

__all__ = ["NAMES", "Dataset", "crop_and_flip", "load", "load_text", "normalizer"]
