"""The papers' numbers: all are there, exactly, and what our tables and pages quote are those."""

import csv
import re
from decimal import Decimal
from pathlib import Path

import pytest

from experiments.fedfisher_table import table as fedfisher
from experiments.harness.figures import label
from experiments.harness.grids import Cell
from experiments.niid_table import table as niid

ROOT = Path(__file__).parents[2]
STUDIES, RESULTS = ROOT / "experiments", ROOT / "experiments/results"
EXTRACTS = ROOT.parent / "shared/papers"
TABLES = {  # of FedLPA: after how many epochs; rows, sum of the accuracies, sum of the spreads
    "Table 1": (200, 216, "7121.09", "65.00"),
    "Table 5": (10, 216, "6137.05", "55.85"),
    "Table 6": (20, 216, "6629.34", "53.16"),
    "Table 7": (50, 216, "6879.84", "67.87"),
    "Table 8": (100, 216, "7105.02", "55.25"),
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


@pytest.mark.parametrize("name", TABLES)
def test_the_sums_of_fedlpas_tables_are_exact(name):
    epochs, *sums = TABLES[name]
    rows = [
        row
        for row in lines(STUDIES / "niid_table/fedlpa_paper.csv")
        if (row["epochs"], row["algorithm"] != "fedov") == (str(epochs), True)
    ]
    assert exact(rows, "accuracy", "spread") == wanted(*sums)


def test_the_sums_of_fedlpas_table_with_fedov_are_exact():
    """Its Table 11 has FedOV and FedLPA after 10 to 200 epochs; FedLPA's repeat the others."""
    own = ("mnist", "classes_per_client", "2")
    rows = [
        row
        for row in lines(STUDIES / "niid_table/fedlpa_paper.csv")
        if tuple(row.values())[:3] == own and row["algorithm"] in ("fedlpa", "fedov")
    ]
    assert exact(rows, "accuracy", "spread") == wanted(10, "653.90", "3.72")


def test_no_cell_of_fedlpa_is_there_twice():
    rows = [tuple(row.values())[:5] for row in lines(STUDIES / "niid_table/fedlpa_paper.csv")]
    assert len(set(rows)) == len(rows) == 5 * 216 + 5


def test_the_sums_of_fedfishers_table_are_exact():
    rows = lines(STUDIES / "fedfisher_table/fedfisher_paper.csv")
    assert exact(rows, "accuracy", "deviation") == wanted(96, "4457.48", "224.42")


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


def extracted(name: str, tables: tuple[str, ...]) -> list[tuple[dict[str, str], dict[str, str]]]:
    """Return the rows of some tables and the settings of each."""
    if not EXTRACTS.exists():
        pytest.skip(f"needs the numbers of the papers in {EXTRACTS}")
    rows = [row for row in lines(EXTRACTS / name) if row["table"] in tables]
    return [(row, dict(one.split("=") for one in row["setting"].split(";"))) for row in rows]


def test_fedlpas_numbers_agree_row_by_row():
    expected = {}
    for row, how in extracted("fedlpa.csv", (*TABLES, "Table 11")):
        number = how.get("beta") or how["classes"]
        cell = row["dataset"], how["partition"], number, how["epochs"], row["algorithm"]
        expected[cell] = row["value"], row["spread"]
    found = {
        tuple(row.values())[:5]: (row["accuracy"], row["spread"])
        for row in lines(STUDIES / "niid_table/fedlpa_paper.csv")
    }
    assert found == expected


def test_fedfishers_numbers_agree_row_by_row():
    expected = {
        (row["dataset"], how["alpha"], row["algorithm"]): (row["value"], row["spread"])
        for row, how in extracted("fedfisher.csv", ("Table 2",))
    }
    found = {
        (row["dataset"], row["alpha"], row["algorithm"]): (row["accuracy"], row["deviation"])
        for row in lines(STUDIES / "fedfisher_table/fedfisher_paper.csv")
    }
    assert found == expected


# What quotes them


@pytest.mark.parametrize("folder", sorted(RESULTS.glob("niid_*")), ids=lambda path: path.name)
def test_the_stored_tables_of_niid_bench_hold_the_papers_numbers(folder):
    recorded = lines(folder / "table.csv")
    (epochs,) = {int(row["epochs"]) for row in recorded}
    paper, names = niid.published(epochs), {}
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
            text = shown[cell.label, label(row["algorithm"])]
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
