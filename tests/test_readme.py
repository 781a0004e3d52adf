"""What the documentation says holds: its code runs, its tables are those that were measured."""

import csv
import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.long
def test_the_examples_run_and_print_the_numbers_that_stand_under_them(run_page):
    names = run_page(ROOT / "README.md")
    assert names["state"].number == 5
    fj, model, clients, trained = (names[x] for x in ("fj", "model", "clients", "trained"))
    test = fj.Examples(names["test"].inputs, names["test"].targets)
    fedavg = fj.algorithms.fedavg()
    updates = fj.merging.summarize(fedavg, trained, clients, key=jax.random.key(2))
    mean, _, _ = fj.merging.merge(fedavg, names["params"], updates, clients.weights)
    own = fj.metrics.accuracy(model, trained.params, test, stacked=True).mean()
    found = [fj.metrics.accuracy(model, params, test) for params in (names["merged"], mean)]
    better = fj.metrics.accuracy(model, names["better"], test)
    _, text = README.split("It prints ", 1)
    said = re.findall(r"\b0\.\d{3}\b", text)[:4]
    # Other versions of JAX round differently: two of the 360 test images.
    for value, number in zip([*found, own, better], said, strict=True):
        assert abs(float(value) - float(number)) < 0.006


def test_the_readme_can_be_read():
    assert len(README.splitlines()) <= 150


def test_each_table_is_the_one_of_its_experiment():
    text = "\n\n".join(page.read_text() for page in PAGES) + "\n\n"
    tables = re.findall(r"<!-- table: (\S+) -->\n\n(.*?)\n\n", text, re.DOTALL)
    assert len(tables) >= 5
    for folder, table in tables:
        found = [page.read_text() for page in (ROOT / folder).glob("*.md")]
        assert any(table in text for text in found), folder


NIID = {
    "niid_mnist": ("fedlpa", "fedlpa_ea", "fedfisher_kfac", "fedavg"),
    "niid_confirmation": ("fedlpa", "fedfisher_kfac", "regmean", "fedfisher_sequential"),
}


def test_the_tables_of_niid_bench_hold_the_means_that_were_measured():
    text = (ROOT / "docs/accuracy.md").read_text()
    rows = re.findall(r"^\| (β|#C) = (\S+) \|(.*)\|$", text, re.MULTILINE)
    assert len(rows) >= 9 * len(NIID)  # CIFAR-10's come last
    for place, (folder, algorithms) in enumerate(NIID.items()):
        with open(ROOT / "experiments/results" / folder / "table.csv", newline="") as file:
            measured = {
                (row["partition"], row["number"], row["algorithm"]): float(row["mean"] or "nan")
                for row in csv.DictReader(file)
            }
        for kind, number, cells in rows[9 * place :][:9]:
            partition = {"β": "niid_bench", "#C": "classes_per_client"}[kind]
            for algorithm, cell in zip(algorithms, cells.split("|"), strict=True):
                mean = measured[partition, number, algorithm]
                assert abs(float(cell.split()[0]) - mean) < 0.0501, (kind, number, algorithm)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_file_that_it_names_exists(page):
    text = page.read_text()
    names = [page.parent / name for name in re.findall(r"\]\((?!http|#)([^)#]+)", text)]
    names += [
        ROOT / name for name in re.findall(r"`((?:tests|notebooks|fisherjax|docs)/[\w/.]+)`", text)
    ]
    for name in names:
        assert name.exists() or name.name == "NAME.py", name


def test_each_page_is_reached_from_the_readme():
    linked = re.findall(r"\]\((?!http)(\S+?)\)", README)
    assert all(str(page.relative_to(ROOT)) in linked for page in PAGES[1:])
