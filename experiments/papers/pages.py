"""Write the page of a paper, and the page over all papers, in Markdown."""

import json
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from experiments.harness import papers, records, tables
from experiments.papers import item_tables, items
from experiments.papers.items import Comparison, Item, Paper

_UP = Path("../../..")  # from the folder of the pages to the root of the repository
_ACCURACIES = ("accuracy", "attack_accuracy")
_WRITTEN = """This page is written by `{command}` from the records in
[experiments/results]({up}/experiments/results); a test holds it to them."""
_TERMS = """* *Difference* is ours less the paper's, and *median* that of its absolute values.
* *Within* says whether the difference is at most one standard deviation: the root of the sum of the
  squares of ours and of the paper's spread. A single run has no spread, so that the paper's alone
  counts then; a dash means that neither has one.
* A cell is compared only where data set, kind of split, network and method are the paper's. What
  deviates in other ways, such as epochs, seeds and solvers, stands in the table of items: first
  ours, then the paper's behind "for", if it is known."""
_COUNTS = """*Accuracies* are the cells of the paper's tables that are accuracies, *compared* those
of them with a record of ours, *comparisons* all pairs of such a cell and a record: a cell may have
several records, and none is chosen. *Within* and *median* are of the comparisons. *Set beside* are
cells whose record has so much less data or training that their difference is not counted."""
_ITEMS = """Items are the tables, of which the repository keeps every number, and the figures and
theorems that our pages are about. A finished table takes another method or seed: its command with
more `--algorithms` or `--seeds` and the same `--out` computes what is missing, and does not train
again where clients were kept ([continue, extend and sweep runs](../../how_to/continue_runs.md))."""


def page(paper: Paper, root: Path) -> str:
    """Return the page of a paper, of the records below the root of the repository."""
    found = [(item, items.compared(paper, item, root)) for item in paper.items]
    command = f"python -m experiments.papers --paper {paper.name}"
    heading = ("item", "what it is", "here", "deviations", "command", "median", "within")
    lines = [_line(paper, item, own, root) for item, own in found]
    parts = [
        f"# {paper.title}",
        f"{paper.source.strip()}\n\n{paper.note.strip()}",
        _WRITTEN.format(command=command, up=_UP),
        _TERMS,
        "## Items",
        _markdown(tables.Table("", heading, lines, text=5)),
        *(part for item, own in found for part in _section(paper, item, own, root)),
    ]
    return "\n\n".join(parts) + "\n"


def overview(every: Sequence[Paper], root: Path) -> str:
    """Return the page over papers: how many cells are compared, and how far they are."""
    counts = ("items", "accuracies", "compared", "comparisons", "set beside", "within", "median")
    lines = [_counts(paper, root) for paper in every]
    parts = [
        "# The papers, table by table",
        _WRITTEN.format(command="python -m experiments.papers", up=_UP),
        _markdown(tables.Table("", ("paper", *counts), lines)),
        *(_COUNTS, _TERMS, _ITEMS),
        "\n".join(["```{toctree}", ":maxdepth: 1", "", *(x.name for x in every), "```"]),
    ]
    return "\n\n".join(parts) + "\n"


def _counts(paper: Paper, root: Path) -> tuple[str, ...]:
    counted: list[Comparison] = []
    beside: list[Comparison] = []
    for item in paper.items:
        own = items.compared(paper, item, root)
        kind = counted if item.counted else beside
        kind += [one for one in own if one.cell.metric in _ACCURACIES]
    every = [one for one in papers.numbers(paper.name) if one.metric in _ACCURACIES]
    median, within = item_tables.far(counted)
    compared, set_beside = (str(item_tables.distinct(own)) for own in (counted, beside))
    numbers = str(len(paper.items)), str(len(every)), compared, str(len(counted)), set_beside
    return f"[{paper.title}]({paper.name}.md)", *numbers, within, median


def _line(paper: Paper, item: Item, own: Sequence[Comparison], root: Path) -> tuple[str, ...]:
    """Return the line of an item in the table of items."""
    anchor = re.sub(r"[^\w\- ]", "", item.name.lower()).replace(" ", "-")
    commands = [*_commands(item, root).values()] or item.commands
    programs = dict.fromkeys(f"`{shlex.split(command)[2]}`" for command in commands)
    deviations = "; ".join([*item_tables.differing(item, own), *item.deviations])
    here = _here(len(items.cells(paper, item)), item, own)
    words = (item.what, here, deviations or "-", ", ".join(programs) or "-")
    return f"[{item.name}](#{anchor})", *words, *item_tables.far(own)


def _here(number: int, item: Item, own: Sequence[Comparison]) -> str:
    """Say in a few words what stands beside an item of so many cells."""
    if own:
        how = "compared" if item.counted else "set beside"
        return f"{item_tables.distinct(own)} of {number} cells {how}"
    if item.elsewhere:
        return "a record on other data" if number else "a record; no numbers in the paper"
    return "not run" if item.commands or not number else "not compared"


def _section(paper: Paper, item: Item, own: Sequence[Comparison], root: Path) -> Iterator[str]:
    """Yield the paragraphs and tables of an item."""
    cells, link = items.cells(paper, item), partial(_link, root)
    yield f"## {item.name}"
    yield _wrapped(f"{item.what}.")
    if same := item_tables.shared(own):
        yield _wrapped(f"The same in the paper and here: {', '.join(same)}.")
    if own:
        yield _markdown(item_tables.compared(own, link))
    if item.elsewhere:
        what = "On other data, not compared" if cells else "Here"
        yield _wrapped(f"{what}: {', '.join(map(link, item.elsewhere))}.")
    if absent := item_tables.absent(cells, own, item):
        yield "Not compared:" if own else "Nothing of it is compared:"
        yield _markdown(absent)
    if own or item.elsewhere:
        of_records = _commands(item, root).items()
        yield _block(line for record, command in of_records for line in (f"# {record}", command))
    if item.commands:
        yield "What is missing would be run by"
        yield _block(item.commands)
    if item.why:
        yield item.why.strip()


def _page_of(root: Path, record: str) -> Path:
    """Return the page of a record, below the root of the repository."""
    folder = items.RESULTS / record
    named = (folder.with_suffix(".md"), folder / "table.md", folder / "summary.md")
    return next(path for path in named if (root / path).exists())


def _link(root: Path, record: str) -> str:
    return f"[{record.rpartition('/')[2]}]({_UP / _page_of(root, record)})"


def _commands(item: Item, root: Path) -> dict[str, str]:
    """Return the commands of the records that are compared, or else of those elsewhere."""
    found = {
        record: f"{_command(root, record)} {reading.options}".strip()
        for reading in item.readings
        for record in reading.records
    }
    return found or {record: _command(root, record) for record in item.elsewhere}


def _command(root: Path, record: str) -> str:
    path = root / _page_of(root, record)
    shown = re.findall(r"^python -m .*$", path.read_text(), re.MULTILINE)
    config = path.with_name(records.CONFIG)
    return shown[-1] if shown else json.loads(config.read_text())["command"]


def _markdown(table: tables.Table) -> str:
    return tables.markdown(table).strip()


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _block(lines: Iterable[str]) -> str:
    return "\n".join(["```bash", *lines, "```"])
