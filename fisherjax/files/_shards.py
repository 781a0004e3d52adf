"""Open checkpoints of any size: a .safetensors file, or a folder of such shards with an index.

Nothing but headers is read. An index comes from elsewhere, as shards do: it may name files of its
own folder only, and has to say of every array where it is.
"""

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fisherjax.files import base
from fisherjax.files._limits import ArrayKind, Limits
from fisherjax.files._places import _some

INDEX, SHARD = ".safetensors.index.json", ".safetensors"
# Entries of each file that are in memory at once: few enough for the caches of a processor.
PIECE = 1 << 18
# Files that are not copied: those with weights, and an index, which would name some of them.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")
_WEIGHTS += (".index.json",)


class Stored(NamedTuple):
    """An array in a file, or in memory.

    Attributes:
        kind: Its dtype and shape.
        path: The file.
        offset: Place of its first byte.
        array: The array, if it is in memory.
    """

    kind: ArrayKind
    path: Path = Path()
    offset: int = 0
    array: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Number of its entries."""
        return int(np.prod(self.kind.shape, dtype=np.int64))

    @property
    def is_float(self) -> bool:
        """Whether it is of floats, which can be merged."""
        return bool(jnp.issubdtype(jnp.dtype(self.kind.dtype), np.floating))

    def read(self, first: int = 0, count: int | None = None) -> np.ndarray:
        """Read a number of its entries (default: all), in C order, as a vector."""
        count = self.size - first if count is None else count
        if self.array is not None:
            return self.array.reshape(-1)[first : first + count]
        dtype = jnp.dtype(self.kind.dtype)
        # Read rather than mapped, so that memory holds what is used and no more.
        found = np.fromfile(
            self.path, dtype.newbyteorder("<"), count, offset=self.offset + first * dtype.itemsize
        )
        if found.size < count:
            raise ValueError(f"{str(self.path)!r} became shorter while it was read")
        return found.astype(dtype, copy=False)

    def whole(self) -> np.ndarray:
        """Read the array, in its shape."""
        return self.read().reshape(self.kind.shape)


class Checkpoint(NamedTuple):
    """A model in one or more files.

    Attributes:
        path: Its file or folder; empty for one in memory.
        arrays: Its arrays by name.
        shards: Names of arrays, by the name of the file that holds them.
        metadata: Texts of the header of each shard.
        index: Name of the file that says where arrays are; "" without one.
        others: Names of the other files of its folder that are no weights.
        nbytes: Bytes of all shards.
        about: Description of its shards, if a merge wrote them.
    """

    path: Path
    arrays: dict[str, Stored]
    shards: dict[str, tuple[str, ...]]
    metadata: dict[str, Mapping[str, str]]
    index: str
    others: tuple[str, ...]
    nbytes: int
    about: dict[str, Any]

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder, of which other files are copied too."""
        return self.path != Path() and self.path.is_dir()


def pieces_of(stored: Stored) -> Iterator[np.ndarray]:
    """Read an array piece by piece."""
    for first in range(0, stored.size, PIECE):
        yield stored.read(first, min(PIECE, stored.size - first))


def is_finite(piece: np.ndarray) -> bool:
    """Return whether all numbers of an array are finite."""
    if piece.dtype.itemsize != 2 or piece.dtype.kind in "iu" or not piece.size:
        return bool(np.isfinite(piece).all())
    # NumPy's test is slow for short floats, whose exponent has only ones if they are not finite.
    infinite = int(np.array(np.inf, piece.dtype).view(np.uint16))
    return bool((piece.view(np.uint16) & 0x7FFF).max() < infinite)


def is_folder(path: Any) -> bool:
    """Return whether a path is that of a folder with a checkpoint, or of its index."""
    is_path = isinstance(path, (str, bytes, os.PathLike))
    return is_path and (os.fsdecode(path).endswith(INDEX) or os.path.isdir(path))


