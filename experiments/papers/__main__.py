"""Compare the tables of four papers with the records of this repository, on a page for each paper.

    python -m experiments.papers --paper fedfisher fedlpa

Every table, figure and theorem is an item of its paper's page: what stands here, how it deviates,
ours and the paper's numbers with their differences, the cells that were never run, and the
commands. All numbers of ours are read from experiments/results, so that nothing is trained. The
page over all papers, index.md, is written in any case.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from rich.console import Console

from experiments.harness import commands, papers, records
from experiments.papers import items, pages

PROGRAM = "experiments.papers"
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Config:
    """Which pages are written, and where."""

    paper: tuple[Literal[*papers.NAMES], ...] = papers.NAMES
    """Papers whose pages are written."""
    out: commands.Folder = ROOT / "docs/results/papers"
    """Folder for the pages."""


def check(asked: Config) -> None:
    """Refuse options that name no paper, or one twice."""
    commands.check_list(asked, "paper")


@commands.command(PROGRAM, __doc__, Config, check, continues=False, cached=False)
def main(asked: Config, console: Console) -> None:
    asked.out.mkdir(parents=True, exist_ok=True)
    every = [items.read(name) for name in papers.NAMES]
    texts = {x.name: pages.page(x, ROOT) for x in every if x.name in asked.paper}
    for name, text in (texts | {"index": pages.overview(every, ROOT)}).items():
        path = asked.out / f"{name}.md"
        records.write_text(path, text)
        console.print(str(path), soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
