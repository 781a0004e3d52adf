"""Measure epsilon over noise, rounds and sampling rates, and the time and memory that it takes.

    python -m experiments.privacy.costs --out runs/epsilon

summary.md has epsilon, and for each rate the most seconds and megabytes; results.csv has those of
each epsilon. Seconds are CPU time, and megabytes the peak of what Python and NumPy allocate.
"""

import dataclasses
import itertools
import time
import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, records, tables

PROGRAM = "experiments.privacy.costs"


@dataclasses.dataclass(frozen=True)
class Config:
    """The grid."""

    noise_multipliers: tuple[float, ...] = (0.01, 0.1, 1.0, 10.0, 100.0)
    """Noise multipliers of one round."""
    rounds: tuple[int, ...] = (1, 100, 10_000, 1_000_000)
    """Numbers of rounds."""
    rates: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)
    """Share of the clients in each secret cohort; with 1 all clients take part in every round."""
    delta: float = 1e-5
    """Delta of every epsilon."""
    out: commands.Folder = Path("runs/epsilon")
    """Folder for the results."""


class Cost(NamedTuple):
    """One epsilon, the CPU seconds and the peak of the memory that it took, in MB."""

    rate: float
    noise_multiplier: float
    rounds: int
    epsilon: float
    seconds: float
    megabytes: float


def measure(rate: float, noise: float, rounds: int, delta: float) -> Cost:
    """Compute one epsilon under a watch."""
    share = Fraction(str(rate))
    cohort = (share.numerator, share.denominator) if rate < 1 else None
    tracemalloc.start()
    begin = time.process_time()
    epsilon = fj.privacy.epsilon(noise, delta=delta, rounds=rounds, cohort=cohort)
    seconds = time.process_time() - begin
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return Cost(rate, noise, rounds, epsilon, round(seconds, 3), round(peak, 1))


def _check(asked: Config) -> None:
    commands.check_list(asked, "noise_multipliers", "rounds", "rates")
    commands.check(asked, "rates", "above 0 and at most 1", lambda x: 0 < x <= 1)


@commands.command(PROGRAM, __doc__, Config, _check, continues=False)
def main(asked: Config, console: Console) -> None:
    # Imports are no part of the first epsilon.
    fj.privacy.epsilon(1.0, delta=asked.delta, rounds=2, cohort=(1, 2))
    grid = itertools.product(asked.rates, asked.noise_multipliers, asked.rounds)
    found = [measure(*cell, asked.delta) for cell in grid]
    epsilon = {cost[:3]: cost.epsilon for cost in found}
    headings = "rate", "noise", *(f"rounds {number:,}" for number in asked.rounds)
    lines = [
        (f"{rate:g}", f"{noise:g}", *(f"{epsilon[rate, noise, n]:.4g}" for n in asked.rounds))
        for rate, noise in itertools.product(asked.rates, asked.noise_multipliers)
    ]
    by_rate = tables.gathered((cost.rate, cost[4:]) for cost in found)
    most = []
    for rate, some in by_rate.items():
        seconds, megabytes = map(max, zip(*some, strict=True))
        most.append((f"{rate:g}", f"{seconds:.2f}", f"{megabytes:.0f}"))
    shown = [
        tables.Table(f"Epsilon for delta {asked.delta:g}", headings, lines),
        tables.Table("The most that one epsilon takes", ("rate", "seconds", "MB"), most),
    ]
    with records.folder(asked.out):
        records.write_text(asked.out / "results.csv", tables.csv_text(Cost._fields, found))
        parts = [*map(tables.markdown, shown), "```", commands.write(asked, PROGRAM), "```", ""]
        records.write_text(asked.out / "summary.md", "\n".join(parts))
    for table in shown:
        console.print(tables.terminal(table))
    console.print(f"In {asked.out}/: results.csv, summary.md")


if __name__ == "__main__":
    raise SystemExit(main())
