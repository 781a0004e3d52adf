"""Data sets as arrays or text, what prepares images, and files of named arrays.

The only module that reads or writes. Images stay uint8 until a batch is used: `normalizer` makes
the function that scales them, `crop_and_flip` the one that also augments them, both for the device.

Letters: N examples, B images of a batch.
"""

import difflib
import functools
import io
import json
import math
import os
import shlex
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax.typing import Array, Key

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
}
NAMES = tuple(_MOMENTS)
"""The data sets that `load` knows."""

_NUMPY_DTYPES = {
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64"),
}
_DTYPES = {".npz": _NUMPY_DTYPES | {"complex128"}, ".safetensors": _NUMPY_DTYPES | {"bfloat16"}}


class Dataset(NamedTuple):
    """One split of a data set in memory, with the constants of its normalisation."""

    inputs: np.ndarray
    """Images uint8 ``[N, H, W, channels]``, or inputs of any other kind ``[N, ...]``."""
    targets: np.ndarray
    """Class labels int32 ``[N]``."""
    num_classes: int
    scale: float
    """The largest value of a pixel."""
    mean: tuple[float, ...]
    """Of each channel, after division by the scale."""
    std: tuple[float, ...]
    name: str


def load(name: str, data_dir: str | os.PathLike | None = None) -> tuple[Dataset, Dataset]:
    """Read a data set into memory.

    "digits" comes with scikit-learn: 1797 images of 8x8, of which the last 360 rows of
    ``numpy.random.RandomState(0).permutation(1797)`` are for testing. The others (`NAMES`) are read
    through TensorFlow Datasets, prepared beforehand; TensorFlow is not needed to read them.

    Args:
      name: one of `NAMES`.
      data_dir: folder of the prepared data sets; without it the environment's ``TFDS_DATA_DIR``,
        without that ``~/tensorflow_datasets``. Digits need none.

    Returns:
      The training and the test split.

    Raises:
      ValueError: if the name is unknown.
      FileNotFoundError: if the folder is missing or the data set is not prepared there; the
        message holds the command that prepares it.

    Example:
      >>> train, test = load("digits")
      >>> train.inputs.shape, train.inputs.dtype.name, test.inputs.shape
      ((1437, 8, 8, 1), 'uint8', (360, 8, 8, 1))

    Source: normalisation of Jhunjhunwala, Wang, Joshi, "FedFisher", AISTATS 2024 (code).
    """
    if name not in NAMES:
        nearest = difflib.get_close_matches(str(name), NAMES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown data set {name!r}: did you mean {nearest!r}? Known: {', '.join(NAMES)}"
        )
    splits, num_classes, scale = _read_digits() if name == "digits" else _read_tfds(name, data_dir)
    train, test = (
        Dataset(inputs, targets, num_classes, scale, *_MOMENTS[name], name)
        for inputs, targets in splits
    )
    return train, test


def _read_digits():
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.uint8)[..., None]
    rows = np.random.RandomState(0).permutation(len(images))
    splits = [
        (images[part], digits.target[part].astype(np.int32)) for part in np.split(rows, [-360])
    ]
    return splits, 10, 16.0


def load_text(name: str = "tiny_shakespeare", data_dir: str | os.PathLike | None = None) -> str:
    r"""Read a text into memory.

    Args:
      name: "tiny_shakespeare", parts of nine plays, prepared through TensorFlow Datasets as those
        of `load` are. Any other text is a string already: ``Path("plays.txt").read_text()``.
      data_dir: as for `load`.

    Returns:
      The whole text; the splits train, validation and test are consecutive pieces of it.

    Raises:
      ValueError: if the name is unknown.
      FileNotFoundError: as `load`.

    Example:
      >>> text = load_text()  # doctest: +SKIP
      >>> text[:46]  # doctest: +SKIP
      'First Citizen:\nBefore we proceed any further, '

    Source: Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks", 2015 (data).
    """
    if name != "tiny_shakespeare":
        raise ValueError(
            f"unknown text {name!r}: expected 'tiny_shakespeare'; images are read by data.load, a "
            "text of your own by pathlib.Path(file).read_text()"
        )
    sources = _sources(name, ["train", "validation", "test"], data_dir)
    return "".join(record["text"].decode() for source in sources for record in source)


