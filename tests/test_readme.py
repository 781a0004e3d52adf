"""The README's code runs, and its tables are those that the experiments wrote."""

import csv
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_examples_run_and_beat_the_weighted_mean():
    names: dict = {}
    for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(code, names)
    fj, model, federation = names["fj"], names["model"], names["federation"]
    fedavg = fj.algorithms.fedavg()
    updates = fj.algorithms.Update({"params": names["trained"].params}, fedavg.kind)
    mean, _, _ = fj.merging.merge(fedavg, names["params"], updates, federation.weights)
    test = fj.Examples(names["test"].inputs, names["test"].targets)
    merged = fj.metrics.accuracy(model, names["merged"], test)
    assert names["state"].number == 5
    assert merged > fj.metrics.accuracy(model, mean, test) + 0.1


def test_each_table_is_the_one_of_its_experiment():
    tables = re.findall(r"<!-- table: (\S+) -->\n\n(.*?)\n\n", README + "\n\n", re.DOTALL)
    assert tables
    for folder, table in tables:
        assert table in (ROOT / folder / "summary.md").read_text(), folder


def test_the_table_of_fedlpa_holds_the_means_that_were_measured():
    with open(ROOT / "experiments/results/niid_mnist/table.csv", newline="") as file:
        measured = {
            (row["partition"], row["number"], row["algorithm"]): float(row["mean"] or "nan")
            for row in csv.DictReader(file)
        }
    rows = re.findall(r"^\| (β|#C) = (\S+) \|(.*)\|$", README, re.MULTILINE)
    assert len(rows) == 9
    for kind, number, cells in rows:
        partition = {"β": "niid_bench", "#C": "classes_per_client"}[kind]
        algorithms = ("fedlpa", "fedlpa_ea", "fedfisher_kfac", "fedavg")
        for algorithm, cell in zip(algorithms, cells.split("|"), strict=True):
            mean = measured[partition, number, algorithm]
            assert abs(float(cell.split()[0]) - mean) < 0.0501, (kind, number, algorithm)


def test_each_file_that_it_names_exists():
    names = re.findall(r"\]\((?!http)(\S+?)\)", README)
    names += re.findall(r"`((?:tests|notebooks|fisherjax)/[\w/.]+)`", README)
    assert names
    for name in names:
        assert (ROOT / name).exists(), name
