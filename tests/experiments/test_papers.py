"""The papers' numbers: all are there, exactly, and what our tables and pages quote are those."""

import csv
import re
from decimal import Decimal
from pathlib import Path

import pytest

from experiments.fedfisher_table import table as fedfisher
from experiments.harness import papers
from experiments.harness.figures import label
from experiments.harness.grids import Cell
from experiments.harness.papers import numbers
from experiments.harness.tables import gathered
from experiments.niid_table import table as niid

ROOT = Path(__file__).parents[2]
STUDIES, RESULTS = ROOT / "experiments", ROOT / "experiments/results"
EXTRACTS = ROOT.parent / "shared/papers"
SUMS = {  # rows, sum of the values, sum of the spreads
    ("fedfisher", "Table 1"): (10, "163.4", "0"),
    ("fedfisher", "Table 2"): (96, "4457.48", "224.42"),
    ("fedfisher", "Table 3"): (28, "1508.56", "43.84"),
    ("fedfisher", "Table 4"): (4, "190.32", "15.24"),
    ("fedfisher", "Table 5"): (8, "452.75", "18.44"),
    ("fedfisher", "Table 6"): (3, "93.0", "6.9"),
    ("fedfish", "Table 1"): (21, "3885352700", "0"),
    ("fedfish", "Table 2"): (32, "16348.026", "0"),
    ("fedfish", "Table 3"): (40, "2556.23", "0"),
    ("fedfish", "Table 4"): (88, "1442.987", "0"),
    ("fedfish", "Table 5"): (72, "1085.83", "0"),
    ("fedfish", "Table 6"): (16, "298.61", "0"),
    ("fedlpa", "Table 1"): (216, "7121.09", "65.00"),
    ("fedlpa", "Table 2"): (108, "4109.91", "28.48"),
    ("fedlpa", "Table 3"): (27, "1386.98", "5.73"),
    ("fedlpa", "Table 4"): (12, "707.59", "0"),
    ("fedlpa", "Table 5"): (216, "6137.05", "55.85"),
    ("fedlpa", "Table 6"): (216, "6629.34", "53.16"),
    ("fedlpa", "Table 7"): (216, "6879.84", "67.87"),
    ("fedlpa", "Table 8"): (216, "7105.02", "55.25"),
    ("fedlpa", "Table 9"): (36, "1790.43", "10.39"),
    ("fedlpa", "Table 10"): (120, "1514.71", "7.07"),
    ("fedlpa", "Table 11"): (10, "653.90", "3.72"),
    ("fedlpa", "Table 12"): (7, "840", "0"),
    ("fedlpa", "Figure 4"): (45, "60000", "0"),
    ("fedlpa", "Appendix G.8"): (15, "8326050.991", "0"),
    ("fedlpa", "Appendix G.10"): (7, "173", "0"),
    ("weighted", "Table 1"): (24, "867.09", "45.93"),
    ("weighted", "Table 2"): (36, "3035.28", "12.03"),
    ("weighted", "Table 3"): (15, "931.54", "0"),
}


