"""Read data sets into memory as arrays or text."""

import io
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fisherjax._core import checks

# Mean and deviation per channel, as in the FedFisher experiments, which use those of MNIST for
# Fashion-MNIST, those of CIFAR-10 for CIFAR-100, and none for SVHN.
_MNIST = (0.1307,), (0.3081,)
_CIFAR = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
_MOMENTS = {
    "digits": ((0.0,), (1.0,)),
    "mnist": _MNIST,
    "fashion_mnist": _MNIST,
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "svhn_cropped": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "cinic10": ((0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835)),
}
_CINIC10 = "cinic10"  # which TensorFlow Datasets does not have
NAMES = tuple(_MOMENTS)
"""The names of the data sets that `load` reads."""

CIFAR100_COARSE = (
    *(4, 1, 14, 8, 0, 6, 7, 7, 18, 3, 3, 14, 9, 18, 7, 11, 3, 9, 7, 11, 6, 11, 5, 10, 7),
    *(6, 13, 15, 3, 15, 0, 11, 1, 10, 12, 14, 16, 9, 11, 5, 5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    *(16, 4, 17, 4, 2, 0, 17, 4, 18, 17, 10, 3, 2, 12, 12, 16, 12, 1, 9, 19, 2, 10, 0, 1, 16),
    *(12, 9, 13, 15, 13, 16, 19, 2, 4, 6, 19, 5, 5, 8, 19, 18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)
"""The coarse class of each class of CIFAR-100, both in the order of their names."""


class Dataset(NamedTuple):
    """One split of a data set in memory, with the constants that normalise it.

    Attributes:
        inputs: Images uint8 [N, H, W, channels], or inputs of any other kind [N, ...].
        targets: Class labels int32 [N].
        num_classes: The number of classes C.
        scale: The largest value of a pixel.
        mean: Mean of each channel after division by the scale.
        std: Standard deviation of each channel after division by the scale.
        name: The name of the data set in `load`.
    """

    inputs: np.ndarray
    targets: np.ndarray
    num_classes: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str


def load(name: str, data_dir: str | os.PathLike | None = None) -> tuple[Dataset, Dataset]:
    """Read the training and the test split of a data set into memory.

    "digits" comes with scikit-learn: 1797 images of 8x8 pixels, of which the last 360 rows of
    `numpy.random.RandomState(0).permutation(1797)` are the test split. The others are read with
    TensorFlow Datasets, without TensorFlow, and must have been prepared once. "cinic10" is prepared
    from a folder of its images, which is not downloaded; its validation split is not read.

    Args:
        name: One of `NAMES`.
        data_dir: Folder of the prepared data sets. The default is the environment variable
            `TFDS_DATA_DIR`, or `~/tensorflow_datasets` if that is not set.

    Raises:
        ValueError: If the name is unknown.
        FileNotFoundError: If the data set is not prepared; the message has the command that
            prepares it.
        ImportError: If the package that reads the data set is missing.

    Example:
        >>> train, test = load("digits")
        >>> train.inputs.shape, test.inputs.shape
        ((1437, 8, 8, 1), (360, 8, 8, 1))

    Source: normalisation of Jhunjhunwala, Wang, Joshi, "FedFisher", AISTATS 2024 (code).
    """
    where = "datasets.NAMES; your own examples need no name, see clients.federation"
    checks.one_of("data set", name, NAMES, where)
    try:
        read = _read_digits() if name == "digits" else _read_tfds(name, data_dir)
    except ImportError as error:
        raise ImportError(
            f"the digits come with scikit-learn, and decoding images needs pillow ({error}): "
            "run pip install 'fisherjax[experiments]'"
        ) from error
    splits, num_classes, scale = read
    mean, std = _MOMENTS[name]
    train, test = (Dataset(x, y, num_classes, scale, mean, std, name) for x, y in splits)
    return train, test


def _read_digits():
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    # Stored like the other data sets: integers, here from 0 to 16, and one channel.
    images = digits.images.astype(np.uint8)[..., None]
    rows = np.random.RandomState(0).permutation(len(images))
    targets = digits.target.astype(np.int32)
    return [(images[part], targets[part]) for part in np.split(rows, [-360])], 10, 16.0


def load_text(name: str = "tiny_shakespeare", data_dir: str | os.PathLike | None = None) -> str:
    """Read a text into memory: its splits train, validation and test, one after another.

    The only name is "tiny_shakespeare", parts of nine plays, prepared with TensorFlow Datasets;
    `data_dir` and the errors are those of `load`. Read your own text with `Path(file).read_text()`.

    Source: Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks", 2015 (data).
    """
    if name != "tiny_shakespeare":
        raise ValueError(
            f"unknown text {name!r}: expected 'tiny_shakespeare'; images are read by "
            "datasets.load, a text of your own by pathlib.Path(file).read_text()"
        )
    sources = _sources(name, "text", ["train", "validation", "test"], data_dir)
    return "".join(record["text"].decode() for source in sources for record in source)


def _read_tfds(name: str, data_dir):
    sources = _sources(name, "image", ["train", "test"], data_dir)
    features = sources[0].dataset_info.features
    shape, num_classes = features["image"].shape, features["label"].num_classes
    return [_decode(source, shape) for source in sources], num_classes, 255.0


def _sources(name: str, feature: str, splits: list[str], data_dir) -> Sequence[Any]:
    import tensorflow_datasets as tfds

    if name == _CINIC10:
        import fisherjax._cinic10  # noqa: F401  registers the name with TensorFlow Datasets
    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR")
    # A bucket ("gs://...") is not a local folder; TensorFlow Datasets checks it.
    if data_dir and "://" not in str(data_dir):
        data_dir = Path(data_dir).expanduser()
        if not data_dir.is_dir():
            raise FileNotFoundError(
                f"the data directory {str(data_dir)!r} does not exist: pass the folder with "
                f"{name!r} as data_dir or TFDS_DATA_DIR, or {_how_to_prepare(name, data_dir)}"
            )
    try:
        # Records are read without decoding: `_decode` takes half the time for images.
        decoders = {feature: tfds.decode.SkipDecoding()}
        sources: Any = tfds.data_source(
            name, split=splits, data_dir=data_dir, decoders=decoders, download=False
        )
        return sources
    except ImportError:  # a package is missing, not the data
        raise
    except Exception as error:  # the type depends on what is missing
        raise FileNotFoundError(
            f"no data set {name!r} in {str(data_dir or '~/tensorflow_datasets')!r} that can be "
            f"read without TensorFlow: {_how_to_prepare(name, data_dir)}\nIf that folder has a "
            "copy of it in another format (tfrecord), choose another data_dir."
        ) from error


def _how_to_prepare(name: str, data_dir) -> str:
    where = f", data_dir={json.dumps(str(data_dir))}" if data_dir else ""
    register = "import fisherjax._cinic10; " if name == _CINIC10 else ""
    # array_record is the only format that can be read without TensorFlow.
    code = (
        f"import tensorflow_datasets as tfds; {register}"
        f'tfds.builder("{name}"{where}, file_format="array_record").download_and_prepare()'
    )
    images = f"{data_dir or '~/tensorflow_datasets'}/downloads/manual/CINIC-10"
    first = f" (train, valid and test of CINIC-10.tar.gz in {images})" if name == _CINIC10 else ""
    install = "pip install 'fisherjax[prepare]'"
    return f"prepare it once{first}:\n  {install}\n  python -c {shlex.quote(code)}"


def _decode(source, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    inputs = np.empty((len(source), *shape), np.uint8)
    targets = np.empty(len(source), np.int32)
    chunk = 4096  # encoded images in memory at a time
    for start in range(0, len(source), chunk):
        rows = range(len(source))[start : start + chunk]
        for row, record in zip(rows, source.__getitems__(list(rows)), strict=True):
            with Image.open(io.BytesIO(record["image"]), formats=("PNG", "JPEG")) as image:
                # Some images of a colour data set may be stored in grey.
                image = image.convert("RGB") if shape[-1] == 3 else image
                inputs[row] = np.asarray(image).reshape(shape)
            targets[row] = record["label"]
    return inputs, targets
