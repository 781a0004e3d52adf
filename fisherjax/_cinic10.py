"""CINIC-10 for TensorFlow Datasets, which does not know it: to be prepared from its images.

Darlow, Crowley, Antoniou, Storkey, CINIC-10 is not ImageNet or CIFAR-10, 2018. Importing this
module is what lets `tfds.builder` know the name; `datasets.load` does that.
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
    """The images of a folder, as they are: 32 x 32, ten classes, three splits of 90,000."""

    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        f"Unpack CINIC-10.tar.gz to downloads/manual/{_FOLDER} of the data directory, so that it "
        f"holds {', '.join(_SPLITS.values())}, and each of them a folder of PNG images for each "
        f"class: {', '.join(CLASSES)}."
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
        found = {split: [*(folder / own).glob("*/*.png")] for split, own in _SPLITS.items()}
        for split, own in _SPLITS.items():
            # TensorFlow Datasets would write a split of nothing.
            absent = {*CLASSES} - {path.parent.name for path in found[split]}
            if absent:
                raise FileNotFoundError(
                    f"no images of {', '.join(sorted(absent))} in {folder / own}: "
                    f"{self.MANUAL_DOWNLOAD_INSTRUCTIONS}"
                )
        return {split: self._generate_examples(paths) for split, paths in found.items()}

    def _generate_examples(self, paths: Sequence[PurePath]) -> Iterator[tuple[str, dict[str, Any]]]:
        for path in paths:
            label = path.parent.name
            yield f"{label}/{path.name}", {"image": path, "label": label}
