"""Run a study: read its options, measure what is missing in its folder, and report all numbers.

A measurement is a NamedTuple of text and numbers and one line of results.csv. Its property `unit`
is what was measured at once, so that an interrupted study continues after the last whole unit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from rich.console import Console

from experiments.harness import commands, folders, limits, progress, records, tables

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
            kind = runs.Measurement
            default = runs.Config.usual(asked.data.dataset)
            asked, found = folders.resume(asked, default, kind._fields, kind)
            measured = partial(runs.measured, asked, console)
            found = completed(asked, program, found, runs.units(asked), measured, console)
            report(asked, found, console)

    return main


def completed(
    asked: Any,
    program: str,
    found: Sequence[Measurement],
    units: Mapping[Any, int],
    measured: Callable[[list[Any]], Iterable[Sequence[Measurement]]],
    console: Console,
) -> list[Measurement]:
    """Measure the units of which a folder lacks measurements, and return all measurements.

    `units` has the number of measurements of each unit. The file is written after each unit.
    """
    done = tables.gathered((one.unit, one) for one in found)
    missing = [unit for unit, number in units.items() if len(done.get(unit, ())) < number]
    if missing:
        words = f"{len(units) - len(missing)} of {len(units)} units are done"
        folders.begin(asked, program, console, words if found else "")
        for unit, new in zip(missing, measured(missing), strict=True):
            done[unit] = [*new]
            rows = [one for own in done.values() for one in own]
            records.write_rows(asked.out / records.RESULTS, rows, new[0]._fields)
    return [one for own in done.values() for one in own]


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
