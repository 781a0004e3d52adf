"""Read files of PyTorch without PyTorch, and without running anything that they name."""

import io
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np

from fisherjax.files._archive import open_archive
from fisherjax.files._limits import LIMITS, Limits, check_limits
from fisherjax.files._paths import checked_path
from fisherjax.files._shown import shown_errors
from fisherjax.files.base import damaged
from fisherjax.files.checkpoints._pickles import Storage, Tensor, itemsize, read_pickle

SUFFIXES = ".pth", ".pt", ".bin", ".ckpt", ".th"
_ZIP = b"PK\x03\x04"
# Versions of PyTorch before 1.6 wrote a sequence of pickles, the first of which is this number.
_SEQUENCE = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_VERSION = 1001
_LENGTH = 8  # bytes in which that format says how many numbers a storage has


class _Content(NamedTuple):
    """What a file describes in how many bytes, and what reads the bytes of all its storages."""

    tree: Any
    nbytes: int
    read: Callable[[Mapping[str, Storage]], dict[str, bytes]]


@shown_errors()
def load_torch(path: str | os.PathLike, *, limits: Limits = LIMITS) -> Any:
    r"""Read a file of `torch.save`, such as a state dict, with NumPy arrays in place of tensors.

    The file's pickle is read by an interpreter that knows tensors, dicts, lists, tuples, numbers
    and text; it imports and calls nothing. Zip archives and the format before PyTorch 1.6 are read.

    Args:
        path: A file that ends in .pth, .pt, .bin, .ckpt or .th.
        limits: Limits for the size of the file, which are checked before memory is allocated. The
            header is the file's pickle; the expansion is the size of all tensors, several of which
            can be views of the same numbers, over the size of the file.

    Returns:
        What was saved. Arrays are read-only, and share memory where the tensors did.

    Raises:
        ValueError: If the suffix is wrong, the file is damaged or exceeds the limits, it holds
            other objects (a whole module, TorchScript, quantized or sparse tensors), or its numbers
            are big-endian.
        FileNotFoundError: If there is no such file.

    Example:
        >>> import tempfile, zipfile
        >>> path = f"{tempfile.mkdtemp()}/net.pth"
        >>> with zipfile.ZipFile(path, "w") as archive:
        ...     archive.writestr("net/data.pkl", b"\x80\x02}X\x05\x00\x00\x00epochK\x03s.")
        >>> load_torch(path)
        {'epoch': 3}
    """
    path = checked_path(path, *SUFFIXES, exists=True)
    check_limits(limits)
    with open(path, "rb") as file:
        start = file.read(len(_SEQUENCE))
        file.seek(0)
        if start.startswith(_ZIP):
            content = _archived(path, file, limits)
        elif start == _SEQUENCE:
            content = _in_sequence(path, file, limits)
        else:
            raise ValueError(
                f"{str(path)!r} begins with {start[:8]!r}; expected a zip archive, or the sequence "
                "of pickles that PyTorch wrote before version 1.6: write it again with "
                "torch.save(model.state_dict(), path)"
            )
        tensors = _tensors(path, content, limits)
        with damaged(path):
            arrays = _arrays(tensors, content)
    return _with_arrays(content.tree, arrays)


def _archived(path: Path, file: BinaryIO, limits: Limits) -> _Content:
    """Read the pickle of a zip archive."""
    archive, listed = open_archive(path, file, limits)
    with damaged(path):
        members = {member.filename: member for member in listed}
        if len(members) < len(listed):
            raise ValueError("a record is there twice")
        folder, *others = {name.partition("/")[0] for name in members}
        if others or f"{folder}/data.pkl" not in members:
            raise ValueError("it has no data.pkl of torch.save")
        if f"{folder}/constants.pkl" in members:
            raise ValueError("it is a program of TorchScript: save model.state_dict() instead")
        # Records that overlap would be longer together than the file.
        if any(member.compress_type for member in listed):
            raise ValueError("its records are compressed, as torch.save does not write them")
        if sum(max(x.file_size, x.compress_size) for x in listed) > path.stat().st_size:
            raise ValueError("its records are longer than the file")

    def record(name: str) -> bytes:
        return archive.read(members[f"{folder}/{name}"])

    nbytes = members[f"{folder}/data.pkl"].file_size
    limits.check(path, "header", nbytes)
    with damaged(path):
        has_order = f"{folder}/byteorder" in members  # since PyTorch 2.0
        _check_order(not has_order or record("byteorder") == b"little")
        tree = read_pickle(io.BytesIO(record("data.pkl")))
    return _Content(tree, nbytes, lambda known: {key: record(f"data/{key}") for key in known})


