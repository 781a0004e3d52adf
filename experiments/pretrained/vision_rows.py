"""Rows of results of the vision table, and the tables that are made of them."""

import statistics
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from experiments.harness import figures, tables
from experiments.pretrained import paired

REFERENCES = {"start": "the start", "own": "a client's own model", "ensemble": "ensemble"}
"""Rows that are no merge."""

Unit = tuple[str, str, int, str]
"""Case, start, seed and method."""


class Measurement(NamedTuple):
    """One accuracy on the test images, a fraction; see `studies`.

    `bytes` is what a client sends. `seconds` are those of all summaries, the merge and exchanges,
    compilation included; of the clients' own models they are those of training.
    """

    case: str
    start: str
    seed: int
    algorithm: str
    accuracy: float
    bytes: int
    seconds: float

    @property
    def unit(self) -> Unit:
        """The unit that the measurement belongs to."""
        return self.case, self.start, self.seed, self.algorithm


def summary(starts: Sequence[str], found: Sequence[Measurement]) -> list[tables.Table]:
    """Return a table of each case, and one of their means if there are several."""
    cases = tables.gathered((one.case, one) for one in found)
    cases |= {f"mean of {len(cases)} cases": [*found]} if len(cases) > 1 else {}
    return [_table(starts, case, ones) for case, ones in cases.items()]


def _table(starts: Sequence[str], title: str, found: Sequence[Measurement]) -> tables.Table:
    """Return accuracies from each start, compared with others, and bytes and seconds."""
    merged = tables.gathered((x.start, x) for x in found if x.algorithm not in REFERENCES)
    how = attrgetter("algorithm"), attrgetter("case", "seed")
    against = {start: paired.compared(ones, *how) for start, ones in merged.items()}
    lines = []
    for name, own in tables.gathered((one.algorithm, one) for one in found).items():
        cells = []
        for start in starts:
            ones = [one for one in own if one.start == start]
            seeds = tables.gathered((one.seed, 100 * one.accuracy) for one in ones)
            mean = tables.spread([*map(statistics.fmean, seeds.values())])
            cells += [mean, against.get(start, {}).get(name, "-")]
        size = statistics.fmean(one.bytes for one in own)
        seconds = tables.spread([one.seconds for one in own], 0)
        label = REFERENCES.get(name) or figures.label(name)
        lines.append((label, *cells, tables.size(size) if size else "-", seconds))
    headings = [heading for start in starts for heading in (start, paired.HEADING)]
    all_of = ("method", *headings, "bytes", "seconds")
    return tables.Table(title, all_of, lines, dim=range(len(REFERENCES)))
