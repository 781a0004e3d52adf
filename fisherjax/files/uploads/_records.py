"""Describe uploads and plain checkpoints, as a merge reads them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fisherjax.files import base
from fisherjax.files._limits import ArrayKind
from fisherjax.files.base import Sealed
from fisherjax.files.uploads._description_checks import FIELDS, FROZEN, STATISTICS
from fisherjax.files.uploads.values import joined, shape_of


class Record(NamedTuple):
    """Description of an upload, or of a plain checkpoint, whose arrays are taken as params.

    Attributes:
        path: Path of the file.
        client: Name of the client; the path of a plain checkpoint.
        examples: Number of the client's examples, which is its weight; 1 for a plain checkpoint.
        algorithm: Method for which the upload was made, a name in `algorithms.METHODS`.
        kind: Kind of the update, in words.
        codec: Name of the codec that packed the arrays, "none" without one.
        layers: Shapes of the params by leaf name; None for encoded leaves of unknown shape.
        statistics: Shapes of running statistics by leaf name: leaves that training changes without
            a gradient.
        frozen: Names of frozen leaves, which are not sent; for a plain checkpoint, names of arrays
            that are not of floats, such as counters.
        arrays: Kinds of the arrays in the file, by name; "params/" or "frozen/" and the name for a
            plain checkpoint.
        nbytes: Size of the file in bytes.
        version: Version of fisherjax that wrote the file; "" for a plain checkpoint.
        sha256: SHA-256 of the file, computed with zeros in place of the digest; "" for a plain
            checkpoint.
        reader: Function that reads an array by name, of a plain checkpoint.
    """

    path: Path
    client: str
    examples: float
    algorithm: str
    kind: str
    codec: str
    layers: dict[str, tuple[int, ...] | None]
    statistics: dict[str, tuple[int, ...]]
    frozen: tuple[str, ...]
    arrays: dict[str, ArrayKind]
    nbytes: int
    version: str
    sha256: str
    reader: Callable[[str], np.ndarray] | None = None

    @property
    def source(self) -> str:
        """The file and the client, for error messages."""
        of_client = "" if self.is_plain else f" of client {self.client!r}"
        return f"{str(self.path)!r}{of_client}"

    @property
    def is_plain(self) -> bool:
        """Whether the file is a plain checkpoint, without a description."""
        return not self.sha256

    def read(self, names: Sequence[str]) -> Iterator[np.ndarray]:
        """Yield arrays one by one."""
        return base.read(self.path, names) if self.reader is None else map(self.reader, names)


class Merge(NamedTuple):
    """Summary of a merge of files.

    Attributes:
        algorithm: Name of the method.
        records: Record of each upload.
        shares: Clients' weights [M] with sum one; zero for clients that were left out.
        left_out: First leaf that is not finite, by client that was left out.
        votes: Clients' shares of the vote [M] with sum one, by layer. They are proportional to p_i
            times the mean eigenvalue of F_i in this layer, or to p_i if the method has no
            curvature. Running statistics, which are averaged with p_i, have no entry.
        taken: What was done with leaves that not all checkpoints have alike, by name.
        copied_from: The folder whose other files were copied beside the merged ones; "" if none.
    """

    algorithm: str
    records: tuple[Record, ...]
    shares: np.ndarray
    left_out: dict[str, str]
    votes: dict[str, np.ndarray]
    taken: Mapping[str, str] = MappingProxyType({})
    copied_from: str = ""


def record_of(file: Sealed) -> Record:
    """Return the record of an upload that was checked."""
    about, arrays = file.about, file.arrays
    values, place = about["values"], ""
    # Params of a compressed update lie inside of its codes.
    for key in ("update", "values", "params"):
        inner = {**values, **values.get("children", {}), **values.get("dict", {})}
        if key in inner:
            values, place = inner[key], joined(place, key)
    params = values.get("dict", values.get("ordered", {})) if place.endswith("params") else {}
    # Shapes for those who look at an upload; the merge itself compares the arrays.
    layers = {x: shape_of(spec, joined(place, x), arrays) for x, spec in params.items()}
    return Record(
        path=file.path,
        **{name: about[name] for name in FIELDS},
        layers=layers,
        statistics={x: arrays[f"{STATISTICS}/{x}"].shape for x in about.get(STATISTICS, ())},
        frozen=tuple(about.get(FROZEN, ())),
        arrays=arrays,
        nbytes=file.nbytes,
        version=about["version"],
        sha256=file.digest,
    )
