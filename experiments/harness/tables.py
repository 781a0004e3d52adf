"""Write tables for a terminal, in Markdown and as CSV."""

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from rich import box
from rich.table import Table as RichTable

Key, Value = TypeVar("Key"), TypeVar("Value")


class Table(NamedTuple):
    """Lines of text under headings."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    text: int = 1  # number of columns on the left that hold words; the others hold numbers
    best: int | None = None  # index of the line that is set in bold
    dim: Sequence[int] = ()  # indices of the lines of references
    sections: Sequence[int] = ()  # indices of the lines after which a terminal shows a rule


def terminal(table: Table) -> RichTable:
    """Return a table for a terminal."""
    shown = RichTable(
        title=table.title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold"
    )
    for place, heading in enumerate(table.headings):
        shown.add_column(heading, justify="left" if place < table.text else "right", no_wrap=True)
    for place, line in enumerate(table.lines):
        style = "dim" if place in table.dim else "bold" if place == table.best else None
        shown.add_row(*line, style=style, end_section=place in table.sections)
    return shown


def markdown(table: Table, level: int = 1) -> str:
    """Return a table in Markdown, under its title as a heading of the given level."""
    rules = ["---" if place < table.text else "---:" for place in range(len(table.headings))]
    lines = [
        [f"**{cell}**" for cell in line] if place == table.best else line
        for place, line in enumerate(table.lines)
    ]
    body = [f"| {' | '.join(line)} |" for line in (table.headings, rules, *lines)]
    return "\n".join([*([f"{'#' * level} {table.title}", ""] if table.title else []), *body, ""])


def csv_text(columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return lines as CSV; None becomes an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return text.getvalue()


def gathered(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key, keys and values in the order in which they come.

    Example:
        >>> gathered([("fedavg", 90.1), ("fedfisher_kfac", 95.0), ("fedavg", 91.3)])
        {'fedavg': [90.1, 91.3], 'fedfisher_kfac': [95.0]}
    """
    found: dict[Key, list[Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean as text, with the standard deviation of several values: 1.5 ± 0.7."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {deviation(values):.{digits}f}"


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; NaN if a value is not finite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def rank(value: float) -> float:
    """Return a number by which to choose the greatest: NaN counts least."""
    return -math.inf if math.isnan(value) else value


def moments(values: Sequence[float]) -> tuple[float | None, float | None, int]:
    """Return mean and standard deviation of two digits, None where undefined, and the number."""
    mean = round(statistics.fmean(values), 2) if values else None
    spread = round(deviation(values), 2) if len(values) > 1 else None
    return mean, spread, len(values)


def quotient(number: float, of: float | None) -> str:
    """Return number / of as text of three digits, or a dash if `of` is None or not above 0."""
    if of is None or of <= 0:
        return "-"
    found = number / of
    return f"{found:#.3g}".rstrip(".") if abs(found) < 1000 else f"{found:.0f}"


def size(count: float) -> str:
    """Return a number of bytes as text, for example 35.3 kB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def duration(seconds: float) -> str:
    """Return a time as text, for example 2 min or 2.0 h."""
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"
