"""The one-shot table: its cells, its resumption, and the paper's numbers beside ours."""

import csv
import dataclasses
import json
import shlex
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from experiments.fedfisher_table import table as fedfisher
from experiments.harness import records
from experiments.harness.grid_runs import WALL
from experiments.harness.grids import Cell, Grid
from experiments.harness.records import ONE_SHOT, Row
from experiments.harness.tables import Table
from experiments.niid_table import __main__ as niid_table
from experiments.niid_table import table as niid
from experiments.niid_table.table import Measured
from experiments.one_shot import __main__ as one_shot

TINY = [
    *("--datasets", "digits", "--num-clients", "3", "--betas", "0.5", "--classes", "2"),
    *("--epochs", "1", "--seeds", "0", "1", "--algorithms", "fedavg", "fednova"),
]
PAPER_AT_10 = {"0.01": 32.2, "0.05": 60.6, "0.1": 78.07, "0.3": 85.6, "0.5": 91.77, "1": 94.7}


def read(folder: Path) -> list[Row]:
    return records.read_rows(folder / records.RESULTS, ONE_SHOT)


def is_accuracy(row: Row, algorithm: str) -> bool:
    return (row.algorithm, row.metric) == (algorithm, "accuracy")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("grid")
    assert niid_table.main([*TINY, "--out", str(out)]) == 0
    return out


def rows_of(cell: Cell, seed: int, accuracy: float) -> list[Row]:
    def row(algorithm, value, seconds=None, client=None, metric="accuracy"):
        more = {"partition_seed": seed, "client": client, "seconds": seconds}
        return Row(algorithm, seed, 1, "test", metric, value, **more)

    return [
        *[row("local", 0.1, 50.0, client) for client in range(2)],
        row("fedavg", accuracy, 1.0),
        row("fedprox", accuracy, 40.0),
        row("all", 100.0, metric=WALL),
    ]


@pytest.mark.long
def test_every_cell_and_seed_leaves_its_run_and_its_label_table(finished):
    folders = {path.name for path in (finished / "digits").iterdir()}
    cells = ("niid_bench0.5", "classes_per_client2")
    assert folders == {f"{cell}-seed{seed}" for cell in cells for seed in (0, 1)}
    for folder in (finished / "digits").iterdir():
        names = {path.name for path in folder.iterdir()}
        assert names == {"config.json", "results.csv", "label_counts.csv"}


def test_the_table_averages_the_runs(finished):
    with open(finished / "table.csv", newline="") as file:
        table = {(x["partition"], x["algorithm"]): x for x in csv.DictReader(file)}
    folder = finished / "digits"
    rows = [read(folder / f"niid_bench0.5-seed{seed}") for seed in (0, 1)]
    values = [100 * row.value for unit in rows for row in unit if is_accuracy(row, "fedavg")]
    line = table["niid_bench", "fedavg"]
    assert np.isclose(float(line["mean"]), np.mean(values), atol=0.006)
    assert np.isclose(float(line["std"]), np.std(values, ddof=1), atol=0.006)
    assert line["runs"] == "2"
    text = (finished / "table.md").read_text()
    assert f"| β = 0.5 | - | {np.mean(values):.1f}" not in text  # DENSE comes last
    assert f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}" in text


@pytest.mark.long
def test_a_finished_grid_computes_nothing_and_an_unfinished_one_what_is_missing(
    finished, compilations
):
    before = (finished / "table.csv").read_text()
    with compilations() as count:
        assert niid_table.main([*TINY, "--out", str(finished)]) == 0
    assert count() == 0
    lost = finished / "digits" / "classes_per_client2-seed1"
    kept = finished / "digits" / "niid_bench0.5-seed0" / records.RESULTS
    old, old_kept = read(lost), kept.read_bytes()
    (lost / records.RESULTS).unlink()
    assert niid_table.main([*TINY, "--out", str(finished)]) == 0
    assert kept.read_bytes() == old_kept
    values = [[r.value for r in rows if r.metric == "accuracy"] for rows in (old, read(lost))]
    assert values[0] == values[1]
    assert (finished / "table.csv").read_text() == before
    # Who asks for less gets the table of all, and nothing is computed.
    with compilations() as count:
        assert niid_table.main([*TINY, "--seeds", "1", "--out", str(finished)]) == 0
    assert count() == 0
    assert (finished / "table.csv").read_text() == before


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory):
    out = tmp_path_factory.mktemp("exchanged")
    words = [*TINY[:-5], "--seeds", "0", "--algorithms", "fedavg", "--out", str(out)]
    assert niid_table.main([*words, "--calibrate", "analytic_head", "--exchanges", "2"]) == 0
    return out


