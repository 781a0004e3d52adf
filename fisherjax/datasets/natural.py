"""Data sets with natural clients: writers of EMNIST, users of Stack Overflow, web domains."""

import itertools
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fisherjax._core import checks
from fisherjax.datasets import _records
from fisherjax.datasets.on_disk import ByClient, by_client


def emnist(
    data_dir: str | os.PathLike | None = None, split: str = "all_train", *, min_examples: int = 1
) -> ByClient:
    """Open EMNIST by writer: 28 x 28 x 1 images of 62 digits and letters, 3400 clients.

    The form is `emnist_all.sqlite`, which TensorFlow Federated distributes; its older HDF5 files
    are not read. Pixels are uint8, 255 times those of the file, where 255 is the background.

    Args:
        data_dir: Folder with the file. The default is that of `load`.
        split: "all_train", "all_test", "digits_only_train" or "digits_only_test".
        min_examples: Writers with fewer examples are left out (default 1).

    Returns:
        The writers; `read` returns images uint8 [n, 28, 28, 1] and labels int32 [n].

    Raises:
        FileNotFoundError: If the file does not exist; the message says where it comes from.
        ValueError: As `by_client`.

    Source: Caldas et al., LEAF, 2018; the file is that of `tff.simulation.datasets.emnist`.
    """
    return by_client(_tff("emnist_all.sqlite", data_dir), split, _characters, min_examples)


def stack_overflow(
    data_dir: str | os.PathLike | None = None,
    split: str = "train",
    *,
    context: int = 128,
    encode: Callable[[str], np.ndarray] | None = None,
) -> ByClient:
    """Open Stack Overflow by user: 342,477 clients with sentences of questions and answers.

    The form is `stackoverflow.sqlite`, which TensorFlow Federated distributes.

    Args:
        data_dir: Folder with the file. The default is that of `load`.
        split: "train", "heldout" (other users) or "test" (later sentences).
        context: As in `texts`, and so is encode.
        encode: See context.

    Returns:
        The users; `read` returns windows as `texts` does.

    Raises:
        FileNotFoundError: If the file does not exist; the message says where it comes from.
        ValueError: As `by_client`.

    Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021; the file is that of
    `tff.simulation.datasets.stackoverflow`. Deviation: windows, without padding, see `texts`.
    """
    decode = _windows("tokens", context, encode)
    return by_client(_tff("stackoverflow.sqlite", data_dir), split, decode)


def texts(
    path: str | os.PathLike,
    split: str = "train",
    *,
    context: int = 128,
    encode: Callable[[str], np.ndarray] | None = None,
) -> ByClient:
    """Open texts that `group` wrote, such as pages of C4 or CC-News by domain.

    The texts of a client follow one another, and are cut into windows; a model predicts each next
    token. A client whose texts are shorter than a window has no example.

    Args:
        path: The folder that `group` wrote.
        split: Name of the split in `group`.
        context: Number of tokens L of a window (default 128).
        encode: Function of a text that returns its tokens, integers [n], with an end if the model
            is to see one; the default is `utf8`.

    Returns:
        The clients; `read` returns the tokens [n, L], and the token after each of them, int32
        [n, L]. It reads no more texts than fill its windows.

    Raises:
        FileNotFoundError: If a shard does not exist, also later, when it is read.
        ValueError: As `by_client`, or if the context is below 1.
    """
    return by_client(path, split, _windows("text", context, encode))


def data_folder(data_dir: str | os.PathLike | None = None) -> Path:
    """Return the folder of data sets: the argument, TFDS_DATA_DIR or `~/tensorflow_datasets`.

    Example:
        >>> data_folder("data")
        PosixPath('data')
    """
    given = data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return Path(given).expanduser()


def utf8(text: str) -> np.ndarray:
    """Return the bytes of a text and of a newline, uint8 [n]: 256 classes for every language.

    Example:
        >>> utf8("aé").tolist()
        [97, 195, 169, 10]
    """
    return np.frombuffer(f"{text}\n".encode(), np.uint8)


def cut(numbers: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut tokens [n] into windows [k, L], and return them with the token after each, int32 [k, L].

    Tokens after the last window are dropped, so that no window is padded.

    Example:
        >>> [x.tolist() for x in cut(np.arange(6), 2)]
        [[[0, 1], [2, 3]], [[1, 2], [3, 4]]]
    """
    end = max(len(numbers) - 1, 0) // context * context
    inputs, targets = numbers[:end], numbers[1 : end + 1]
    return inputs.reshape(-1, context), targets.reshape(-1, context).astype(np.int32)


def _tff(name: str, data_dir: str | os.PathLike | None) -> Path:
    file = data_folder(data_dir) / name
    if not file.is_file():
        address = f"https://storage.googleapis.com/tff-datasets-public/{name}.lzma"
        raise FileNotFoundError(
            f"the file {file} does not exist: download {address}, decompress it with unlzma, and "
            "pass its folder as data_dir or TFDS_DATA_DIR"
        )
    return file


def _characters(records: Iterable[bytes], most: int | None) -> tuple[np.ndarray, np.ndarray]:
    pixels, labels = [], []
    for record in itertools.islice(records, most):
        image, label = _records.parse(record, {"pixels": "float_list", "label": "int64_list"})
        if image.shape != (784,) or not (abs(image - 0.5) <= 0.5).all():
            raise ValueError(f"an image has {image.size} pixels; expected 784 from 0 to 1")
        if label.shape != (1,) or not 0 <= label[0] < 62:
            raise ValueError(f"an image has the label {label}; expected one from 0 to 61")
        pixels.append(image)
        labels.append(label[0])
    images = np.rint(255 * np.reshape(pixels, (-1, 28, 28, 1))).astype(np.uint8)
    return images, np.array(labels, np.int32)


def _windows(feature: str, context: int, encode: Callable[[str], np.ndarray] | None):
    checks.count("context", context)
    tokens = utf8 if encode is None else encode
    none = _integers(tokens(""))[:0]

    def decode(records: Iterable[bytes], most: int | None) -> tuple[np.ndarray, np.ndarray]:
        wanted = math.inf if most is None else most * context + 1
        parts, length = [none], 0
        for record in records:
            (text,) = _records.parse(record, {feature: "bytes_list"})
            numbers = _integers(tokens(text.decode())) if text else none
            parts.append(numbers)
            length += len(numbers)
            if length >= wanted:
                break
        inputs, targets = cut(np.concatenate(parts), context)
        return inputs[:most], targets[:most]

    return decode


def _integers(tokens: Any) -> np.ndarray:
    """Return tokens as an array of integers, at most 32 bits wide."""
    found = np.asarray(tokens)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(
            f"encode returned {found.dtype}{list(found.shape)}; expected the tokens of one text, "
            "integers [n], such as numpy.array(numbers, numpy.int32)"
        )
    # A list without tokens is one of floats.
    return found if found.dtype.itemsize < 4 else found.astype(np.int32)
