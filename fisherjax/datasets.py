"""Data sets as arrays or text, and what prepares images.

Images stay uint8 until a batch is used: `normalizer` makes the function that scales them,
`crop_and_flip` the one that also augments them, both for the device.
"""

import functools
import io
import json
import math
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.typing import AnyArray, Array, Key

# Mean and deviation per channel, as the FedFisher experiments have them: MNIST's also for
# Fashion-MNIST, CIFAR-10's also for CIFAR-100, and SVHN as it is.
_MNIST = (0.1307,), (0.3081,)
_CIFAR = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)
_MOMENTS = {
    "digits": ((0.0,), (1.0,)),
    "mnist": _MNIST,
    "fashion_mnist": _MNIST,
    "cifar10": _CIFAR,
    "cifar100": _CIFAR,
    "svhn_cropped": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "cinic10": (
        (0.47889522, 0.47227842, 0.43047404),
        (0.24205776, 0.23828046, 0.25874835),
    ),
}
_OURS = "cinic10"
NAMES = tuple(_MOMENTS)
"""The data sets that `load` knows."""


class Dataset(NamedTuple):
    """One split of a data set in memory, with the constants of its normalisation.

    Attributes:
        inputs: Images uint8 [N, H, W, channels], or inputs of any other kind [N, ...].
        targets: Class labels int32 [N].
        num_classes: C.
        scale: The largest value of a pixel.
        mean: Of each channel, after division by the scale.
        std: Likewise.
        name: What `load` calls the data set.
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

    "digits" comes with scikit-learn: 1797 images of 8x8, of which the last 360 rows of
    `numpy.random.RandomState(0).permutation(1797)` are for testing. The others (`NAMES`) are read
    through TensorFlow Datasets, prepared beforehand in `data_dir`, without it in the environment's
    `TFDS_DATA_DIR`, without that in `~/tensorflow_datasets`; reading them needs no TensorFlow.
    "cinic10" is prepared from a folder of its images, which nothing downloads; its third split, for
    validation, is left alone.

    Raises:
        ValueError: If the name is unknown.
        FileNotFoundError: If it is not prepared there; the message holds the command that does so.
        ImportError: If the package that reads the data set is missing.

    Example:
        >>> train, test = load("digits")
        >>> train.inputs.shape, test.inputs.shape
        ((1437, 8, 8, 1), (360, 8, 8, 1))

    Source: normalisation of Jhunjhunwala, Wang, Joshi, "FedFisher", AISTATS 2024 (code).
    """
    if name not in NAMES:
        raise ValueError(
            f"unknown data set {name!r}: did you mean {checks.nearest(name, NAMES)}? All are in "
            "datasets.NAMES; examples of your own need no name, see clients.federation"
        )
    try:
        read = _read_digits() if name == "digits" else _read_tfds(name, data_dir)
    except ImportError as error:
        raise ImportError(
            f"the digits come with scikit-learn, and decoding images needs pillow ({error}): "
            "pip install 'fisherjax[experiments]'"
        ) from error
    splits, num_classes, scale = read
    mean, std = _MOMENTS[name]
    train, test = (Dataset(x, y, num_classes, scale, mean, std, name) for x, y in splits)
    return train, test


def _read_digits():
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    # Stored as the other data sets are: whole numbers, here from 0 to 16, and one channel.
    images = digits.images.astype(np.uint8)[..., None]
    rows = np.random.RandomState(0).permutation(len(images))
    targets = digits.target.astype(np.int32)
    return [(images[part], targets[part]) for part in np.split(rows, [-360])], 10, 16.0


def load_text(name: str = "tiny_shakespeare", data_dir: str | os.PathLike | None = None) -> str:
    """Read a text into memory: the splits train, validation and test, which follow one another.

    The only name is "tiny_shakespeare", parts of nine plays, prepared through TensorFlow Datasets;
    `data_dir` and what is raised are those of `load`. Your own text is a string already:
    `Path(file).read_text()`.

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

    if name == _OURS:
        import fisherjax._cinic10  # noqa: F401  otherwise the name would be looked for on the net
    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR")
    # A bucket ("gs://...") is no folder of this machine, and TensorFlow Datasets checks it.
    if data_dir and "://" not in str(data_dir):
        data_dir = Path(data_dir).expanduser()
        if not data_dir.is_dir():
            raise FileNotFoundError(
                f"the data directory {str(data_dir)!r} does not exist: pass the folder that holds "
                f"{name!r} as data_dir or TFDS_DATA_DIR, or {_how_to_prepare(name, data_dir)}"
            )
    try:
        # As it is stored: `_decode` takes half the time for images.
        decoders = {feature: tfds.decode.SkipDecoding()}
        found: Any = tfds.data_source(
            name, split=splits, data_dir=data_dir, decoders=decoders, download=False
        )
        return found
    except ImportError:  # a package is missing, not the data: preparing it again would not help
        raise
    except Exception as error:  # of many types, depending on what is missing
        raise FileNotFoundError(
            f"no data set {name!r} in {str(data_dir or '~/tensorflow_datasets')!r} that can be "
            f"read without TensorFlow: {_how_to_prepare(name, data_dir)}\nA copy of it in another "
            "format (tfrecord) would be in the way: choose another data_dir then."
        ) from error


def _how_to_prepare(name: str, data_dir) -> str:
    where = f", data_dir={json.dumps(str(data_dir))}" if data_dir else ""
    # The only format that is read without TensorFlow.
    known = "import fisherjax._cinic10; " if name == _OURS else ""
    code = (
        f"import tensorflow_datasets as tfds; {known}"
        f'tfds.builder("{name}"{where}, file_format="array_record").download_and_prepare()'
    )
    images = f"{data_dir or '~/tensorflow_datasets'}/downloads/manual/CINIC-10"
    first = f" (train, valid and test of CINIC-10.tar.gz in {images})" if name == _OURS else ""
    install = "pip install 'fisherjax[prepare]'"
    return f"prepare it once{first}:\n  {install}\n  python -c {shlex.quote(code)}"


def _decode(source, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    inputs = np.empty((len(source), *shape), np.uint8)
    targets = np.empty(len(source), np.int32)
    chunk = 4096  # encoded images held at a time
    for start in range(0, len(source), chunk):
        rows = range(len(source))[start : start + chunk]
        for row, record in zip(rows, source.__getitems__(list(rows)), strict=True):
            with Image.open(io.BytesIO(record["image"]), formats=("PNG", "JPEG")) as image:
                # Where images have colours, some may be stored without.
                image = image.convert("RGB") if shape[-1] == 3 else image
                inputs[row] = np.asarray(image).reshape(shape)
            targets[row] = record["label"]
    return inputs, targets


def normalizer(dataset: Dataset) -> Callable[[AnyArray], Array]:
    """Make the function that turns stored pixels into what a network is trained on.

        normalize(x) = (x / scale - mean) / std

    Integer x [..., channels] becomes float32; floating x passes unchanged, as it has been
    normalised before. Equal constants of a data set give the same function object.

    Raises:
        ValueError: If the constants cannot normalise (a zero deviation, differing lengths).

    Example:
        >>> train, _ = load("digits")
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

    def normalize(x: AnyArray) -> Array:
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
        >>> train, _ = load("digits")
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
