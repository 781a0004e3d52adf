"""Compressed uploads, undone before they are merged."""

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fisherjax import compression, tree
from fisherjax._core.compiler import jit
from fisherjax._divergence import diverged, screen
from fisherjax.compression import Difference
from fisherjax.files import uploads
from fisherjax.files.arrays import load_arrays
from fisherjax.files.base import LIMITS, Kind, Limits
from fisherjax.files.uploads import Record

Opened = Sequence[tuple[Record, dict[str, Any], dict[str, Kind]]]
"""What each upload says of itself, how its values are made of its arrays, and what they are."""


@contextlib.contextmanager
def unpacked(
    found: Opened, start: dict[str, np.ndarray] | None, folder: Path, limits: Limits = LIMITS
) -> Iterator[list[Path]]:
    """Undo codecs, one client after another, in files that are there as long as the context.

    Columns of a stream are read together: a layer alone cannot be. What is wrong in such a file is
    told of the upload that it was made of.
    """
    first, _, others = found[0]
    for record, spec, sizes in found:
        _check(record, spec, start)
        check_like(record, sizes, start, first, others)
    with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=folder) as place:
        paths = [record.path for record, *_ in found]
        try:
            for number, (record, *_) in enumerate(found):
                if record.codec != "none":
                    paths[number] = Path(place) / f"{number}.safetensors"
                    _write(paths[number], record, start, limits)
            yield paths
        except ValueError as error:
            text = str(error)
            for path, (record, *_) in zip(paths, found, strict=True):
                text = text.replace(str(path), str(record.path))
            raise ValueError(text) from error


def named(start: Any) -> dict[str, np.ndarray] | None:
    """Give the model that clients started from by leaf name, from a file of that or a pytree."""
    if start is None:
        return None
    if isinstance(start, (str, os.PathLike)):
        return load_arrays(start)
    return tree.by_name(jax.tree.map(np.asarray, tree.as_arrays(start)))


def _check(record: Record, spec: dict[str, Any], start: dict[str, np.ndarray] | None) -> None:
    where = f"{str(record.path)!r} of client {record.client!r}"
    if record.codec == "none":
        return
    if "update" not in spec["dict"]:
        raise ValueError(f"{where} is packed by {record.codec!r}, which is not undone here.")
    leaves = [x["static"]["leaf"] for x in _nodes(spec, Difference.__name__)]
    if leaves and start is None:
        raise ValueError(
            f"{where} is packed by {record.codec!r}, as differences to the model that clients "
            "started from: pass it as `start`, a pytree or a file of arrays by leaf name (--start)."
        )
    started = {} if start is None else start
    for leaf in leaves:
        expected, given = record.layers.get(leaf), started.get(leaf)
        if given is None or expected not in (None, given.shape):
            raise ValueError(
                f"{where} holds differences of '{leaf}' {expected}, but the start has "
                f"{'none' if given is None else given.shape}; expected the model that clients "
                "started from."
            )


def _nodes(spec: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Find what is of a type in the description of values."""
    if not isinstance(spec, dict):
        return
    if spec.get("type") == kind:
        yield spec
    for place in ("dict", "ordered", "children"):
        for inner in spec.get(place, {}).values():
            yield from _nodes(inner, kind)


def check_like(
    record: Record,
    sizes: dict[str, Kind],
    start: dict[str, np.ndarray] | None,
    first: Record,
    others: dict[str, Kind],
) -> None:
    """Refuse what decodes to other shapes than the start's, or the first client's, have."""
    expected = {name: (kind.shape, repr(str(first.path))) for name, kind in others.items()}
    for name, array in ({} if start is None else start).items():
        for place in ("params", uploads.STATISTICS):
            expected[f"{place}/{name}"] = array.shape, "the start"
    for name in sizes.keys() & expected.keys():
        shape, whose = expected[name]
        if sizes[name].shape != shape:
            raise ValueError(
                f"{str(record.path)!r} of client {record.client!r} decodes to other layers than "
                f"{whose}: {name} is {sizes[name]}, expected {list(shape)}. All clients must have "
                "trained the same network."
            )


def _write(path: Path, record: Record, start: dict[str, np.ndarray] | None, limits: Limits) -> None:
    """Decode one client's upload, and write that as an upload that is not packed."""
    update, _ = uploads.load_update(record.path, limits=limits)
    try:
        values = _decode(update.values["update"], {} if start is None else start)
        stacked = jax.tree.map(lambda x: x[None], values)
        # Who diverged is told of what was decoded, as of what was not packed.
        if not diverged(stacked):
            # As when updates are merged in memory: rounding left some Fishers indefinite.
            found = screen(stacked, np.ones(1), "raise")
            values = jax.tree.map(lambda x: x[0], found.values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{str(record.path)!r} of client {record.client!r} cannot be decoded ({error}): have "
            "it sent again"
        ) from error
    # Its kind without the codec's name, which stands behind it; codecs leave the rest as it is.
    kind = update.kind.partition(uploads.THEN)[0]
    plain = dataclasses.replace(update, values=values, kind=kind)
    said = {"algorithm": record.algorithm, "client": record.client, "examples": record.examples}
    uploads.save_update(path, plain, codec="none", **said)


# Compiled once for uploads of one structure.
_decode = jit(compression.decode)