def open_checkpoint(path: Any, limits: Limits) -> Checkpoint:
    """Check the files of a checkpoint, and find its arrays.

    Raises:
        ValueError: If a file is damaged or exceeds the limits, or the index and the shards differ.
        FileNotFoundError: If there is no such file.
    """
    if not is_folder(path):
        return of_file(_model(path, limits))
    path = Path(os.fsdecode(path))
    folder, given = (path.parent, [path.name]) if path.name.endswith(INDEX) else (path, [])
    names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file())
    indices = given or [name for name in names if name.endswith(INDEX)]
    shards = [name for name in names if name.endswith(SHARD)]
    if len(indices) > 1 or (not indices and len(shards) != 1):
        have = f"{len(indices)} indices" if indices else f"{len(shards)} {SHARD} files and no index"
        raise ValueError(
            f"{str(folder)!r} is a folder with {have}; expected one file of weights, or an index "
            f"such as model{INDEX} that says which array is in which file"
        )
    listed: dict[str, set[str]] = {name: set() for name in shards}
    if indices:
        listed = _read_index(folder / indices[0], limits)
    if missing := [name for name in listed if name not in names]:
        raise ValueError(
            f"{str(folder / indices[0])!r} names the shards {_some(missing)}, which are not in its "
            "folder: download them again"
        )
    others = _others(folder)
    if unread := [x for x in others if x.endswith(SHARD) and x not in listed]:
        warnings.warn(
            f"{str(folder)!r} has {_some(unread)} besides the weights that are read, "
            f"{_some(listed)}: these files are neither merged nor copied.",
            stacklevel=2,
        )
    found = {name: _model(_inside(folder, name), limits) for name in listed}
    for name, file in found.items() if indices else ():
        _check_shard(folder / indices[0], name, listed, file)
    return Checkpoint(
        folder,
        {name: stored for file in found.values() for name, stored in _stored(file).items()},
        {name: tuple(file.arrays) for name, file in found.items()},
        {name: file.metadata for name, file in found.items()},
        indices[0] if indices else "",
        tuple(name for name in others if not name.endswith(_WEIGHTS) and _inside(folder, name)),
        sum(file.nbytes for file in found.values()),
        next(iter(found.values())).about,
    )


def of_file(file: base.Sealed) -> Checkpoint:
    """Return the checkpoint in a file that was checked."""
    name, shards = file.path.name, {file.path.name: tuple(file.arrays)}
    metadata = {name: file.metadata}
    return Checkpoint(file.path, _stored(file), shards, metadata, "", (), file.nbytes, file.about)


def _model(path: Any, limits: Limits) -> base.Sealed:
    """Open a file that is a plain checkpoint, or a model that a merge wrote."""
    file = base.opened(path, limits)
    if (what := file.about.get("what", "model")) != "model":
        raise ValueError(f"{str(file.path)!r} is a file of {what}; expected one of a model")
    return file


def _stored(file: base.Sealed) -> dict[str, Stored]:
    return {name: Stored(kind, file.path, file.offsets[name]) for name, kind in file.arrays.items()}


def _read_index(path: Path, limits: Limits) -> dict[str, set[str]]:
    """Read which arrays are in which shard, the shards in order of their names."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    _inside(path.parent, path.name)
    limits.check(path, "header", path.stat().st_size)
    try:
        entries = json.loads(path.read_bytes(), object_pairs_hook=base.unique)
        places = entries["weight_map"]
        if not all(isinstance(x, str) for x in (*places, *places.values())) or not places:
            raise ValueError("its weight_map is not a dict from names of arrays to names of files")
    # The text of the file may be wrong in any way.
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{str(path)!r} is damaged, or is not an index ({str(error) or repr(error):.200}); "
            'expected {"weight_map": {"name of an array": "name of its file"}}'
        ) from error
    limits.check(path, "arrays", len(places))
    listed: dict[str, set[str]] = {name: set() for name in sorted(set(places.values()))}
    for name, shard in places.items():
        # Anything else could read, or be written, outside of the folder.
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(SHARD) or "\0" in shard:
            raise ValueError(
                f"{str(path)!r} puts {name!r} into {shard!r}; expected the name of a {SHARD} file "
                "in its own folder"
            )
        listed[shard].add(name)
    return listed


def _check_shard(index: Path, name: str, listed: dict[str, set[str]], file: base.Sealed) -> None:
    """Check that a shard has the arrays that the index puts there, and no others."""
    if missing := sorted(listed[name] - file.arrays.keys()):
        raise ValueError(f"{str(index)!r} puts {_some(missing)} into {name!r}, which lacks them")
    if more := sorted(file.arrays.keys() - listed[name]):
        place = next((shard for shard, own in listed.items() if more[0] in own), None)
        where = f"puts {more[0]!r} into {place!r}" if place else f"does not name {_some(more)}"
        raise ValueError(
            f"{str(file.path)!r} holds {_some(more)}, but {str(index)!r} {where}: an array must be "
            "in one shard only, the one that the index names"
        )


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; refuse a link to a file of somewhere else.

    Hugging Face's cache links from snapshots/REVISION to blobs, which are beside the snapshots.
    """
    root, target = folder.resolve(), (folder / name).resolve()
    if not (target.is_relative_to(root) or target.parent == root.parent.parent / "blobs"):
        raise ValueError(
            f"{str(folder / name)!r} is a link to {str(target)!r}, outside of its folder: replace "
            "it by the file, if you trust whoever made the folder"
        )
    return folder / name


def _others(folder: Path) -> list[str]:
    """List the files of a folder, with those that are in folders of it."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                found.append(os.path.relpath(os.path.join(parent, name), folder))
    return found
