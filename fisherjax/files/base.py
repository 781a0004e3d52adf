"""Write files atomically, and write and read sealed files, whose bytes are all checked.

A sealed file is a safetensors file, which other programs can read too. Its metadata hold a
description of the file as JSON, and the SHA-256 of the whole file, computed with zeros in place of
the digest. It is written and read one array at a time, so that it need not fit into memory.
"""

import contextlib
import hashlib
import json
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from safetensors import safe_open

from fisherjax.files._limits import CODES, LIMITS, ArrayKind, Limits, check_limits, check_storable
from fisherjax.files._paths import atomic_file, checked_path
from fisherjax.files._shown import shown_errors

FORMATS = 1, 2
"""Versions of the metadata that can be read. Version 2 has leaves that are not trained."""
KINDS = "upload", "model", "fisher"
"""What a sealed file can be."""

_ABOUT, _DIGEST, _LENGTH = "fisherjax", "sha256", 8
_UNKNOWN = "0" * 64
_SHORT = "F4", "F6", "F8"


class Sealed(NamedTuple):
    """A file that was checked.

    Attributes:
        path: Path of the file.
        about: Description of the file, as its writer gave it; empty for a plain file, which another
            program or `save_arrays` wrote.
        arrays: Kind of each array, by name.
        nbytes: Size of the file in bytes.
        digest: SHA-256 of the file, computed with zeros in place of the digest; "" for a plain
            file.
        offsets: Place in the file of each array's first byte, by name.
        metadata: Other texts of the header, such as the format that a program needs to read it.
    """

    path: Path
    about: dict[str, Any]
    arrays: dict[str, ArrayKind]
    nbytes: int
    digest: str
    offsets: Mapping[str, int] = MappingProxyType({})
    metadata: Mapping[str, str] = MappingProxyType({})


@contextlib.contextmanager
def sealing(
    path: str | os.PathLike,
    kinds: Mapping[str, ArrayKind],
    about: Mapping[str, Any],
    limits: Limits = LIMITS,
) -> Iterator[Callable[[str, Any], None]]:
    """Write a sealed file; the context manager yields `put(name, array)`, to call for each array.

    Args:
        path: Path of the file, which ends in .safetensors.
        kinds: Kind of each array, by name.
        about: Description of the file, which JSON can hold.
        limits: Limits for the header and the names, by which the file will be read.

    Raises:
        ValueError: If the suffix is not .safetensors, a name or the description cannot be stored,
            the header exceeds the limits, or an array was not put or has another kind than in
            `kinds`.
        TypeError: If the format does not hold the dtype of an array.
    """
    path = checked_path(path, ".safetensors")
    # The kinds are known before the arrays, so that each is written as soon as it is merged.
    header, places = header_of(path, kinds, about, limits)
    with atomic_file(path) as file:
        file.write(header)
        left = dict(places)

        def put(name: str, array: Any) -> None:
            if ArrayKind.of(array) != kinds[name]:
                raise ValueError(f"{name} is {ArrayKind.of(array)}; expected {kinds[name]}")
            # Arrays may come in any order; one that comes twice fails here.
            file.seek(left.pop(name))
            file.write(little(array))

        yield put
        if left:
            raise ValueError(f"{list(left)} were not written; expected a call of put for each")
        write_digest(file, header, hashlib.sha256(header), len(header))


def little(array: Any) -> memoryview:
    """Return the bytes of an array as the format requires them: C order, little-endian."""
    array = np.asarray(array, order="C")
    swapped = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return swapped.reshape(-1).view(np.uint8).data


def write_digest(file: BinaryIO, header: bytes, hashed: Any, size: int) -> None:
    """Write the digest of a file whose other bytes are all written.

    Args:
        file: The file.
        header: Its header, with zeros in place of the digest.
        hashed: The `hashlib.sha256` of its first bytes.
        size: Number of these bytes.
    """
    file.seek(size)
    _hash_rest(file, hashed)
    file.seek(header.index(_UNKNOWN.encode()))
    file.write(hashed.hexdigest().encode())


@shown_errors()
def unseal(path: str | os.PathLike, limits: Limits = LIMITS) -> Sealed:
    """Check a sealed file, and return its description and the kinds of its arrays.

    Raises:
        ValueError: If the file is truncated or changed, was written by another program or a later
            version, or its header exceeds the limits.
        FileNotFoundError: If there is no such file.
    """
    file = opened(path, limits)
    if not file.about:
        raise ValueError(
            f"{str(path)!r} was written by another program: its arrays have no description; "
            "expected a file of files.save_update or files.merge_files. Read its arrays with "
            "files.load_arrays"
        )
    return file