def _in_sequence(path: Path, file: BinaryIO, limits: Limits) -> _Content:
    """Read the pickles of the format before PyTorch 1.6, which are followed by the storages."""
    nbytes = path.stat().st_size
    pickles = io.BytesIO(file.read(min(limits.header, nbytes)))
    pickles.seek(len(_SEQUENCE))
    try:
        with damaged(path):
            version, about, tree, keys = (read_pickle(pickles) for _ in range(4))
            if version != _VERSION:
                raise ValueError(f"it has another version of the format than {_VERSION}")
            _check_order(about["little_endian"] is True)
    except ValueError:
        # The pickles may go on behind what was read of them.
        limits.check(path, "header", nbytes if pickles.tell() == limits.header else 0)
        raise

    def read(known: Mapping[str, Storage]) -> dict[str, bytes]:
        found = {}
        file.seek(pickles.tell())
        for key in keys:
            size = int.from_bytes(file.read(_LENGTH), "little")
            # Python allocates what is asked for, even if the file is shorter.
            if size != known[key].size or key in found or known[key].nbytes > nbytes:
                raise ValueError(f"storage {key!r:.200} is there twice, or has another size")
            found[key] = file.read(known[key].nbytes)
        return found

    return _Content(tree, pickles.tell(), read)


def _check_order(is_little: bool) -> None:
    if not is_little:
        raise ValueError("its numbers are big-endian; expected little-endian ones")


def _tensors(path: Path, content: _Content, limits: Limits) -> list[Tensor]:
    """List the tensors of a file, and check the sizes of what it describes."""
    found: list[Tensor] = []
    level, depth, left = [content.tree], 0, content.nbytes
    while level:
        limits.check(path, "nesting", depth)
        inner: list[Any] = []
        for value in level:
            if isinstance(value, Tensor):
                found.append(value)
            elif type(value) in (dict, list, tuple):
                # Few bytes can describe lists that hold each other in any number of ways.
                left -= len(value)
                if left < 0:
                    raise ValueError(
                        f"{str(path)!r} describes more values than the bytes that describe them: "
                        "it was made to fill the memory"
                    )
                inner.extend(value.values() if type(value) is dict else value)
                names = [x for x in value if type(x) is str] if type(value) is dict else []
                limits.check(path, "name", max(map(len, names), default=0))
            elif value is not None and type(value) not in (str, int, float, bool):
                raise ValueError(
                    f"{str(path)!r} has a {getattr(value, 'name', type(value).__name__)} that is "
                    "no part of a tensor; expected tensors, dicts, lists, numbers and text"
                )
        level, depth = inner, depth + 1
    limits.check(path, "arrays", len(found))
    # Views of a few numbers may be as large as they like.
    size = sum(itemsize(x.dtype) * math.prod(x.shape) for x in found)
    limits.check(path, "expansion", size // path.stat().st_size)
    return found


def _arrays(tensors: list[Tensor], content: _Content) -> dict[Tensor, np.ndarray]:
    """Read the storages, and return each tensor as a view of one."""
    known: dict[str, Storage] = {}
    for tensor in tensors:
        if known.setdefault(tensor.storage.key, tensor.storage) != tensor.storage:
            raise ValueError(f"storage {tensor.storage.key!r:.200} has two types or sizes")
    read = content.read(known)
    for key, storage in known.items():
        if len(read[key]) != storage.nbytes:
            raise ValueError(f"storage {key!r:.200} has {len(read[key])} bytes, not those it says")
        # Any byte but zero is true in PyTorch; NumPy expects a one.
        if storage.dtype == "bool":
            read[key] = (np.frombuffer(read[key], np.uint8) != 0).tobytes()
    return {tensor: _view(tensor, read[tensor.storage.key]) for tensor in set(tensors)}


def _view(tensor: Tensor, data: bytes) -> np.ndarray:
    size, dtype = itemsize(tensor.dtype), jax.numpy.dtype(tensor.dtype).newbyteorder("<")
    strides = [size * step for step in tensor.strides]
    return np.ndarray(tensor.shape, dtype, data, size * tensor.offset, strides)


def _with_arrays(tree: Any, arrays: Mapping[Tensor, np.ndarray]) -> Any:
    if isinstance(tree, Tensor):
        return arrays[tree]
    if isinstance(tree, dict):
        return {key: _with_arrays(value, arrays) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_with_arrays(value, arrays) for value in tree)
    return tree
