"""Decode compressed uploads to files before they are merged."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fisherjax import compression, tree
from fisherjax._core.compiler import jit
from fisherjax._finite_uploads import diverged, screen
from fisherjax.compression import Difference
from fisherjax.files._limits import ArrayKind, Limits
from fisherjax.files._paths import scratch
from fisherjax.files.arrays import load_arrays
from fisherjax.files.uploads import update as uploads
from fisherjax.files.uploads._records import Record

Opened = Sequence[tuple[Record, dict[str, Any], dict[str, ArrayKind]]]
"""For each upload its record, the description of its values, and the kinds that they decode to."""


@contextlib.contextmanager
def decoded_files(
    found: Opened, start: dict[str, np.ndarray] | None, folder: Path, limits: Limits
) -> Iterator[list[Path]]:
    """Decode compressed uploads to temporary files, client by client; yield paths of all uploads.

    Whole uploads are decoded, because a layer of a stream cannot be read alone. Errors about a
    temporary file name the upload that it was decoded from.
    """
    first, _, others = found[0]
    # All uploads are checked before the first is decoded, because decoding takes long.
    for record, spec, sizes in found:
        _check(record, spec, start)
        check_like(record, sizes, start, first, others)
    with scratch(folder) as place:
        paths = [record.path for record, *_ in found]
        try:
            for number, (record, *_) in enumerate(found):
                if record.codec != "none":
                    paths[number] = place / f"{number}.safetensors"
                    _write(paths[number], record, start, limits)
            yield paths
        except ValueError as error:
            text = str(error)
            for path, (record, *_) in zip(paths, found, strict=True):
                # Only the user's own file can be mended; the temporary one is gone by then.
                text = text.replace(str(path), str(record.path))
            raise ValueError(text) from error


def start_by_name(start: Any, limits: Limits) -> dict[str, np.ndarray] | None:
    """Return the model that clients started from by leaf name, from a pytree or its file."""
    if start is None:
        return None
    if isinstance(start, (str, bytes, os.PathLike)):
        return load_arrays(os.fsdecode(start), limits=limits)
    return tree.by_name(jax.tree.map(np.asarray, tree.as_arrays(start)))


def _check(record: Record, spec: dict[str, Any], start: dict[str, np.ndarray] | None) -> None:
    if record.codec == "none":
        return
    if "update" not in spec["dict"]:
        raise ValueError(
            f"{record.source} is packed by {record.codec!r}, but does not hold an encoded update; "
            "expected one of compression.encode or compression.compressed."
        )
    # Differences mean nothing without what they are differences from.
    leaves = [x["static"]["leaf"] for x in _nodes(spec, Difference.__name__)]
    if leaves and start is None:
        raise ValueError(
            f"{record.source} is packed by {record.codec!r}, as differences from the model that "
            "clients started from: pass this model as `start` (--start), a pytree or a file of "
            "arrays by leaf name."
        )
    started = {} if start is None else start
    for leaf in leaves:
        expected, given = record.layers.get(leaf), started.get(leaf)
        if given is None or expected not in (None, given.shape):
            raise ValueError(
                f"{record.source} holds differences of '{leaf}' {expected}, but the start has "
                f"{'none' if given is None else given.shape}; expected the model that clients "
                "started from."
            )


def _nodes(spec: Any, kind: str) -> Iterator[dict[str, Any]]:
    """Yield the nodes of a type in the description of values."""
    if not isinstance(spec, dict):
        return
    if spec.get("type") == kind:
        yield spec
    for place in ("dict", "ordered", "children"):
        for inner in spec.get(place, {}).values():
            yield from _nodes(inner, kind)


def check_like(
    record: Record,
    sizes: dict[str, ArrayKind],
    start: dict[str, np.ndarray] | None,
    first: Record,
    others: dict[str, ArrayKind],
) -> None:
    """Check that an upload decodes to the shapes of the start and of the first client."""
    expected = {name: (kind, repr(str(first.path))) for name, kind in others.items()}
    for name, array in ({} if start is None else start).items():
        # The start has all leaves; which of them are trained only the uploads say.
        for place in ("params", uploads.STATISTICS, uploads.FROZEN):
            expected[f"{place}/{name}"] = ArrayKind.of(array), "the start"
    for name in sizes.keys() & expected.keys():
        kind, other = expected[name]
        # Arrays of a plain checkpoint that are not of floats are copied, not computed with.
        is_copied = name.startswith(f"{uploads.FROZEN}/")
        if sizes[name].shape != kind.shape or (is_copied and sizes[name] != kind):
            raise ValueError(
                f"{record.source} decodes to other layers than {other}: {name} is {sizes[name]}, "
                f"expected {kind if is_copied else list(kind.shape)}. All clients must have "
                "trained the same network."
            )


def _write(path: Path, record: Record, start: dict[str, np.ndarray] | None, limits: Limits) -> None:
    """Decode one client's upload, and write it as an upload that is not compressed."""
    # Read again rather than kept: memory then holds one client's upload at a time.
    update, _ = uploads.load_update(record.path, limits=limits)
    try:
        values = _decode(update.values["update"], {} if start is None else start)
        stacked = jax.tree.map(lambda x: x[None], values)
        # A decoded update that diverged is reported later, like one that was not compressed.
        if not diverged(stacked):
            # Rounding may make a Fisher indefinite; `screen` repairs it, as for a merge in memory.
            found = screen(stacked, np.ones(1), "raise")
            values = jax.tree.map(lambda x: x[0], found.values)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{record.source} cannot be decoded ({error}): ask the client to send it again"
        ) from error
    # The kind of the update without the codec's name, which follows it.
    kind = update.kind.partition(uploads.THEN)[0]
    plain = dataclasses.replace(update, values=values, kind=kind)
    how = {"algorithm": record.algorithm, "client": record.client, "examples": record.examples}
    # Decoded files may have longer headers and names than their uploads.
    limits = limits._replace(header=1 << 62, name=1 << 62)
    uploads.save_update(path, plain, codec="none", limits=limits, **how)


# Jitted here, so that it compiles once for uploads of the same structure.
_decode = jit(compression.decode)
