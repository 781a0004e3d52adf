"""Measured numbers as lines of results.csv: read back, measured where they are missing, written.

A point is a NamedTuple of text and numbers, one line, and its `unit` is what it was measured with.
"""

import csv
import inspect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from experiments.harness import records, tables

Point = TypeVar("Point")


def read(path: Path, kind: type[Point]) -> list[Point]:
    """Read points of a kind, by the types of its fields; none if there is no file."""
    if not path.exists():
        return []
    types = inspect.get_annotations(kind).values()
    with records.damage(path), open(path, newline="") as file:
        _, *lines = csv.reader(file)
        return [kind(*(t(x) for t, x in zip(types, line, strict=True))) for line in lines]


def continued(
    asked: Any,
    program: str,
    default: Any,
    kind: type,
    units: Sequence[Any],
    measured: Callable[[list[Any]], Iterable[Sequence[Any]]],
) -> list[Any]:
    """Measure the units that are missing in a folder, and write after each; give all points.

    A folder that holds another experiment is refused; the default says what options did that did
    not exist yet.
    """
    path = asked.out / records.RESULTS
    points = read(path, kind)
    if points:
        records.check_config(asked.out, asked, default)
    done = {point.unit for point in points}
    missing = [unit for unit in units if unit not in done]
    if missing:
        records.write_config(asked.out, asked, program)
        for found in measured(missing):
            points += found
            records.write_text(path, tables.csv_text(kind._fields, points))
    return points
