"""One table, wherever it is read: in a terminal, in Markdown, as CSV."""

import csv
import io
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table as RichTable


class Table(NamedTuple):
    """Lines of text under headings."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    text: int = 1  # columns on the left that are words; the others are numbers
    best: int | None = None  # the line that stands out
    dim: Sequence[int] = ()  # lines that are there to compare with
    sections: Sequence[int] = ()  # lines after which a terminal shows a rule


def terminal(table: Table) -> RichTable:
    """Lay a table out for a terminal."""
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
    """Write a table in Markdown, under its title as a heading of a level."""
    rules = ["---" if place < table.text else "---:" for place in range(len(table.headings))]
    lines = [
        [f"**{cell}**" for cell in line] if place == table.best else line
        for place, line in enumerate(table.lines)
    ]
    body = [f"| {' | '.join(line)} |" for line in (table.headings, rules, *lines)]
    return "\n".join([*([f"{'#' * level} {table.title}", ""] if table.title else []), *body, ""])


def csv_text(columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Write lines as CSV; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return text.getvalue()


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Write a mean, with the standard deviation of several values: 1.5 ± 0.7."""
    if not values:
        return "-"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def quotient(number: float, of: float | None) -> str:
    """Write a number for each unit of something, as 1.05 or 54.0; a dash where there is none."""
    if of is None or of <= 0:
        return "-"
    found = number / of
    return f"{found:#.3g}".rstrip(".") if abs(found) < 1000 else f"{found:.0f}"


def size(count: float) -> str:
    """Write a number of bytes, for example 35.3 kB."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def duration(seconds: float) -> str:
    """Round a time for reading: 2 min or 2.0 h."""
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{seconds / 3600:.1f} h"
