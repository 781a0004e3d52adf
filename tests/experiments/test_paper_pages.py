"""The pages that set the papers beside our records: written by the records, complete, and read."""

import csv
import dataclasses
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

from experiments.compression import runs as compression
from experiments.fedfisher_table import table as fedfisher_table
from experiments.fedlpa_pictures import __main__ as fedlpa_pictures
from experiments.harness import commands, config, grids, limits, papers
from experiments.papers import __main__ as command
from experiments.papers import items, pages, readers
from experiments.papers.items import Comparison
from experiments.personalized import settings as personalized

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/results/papers"
EVERY = {name: items.read(name) for name in papers.NAMES}
READ = {  # the options of the commands that would run what is missing, and their check
    "fedfisher_table": (fedfisher_table.Grid, grids.check),
    "niid_table": (grids.Grid, grids.check),
    "compression": (compression.Config.usual, limits.check_options),
    "federated": (config.federated, limits.check_federated),
    "personalized": (personalized.default, personalized.check),
    "fedlpa_pictures": (fedlpa_pictures.Config, fedlpa_pictures._check),
}


@pytest.fixture(scope="module", params=papers.NAMES)
def paper(request):
    return EVERY[request.param]


def section(page: str, item: items.Item) -> str:
    """Return what stands on a page under the heading of an item."""
    _, _, rest = page.partition(f"\n## {item.name}\n")
    return rest.partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if "---" not in line]


# Written by the records


def test_writing_a_page_again_gives_the_page_byte_for_byte(paper):
    assert pages.page(paper, ROOT).encode() == (PAGES / f"{paper.name}.md").read_bytes()


def test_writing_the_page_over_papers_again_gives_it_byte_for_byte():
    written = pages.overview([*EVERY.values()], ROOT)
    assert written.encode() == (PAGES / "index.md").read_bytes()


def test_the_command_writes_the_pages_that_are_asked_for(tmp_path):
    assert command.main(["--paper", "fedfish", "weighted", "--out", str(tmp_path)]) == 0
    assert {x.name for x in tmp_path.iterdir()} == {"fedfish.md", "weighted.md", "index.md"}
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (PAGES / path.name).read_bytes()


def test_another_number_in_a_record_moves_the_page_by_as_much(tmp_path):
    """Of the number, its difference, and nothing else in the row."""
    record, paper = "fedfisher_cifar10", EVERY["fedfisher"]
    results = tmp_path / items.RESULTS
    results.mkdir(parents=True)
    for path in (ROOT / items.RESULTS).iterdir():
        if path.name != record:
            os.symlink(path, results / path.name)
    shutil.copytree(ROOT / items.RESULTS / record, results / record)
    table = results / record / "table.csv"
    with open(table, newline="") as file:
        heading, *lines = csv.reader(file)
    place = heading.index("mean")
    (changed,) = (x for x in lines if x[2:4] == ["0.05", "fedfisher_kfac"])
    changed[place] = f"{float(changed[place]) + 1.25:.2f}"
    with open(table, "w", newline="") as file:
        csv.writer(file).writerows([heading, *lines])
    (item,) = (x for x in paper.items if x.name == "Table 2")
    found = [items.compared(paper, item, root) for root in (ROOT, tmp_path)]
    moved = [b.difference - a.difference for a, b in zip(*found, strict=True)]
    assert sorted(moved)[-1] == pytest.approx(1.25)
    assert [round(x, 9) for x in moved].count(0) == len(moved) - 1
    assert pages.page(paper, tmp_path) != pages.page(paper, ROOT)


def test_each_accuracy_that_is_compared_stands_on_the_page_of_its_record(paper):
    """Which another program wrote, from the rows of the run."""
    for item in paper.items:
        for one in items.compared(paper, item, ROOT):
            if "accuracy" in one.cell.metric:
                folder = ROOT / items.RESULTS / one.record
                text = "".join(path.read_text() for path in folder.glob("*.md"))
                known = [float(x) for x in re.findall(r"(?<![\d.])\d+\.\d(?!\d)", text)]
                assert min(abs(one.ours.value - x) for x in known) < 0.0501, one