def _read_tfds(name: str, data_dir):
    """Read both splits with the images still encoded: our loop decodes in half the time."""
    sources = _sources(name, ["train", "test"], data_dir, still_encoded=("image",))
    features = sources[0].dataset_info.features
    shape, num_classes = features["image"].shape, features["label"].num_classes
    return [_decode(source, shape) for source in sources], num_classes, 255.0


def _sources(name: str, splits: list[str], data_dir, still_encoded: tuple[str, ...] = ()):
    import tensorflow_datasets as tfds

    data_dir = data_dir or os.environ.get("TFDS_DATA_DIR")
    if data_dir and "://" not in str(data_dir):
        data_dir = Path(data_dir).expanduser()
        if not data_dir.is_dir():
            raise FileNotFoundError(
                f"the data directory {str(data_dir)!r} does not exist: pass the folder that holds "
                f"{name!r} as data_dir or TFDS_DATA_DIR, or {_how_to_prepare(name, data_dir)}"
            )
    try:
        return tfds.data_source(
            name,
            split=splits,
            data_dir=data_dir,
            download=False,
            decoders={feature: tfds.decode.SkipDecoding() for feature in still_encoded},
        )
    except ImportError:
        raise
    except Exception as error:  # of many types, depending on what is missing
        raise FileNotFoundError(
            f"no data set {name!r} in {str(data_dir or '~/tensorflow_datasets')!r} that can be "
            f"read without TensorFlow: {_how_to_prepare(name, data_dir)}\nA copy of it in another "
            "format (tfrecord) would be in the way: choose another data_dir then."
        ) from error


def _how_to_prepare(name: str, data_dir) -> str:
    where = f", data_dir={json.dumps(str(data_dir))}" if data_dir else ""
    code = (
        "import tensorflow_datasets as tfds; "
        f'tfds.builder("{name}"{where}, file_format="array_record").download_and_prepare()'
    )
    return f"prepare it once:\n  pip install 'fisherjax[prepare]'\n  python -c {shlex.quote(code)}"


def _decode(source, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    inputs = np.empty((len(source), *shape), np.uint8)
    targets = np.empty(len(source), np.int32)
    chunk = 4096  # encoded images held at a time
    for start in range(0, len(source), chunk):
        rows = range(start, min(start + chunk, len(source)))
        for row, record in zip(rows, source.__getitems__(list(rows)), strict=True):
            with Image.open(io.BytesIO(record["image"]), formats=("PNG", "JPEG")) as image:
                inputs[row] = np.asarray(image).reshape(shape)
            targets[row] = record["label"]
    return inputs, targets


def normalizer(dataset: Dataset) -> Callable[[Array], Array]:
    r"""Make the function that turns stored pixels into what a network is trained on.

    .. math:: x \mapsto (x / \text{scale} - \text{mean}) / \text{std}

    Args:
      dataset: its constants are used, its arrays are not.

    Returns:
      ``normalize(x)``, for ``jit`` and ``vmap``: integer x ``[..., channels]`` becomes float32;
      floating x passes unchanged, as it has been normalised before. Equal constants give the same
      function object, so that nothing compiles again.

    Raises:
      ValueError: if the constants cannot normalise (a zero deviation, differing lengths).

    Example:
      >>> train, _ = load("digits")
      >>> float(normalizer(train)(train.inputs).max())
      1.0
    """
    scale, mean, std = float(dataset.scale), *map(_floats, (dataset.mean, dataset.std))
    if len(mean) != len(std) or not all(math.isfinite(x) and x > 0 for x in (scale, *std)):
        raise ValueError(
            f"cannot normalise {dataset.name!r} with scale {scale}, mean {mean}, std {std}: give "
            "one mean and one std per channel, scale and stds above 0"
        )
    return _normalizer(scale, mean, std)


def _floats(values) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


@functools.cache
def _normalizer(scale, mean, std):
    mean, std = np.float32(mean), np.float32(std)

    def normalize(x):
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jnp.floating):
            return x
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"inputs have dtype {x.dtype}, expected stored pixels (integers)")
        per_channel = (1,) * (x.ndim - 1) + (-1,)
        x = x.astype(jnp.float32) / np.float32(scale)
        return (x - mean.reshape(per_channel)) / std.reshape(per_channel)

    return normalize


