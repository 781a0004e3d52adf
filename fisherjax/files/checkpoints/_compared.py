"""Compare the arrays of checkpoints: which are merged, which are copied, and which differ."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fisherjax.files._limits import ArrayKind, Limits
from fisherjax.files._places import _some
from fisherjax.files._shards import SHARD, Checkpoint, Stored, pieces_of
from fisherjax.files.checkpoints._fishers import Fisher
from fisherjax.files.uploads._packed import start_by_name

UNEQUAL = "raise", "start", "first", "skip"
"""What becomes of leaves whose shapes differ, or that some checkpoints lack."""


class Sources(NamedTuple):
    """What is read.

    Attributes:
        models: The checkpoints.
        fishers: Their Fisher files, or an empty list.
        start: What they started from, or None.
    """

    models: list[Checkpoint]
    fishers: list[Fisher]
    start: Checkpoint | None


class Compared(NamedTuple):
    """What becomes of each leaf.

    Attributes:
        merged: Names of the leaves that are merged.
        copied: Arrays that are copied, by name.
        taken: What was done with each leaf that not all have alike, in words.
        like: The checkpoint whose dtypes and files the result has.
    """

    merged: list[str]
    copied: dict[str, Stored]
    taken: dict[str, str]
    like: Checkpoint


def compare(sources: Sources, unequal: str, needs_start: bool) -> Compared:
    """Find the leaves that are merged, and those that are copied or left out.

    Raises:
        ValueError: If leaves differ and `unequal` is "raise".
    """
    models, _, start = sources
    if start is None and (needs_start or unequal == "start"):
        raise ValueError(
            "The start is missing, the model that the checkpoints started from: pass it as `start` "
            "(--start), a file, a folder or a pytree."
        )
    like = models[0] if start is None or unequal == "first" else start
    taker = {"start": start, "first": models[0]}.get(unequal)
    merged, copied, taken, faults = [], {}, {}, []
    for name in sorted({name for x in (*models, start) if x is not None for name in x.arrays}):
        each = [(x.arrays.get(name), repr(str(x.path))) for x in models]
        # A start may lack leaves of a method that does not read it.
        if start is not None and (needs_start or name in start.arrays):
            each.insert(0, (start.arrays.get(name), "the start"))
        if not (fault := _fault(name, each)):
            if each[0][0].is_float:  # pyright: ignore
                merged.append(name)
            else:
                copied[name] = like.arrays.get(name, each[0][0])
        elif taker is not None and name in taker.arrays:
            copied[name] = taker.arrays[name]
            taken[name] = "of the start" if taker is start else "of the first"
        else:
            taken[name] = "left out"
        faults += [fault] if fault else []
    if faults and unequal == "raise":
        raise ValueError(
            f"Not all checkpoints have the same arrays: {_some(faults, '; ')}. To merge the "
            "others, take these from the start or from the first checkpoint, or skip them: "
            "unequal='start', 'first' or 'skip' (--unequal first)."
        )
    if not merged:
        raise ValueError("The checkpoints have no array of floats in common, so none is merged.")
    return Compared(merged, copied, taken, like)


def _fault(name: str, each: list[tuple[Stored | None, str]]) -> str:
    """Say how an array differs between checkpoints; return "" if it does not."""
    first, where = each[0]
    for stored, other in each[1:]:
        if first is None or stored is None or stored.kind.shape != first.kind.shape:
            break
        # Floats of other widths can be merged; anything else has to be equal.
        if stored.kind != first.kind and not (stored.is_float and first.is_float):
            break
        # Counters may differ, but packed weights would be those of one checkpoint.
        if not first.is_float and first.size > 1:
            same = zip(pieces_of(stored), pieces_of(first), strict=True)
            if not all(np.array_equal(x, y) for x, y in same):
                return (
                    f"{name} is {first.kind} with other numbers in {other} than in {where} (if it "
                    "is a packed weight, unpack it first)"
                )
    else:
        return ""
    here = "missing" if stored is None else stored.kind
    return f"{name} is {here} in {other}, expected {(first and first.kind) or 'none'} as in {where}"


def in_memory(start: Any, limits: Limits) -> Checkpoint:
    """Return a pytree of arrays, or a file of them that is no .safetensors, as a checkpoint."""
    found = start_by_name(start, limits) or {}
    arrays = {name: Stored(ArrayKind.of(x), array=x) for name, x in found.items()}
    name = f"model{SHARD}"
    return Checkpoint(Path(), arrays, {name: tuple(arrays)}, {name: {}}, "", (), 0, {})