def test_the_numbers_of_the_paper_are_those_of_its_cells(paper):
    """Of every row of a page: what stands under paper is a cell of the item, as printed."""
    for item in paper.items:
        printed = {f"{x.value} ± {x.spread}".removesuffix(" ± ") for x in items.cells(paper, item)}
        text = section((PAGES / f"{paper.name}.md").read_text(), item)
        for line in rows(text):
            if line[-1] in ("yes", "no", "-"):
                assert line[-3] in printed


def test_prose_has_no_numbers():
    """They would be of records, which change: pages have those in tables alone."""
    names = r"CIFAR-10\d?|ResNet18|Tables? \d+|Appendix G\.\d+|\[[^]]*\]\([^)]*\)|`[^`]*`"
    for own in EVERY.values():
        for item in own.items:
            reasons = [rule.reason for rule in item.missing]
            for text in (own.note, item.why, *item.deviations, *reasons):
                assert not re.search(r"\d", re.sub(names, "", text)), text


# Complete


def test_every_table_of_a_paper_is_an_item_of_its_page(paper):
    text = (PAGES / f"{paper.name}.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    tables = {one.table for one in papers.numbers(paper.name)}
    assert tables <= set(headings)
    listed = re.findall(r"^\| \[([^]]*)\]\(#", text, re.MULTILINE)
    assert headings == ["Items", *listed] == ["Items", *(item.name for item in paper.items)]


def test_every_cell_of_a_paper_is_compared_or_said_not_to_be_with_a_reason(paper):
    text = (PAGES / f"{paper.name}.md").read_text()
    for item in paper.items:
        own = section(text, item)
        _, _, missing = own.partition("ompared:\n\n")
        absent = [x for x in rows(missing.partition("\n\n")[0]) if x[-1].isdigit()]
        cells = {items.place(x.cell) for x in items.compared(paper, item, ROOT)}
        number = len(cells) + sum(int(line[-1]) for line in absent)
        assert number == len(items.cells(paper, item)), item.name
        assert all(len(reason) > 2 for *_, reason, _ in absent), item.name


def test_a_cell_is_compared_only_with_its_own_data_set_split_and_method():
    key = {"dataset": "mnist", "beta": "0.1", "algorithm": "fedavg", "metric": "accuracy"}
    ours = readers.Ours(key, 44.4, 6.6, {"epochs": "10"})
    setting = {"partition": "niid_bench", "beta": "0.1", "epochs": "200"}
    cell = papers.Number("Table 1", "mnist", setting, "fedavg", "accuracy", "48.63", "0.1", "%")
    assert readers.agrees(ours, cell)
    others = (
        {"dataset": "cifar10"},
        {"algorithm": "fedlpa"},
        {"metric": "seconds"},
        {"setting": setting | {"beta": "0.3"}},
        {"setting": {"classes": "2"}},
    )
    for other in others:
        assert not readers.agrees(ours, cell._replace(**other))


@pytest.mark.parametrize(
    ("ours", "spread", "theirs", "within"),
    [
        (50.0, 3.0, ("55.0", "4.0"), True),  # the hypotenuse of 3 and 4 is 5
        (49.9, 3.0, ("55.0", "4.0"), False),
        (50.0, None, ("55.0", "4.0"), False),
        (51.0, None, ("55.0", "4.0"), True),
        (51.0, None, ("55.0", ""), None),
        (55.0, None, ("55.0", ""), True),
    ],
)
def test_within_is_one_standard_deviation_of_the_difference(ours, spread, theirs, within):
    cell = papers.Number("Table 1", "mnist", {}, "fedavg", "accuracy", *theirs, "percent")
    assert Comparison(cell, readers.Ours({}, ours, spread, {}), "").within is within


# Read


@pytest.mark.long
def test_the_commands_that_would_run_what_is_missing_are_read(paper):
    for item in paper.items:
        for line in item.commands:
            python, _, program, *arguments = shlex.split(line)
            assert python == "python"
            defaults, check = READ[program.removeprefix("experiments.")]
            chooser = "table" if program.endswith("personalized") else "dataset"
            asked = commands.read(arguments, program, "", defaults, check, chooser)
            assert dataclasses.is_dataclass(asked)
