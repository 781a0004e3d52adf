"""Measure what rounds over Flower cost: seconds, memory and bytes, beside Flower's own averaging.

    python -m experiments.flower.load --nodes 2 --sizes 0.35 --work jax

Everything runs on this machine: a superlink, so many supernodes, and one run after another, which
alternate between fisherjax's averaging and Flower's. Clients train with JAX, or replay a recorded
upload. Above eight nodes the superlink has no database on disk. The first round of a run is left
out, as the server compiles in it. An interrupt ends everything at once, and the same command goes
on after the last whole run. results.csv has a row for each round; summary.md has the tables:
seconds without the start, imports and compilation of the clients, with the quotient of both
strategies and its interval of 95 %; the server's peak memory above that before the first round; and
bytes through the socket over those of the arrays.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from rich.console import Console

from experiments.flower.load import report, runs
from experiments.harness import commands, folders, limits, records

PROGRAM = "experiments.flower.load"


@dataclasses.dataclass(frozen=True)
class Config:
    """What is measured."""

    work: Literal["replay", "jax"] = "replay"
    """Clients that replay a recorded upload, without JAX, or train."""
    nodes: tuple[int, ...] = (2,)
    """Numbers of supernodes."""
    sizes: tuple[float, ...] = (0.35,)
    """Sizes of a model, and so of an upload, in megabytes."""
    rounds: int = 6
    """Number of rounds of a run, of which the first is left out."""
    repeats: int = 3
    """Number of runs of each strategy, which alternate."""
    epochs: int = 1
    """Passes over 256 examples of a client that trains."""
    port: int = 8600
    """Port of the superlink; supernodes count on from the next."""
    out: commands.Folder = Path("runs/flower_load")
    """Folder for the results; an unfinished measurement there continues."""


def _check(asked: Config) -> None:
    commands.check(asked, "rounds", "2 or more", lambda number: number >= 2)
    commands.check(asked, "sizes", "0.01 or more", lambda size: size >= 0.01)
    limits.check_options(asked)


@commands.command(PROGRAM, __doc__, Config, _check, all_cores=lambda _: False, cached=False)
def main(asked: Config, console: Console) -> None:
    with records.folder(asked.out):
        columns, kind = runs.Measured._fields, runs.Measured
        asked, rows = folders.resume(asked, Config(), columns, kind)
        folders.begin(asked, PROGRAM, console, f"{len(rows)} rounds are measured" if rows else "")
        for new in runs.measured(asked, {row.unit for row in rows}, console):
            rows += new
            records.write_rows(asked.out / records.RESULTS, rows, columns)
        report.report(asked, rows, PROGRAM, console)


if __name__ == "__main__":
    raise SystemExit(main())
