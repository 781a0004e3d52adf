"""Read data sets as arrays, as text or client by client, and normalise and augment images.

Images stay uint8 in memory until a batch is used. Two functions of a batch run on the device:
`normalizer` makes one that scales images, `crop_and_flip` one that also augments them.
"""

from fisherjax.datasets.grouping import c4_pages, cc_news_pages, group
from fisherjax.datasets.images import crop_and_flip, normalizer
from fisherjax.datasets.natural import data_folder, emnist, stack_overflow, texts, utf8
from fisherjax.datasets.on_disk import ByClient, Decode, by_client
from fisherjax.datasets.reading import CIFAR100_COARSE, NAMES, Dataset, load, load_text

__all__ = [
    "CIFAR100_COARSE",
    "NAMES",
    "ByClient",
    "Dataset",
    "Decode",
    "by_client",
    "c4_pages",
    "cc_news_pages",
    "crop_and_flip",
    "data_folder",
    "emnist",
    "group",
    "load",
    "load_text",
    "normalizer",
    "stack_overflow",
    "texts",
    "utf8",
]