@pytest.mark.slow
def test_exchanges_without_training_are_columns_of_their_last_round(exchanged):
    with open(exchanged / "table.csv", newline="") as file:
        table = {(x["partition"], x["algorithm"]): x for x in csv.DictReader(file)}
    names = {"fedavg": 1, "fedavg+analytic_head": 2, "fedavg+natural_gradient": 3}
    assert {name for _, name in table} == set(names)
    rows = read(exchanged / "digits" / "niid_bench0.5-seed0")
    for name, number in names.items():
        (value,) = (r.value for r in rows if is_accuracy(r, name) and r.round == number)
        assert np.isclose(float(table["niid_bench", name]["mean"]), 100 * value, atol=0.006)
    text = (exchanged / "table.md").read_text()
    assert "| FedAvg + analytic head | FedAvg + natural gradient | seconds |" in text
    assert "by exchanges without training" in text


@pytest.mark.long
def test_what_follows_a_merge_is_what_one_shot_computes(exchanged, tmp_path):
    """The same split, seed and options: the same numbers, by the other command."""
    ran = exchanged / "digits" / "niid_bench0.5-seed0"
    command = json.loads((ran / records.CONFIG).read_text())["command"]
    words = shlex.split(command)[3:]
    words[words.index("--out") + 1] = str(tmp_path)
    assert one_shot.main(words) == 0
    found, expected = (
        [(r.algorithm, r.round, r.value) for r in read(folder) if r.metric == "accuracy"]
        for folder in (tmp_path, ran)
    )
    assert found == expected


def test_a_grid_is_refused_while_somebody_is_at_work_in_the_folder_of_a_run(tmp_path, capsys):
    run = tmp_path / "digits" / "niid_bench0.5-seed1"
    with records.folder(run):
        assert niid_table.main([*TINY, "--out", str(tmp_path)]) == 1
    assert f"another process is writing to --out {run}:" in capsys.readouterr().err


def test_the_seed_sets_the_split():
    (first, second) = (
        Grid().configuration(Cell("mnist", "niid_bench", "0.1"), seed) for seed in (0, 1)
    )
    assert (first.partition_seeds, first.seeds) == ((0,), (0,))
    assert (second.partition_seeds, second.seeds) == ((1,), (1,))


def test_cells_differ_in_their_split_only():
    grid = Grid()
    asked = [grid.configuration(cell, 0) for cell in grid.cells("mnist")]
    split = {"partition": "iid", "beta": 1.0, "classes_per_client": 1}
    plain = {
        dataclasses.replace(own, data=dataclasses.replace(own.data, **split), out=None)
        for own in asked
    }
    assert len(plain) == 1
    assert len({own.out for own in asked}) == len(asked) == 9


def test_the_papers_numbers_are_those_of_its_tables():
    paper = niid.published(10)
    for number, accuracy in PAPER_AT_10.items():
        assert paper[Cell("mnist", "niid_bench", number), "fedlpa"].accuracy == accuracy
    assert paper[Cell("cifar10", "classes_per_client", "2"), "fedlpa"] == (20.40, 0.03)
    assert paper[Cell("mnist", "niid_bench", "0.05"), "fednova"] == (20.80, 0.13)
    at_200 = niid.published(200)
    fedov = at_200.pop((Cell("mnist", "classes_per_client", "2"), "fedov"))
    assert fedov.accuracy == 64.5
    assert len(at_200) == 4 * (9 + 1) * 6
    for clients, accuracy in ((5, 59.27), (20, 57.37), (50, 57.03)):
        paper_of = niid.published(200, clients)
        assert paper_of[Cell("fashion_mnist", "niid_bench", "0.1"), "fedlpa"].accuracy == accuracy
    assert all(0 < theirs.accuracy < 100 for theirs in paper.values())
    assert at_200[Cell("mnist", "classes_per_client", "2"), "fedlpa"].accuracy == 69.63
    assert at_200[Cell("svhn_cropped", "niid_bench", "1"), "dense"].accuracy == 54.40


@pytest.mark.parametrize("epochs", [10, 20, 50, 100, 200])
def test_the_paper_has_every_row_of_the_default_grid_after_so_many_epochs(epochs):
    paper = niid.published(epochs)
    for dataset in Grid().datasets:
        for cell in Grid().cells(dataset):
            for name in ("fedlpa", "fednova", "scaffold", "fedavg", "fedprox", "dense"):
                assert (cell, name) in paper


