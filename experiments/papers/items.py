"""List the items of a paper, and compare the cells of its tables with our records.

A paper has a file NAME.toml with what no record can say: what each item is, which records stand
beside it and how they are read, where they deviate, and why cells are missing or far apart. It has
no number of ours: those are read from the records.
"""

import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.harness import papers
from experiments.papers import readers
from experiments.papers.readers import Ours

RESULTS = Path("experiments/results")
"""The folder of the records, below the root of the repository."""
_READERS: dict[str, readers.Reader] = {
    reader.__name__: reader
    for reader in (
        *(readers.niid_table, readers.fedfisher_table, readers.uncompressed, readers.one_shot),
        *(readers.compression, readers.attack, readers.overheads, readers.uploads),
        *(readers.upload_ratios, readers.owners, readers.personalized),
    )
}


class Reading(NamedTuple):
    """Records that are read in one way."""

    reader: str
    records: Sequence[str]
    algorithms: Sequence[str] = ()  # only these; all if empty
    options: str = ""  # what the records' commands need since defaults changed


class Missing(NamedTuple):
    """Why cells that have one of the values of each name were not run."""

    cells: Mapping[str, Sequence[str]]
    reason: str


class Item(NamedTuple):
    """A table, a figure or a theorem of a paper."""

    name: str
    what: str
    readings: Sequence[Reading] = ()
    counted: bool = True  # whether its comparisons count in the overview
    theirs: Mapping[str, str] = {}  # the paper's settings that its cells do not have
    deviations: Sequence[str] = ()
    elsewhere: Sequence[str] = ()  # records of ours on other data, or of figures without numbers
    missing: Sequence[Missing] = ()
    commands: Sequence[str] = ()  # they would run what is missing
    why: str = ""


class Paper(NamedTuple):
    """A paper, its items, and what has to be known of its numbers."""

    name: str
    title: str
    source: str
    note: str
    items: Sequence[Item]


class Comparison(NamedTuple):
    """A cell of a paper and a measurement of the same."""

    cell: papers.Number
    ours: Ours
    record: str

    @property
    def difference(self) -> float:
        """Ours less the paper's."""
        return self.ours.value - float(self.cell.value)

    @property
    def within(self) -> bool | None:
        """Whether it is at most one standard deviation of a difference; None if none is known."""
        known = (self.ours.spread, float(self.cell.spread) if self.cell.spread else None)
        spreads = [spread for spread in known if spread is not None]
        if self.difference and not spreads:
            return None
        return abs(self.difference) <= math.hypot(*spreads)


def read(name: str) -> Paper:
    """Read the items of a paper."""
    found = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())
    items = [_item(**values) for values in found.pop("items")]
    return Paper(name=name, items=items, **found)


def cells(paper: Paper, item: Item) -> list[papers.Number]:
    """Return the numbers that a paper has in an item."""
    return [one for one in papers.numbers(paper.name) if one.table == item.name]


def compared(paper: Paper, item: Item, root: Path) -> list[Comparison]:
    """Return the comparisons of an item, in the paper's order and then that of the records."""
    measured = [
        (ours, record)
        for reading in item.readings
        for record in reading.records
        for ours in _READERS[reading.reader](root / RESULTS / record)
        if not reading.algorithms or ours.key["algorithm"] in reading.algorithms
    ]
    return [
        Comparison(cell, ours, record)
        for cell in cells(paper, item)
        for ours, record in measured
        if readers.agrees(ours, cell)
    ]


def reason(item: Item, cell: papers.Number) -> str:
    """Return why a cell was not run, by the first rule that it meets."""
    values = {"dataset": cell.dataset, "algorithm": cell.algorithm, "metric": cell.metric}
    values |= cell.setting
    for rule in item.missing:
        if all(values.get(name) in some for name, some in rule.cells.items()):
            return rule.reason
    return ""


def place(cell: papers.Number) -> tuple:
    """Return what tells a cell of a paper from all others of the paper."""
    return cell.table, cell.dataset, tuple(cell.setting.items()), cell.algorithm, cell.metric


def _item(readings: Sequence = (), missing: Sequence = (), **values) -> Item:
    ways = [Reading(**x) for x in readings]
    return Item(readings=ways, missing=[Missing(**x) for x in missing], **values)
