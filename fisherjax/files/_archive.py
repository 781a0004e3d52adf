"""Read NumPy's .npz archives, after comparing what they claim with the bytes that came."""

import math
import os
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from fisherjax.files._limits import Limits
from fisherjax.files.base import damaged


def read_archive(path: Path, limits: Limits) -> dict[str, np.ndarray]:
    """Read the arrays of an .npz file.

    Raises:
        ValueError: If the file is damaged, lacks a member or exceeds the limits.
    """
    found: dict[str, np.ndarray] = {}
    with open(path, "rb") as file:
        archive, members = open_archive(path, file, limits)
        # A member of a few compressed bytes may be as long as it likes.
        size = sum(member.file_size for member in members)
        limits.check(path, "expansion", size // path.stat().st_size)
        for member in members:
            with damaged(path):
                name = member.filename.removesuffix(".npy")
                if name in found:
                    raise ValueError(f"{name!r} is there twice")
                found[name] = _member(archive, member)
    return found


def open_archive(
    path: Path, file: BinaryIO, limits: Limits
) -> tuple[zipfile.ZipFile, list[zipfile.ZipInfo]]:
    """Open a zip archive, and list its members after checking their number and names.

    Raises:
        ValueError: If the directory of the archive is damaged or exceeds the limits.
    """
    with damaged(path):
        archive = zipfile.ZipFile(file)
        members = archive.infolist()
        # A damaged directory can hide members, but its end says how many there are.
        file.seek(-22 - len(archive.comment), os.SEEK_END)
        count = int.from_bytes(file.read(22)[10:12], "little")
        if count != min(len(members), 0xFFFF):
            raise ValueError(f"it says that it has {count} arrays, but has {len(members)}")
    limits.check(path, "arrays", len(members))
    limits.check(path, "name", max((len(x.filename) for x in members), default=0))
    return archive, members


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        # Names of fields need a third version of the header, but arrays of numbers have none.
        parse = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = parse(file)
        # NumPy would allocate what the header claims before it reads.
        claimed, came = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
        if claimed != came:
            raise ValueError(
                f"{member.filename!r} claims shape {shape!s:.80} of {dtype}, but has {came} bytes"
            )
    with archive.open(member) as file:
        # Loading a pickle can run any program, which an untrusted file must not.
        return np.lib.format.read_array(file, allow_pickle=False)