def test_nothing_stands_in_for_what_the_paper_does_not_have():
    cell = Cell("mnist", "niid_bench", "0.1")
    own = {cell: niid.measured(rows_of(cell, 0, 0.5))}
    for epochs, clients, brackets in ((20, 10, True), (30, 10, False), (20, 5, False)):
        (line,) = niid.table("", own, ("fedavg",), epochs, clients).lines
        assert any("(" in text for text in line) == brackets
        said = niid.footnote((), ("fedavg",), epochs, 1, "last", clients)
        none = f"the paper has no numbers of {clients} clients after {epochs} epochs"
        assert (none in said) != brackets
        (found,) = (
            row
            for row in csv.DictReader(niid.as_csv(own, ("fedavg",), epochs, clients).splitlines())
            if row["algorithm"] == "fedavg"
        )
        expected = ("46.63", "0.23") if brackets else ("", "")
        assert (found["paper"], found["paper_spread"]) == expected


def test_theirs_after_as_many_epochs_stand_in_brackets():
    cell = Cell("mnist", "niid_bench", "0.1")
    own = niid.measured([r for s in (0, 1) for r in rows_of(cell, s, 0.5 + s / 10)])
    table = niid.table("", {cell: own}, ("fedavg", "fedprox"), epochs=10)
    (line,) = table.lines
    shown = dict(zip(table.headings, line, strict=True))
    assert shown["FedAvg"] == "55.0 ± 7.1 (43.8)"
    assert shown["FedProx"] == "55.0 ± 7.1 (44.3)"
    assert shown["DENSE"] == "- (65.5)"
    assert shown["seconds"] == "100"


def test_only_training_grows_with_the_epochs():
    cell = Cell("mnist", "niid_bench", "0.1")
    own = niid.measured(rows_of(cell, 0, 0.5))
    assert (own.seconds, own.training) == (100.0, 90.0)  # of the clients and of fedprox
    said = niid.extrapolation({cell: own}, epochs=10, num_seeds=3)
    assert f"{(10 + 20 * 90) / 3600:.1f} h a seed" in said
    assert f"{3 * (10 + 20 * 90) / 3600:.1f} h for 3" in said


def test_nothing_computed_is_a_table_of_theirs():
    cell = Cell("mnist", "niid_bench", "0.1")
    (line,) = niid.table("", {cell: niid.measured([])}, ("fedlpa",), epochs=10).lines
    assert line == ["β = 0.1", "- (78.1)", "- (65.5)", "-"]
    assert niid.extrapolation({cell: Measured({}, None, None)}, 10, 3) == ""


def test_a_column_of_theirs_alone_is_named_where_it_stands():
    for headings, named in ((("FedAvg", "DENSE", "FedOV"), True), (("FedAvg", "DENSE"), False)):
        said = niid.footnote([Table("", headings, [])], ("fedavg", "dense"), 10, 3, "last")
        assert ("FedOV" in said) == named


def test_a_table_of_one_seed_promises_no_deviation():
    for seeds, deviation in ((1, False), (3, True)):
        said = (
            niid.footnote((), ("dense",), 10, seeds, "last"),
            fedfisher.footnote(fedfisher.Grid(seeds=tuple(range(seeds)))),
        )
        assert all(("deviation over" in own) == deviation for own in said)


def test_a_table_whose_students_were_chosen_on_test_data_says_so():
    told = partial(niid.footnote, (), ("dense",), 10, 3)
    said = {how: told(how) for how in ("last", "validation", "test")}
    assert "ours are not chosen" in said["last"]
    assert "training images" in said["validation"]
    assert "not chosen" not in said["validation"]
    assert "on the test data of several candidates, so are ours" in said["test"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--datasets minst", "--datasets is 'minst', did you mean 'mnist'"),
        ("--datasets digits --betas 0 --classes", "--beta is 0.0, expected a number above 0"),
        ("--datasets digits --classes 11", "--classes-per-client is 11, expected 1 to the 10"),
        ("--datasets digits --betas --classes", "no cells"),
        ("--datasets digits --algorithms fedlap", "did you mean 'fedlpa'"),
        ("--datasets digits --fedprox.mu -1", "--fedprox.mu is -1.0"),
        ("--datasets digits --seeds 1 1", "expected each only once"),
        ("--datasets digits --exchanges -1", "--exchanges is -1, expected 0 or more"),
        (
            "--datasets digits --calibrate ccvr ccvr",
            "expected each only once",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_before_training(tmp_path, capsys, words, message):
    assert niid_table.main([*words.split(), "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("results.csv"))
