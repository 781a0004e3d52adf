"""Files that appear whole or not at all, and files whose every bit is checked.

A sealed file is a safetensors file, which other programs read too. Its metadata hold what there is
to know of it, as JSON, and the SHA-256 of the whole file, computed with zeros in place of itself.
It is written and read an array at a time: nobody holds all of it.
"""

import contextlib
import hashlib
import json
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import jax
import numpy as np
from safetensors import safe_open

from fisherjax._core import checks

FORMATS = 1, 2
"""Versions of what the metadata mean: the second has leaves that are not trained. Later ones are
refused."""

CODES = {
    **{"bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"},
    **{"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
}
"""What safetensors calls the types of arrays that it holds."""

_ABOUT, _DIGEST, _LENGTH = "fisherjax", "sha256", 8
_UNKNOWN = "0" * 64


class Limits(NamedTuple):
    """How large uploads may be; more is refused before anything takes memory for it.

    Attributes:
        header: Bytes of a file's header, which says what the arrays are.
        arrays: How many arrays a file has, and leaves that it names as frozen.
        name: Characters of the name of an array, or of a frozen leaf.
        nesting: How deep values are nested, in dicts, operators and codes.
        expansion: Bytes that an upload may decode to, in units of the bytes of its file.
    """

    header: int = 1 << 22
    arrays: int = 10_000
    name: int = 1_000
    nesting: int = 32
    expansion: int = 1_000

    def check(self, path: Path, which: str, found: int) -> None:
        """Refuse what is beyond a limit, and say how to raise it."""
        most = checks.count(f"the limit of {which}", getattr(self, which))
        if found > most:
            raise ValueError(
                f"{str(path)!r} is beyond a limit for uploads, {_LIMITED[which]}: {found}, and at "
                f"most {most}. If you trust its sender, raise it: limits=files.Limits({which}="
                f"{found}), or --limit {which}={found}"
            )


LIMITS = Limits()
"""What is read unless a caller says otherwise."""
_LIMITED = {
    "header": "the bytes of the header",
    "arrays": "the number of arrays",
    "name": "the characters of a name",
    "nesting": "how deep values are nested",
    "expansion": "the bytes that it decodes to over its own",
}


class Kind(NamedTuple):
    """Type and shape of an array."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> "Kind":
        """Read them off an array."""
        return cls(array.dtype.name, tuple(array.shape))

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return jax.numpy.dtype(self.dtype).itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Sealed(NamedTuple):
    """A sealed file that was checked: what it says of itself, its arrays, and its size in bytes."""

    path: Path
    about: dict[str, Any]
    arrays: dict[str, Kind]
    nbytes: int
    digest: str


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes its name when it is complete; until then the old one stays."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {str(path.parent)!r} does not exist: make it first")
    # In the same folder, as only there a renamed file replaces another in one step; and under a
    # name that no other writer has.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "x+b") as file:
            yield file
            # On the disk before it has the name: after a power cut the name never stands for less.
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def checked_path(path: str | os.PathLike, *suffixes: str) -> Path:
    """Refuse a file name that ends in anything else."""
    path = Path(path)
    if path.suffix not in suffixes:
        known = " or ".join(suffixes)
        raise ValueError(f"the file name {path.name!r} ends in {path.suffix!r}: end it in {known}")
    return path


@contextlib.contextmanager
def sealing(
    path: str | os.PathLike, kinds: Mapping[str, Kind], about: Mapping[str, Any]
) -> Iterator[Callable[[str, Any], None]]:
    """Write a sealed file: the context is `put(name, array)`, to be called once for each array.

    Raises:
        ValueError: For another suffix than .safetensors, a name that cannot be stored, what JSON
            does not hold, or an array that was not put or is of another kind than was said.
        TypeError: If an array is of a type that the format does not hold.
    """
    path = checked_path(path, ".safetensors")
    header, places = _header(kinds, about)
    with appearing(path) as file:
        file.write(header)
        left = dict(places)

        def put(name: str, array: Any) -> None:
            if Kind.of(array) != kinds[name]:
                raise ValueError(f"{name} is {Kind.of(array)}; expected {kinds[name]}")
            file.seek(len(header) + left.pop(name))
            # On the host in C order, little-endian as the format wants it.
            array = np.asarray(array, order="C")
            swapped = array.astype(array.dtype.newbyteorder("<"), copy=False)
            file.write(swapped.reshape(-1).view(np.uint8).data)

        yield put
        if left:
            raise ValueError(f"{list(left)} were not written")
        file.flush()
        place = header.index(_UNKNOWN.encode())
        digest = _digest(file, place)
        file.seek(place)
        file.write(digest.encode())


def unseal(path: str | os.PathLike, limits: Limits = LIMITS) -> Sealed:
    """Read what a sealed file says of itself, once all of it was checked.

    Raises:
        ValueError: If the file is truncated, changed, of another program or of a later version, or
            its header is beyond the limits.
        FileNotFoundError: If there is none.
    """
    path = checked_path(path, ".safetensors")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    nbytes = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        # One that says it is longer than the file is damaged, and is said to be so below.
        limits.check(path, "header", length if length <= nbytes else 0)
    try:
        with safe_open(path, framework="np"):  # which checks the header
            pass
        with open(path, "rb") as file:
            file.seek(_LENGTH)
            header = file.read(length)
        entries = json.loads(header)
        metadata = entries.pop("__metadata__", {})
        about = json.loads(metadata.get(_ABOUT, "null"))
    except Exception as error:  # safetensors has its own, and anything may be in JSON
        raise ValueError(
            f"{str(path)!r} is damaged, or no .safetensors file ({error}): have it sent again"
        ) from error
    if not isinstance(about, dict):
        raise ValueError(
            f"{str(path)!r} is of another program: it holds arrays, but nothing says what they "
            "are. files.load_arrays reads them, files.save_update writes uploads"
        )
    if (format_ := about.get("format")) not in FORMATS:
        raise ValueError(
            f"{str(path)!r} has format {format_!r} and was written by fisherjax "
            f"{about.get('version')}; this is {version()}, which reads formats "
            f"{' and '.join(map(str, FORMATS))}: update it"
        )
    _check_digest(path, header, metadata.get(_DIGEST, ""))
    limits.check(path, "arrays", len(entries))
    limits.check(path, "name", max(map(len, entries), default=0))
    arrays = {name: _kind(path, name, entry) for name, entry in entries.items()}
    # An array without entries takes no bytes, however long its other axes are.
    limits.check(path, "expansion", max(map(_longest, arrays.values()), default=0) // nbytes)
    return Sealed(path, about, arrays, nbytes, metadata[_DIGEST])


def _kind(path: Path, name: str, entry: Mapping[str, Any]) -> Kind:
    names = {code: name for name, code in CODES.items()}
    if entry["dtype"] not in names:
        raise ValueError(
            f"{str(path)!r}: {name} has type {entry['dtype']}; expected one of {', '.join(names)}"
        )
    return Kind(names[entry["dtype"]], tuple(entry["shape"]))


def _longest(kind: Kind) -> int:
    return max(kind.shape, default=0)


def read(path: Path, names: Iterable[str]) -> Iterator[np.ndarray]:
    """Yield arrays of a file one after the other; pages of the file are let go of at the end."""
    with safe_open(path, framework="np") as file:
        for name in names:
            yield file.get_tensor(name)


def version() -> str:
    """Give the version of the library."""
    return sys.modules[__name__.partition(".")[0]].__version__


def _header(kinds: Mapping[str, Kind], about: Mapping[str, Any]) -> tuple[bytes, dict[str, int]]:
    """Write the head of a file, and give the place of each array behind it."""
    for name, kind in kinds.items():
        if name == "__metadata__" or "\0" in name:
            # The first is what safetensors keeps for itself.
            raise ValueError(f"a leaf is called {name!r}, which a file cannot hold: rename it")
        if kind.dtype not in CODES:
            raise TypeError(
                f"{name} has dtype {kind.dtype}, which a .safetensors file cannot hold: expected "
                f"one of {', '.join(sorted(CODES))}"
            )
    about = {"format": FORMATS[0], "version": version()} | dict(about)
    said = json.dumps(about, allow_nan=False, separators=(",", ":"))
    # The digest first: no other place of the header can be taken for its own.
    entries: dict[str, Any] = {"__metadata__": {_DIGEST: _UNKNOWN, _ABOUT: said}}
    places, end = {}, 0
    # Wide types first, so that each begins at a multiple of its size.
    widest = sorted(kinds, key=lambda name: (-jax.numpy.dtype(kinds[name].dtype).itemsize, name))
    for name in widest:
        dtype, shape = kinds[name]
        places[name], end = end, end + kinds[name].nbytes
        offsets = [places[name], end]
        entries[name] = {"dtype": CODES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)
    return len(text).to_bytes(_LENGTH, "little") + text, places


def _check_digest(path: Path, header: bytes, said: str) -> None:
    place = header.find(said.encode()) if len(said) == len(_UNKNOWN) else -1
    if place >= 0:
        with open(path, "rb") as file:
            found = _digest(file, _LENGTH + place)
    if place < 0 or found != said:
        raise ValueError(
            f"{str(path)!r} was changed after it was written: its SHA-256 is not what it says. "
            "Have it sent again"
        )


def _digest(file: BinaryIO, place: int) -> str:
    """Sum a file up, with zeros where its digest is."""
    file.seek(0)
    digest = hashlib.sha256(file.read(place))
    digest.update(_UNKNOWN.encode())
    file.seek(place + len(_UNKNOWN))
    while chunk := file.read(1 << 18):
        digest.update(chunk)
    return digest.hexdigest()
