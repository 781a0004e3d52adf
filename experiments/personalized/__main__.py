"""Compare methods that give each client a model of its own, on clients whose data differ much.

    python -m experiments.personalized --table digits --out runs/personalized_digits
    python -m experiments.personalized --table cifar10 --out runs/personalized_cifar10

Table 1 (cifar10): 20 clients with 8 of the 10 classes each, or with Dirichlet shares of them.
Table 2 (digits): five clients with digits of five looks; and table 3, FedAvg with more local
epochs. Everybody is judged on test data like its own training data, and clients count the same.
Temperatures of the weighted methods are chosen for all runs on training data held aside, of the
first split with the first seed, before any test.

results.csv: the mean over clients in the course of the rounds, and each client's at the end;
weights.csv: how weighted methods mix clients; personalized.png, temperatures.png, weights.png,
domains.png; summary.md: the tables. An interrupted run continues when the same command is given
again.
"""

import csv
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from experiments.harness import commands, records, tables
from experiments.harness.progress import bar
from experiments.personalized import domains, pictures, settings
from experiments.personalized.runs import World, measured, world
from experiments.personalized.settings import Config, Point, Unit

PROGRAM = "experiments.personalized"


@commands.command(PROGRAM)
def main(arguments: Sequence[str], console: Console) -> None:
    asked = commands.read(arguments, PROGRAM, __doc__, settings.default, chooser="table")
    settings.check(asked)
    path = asked.out / records.RESULTS
    with records.folder(asked.out):
        points = _read(path)
        if points:
            records.check_config(asked.out, asked, settings.default(asked.table))
        else:
            records.write_config(asked.out, asked, PROGRAM)
        worlds: dict[tuple[str, bool], World] = {}
        for found in _stage(asked, settings.choosing(asked), points, worlds, console):
            points += found
            _write(path, points)
        temperatures = settings.chosen(asked, points)
        for found in _stage(asked, settings.judging(asked, temperatures), points, worlds, console):
            points += found
            _write(path, points)
        _report(asked, points, worlds, console)


def _stage(
    asked: Config, units: list[Unit], points: list[Point], worlds: dict, console: Console
) -> Iterator[list[Point]]:
    """Play the runs that are missing."""
    done = {point.unit for point in points}
    missing = [unit for unit in units if unit not in done]
    with bar(console) as shown:
        length = sum(unit.rounds * unit.epochs for unit in missing)
        watched = shown.add_task("", total=length, speed="")
        for unit in missing:
            begun, where = time.perf_counter(), (unit.split, unit.held)
            if where not in worlds:
                worlds[where] = world(asked, *where)
            shown.update(watched, description=_named(unit))
            played, found, info = measured(asked, unit, worlds[where]), [], None
            for now, last in played:
                found, info = found + now, last
                shown.advance(watched, unit.epochs)
            if isinstance(info, jax.Array) and not unit.held and unit.seed == asked.seeds[0]:
                name = f"{unit.split}, {pictures.label(unit.algorithm, unit.temperature)}"
                pictures.keep_weights(asked.out / "weights.csv", name, np.asarray(info))
            end = next(p.accuracy for p in found if p.round == unit.rounds and p.client is None)
            seconds = time.perf_counter() - begun
            told = f"{_named(unit)}: {100 * end:.1f}  [dim]({seconds:.0f} s)[/]"
            console.print(told, soft_wrap=True)
            yield found


def _named(unit: Unit) -> str:
    name = pictures.label(unit.algorithm, unit.temperature)
    aside = ", held aside" if unit.held else ""
    return f"{unit.split}, {name}, {unit.epochs} epochs, seed {unit.seed}{aside}"


def _read(path: Path) -> list[Point]:
    if not path.exists():
        return []
    with records.damage(path), open(path, newline="") as file:
        _, *lines = csv.reader(file)
        return [_point(*line) for line in lines]


def _point(*words: str) -> Point:
    split, algorithm, temperature, epochs, seed, rounds, held, now, client, value = words
    numbers = int(epochs), int(seed), int(rounds), held == "True", int(now)
    first = float(temperature) if temperature else None
    return Point(split, algorithm, first, *numbers, int(client) if client else None, float(value))


def _write(path: Path, points: Sequence[Point]) -> None:
    records.write_text(path, tables.csv_text(Point._fields, points))


def _report(asked: Config, points: list[Point], worlds: dict, console: Console) -> None:
    parts = [f"# {asked.table}: a model for each client", ""]
    for split in asked.splits:
        where = (split, False)
        if where not in worlds:
            worlds[where] = world(asked, *where)
        shown = pictures.table(asked, points, split, worlds[where].names)
        console.print(tables.terminal(shown))
        parts.append(tables.markdown(shown, level=2))
    if asked.table3:
        shown = pictures.epochs_table(asked, points)
        console.print(tables.terminal(shown))
        parts.append(tables.markdown(shown, level=2))
    drawn = ["personalized.png"]
    pictures.draw_accuracies(asked, points, asked.out / drawn[0])
    if any(p.held for p in points):
        drawn.append("temperatures.png")
        pictures.draw_temperatures(points, asked.out / drawn[-1])
    if pictures.draw_weights(asked, worlds, asked.out):
        drawn.append("weights.png")
    for (_, held), one in worlds.items():
        if one.looks and not held:
            drawn.append("domains.png")
            domains.draw(one.looks, asked.out / drawn[-1])
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in drawn]
    parts += ["", "```", commands.write(asked, PROGRAM), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))
    console.print(f"In {asked.out}/: config.json, results.csv, summary.md, {', '.join(drawn)}")


if __name__ == "__main__":
    sys.exit(main())