@shown_errors()
def opened(path: str | os.PathLike, limits: Limits = LIMITS) -> Sealed:
    """Check a .safetensors file, sealed or plain, without reading its arrays into memory.

    Raises:
        ValueError: If the file is damaged, or its header exceeds the limits; if it is sealed, also
            if a byte was changed, or a later version wrote it.
        FileNotFoundError: If there is no such file.
    """
    path = checked_path(path, ".safetensors", exists=True)
    check_limits(limits)
    nbytes = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        # A header that claims to be longer than the file is damaged, which is an error below.
        limits.check(path, "header", length if length <= nbytes else 0)
        header = file.read(min(length, nbytes))
    with damaged(path):
        # safetensors compares offsets and lengths with the size of the file.
        with safe_open(path, framework="np"):
            pass
        entries = json.loads(header, object_pairs_hook=unique)
        metadata = entries.pop("__metadata__", {})
        about = json.loads(metadata.get(_ABOUT, "{}"), object_pairs_hook=unique)
        if not isinstance(about, dict) or bool(about) != (_DIGEST in metadata):
            raise ValueError("it lacks its description or its digest")
    if about:
        _check_sealed(path, about, header, metadata[_DIGEST])
    limits.check_header(path, length, entries.keys())
    arrays = {name: _kind(path, name, entry) for name, entry in entries.items()}
    begin = _LENGTH + length
    offsets = {name: begin + entry["data_offsets"][0] for name, entry in entries.items()}
    # An array of size zero takes no bytes, but its other axes may be of any length. Plain arrays
    # are only read.
    longest = max((axis for kind in arrays.values() for axis in kind.shape), default=0)
    limits.check(path, "expansion", longest // nbytes if about else 0)
    others = {name: text for name, text in metadata.items() if name not in (_ABOUT, _DIGEST)}
    return Sealed(path, about, arrays, nbytes, metadata.get(_DIGEST, ""), offsets, others)


@contextlib.contextmanager
def damaged(path: Path) -> Iterator[None]:
    """Turn the errors of other libraries, each of which has its own, into one about the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{str(path)!r} is damaged, or is not a {path.suffix} file ({error}); expected arrays "
            "of numbers, without Python objects: write it again, or ask its sender to send it again"
        ) from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dict of pairs; raise if a name is there twice, as programs differ in which counts."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name is there twice")
    return made


def _check_sealed(path: Path, about: Mapping[str, Any], header: bytes, digest: str) -> None:
    # Checked before the digest, so that a user of an old version hears what to do about it.
    if (format_ := about.get("format")) not in FORMATS:
        raise ValueError(
            f"{str(path)!r} has format {reprlib.repr(format_)} and was written by fisherjax "
            f"{about.get('version')}; this is fisherjax {version()}, which reads "
            f"formats {' and '.join(map(str, FORMATS))}: update it"
        )
    # Before anything else of the header is believed.
    _check_digest(path, header, digest)
    if (what := about.get("what")) not in KINDS:
        raise ValueError(
            f"the header of {str(path)!r} says that it is {reprlib.repr(what)}; expected "
            f"{' or '.join(map(repr, KINDS))}: update fisherjax"
        )


def _kind(path: Path, name: str, entry: Mapping[str, Any]) -> ArrayKind:
    names = {code: name for name, code in CODES.items()}
    if (code := entry["dtype"]) not in names:
        # Their scales are other arrays, without which their numbers mean nothing.
        hint = ". Convert floats of so few bits to BF16 first" if code[:2] in _SHORT else ""
        raise ValueError(
            f"{str(path)!r}: array '{name}' has type {code}; expected one of "
            f"{', '.join(names)}{hint}"
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


def header_of(
    path: Path,
    kinds: Mapping[str, ArrayKind],
    about: Mapping[str, Any],
    limits: Limits,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file, and the place in the file of each array's first byte."""
    for name, kind in kinds.items():
        check_storable(name, kind.dtype)
    about = {"format": FORMATS[0], "version": version()} | dict(about)
    description = json.dumps(about, allow_nan=False, separators=(",", ":"))
    # The digest comes first, so that the first match of its text in the header is its own place.
    texts = {_DIGEST: _UNKNOWN, _ABOUT: description} | dict(metadata)
    entries: dict[str, Any] = {"__metadata__": texts}
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
    # Otherwise nobody could read what was written.
    limits.check_header(path, len(text), kinds.keys())
    header = len(text).to_bytes(_LENGTH, "little") + text
    return header, {name: len(header) + place for name, place in places.items()}


def _check_digest(path: Path, header: bytes, expected: str) -> None:
    found = ""
    if len(expected) == len(_UNKNOWN) and expected.encode() in header:
        zeroed = header.replace(expected.encode(), _UNKNOWN.encode(), 1)
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(_LENGTH) + zeroed)
            file.seek(len(header), os.SEEK_CUR)
            _hash_rest(file, digest)
            found = digest.hexdigest()
    if not found or found != expected:
        raise ValueError(
            f"{str(path)!r} was changed after it was written: its SHA-256 is not the one in its "
            "header. Ask its sender to send it again"
        )


def _hash_rest(file: BinaryIO, digest: Any) -> None:
    """Add the bytes of a file from where it is to a digest."""
    # In chunks, because a file may be larger than the memory.
    while chunk := file.read(1 << 18):
        digest.update(chunk)
