"""Prepare CINIC-10 with TensorFlow Datasets, from a folder of its images.

Darlow, Crowley, Antoniou, Storkey, CINIC-10 is not ImageNet or CIFAR-10, 2018. Importing this
module registers the name "cinic10" with `tfds.builder`; `datasets.load` imports it.
"""

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import tensorflow_datasets as tfds

CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)
_SPLITS = {"train": "train", "validation": "valid", "test": "test"}
_FOLDER = "CINIC-10"


class Cinic10(tfds.core.GeneratorBasedBuilder):
    """The unchanged images of a folder: 32 x 32 pixels, ten classes, three splits of 90,000."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        f"Unpack CINIC-10.tar.gz to downloads/manual/{_FOLDER} of the data directory, so that it "
        f"contains {', '.join(_SPLITS.values())}, each with one folder of PNG images per class: "
        f"{', '.join(CLASSES)}."
    )

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=(32, 32, 3)),
            "label": tfds.features.ClassLabel(names=CLASSES),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=__doc__,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        folder = dl_manager.manual_dir / _FOLDER
        paths_of = {
            split: [*(folder / subfolder).glob("*/*.png")] for split, subfolder in _SPLITS.items()
        }
        for split, subfolder in _SPLITS.items():
            # TensorFlow Datasets would write an empty split without an error.
            absent = {*CLASSES} - {path.parent.name for path in paths_of[split]}
            if absent:
                raise FileNotFoundError(
                    f"no images of {', '.join(sorted(absent))} in {folder / subfolder}: "
                    f"{self.MANUAL_DOWNLOAD_INSTRUCTIONS}"
                )
        return {split: self._generate_examples(paths) for split, paths in paths_of.items()}

    def _generate_examples(self, paths: Sequence[PurePath]) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in paths:
            label = path.parent.name
            yield f"{label}/{path.name}", {"image": path, "label": label}
