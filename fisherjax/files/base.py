"""Write files atomically, and write and read sealed files, whose bytes are all checked.

A sealed file is a safetensors file, which other programs can read too. Its metadata hold a
description of the file as JSON, and the SHA-256 of the whole file, computed with zeros in place of
the digest. It is written and read one array at a time, so that it need not fit into memory.
"""

import contextlib
import hashlib
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from safetensors import safe_open

from fisherjax.files._limits import CODES, LIMITS, ArrayKind, Limits, check_storable

FORMATS = 1, 2
"""Versions of the metadata that can be read. Version 2 has leaves that are not trained."""


_ABOUT, _DIGEST, _LENGTH = "fisherjax", "sha256", 8
_UNKNOWN = "0" * 64


class Sealed(NamedTuple):
    """A sealed file that was checked.

    Attributes:
        path: Path of the file.
        about: Description of the file, as its writer gave it.
        arrays: Kind of each array, by name.
        nbytes: Size of the file in bytes.
        digest: SHA-256 of the file, computed with zeros in place of the digest.
    """

    path: Path
    about: dict[str, Any]
    arrays: dict[str, ArrayKind]
    nbytes: int
    digest: str


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for writing; it replaces the one at `path` only once it is complete."""
    # Otherwise the error would name the temporary file, which the user has never heard of.
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist: make it first")
    # In the same folder, because a rename is atomic only within a file system; with a unique name,
    # because there may be other writers.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "x+b") as file:
            yield file
            # The bytes reach the disk before the name, so that a power cut leaves no partial file.
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def checked_path(path: str | os.PathLike, *suffixes: str) -> Path:
    """Return a path; raise if it does not end in one of the suffixes."""
    path = Path(path)
    if path.suffix not in suffixes:
        known = " or ".join(suffixes)
        raise ValueError(f"the file name {path.name!r} ends in {path.suffix!r}: end it in {known}")
    return path


@contextlib.contextmanager
def sealing(
    path: str | os.PathLike, kinds: Mapping[str, ArrayKind], about: Mapping[str, Any]
) -> Iterator[Callable[[str, Any], None]]:
    """Write a sealed file; the context manager yields `put(name, array)`, to call for each array.

    Args:
        path: Path of the file, which ends in .safetensors.
        kinds: Kind of each array, by name.
        about: Description of the file, which JSON can hold.

    Raises:
        ValueError: If the suffix is not .safetensors, a name or the description cannot be stored,
            or an array was not put or has another kind than in `kinds`.
        TypeError: If the format does not hold the dtype of an array.
    """
    path = checked_path(path, ".safetensors")
    # The kinds are known before the arrays, so that each is written as soon as it is merged.
    header, places = _header(kinds, about)
    with atomic_file(path) as file:
        file.write(header)
        left = dict(places)

        def put(name: str, array: Any) -> None:
            if ArrayKind.of(array) != kinds[name]:
                raise ValueError(f"{name} is {ArrayKind.of(array)}; expected {kinds[name]}")
            # Arrays may come in any order; one that comes twice fails here.
            file.seek(len(header) + left.pop(name))
            # The format requires C order and little-endian numbers.
            array = np.asarray(array, order="C")
            swapped = array.astype(array.dtype.newbyteorder("<"), copy=False)
            file.write(swapped.reshape(-1).view(np.uint8).data)

        yield put
        if left:
            raise ValueError(f"{list(left)} were not written; expected a call of put for each")
        file.flush()
        place = header.index(_UNKNOWN.encode())
        # Computed from what was written, so that it also covers the header.
        digest = _digest(file, place)
        file.seek(place)
        file.write(digest.encode())


def unseal(path: str | os.PathLike, limits: Limits = LIMITS) -> Sealed:
    """Check a sealed file, and return its description and the kinds of its arrays.

    Raises:
        ValueError: If the file is truncated or changed, was written by another program or a later
            version, or its header exceeds the limits.
        FileNotFoundError: If there is no such file.
    """
    path = checked_path(path, ".safetensors")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    nbytes = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        # A header that claims to be longer than the file is damaged, which is an error below.
        limits.check(path, "header", length if length <= nbytes else 0)
    try:
        # safetensors compares offsets and lengths with the size of the file.
        with safe_open(path, framework="np"):
            pass
        with open(path, "rb") as file:
            file.seek(_LENGTH)
            header = file.read(length)
        entries = json.loads(header)
        metadata = entries.pop("__metadata__", {})
        about = json.loads(metadata.get(_ABOUT, "null"))
    except Exception as error:  # safetensors has its own errors, and JSON may hold anything
        raise ValueError(
            f"{str(path)!r} is damaged, or is not a .safetensors file ({error}): ask its sender to "
            "send it again"
        ) from error
    if not isinstance(about, dict):
        raise ValueError(
            f"{str(path)!r} was written by another program: its arrays have no description; "
            "expected a file of files.save_update or files.merge_files. Read its arrays with "
            "files.load_arrays"
        )
    # Checked before the digest, so that a user of an old version hears what to do about it.
    if (format_ := about.get("format")) not in FORMATS:
        raise ValueError(
            f"{str(path)!r} has format {format_!r} and was written by fisherjax "
            f"{about.get('version')}; this is fisherjax {version()}, which reads formats "
            f"{' and '.join(map(str, FORMATS))}: update it"
        )
    # Before the entries of the arrays are believed.
    _check_digest(path, header, metadata.get(_DIGEST, ""))
    limits.check(path, "arrays", len(entries))
    limits.check(path, "name", max(map(len, entries), default=0))
    arrays = {name: _kind(path, name, entry) for name, entry in entries.items()}
    # An array of size zero takes no bytes, but its other axes may be of any length.
    longest = max((axis for kind in arrays.values() for axis in kind.shape), default=0)
    limits.check(path, "expansion", longest // nbytes)
    return Sealed(path, about, arrays, nbytes, metadata[_DIGEST])


def _kind(path: Path, name: str, entry: Mapping[str, Any]) -> ArrayKind:
    names = {code: name for name, code in CODES.items()}
    if entry["dtype"] not in names:
        raise ValueError(
            f"{str(path)!r}: array '{name}' has type {entry['dtype']}; expected one of "
            f"{', '.join(names)}"
        )
    return ArrayKind(names[entry["dtype"]], tuple(entry["shape"]))


def read(path: Path, names: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield arrays of a file one by one; the file is unmapped at the end."""
    with safe_open(path, framework="np") as file:
        for name in names:
            yield file.get_tensor(name)


