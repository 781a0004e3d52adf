"""Read installed packages as clients: a domain is a package, its docs and sources are its texts."""

import os
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import fisherjax as fj
from fisherjax.datasets import ByClient

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")


def packages(folder: str | os.PathLike | None = None, *, context: int) -> ByClient:
    """Open the packages of a folder by name, without importing them; tokens are bytes.

    Args:
        folder: Folder of installed packages, such as lib/python3.11/site-packages; None takes those
            of this Python.
        context: Number of tokens of a window.

    Returns:
        The packages that have files with one of `SUFFIXES`; `read` returns windows as
        `datasets.texts` does.

    Raises:
        ValueError: If no package has such a file.
    """
    path = {} if folder is None else {"path": [str(Path(folder).expanduser())]}
    found = {}
    for one in metadata.distributions(**path):
        listed = sorted(file for file in one.files or () if file.suffix in SUFFIXES)
        if listed:
            found[one.name.lower()] = [Path(file.locate()) for file in listed]
    if not found:
        raise ValueError(
            f"{folder or 'this Python'} has no package with files {', '.join(SUFFIXES)}; expected "
            "a folder of installed packages, such as lib/python3.11/site-packages"
        )
    names = sorted(found)

    def read(client: int, most: int | None = None, seed: Any = None) -> tuple[Any, np.ndarray]:
        own = found[names[client]]
        windows = _windows(own, context, None if most is None else most + 1)
        if most is None or len(windows[1]) <= most:
            return windows
        if seed is not None:
            own = [own[k] for k in np.random.default_rng(seed).permutation(len(own))]
        return _windows(own, context, most)

    return ByClient(np.array([len(found[name]) for name in names]), names.__getitem__, read)


def _windows(
    files: Iterable[Path], context: int, most: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Cut the bytes of files, one after another, into at most so many windows."""
    parts, length = [np.zeros(0, np.uint8)], 0
    for file in files:
        if most is not None and length > most * context:
            break
        parts.append(np.frombuffer(file.read_bytes(), np.uint8))
        length += len(parts[-1])
    inputs, targets = fj.datasets.natural.cut(np.concatenate(parts), context)
    return inputs[:most], targets[:most]
