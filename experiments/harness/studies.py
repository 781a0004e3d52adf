"""Run a study: read its options, measure what is missing in its folder, and report all numbers.

A measurement is a NamedTuple of text and numbers and one line of results.csv. Its property `unit`
is what was measured at once, so that an interrupted study continues after the last whole unit.
"""

import csv
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_args

from rich.console import Console

from experiments.harness import commands, limits, progress, records, tables

Measurement = TypeVar("Measurement")
Report = Callable[[Any, list[Any], Console], None]
"""Report a study, given its configuration, all of its measurements and a console."""


def study(
    program: str,
    description: str,
    runs: ModuleType,
    check: Callable[[Any], None],
    report: Report,
) -> Callable[..., int]:
    """Make the program of a study.

    The module `runs` defines `Config` with a class method `usual`, `Measurement`, `units`, which
    lists what a configuration asks for, and `measured`, which yields the measurements of the units
    that are missing.
    """

    def check_all(asked: Any) -> None:
        limits.check_options(asked)
        check(asked)

    @commands.command(program, description, runs.Config.usual, check_all)
    def main(asked: Any, console: Console) -> None:
        with records.folder(asked.out):
            measured, units = partial(runs.measured, asked, console), runs.units(asked)
            default = runs.Config.usual(asked.data.dataset)
            found = continued(asked, program, default, runs.Measurement, units, measured)
            report(asked, found, console)

    return main


def continued(
    asked: Any,
    program: str,
    default: Any,
    kind: type[Measurement],
    units: Sequence[Any],
    measured: Callable[[list[Any]], Iterable[Sequence[Measurement]]],
) -> list[Measurement]:
    """Measure the units that are missing in a folder, and return all measurements.

    The file is written after each unit. A folder that holds another experiment is refused; the
    default configuration gives the values of options that did not exist yet.
    """
    path = asked.out / records.RESULTS
    found = read(path, kind)
    if found:
        records.check_config(asked.out, asked, default)
    done = {measurement.unit for measurement in found}
    missing = [unit for unit in units if unit not in done]
    if missing:
        records.write_config(asked.out, asked, program)
        for new in measured(missing):
            found += new
            records.write_text(path, tables.csv_text(kind._fields, found))
    return found


def read(path: Path, kind: type[Measurement]) -> list[Measurement]:
    """Read measurements by the types of their fields; return an empty list if there is no file."""
    if not path.exists():
        return []
    types = inspect.get_annotations(kind).values()
    with records.damage(path), open(path, newline="") as file:
        _, *lines = csv.reader(file)
        return [kind(*(_cell(t, x) for t, x in zip(types, line, strict=True))) for line in lines]


def _cell(kind: Any, text: str) -> Any:
    kind, *optional = get_args(kind) or (kind,)
    if optional and not text:
        return None
    return text == "True" if kind is bool else kind(text)


def each(console: Console, units: Sequence[Any], words: Callable[[Any], str]) -> Iterator[Any]:
    """Yield units one after another under a progress bar, which shows the words of each."""
    with progress.bar(console) as shown:
        watched = shown.add_task("", total=len(units), speed="")
        for unit in units:
            shown.update(watched, description=words(unit))
            yield unit
            shown.advance(watched)


def report(
    asked: Any,
    program: str,
    shown: Sequence[tables.Table],
    pictures: Mapping[str, str],
    console: Console,
    words: str = "",
    heading: str = "",
) -> None:
    """Print tables, and write them to summary.md with words, pictures and the command.

    `pictures` are descriptions by the names of files in the folder. Under a heading, tables have
    headings of the second level.
    """
    for table in shown:
        console.print(tables.terminal(table))
    parts = [f"# {heading}", ""] if heading else []
    parts += [tables.markdown(table, level=2 if heading else 1) for table in shown]
    parts += [words, ""] if words else []
    parts += [f"![{description}]({name})" for name, description in pictures.items()]
    parts += ["", "```", commands.write(asked, program), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))
    files = ", ".join(["config.json", "results.csv", *pictures, "summary.md"])
    console.print(f"In {asked.out}/: {files}")