def version() -> str:
    """Return the version of the library."""
    return sys.modules[__name__.partition(".")[0]].__version__


def _header(
    kinds: Mapping[str, ArrayKind], about: Mapping[str, Any]
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and the offset of each array behind it."""
    for name, kind in kinds.items():
        check_storable(name, kind.dtype)
    about = {"format": FORMATS[0], "version": version()} | dict(about)
    description = json.dumps(about, allow_nan=False, separators=(",", ":"))
    # The digest comes first, so that the first match of its text in the header is its own place.
    entries: dict[str, Any] = {"__metadata__": {_DIGEST: _UNKNOWN, _ABOUT: description}}
    places, end = {}, 0
    # Wide types come first, so that each array begins at a multiple of its item size.
    widest = sorted(kinds, key=lambda name: (-jax.numpy.dtype(kinds[name].dtype).itemsize, name))
    for name in widest:
        dtype, shape = kinds[name]
        places[name], end = end, end + kinds[name].nbytes
        offsets = [places[name], end]
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The format asks for arrays that begin at multiples of eight bytes.
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text, places


def _check_digest(path: Path, header: bytes, expected: str) -> None:
    place = header.find(expected.encode()) if len(expected) == len(_UNKNOWN) else -1
    if place >= 0:
        with open(path, "rb") as file:
            found = _digest(file, _LENGTH + place)
    if place < 0 or found != expected:
        raise ValueError(
            f"{str(path)!r} was changed after it was written: its SHA-256 is not the one in its "
            "header. Ask its sender to send it again"
        )


def _digest(file: BinaryIO, place: int) -> str:
    """Compute the SHA-256 of a file, with zeros in place of its digest."""
    file.seek(0)
    digest = hashlib.sha256(file.read(place))
    digest.update(_UNKNOWN.encode())
    file.seek(place + len(_UNKNOWN))
    # In chunks, because a file may be larger than the memory.
    while chunk := file.read(1 << 18):
        digest.update(chunk)
    return digest.hexdigest()