def lines(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def exact(rows, *columns: str) -> tuple[int | Decimal, ...]:
    return len(rows), *(sum(Decimal(row[name]) for row in rows) for name in columns)


def wanted(*numbers: int | str) -> tuple[int | Decimal, ...]:
    return tuple(map(Decimal, numbers))


def brackets(text: str) -> str | None:
    """Return what stands in brackets at the end of a cell, a star included."""
    found = re.search(r"\(([^)]*)\)$", text.strip())
    return found and found[1]


def cells_of(page: str) -> list[tuple[str, str, str | None]]:
    """Return row, heading and brackets of every cell of the tables over splits on a page."""
    found, headings = [], []
    for line in page.splitlines():
        row, *texts = line.strip("| ").split(" | ")
        if line.startswith("|  |") or line.startswith("| split"):
            headings = [text.strip() for text in line.strip("|").split("|")][1:]
        elif line.startswith(("| β", "| #C", "| 5 clients")):
            found += [(row, *both) for both in zip(headings, map(brackets, texts), strict=True)]
    return found


# All are there


def by_table() -> dict[tuple[str, str], list[papers.Number]]:
    return gathered(((name, one.table), one) for name in papers.NAMES for one in numbers(name))


def test_the_sums_of_the_papers_tables_are_exact():
    found = {
        place: (
            len(own),
            sum(Decimal(one.value) for one in own),
            sum(Decimal(one.spread or 0) for one in own),
        )
        for place, own in by_table().items()
    }
    assert found == {place: wanted(*sums) for place, sums in SUMS.items()}


def test_no_cell_is_there_twice():
    for place, own in by_table().items():
        cells = [(x.dataset, tuple(x.setting.items()), x.algorithm, x.metric) for x in own]
        assert len(set(cells)) == len(cells), place


def test_the_sums_of_fedfishers_tables_of_compression_are_exact():
    """Its Tables 4 and 5 stand on a page, digit for digit."""
    page = (ROOT / "docs/results/compression.md").read_text()
    for name, sums in (
        ("diagonal", (4, "190.32", "15.24")),
        ("K-FAC", (8, "452.75", "18.44")),
    ):
        texts = re.findall(rf"^\| {name}, paper, .*$", page, re.MULTILINE)
        numbers = re.findall(r"(\d+\.\d\d) ± (\d+\.\d\d)", "".join(texts))
        rows = [dict(zip(("value", "spread"), both, strict=True)) for both in numbers]
        assert exact(rows, "value", "spread") == wanted(*sums)


# They agree with what was taken from the papers apart from this


@pytest.mark.parametrize(
    ("name", "extract"),
    [*zip(papers.NAMES, ("fedfisher", "fedlpa", "fedfish", "weighted_fedavg"), strict=True)],
)
def test_the_numbers_agree_byte_for_byte(name, extract):
    if not EXTRACTS.exists():
        pytest.skip(f"needs the numbers of the papers in {EXTRACTS}")
    kept = STUDIES / f"harness/paper_cells/{name}.csv"
    assert kept.read_bytes() == (EXTRACTS / f"{extract}.csv").read_bytes()


# What quotes them


OF_NIID = [
    path.parent for name in ("niid", "fedlpa") for path in RESULTS.glob(f"{name}_*/table.md")
]


@pytest.mark.parametrize("folder", sorted(OF_NIID), ids=lambda path: path.name)
def test_the_stored_tables_of_niid_bench_hold_the_papers_numbers(folder):
    # Variants, which the paper does not have, are labelled in runs only.
    recorded = [row for row in lines(folder / "table.csv") if "@" not in row["algorithm"]]
    (epochs,) = {int(row["epochs"]) for row in recorded}
    (clients,) = set(re.findall(r"(\d+) clients", (folder / "table.md").read_text()))
    paper, names = niid.published(epochs, int(clients)), {}
    for row in recorded:
        cell = Cell(row["dataset"], row["partition"], row["number"])
        names[cell.label, row["algorithm"]] = theirs = paper.get((cell, row["algorithm"]))
        found = row["paper"], row["paper_spread"]
        assert tuple(map(float, filter(None, found))) == (theirs or ())
    shown = {
        (split, heading): text
        for split, heading, text in cells_of((folder / "table.md").read_text())
        if heading != "seconds"
    }
    headings = {"dense": "DENSE", "fedov": "FedOV"}
    for (split, name), theirs in names.items():
        text = shown[split, headings.get(name) or label(name)]
        assert text == (theirs and f"{theirs.accuracy:.1f}"), (split, name)


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("fedfisher_*")), ids=lambda path: path.name)
def test_the_stored_tables_of_fedfisher_hold_the_papers_numbers(folder):
    paper, shown = fedfisher.published(), {}
    for row, heading, text in cells_of((folder / "table.md").read_text()):
        shown.setdefault((row, heading), text)  # the first table is of the merges
    for row in lines(folder / "table.csv"):
        cell = fedfisher.Cell(row["dataset"], int(row["num_clients"]), float(row["alpha"]))
        theirs = paper.get((cell, row["algorithm"]))
        found = row["paper"], row["paper_std"]
        assert tuple(map(float, filter(None, found))) == (theirs or ())
        if "+" not in row["algorithm"]:
            text = shown.get((cell.label, label(row["algorithm"])))
            assert text == (theirs and f"{theirs.accuracy:.1f}")


def test_the_page_on_niid_bench_holds_the_papers_numbers_and_none_of_other_epochs():
    page = (ROOT / "docs/results/niid_bench.md").read_text()
    first, *_ = page.split("<!-- table")
    names = {"FedLPA": "fedlpa", "FedAvg": "fedavg"}
    paper, found = niid.published(10), []
    for split, heading, text in cells_of(first):
        if text is not None:
            kind, number = split.split(" = ")
            partition = {"β": "niid_bench", "#C": "classes_per_client"}[kind]
            theirs = paper[Cell("mnist", partition, number), names[heading]]
            assert text == f"{theirs.accuracy:.1f}", (split, heading)
            found.append(split)
    assert len(found) == 2 * 9


def test_what_compression_costs_here_beside_the_paper_is_what_was_measured():
    page = (ROOT / "docs/results/compression.md").read_text()
    folders = {
        ("K-FAC", "MNIST"): ("compression_reference", "fedfisher_kfac", "paper"),
        ("K-FAC", "CIFAR-10"): ("compression_cifar10", "fedfisher_kfac", "paper"),
        ("diagonal", "MNIST"): ("compression_reference", "fedfisher_diag", "even"),
        ("diagonal", "CIFAR-10"): ("compression_cifar10_diagonal", "fedfisher_diag", "even"),
    }
    for (name, dataset), (folder, algorithm, codec) in folders.items():
        (text,) = re.findall(rf"^\| {name}, here, {dataset} \| (.*) \|$", page, re.MULTILINE)
        measured = {
            row["codec"]: float(row["accuracy"])
            for row in lines(RESULTS / folder / "results.csv")
            if row["algorithm"] == algorithm
        }
        asked = ("none", *(f"{codec}, {bits} bits" for bits in (16, 8, 5)))
        for number, which in zip(text.split(" | "), asked, strict=True):
            assert number == "-" or abs(float(number) - 100 * measured[which]) < 0.0501
