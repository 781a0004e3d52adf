"""Compute what one round of 10^4 to 10^8 devices costs, and stream uploads to check it.

    python -m experiments.scale --out runs/scale

First it measures on one core how long uploads take to decode and to add, and secure sums to mask.
costs.md has what follows for each method, for LeNet and a transformer of MiniLM-L6's size. Then it
merges --trial uploads of LeNet's diagonal by a tree of processes, writes into prediction.md how
long --uploads of them will take, merges those, and the trial's again. tree.csv has the runs, and
summary.md compares them. Nothing else should run on the machine.
"""

import dataclasses
import json
import multiprocessing
import os
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from experiments.harness import commands, records, tables
from experiments.scale import coefficients, costs, networks, picture, tree

PROGRAM = "experiments.scale"
COSTS, MEASURED, PREDICTION, RUNS = "costs.md", "coefficients.json", "prediction.md", "tree.csv"
PICTURE = "scale.png"
_COLUMNS = ("run", "uploads", "seconds", "core_seconds", "memory", "difference", "load")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What is streamed."""

    uploads: int = 1_000_000
    """Number of uploads that the tree merges, each decoded from the bytes of a file."""
    trial: int = 10_000
    """Number of uploads of the run before, which predicts the time, and of the run after."""
    distinct: int = 256
    """Number of distinct uploads, which are used in turn."""
    processes: int = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    """Number of processes that decode and add."""
    out: commands.Folder = Path("runs/scale")
    """Folder for the results."""


def _check(asked: Config) -> None:
    for option in ("uploads", "trial", "distinct", "processes"):
        commands.check(asked, option, "1 or more", lambda number: number >= 1)


@commands.command(PROGRAM, __doc__, Config, _check, continues=False, all_cores=lambda _: False)
def main(asked: Config, console: Console) -> None:
    with records.folder(asked.out):
        with console.status("measuring coefficients"):
            known = coefficients.measured()
        records.write_text(asked.out / MEASURED, json.dumps(known, indent=2) + "\n")
        rows = _stream(asked, console)
        made = networks.lenet(), networks.transformer()
        sizes = {network.name: list(costs.sent(network)) for network in made}
        records.write_text(asked.out / COSTS, written(sizes, known))
        picture.draw(asked.out / PICTURE, sizes, known)
        _report(asked, rows, console)


def written(sizes: Mapping[str, Sequence[costs.Sent]], known: costs.Coefficients) -> str:
    """Return costs.md: the tables of networks, by name."""
    made = costs.report(sizes, known, tree.METHOD)
    return "\n".join(tables.markdown(table, level=3) for table in made)


def _stream(asked: Config, console: Console) -> list[list[Any]]:
    """Merge by the tree before, at scale and after; write each run as it ends, and return all."""
    spawn, shard = multiprocessing.get_context("spawn"), -(-asked.trial // asked.processes)
    shard = min(tree.SHARD, shard)
    with tempfile.TemporaryDirectory() as folder:
        paths = tree.write(Path(folder), asked.distinct)
        given = spawn.Barrier(asked.processes), paths, shard
        with ProcessPoolExecutor(asked.processes, spawn, tree.prepare, given) as pool:
            list(pool.map(len, [()] * asked.processes))  # all processes have started and compiled
            rows: list[list[Any]] = []

            def run(name: str, uploads: int) -> float:
                found = tree.run(pool, paths, uploads, shard)
                error = tree.difference(found.merged, tree.exact(paths, uploads))
                load = os.getloadavg()[0]
                numbers = found.seconds, found.core_seconds, found.memory
                rows.append([name, uploads, *map(float, numbers), error, load])
                records.write_text(asked.out / RUNS, tables.csv_text(_COLUMNS, rows))
                words = f"{name}: {uploads:,} uploads in {found.seconds:.1f} s"
                console.print(words, soft_wrap=True)
                return found.seconds

            expected = asked.uploads / asked.trial * run("before", asked.trial)
            text = f"{asked.uploads:,} uploads are predicted to take {expected:.1f} s.\n"
            records.write_text(asked.out / PREDICTION, text)
            console.print(text, end="")
            run("at scale", asked.uploads)
            run("after", asked.trial)
    return rows


def _report(asked: Config, rows: list[list[Any]], console: Console) -> None:
    headings = "run", "uploads", "s", "us / upload", "core-us / upload", "memory", "error", "load"
    lines = [
        (name, f"{n:,}", f"{s:.1f}", f"{1e6 * s / n:.0f}", f"{1e6 * core / n:.0f}",
         tables.size(memory), f"{error:.1e}", f"{load:.1f}")
        for name, n, s, core, memory, error, load in rows
    ]  # fmt: skip
    table = tables.Table(f"A tree of {asked.processes} processes", headings, lines)
    console.print(tables.terminal(table))
    words = f"{compared(rows, 2)} {compared(rows, 3)}"
    console.print(words, soft_wrap=True)
    parts = [tables.markdown(table), words, "", f"jax {jax.__version__}, {os.cpu_count()} cores."]
    parts += ["", "```", commands.write(asked, PROGRAM), "```", ""]
    records.write_text(asked.out / "summary.md", "\n".join(parts))
    console.print(f"In {asked.out}/: {COSTS}, {MEASURED}, {PREDICTION}, {RUNS}, {PICTURE}")


def compared(rows: list[list[Any]], column: int) -> str:
    """Say how many times as long an upload took at scale as in the mean of the trials."""
    before, scale, after = (row[column] / row[1] for row in rows)
    what = {2: "An upload", 3: "Its core time"}[column]
    return f"{what} took {2 * scale / (before + after):.3f} times the mean of before and after."


if __name__ == "__main__":
    raise SystemExit(main())
