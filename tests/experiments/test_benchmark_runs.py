"""The benchmark's command: what it refuses, and tiny runs of every suite."""

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.benchmark import __main__ as command
from experiments.benchmark import config, floors, peers, report

SERVER = ["--models", "lenet", "--num-clients", "2", "--num-examples", "24", "--adam-steps", "2"]
MATMUL = ["--matmul-size", "16"]
TINY = {
    "train": ["--models", "lenet", "--num-clients", "2", "--num-examples", "24", *MATMUL],
    "fisher": ["--models", "lenet", "--num-examples", "16", *MATMUL],
    "server": SERVER,
    "clients": ["--num-clients", "3", "--num-examples", "24", "--uploads", "3"],
    "pipeline": ["--dataset", "digits", "--epochs", "1"],
    "pfl": ["--num-clients", "2", "--num-examples", "12", "--batch-size", "3", *MATMUL],
    "rounds": ["--num-clients", "2", "--num-examples", "12", "--batch-size", "3"],
    "population": ["--num-clients", "3", "--num-examples", "12", "--batch-size", "4"],
    "growth": ["--num-clients", "2", "3", "--widths", "8", "16", "--layers", "2"],
    "devices": ["--models", "lenet", "--num-clients", "2", "--num-examples", "12"],
}


def tiny(suite: str, out: Path) -> list[str]:
    out_and_how = ["--out", str(out), "--repeats", "1", "--data", "synthetic"]
    return ["--suite", suite, *TINY[suite], *out_and_how]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--suite", "train", "--adam-steps", "9"], "--adam-steps means nothing to --suite train"),
        (["--suite", "fisher", "--num-examples", "0"], "--num-examples is 0, expected"),
        (["--suite", "train", "--num-clients", "5", "-1"], "--num-clients is 5 -1, expected"),
        (["--suite", "train", "--models", "cnn", "cnn"], "--models is cnn cnn, expected each"),
        (["--suite", "pfl", "--chunks", "51"], "--chunks is 51, expected at most 50"),
        (["--suite", "train", "--models"], "--models is empty, expected at least one"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tmp_path, capsys, arguments, said):
    assert command.main([*arguments, "--out", str(tmp_path / "out")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_devices_that_do_not_divide_the_clients_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(config.jax, "device_count", lambda: 2)
    assert command.main(["--suite", "devices", "--num-clients", "5", "--out", str(tmp_path)]) == 1
    assert "--num-clients is 5, expected multiples of 2, the" in capsys.readouterr().err


def test_an_unknown_suite_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--suite", "speed", "--out", str(tmp_path)])
    assert stop.value.code != 0
    assert "fisher" in capsys.readouterr().err


def test_a_folder_with_results_is_refused(tmp_path, capsys):
    (tmp_path / report.JSON).write_text("{}")
    assert command.main(tiny("fisher", tmp_path)) == 1
    assert "holds results already" in capsys.readouterr().err


def test_a_data_set_that_is_not_prepared_is_refused(tmp_path, capsys):
    options = ["--suite", "pipeline", "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    assert command.main(options) == 1
    assert "mnist" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["torch", "nngeometry"])
def test_a_missing_peer_is_named_with_its_remedy(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    notes = []
    assert not peers.are_there(notes.append, "json", package)
    [said] = notes
    assert said.startswith(package)
    assert "pip install 'fisherjax[bench]'" in said


def test_an_interrupted_run_does_not_promise_that_it_continues(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_run", interrupt)
    assert command.main(tiny("fisher", tmp_path)) == 130
    assert "the same command" not in capsys.readouterr().out


def test_floors_refuse_what_they_cannot_measure(capsys):
    assert floors.main(["--repeats", "0"]) == 1
    assert "--repeats is 0, expected 1 or more" in capsys.readouterr().err


def check_files(out: Path) -> dict:
    with open(out / report.CSV, newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == report.Row._fields
    assert all(np.isfinite(float(row["value"])) for row in rows)
    assert (out / report.PLOT).read_bytes().startswith(b"\x89PNG")
    return json.loads((out / report.JSON).read_text())


@pytest.mark.slow
@pytest.mark.parametrize("suite", TINY)
def test_a_tiny_run_leaves_complete_files(tmp_path, suite):
    assert command.main(tiny(suite, tmp_path)) == 0
    document = check_files(tmp_path)
    cases = {row["case"] for row in document["results"]}
    assert cases
    assert cases == {row["case"] for row in document["results"] if row["metric"] == "median"}


@pytest.mark.slow
def test_a_missing_peer_is_reported_with_its_remedy_and_the_rest_runs(
    tmp_path, capsys, monkeypatch
):
    # Not torch: tyro imports it wherever sys.modules names it.
    monkeypatch.setitem(sys.modules, "nngeometry", None)
    assert command.main(tiny("fisher", tmp_path)) == 0
    assert "pip install 'fisherjax[bench]'" in capsys.readouterr().out
    document = check_files(tmp_path)
    assert "pip install 'fisherjax[bench]'" in document["notes"][0]
    assert not any(row["case"] == "nngeometry" for row in document["results"])


@pytest.mark.slow
def test_both_fishers_agree_with_nngeometry(tmp_path):
    pytest.importorskip("nngeometry")
    assert command.main(tiny("fisher", tmp_path)) == 0
    results = check_files(tmp_path)["results"]
    errors = [row["value"] for row in results if row["metric"] == "relative_error"]
    assert len(errors) == 2
    assert max(errors) < 1e-5