def crop_and_flip(normalize: Callable[[Array], Array], padding: int = 4, mode: str = "constant"):
    """Make the augmentation of the CIFAR experiments: a random crop and a random mirror image.

    Each image is normalised, padded on all sides, cut to its old size at a random place and
    mirrored left to right in half of the cases.

    Args:
      normalize: what `normalizer` returned.
      padding: width of the border; the crop moves by up to this many pixels each way.
      mode: what the border holds, as in ``numpy.pad``: "constant" is zeros, "reflect" the image
        mirrored at its outermost pixels, which needs a padding below its size.

    Returns:
      ``augment(key, images)`` from stored images ``[B, H, W, channels]`` to normalised ones, every
      image with draws of its own; the same object for the same arguments.

    Raises:
      ValueError: if ``padding`` is not a whole number from 0 up, or the mode is unknown.

    Example:
      >>> augment = crop_and_flip(normalizer(load("digits")[0]), padding=1)
      >>> augment(jax.random.key(0), jnp.zeros((2, 8, 8, 1), jnp.uint8)).shape
      (2, 8, 8, 1)

    Source: with zeros Jhunjhunwala, Wang, Joshi, "FedFisher", AISTATS 2024 (code). It draws once
    for a whole minibatch; drawing for each image is the usual form and augments more. With
    reflection Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos", ICDE 2022 (code).
    """
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise ValueError(f"padding is {padding!r}, expected a whole number of pixels from 0 up")
    if mode not in ("constant", "reflect"):
        raise ValueError(f"mode is {mode!r}, expected 'constant' or 'reflect'")
    return _crop_and_flip(normalize, padding, mode)


@functools.cache
def _crop_and_flip(normalize, padding, mode):
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
        rows = jnp.arange(height)[None] + down
        columns = jnp.arange(width)[None]
        flipped = jax.random.bernoulli(flip_key, 0.5, (batch, 1))
        columns = jnp.where(flipped, width - 1 - columns, columns) + right
        if mode == "reflect":
            rows, columns = _reflected(rows, height), _reflected(columns, width)
        # One gather of the stored bytes: slicing padded floats image by image took 20 times longer.
        cropped = images[
            jnp.arange(batch)[:, None, None],
            jnp.clip(rows, 0, height - 1)[:, :, None],
            jnp.clip(columns, 0, width - 1)[:, None, :],
        ]
        inside_rows = (rows >= 0) & (rows < height)
        inside_columns = (columns >= 0) & (columns < width)
        inside = inside_rows[:, :, None, None] & inside_columns[:, None, :, None]
        return jnp.where(inside, normalize(cropped), 0)

    return augment


def _reflected(places: Array, size: int) -> Array:
    """Fold places outside 0 to size - 1 back inside, without repeating the edge."""
    return size - 1 - jnp.abs(size - 1 - jnp.abs(places))


