"""Compare methods that train a model for each client, on clients whose data differ much.

    python -m experiments.personalized --table digits --out runs/personalized_digits
    python -m experiments.personalized --table cifar10 --out runs/personalized_cifar10

Table 1 (cifar10) has 20 clients with 8 of the 10 classes each, or with Dirichlet shares of them.
Table 2 (digits) has five clients whose digits look different, and table 3 is FedAvg with more local
epochs. Each client is tested on data like its own training data, and all clients count the same.
The temperatures of the weighted methods are chosen once, with the first seed on held-out training
data of the first split, before any test.

results.csv holds the mean accuracy over clients during the rounds and that of each client at the
end, weights.csv the weights that weighted methods give to clients, and summary.md the tables.
The figures are personalized.png, temperatures.png, weights.png and domains.png. The same command
continues an interrupted run.
"""

import time
from collections.abc import Iterator, Sequence
from functools import cache, partial

import jax
import numpy as np
from rich.console import Console

from experiments.harness import commands, folders, records, studies
from experiments.personalized import domains, pictures, runs, settings
from experiments.personalized.settings import Config, Measurement, Unit

PROGRAM = "experiments.personalized"


@commands.command(PROGRAM, __doc__, settings.default, settings.check, chooser="table")
def main(asked: Config, console: Console) -> None:
    with records.folder(asked.out):
        default = settings.default(asked.table)
        asked, found = folders.resume(asked, default, Measurement._fields, Measurement)
        population = cache(partial(runs.population, asked))
        measured = partial(_measured, asked, population, console)

        def complete(units: Sequence[Unit], found: list[Measurement]) -> list[Measurement]:
            sizes = settings.sizes(asked, units)
            return studies.completed(asked, PROGRAM, found, sizes, measured, console)

        found = complete(settings.choosing(asked), found)
        found = complete(settings.testing(asked, settings.chosen(asked, found)), found)
        _report(asked, found, population, console)


def _measured(
    asked: Config, population: runs.Populations, console: Console, missing: Sequence[Unit]
) -> Iterator[list[Measurement]]:
    """Run the rounds of the missing units."""
    for unit in studies.each(console, missing, _named):
        start, found, info = time.perf_counter(), [], None
        for new, last in runs.measured(asked, unit, population(unit.split, unit.held)):
            found, info = found + new, last
        if isinstance(info, jax.Array) and not unit.held and unit.seed == asked.seeds[0]:
            name = f"{unit.split}, {pictures.label(unit.algorithm, unit.temperature)}"
            pictures.keep_weights(asked.out / "weights.csv", name, np.asarray(info))
        end = next(p.accuracy for p in found if p.round == unit.rounds and p.client is None)
        seconds = time.perf_counter() - start
        line = f"{_named(unit)}: {100 * end:.1f}  [dim]({seconds:.0f} s)[/]"
        console.print(line, soft_wrap=True)
        yield found


def _named(unit: Unit) -> str:
    name = pictures.label(unit.algorithm, unit.temperature)
    held_out = ", held out" if unit.held else ""
    return f"{unit.split}, {name}, {unit.epochs} epochs, seed {unit.seed}{held_out}"


def _report(
    asked: Config, found: list[Measurement], population: runs.Populations, console: Console
) -> None:
    populations = {split: population(split, False) for split in asked.splits}
    shown = [pictures.table(asked, found, s, own.names) for s, own in populations.items()]
    shown += [pictures.epochs_table(asked, found)] if asked.table3 else []
    drawn = ["personalized.png"]
    pictures.draw_accuracies(asked, found, asked.out / drawn[0])
    if any(one.held for one in found):
        drawn.append("temperatures.png")
        pictures.draw_temperatures(found, asked.out / drawn[-1])
    if pictures.draw_weights(asked, populations, asked.out):
        drawn.append("weights.png")
    if looks := [look for own in populations.values() for look in own.looks]:
        drawn.append("domains.png")
        domains.draw(looks, asked.out / drawn[-1])
    heading = f"{asked.table}: a model for each client"
    drawings = {name: name.removesuffix(".png") for name in drawn}
    studies.report(asked, PROGRAM, shown, drawings, console, heading=heading)


if __name__ == "__main__":
    raise SystemExit(main())
