"""Dtypes and names that a file can hold, and limits for its size."""

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fisherjax._core import checks

CODES = {
    **{"bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64"},
    **{"uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "complex64": "C64"},
    **{"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"},
}
"""Names of dtypes in the safetensors format, by their names in NumPy and JAX."""


class Limits(NamedTuple):
    """Limits for the size of files, which are checked before memory is allocated.

    Attributes:
        header: Bytes of a file's header, which describes the arrays (default 4 MiB).
        arrays: Number of arrays and frozen leaves of a file (default 10,000).
        name: Characters of the name of an array, a leaf or a client (default 1,000).
        nesting: Depth to which dicts, operators and codes are nested (default 32).
        expansion: Bytes of the decoded arrays over the bytes of their file (default 1,100).
    """

    # Generous for real networks: a thousand layers are described in about a megabyte. A compressed
    # archive of zeros has 1,032 times the bytes of its file.
    header: int = 1 << 22
    arrays: int = 10_000
    name: int = 1_000
    nesting: int = 32
    expansion: int = 1_100

    def check(self, path: Path, which: str, found: int) -> None:
        """Check a size against a limit; the error says how to raise the limit."""
        # The limits are options of a command too, and may be of any type.
        most = checks.count(f"the limit of {which}", getattr(self, which))
        if found > most:
            raise ValueError(
                f"{str(path)!r} exceeds a limit for files: {_LIMITED[which]} is {found}; "
                f"expected at most {most}. If you trust its sender, raise the limit: "
                f"limits=files.Limits({which}={found}), or --limit {which}={found}"
            )

    def check_header(self, path: Path, length: int, names: Collection[str]) -> None:
        """Check a file's header of this length in bytes, and the names of its arrays."""
        self.check(path, "header", length)
        self.check(path, "arrays", len(names))
        self.check(path, "name", max(map(len, names), default=0))


LIMITS = Limits()
"""The default limits."""


def check_limits(value: Any) -> None:
    """Check that a value is `Limits`."""
    checks.instance("limits", value, Limits, "files.Limits, such as files.Limits(arrays=50_000)")


# How errors call what a limit is for.
_LIMITED = {
    "header": "the size of the header in bytes",
    "arrays": "the number of arrays",
    "name": "the length of a name in characters",
    "nesting": "the depth to which values are nested",
    "expansion": "the size of the decoded upload over the size of the file",
}


class ArrayKind(NamedTuple):
    """The dtype and the shape of an array, as a file declares them.

    Attributes:
        dtype: Name of the dtype, such as "float32".
        shape: Sizes of the axes.
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> "ArrayKind":
        """Return the kind of an array."""
        return cls(array.dtype.name, tuple(array.shape))

    @property
    def nbytes(self) -> int:
        """Size of such an array in bytes."""
        return jax.numpy.dtype(self.dtype).itemsize * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def check_storable(name: str, dtype: Any) -> None:
    """Check that the format can hold an array of this name and dtype."""
    # The format reserves one name, and has no lone surrogates.
    if name == "__metadata__" or "\0" in name or re.search("[\ud800-\udfff]", name):
        raise ValueError(f"a leaf is called {name!r}, which a file cannot hold: rename it")
    # JAX's keys and floats of 8 bits have no code here.
    if getattr(dtype, "name", dtype) not in CODES:
        raise TypeError(
            f"{name} has dtype {dtype}, which a .safetensors file cannot hold; expected one of "
            f"{', '.join(sorted(CODES))}"
        )
