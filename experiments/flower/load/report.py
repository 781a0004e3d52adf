"""Report the load: seconds of both strategies and their quotient, memory and bytes."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from rich.console import Console

from experiments.flower.load.runs import STRATEGIES, Measured
from experiments.harness import studies, tables

_WORDS = (
    "Seconds are means of a round, ± half the width of an interval of 95 %; start, import, compile "
    "and work are means over clients; aggregation is from the last upload's arrival to the merged "
    "model; transfer is the remainder of the round, in which nodes look for messages every 3 "
    "seconds. The quotient, fisherjax over Flower, is of work, transfer and aggregation, with its "
    "interval. Memory is the peak of the server app above that "
    "before the first round, superlink that process's peak until then. Wire is all bytes "
    "through the nodes' sockets over those of the arrays."
)


def report(asked: Any, rows: Sequence[Measured], program: str, console: Console) -> None:
    """Print and write the tables."""
    cases = tables.gathered(((r.work, r.nodes, r.size), r) for r in rows)
    lines, compared = [], []
    for (work, nodes, size), own in cases.items():
        by = tables.gathered((row.strategy, row) for row in own)
        name = f"{nodes} {work}, {size:g} MB"
        lines += [(name, strategy, *_cells(by[strategy])) for strategy in STRATEGIES]
        sums = ([x.train + x.transfer + x.aggregate for x in by[own]] for own in STRATEGIES)
        low, middle, high = quotient(*sums)
        compared.append((name, f"{middle:.3f}", f"{low:.3f}", f"{high:.3f}"))
    headings = (
        *("nodes", "strategy", "rounds", "start", "import", "compile", "work", "transfer"),
        *("aggregation", "memory", "superlink", "wire"),
    )
    shown = [
        tables.Table("Load on Flower", headings, lines, text=2),
        tables.Table("fisherjax over Flower", ("nodes", "quotient", "from", "to"), compared),
    ]
    studies.report(asked, program, shown, {}, console, words=_WORDS, heading="Load on Flower")


def _cells(rows: Sequence[Measured]) -> list[str]:
    """Return the means of a strategy's rounds."""
    digits = {"start": 2, "imports": 2, "compile": 2, "train": 2, "transfer": 2, "aggregate": 3}
    times = [_interval([getattr(row, n) for row in rows], places) for n, places in digits.items()]
    memory = (tables.size(max(getattr(row, n) for row in rows)) for n in ("memory", "superlink"))
    return [str(len(rows)), *times, *memory, f"{fmean(row.wire for row in rows):.3f}"]


def _interval(values: Sequence[float], digits: int) -> str:
    half = 1.96 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{fmean(values):.{digits}f} ± {half:.{digits}f}"


def quotient(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Compute the quotient of two means with its interval of 95 %, by the delta method.

    Example:
        >>> low, middle, high = quotient([2.0, 2.2, 1.8], [1.0, 1.1, 0.9])
        >>> round(middle, 3), low < middle < high
        (2.0, True)
    """
    middle = fmean(ours) / fmean(theirs)
    relative = [
        stdev(values) / fmean(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        for values in (ours, theirs)
    ]
    half = 1.96 * middle * math.hypot(*relative)
    return middle - half, middle, middle + half