def save_arrays(path: str | os.PathLike, tree: Any) -> None:
    """Write the leaves of a pytree to one file of flat named arrays.

    A leaf's name is the way to it, ``"dense/kernel"``, ``"layers/0/kernel"``. The file appears
    whole or not at all: what was there before stays until the new one is complete.

    Args:
      path: ends in ``.safetensors`` or ``.npz``; its folder exists.
      tree: any pytree of arrays: dicts, lists, NamedTuples, registered dataclasses.

    Raises:
      ValueError: for another suffix, two leaves of one name, or a name that cannot be stored.
      TypeError: if a leaf is not an array, or of a type that the format does not hold (.npz cannot
        tell bfloat16).
      FileNotFoundError: if the folder is missing.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
      >>> save_arrays(path, {"dense": {"kernel": np.ones((2, 3))}})
      >>> load_arrays(path)["dense/kernel"].shape
      (2, 3)
    """
    path, suffix = _checked_path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist: make it first")
    arrays = {name: _stored(name, leaf, suffix) for name, leaf in _named(tree).items()}
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as file:
            _WRITE[suffix](file, arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def load_arrays(path: str | os.PathLike, like: Any = None) -> Any:
    """Read a file of flat named arrays.

    Args:
      path: a file that `save_arrays`, or another program, wrote.
      like: a pytree of arrays or ``jax.ShapeDtypeStruct``; the result has its structure. Without
        it the result is a dict from names to arrays.

    Returns:
      NumPy arrays, which keep their 64 bits whatever JAX is set to.

    Raises:
      ValueError: for another suffix, a damaged file, or names, shapes and types that are not those
        of ``like``; the message lists them.
      FileNotFoundError: if there is no such file.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp()) / "model.npz"
      >>> save_arrays(path, [np.zeros(2), np.ones(3)])
      >>> load_arrays(path, like=[np.zeros(2), np.zeros(3)])[1]
      array([1., 1., 1.])
    """
    path, suffix = _checked_path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    try:
        arrays = _READ[suffix](path)
    except Exception as error:  # safetensors, zipfile and zlib each have their own
        raise ValueError(
            f"{str(path)!r} is damaged or not a {suffix} file ({error}): write it again"
        ) from error
    if like is None:
        return arrays
    expected = _named(like)
    faults = [f"missing {name}" for name in expected if name not in arrays]
    faults += [f"not expected {name}" for name in arrays if name not in expected]
    for name in filter(arrays.__contains__, expected):
        found, wanted = _kind(arrays[name]), _kind(expected[name])
        if found != wanted:
            faults.append(f"{name} is {found}, expected {wanted}")
    if faults:
        more = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise ValueError(
            f"the arrays of {str(path)!r} are not those of `like`: {'; '.join(faults[:20])}{more}. "
            "Pass the structure it was saved from, or none to get a dict"
        )
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in expected])


def _checked_path(path) -> tuple[Path, str]:
    path = Path(path)
    if path.suffix not in _DTYPES:
        raise ValueError(
            f"the file name {path.name!r} ends in {path.suffix!r}: end it in .safetensors or .npz"
        )
    return path, path.suffix


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves by name, in the order of flattening; a bare array is called "array"."""
    named = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "array"
        if name in named:
            raise ValueError(f"two leaves are called {name!r}: rename a key that holds a '/'")
        if name == "__metadata__" or "\0" in name:
            raise ValueError(f"a leaf is called {name!r}, which a file cannot hold: rename it")
        named[name] = leaf
    return named


def _kind(leaf) -> str:
    leaf = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    return f"{leaf.dtype.name}{list(leaf.shape)}"


def _stored(name: str, leaf, suffix: str) -> np.ndarray:
    """Return a leaf as the formats want it: on the host, in C order and native byte order."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    if leaf.dtype.name not in _DTYPES[suffix]:
        raise TypeError(
            f"{name} has dtype {leaf.dtype}, which a {suffix} file cannot hold: expected one of "
            f"{', '.join(sorted(_DTYPES[suffix]))}"
        )
    return np.asarray(leaf, dtype=leaf.dtype.newbyteorder("="), order="C")


def _write_safetensors(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    from safetensors.numpy import save

    # Not save_file, which takes the permission to read from everybody else.
    file.write(save(arrays))


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(path)


def _write_npz(file: BinaryIO, arrays: dict[str, np.ndarray]) -> None:
    # Not numpy.savez: it takes names as keywords, so that none may be "file", and numpy.load
    # confuses "x" with "x.npy".
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    arrays = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as entry:
                array = np.lib.format.read_array(entry, allow_pickle=False)
            arrays[name.removesuffix(".npy")] = array
    return arrays


_WRITE = {".safetensors": _write_safetensors, ".npz": _write_npz}
_READ = {".safetensors": _read_safetensors, ".npz": _read_npz}
