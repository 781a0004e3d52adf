"""The command end to end, on digits and small settings."""

import csv
import dataclasses
import json
import os
import re
import shlex
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from experiments.harness import commands, folders, one_round, records, steps
from experiments.harness.config import Data, Merging, OneShot, Training
from experiments.harness.records import ONE_SHOT, Row
from experiments.one_shot import __main__ as one_shot
from tests.harness.test_folders import own_choices

SMALL = OneShot(
    Data(num_clients=3, alpha=1.0),
    Training(learning_rate=0.1, momentum=0.0, batch_size=64),
    Merging(("fedavg", "fedfisher_diag", "fisher_merge")),
    epochs=2,
    partition_seeds=(0, 1),
    seeds=(0,),
)


def run(asked: OneShot, **changes: object) -> int:
    asked = dataclasses.replace(asked, **changes)
    return one_shot.main(shlex.split(commands.write(asked, one_shot.PROGRAM))[3:])


def results(out: Path) -> list[Row]:
    return records.read_rows(out / records.RESULTS, ONE_SHOT)


def without_time(rows: list[Row]) -> list[Row]:
    timed = {steps.SERVER}
    return [row._replace(seconds=None) for row in rows if row.metric not in timed]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert run(SMALL, out=out) == 0
    return out


@pytest.mark.long
def test_a_run_leaves_one_row_for_each_number_and_all_five_files(whole):
    rows = results(whole)
    names = [(row.algorithm, row.partition_seed, row.client) for row in without_time(rows)]
    merged = ("ensemble", *SMALL.merging.algorithms)
    expected = [("central", None, None)]
    expected += [("local", split, client) for split in (0, 1) for client in range(3)]
    expected += [(name, split, None) for split in (0, 1) for name in merged]
    assert sorted(names, key=str) == sorted(expected, key=str)
    assert all(0 <= row.value <= 1 for row in without_time(rows))
    server = [row.algorithm for row in rows if row.metric == steps.SERVER]
    assert server == 2 * list(SMALL.merging.algorithms)
    files = {path.name for path in whole.iterdir()}
    assert files == {"config.json", "results.csv", "label_counts.csv", "summary.md", "accuracy.png"}


def test_a_finished_run_prints_its_table_again_and_computes_nothing(whole, capsys, compilations):
    before = (whole / "results.csv").read_text()
    with compilations() as count:
        assert run(SMALL, out=whole) == 0
    assert count() == 0
    assert (whole / "results.csv").read_text() == before
    assert "fedfisher_diag" in capsys.readouterr().out


@pytest.mark.long
def test_an_interrupted_run_continues_to_the_same_numbers(whole, tmp_path, capsys):
    rows = results(whole)
    kept = [row for row in rows if row.partition_seed == 0]
    folders.write_config(tmp_path, dataclasses.replace(SMALL, out=tmp_path), one_shot.PROGRAM)
    records.write_rows(tmp_path / "results.csv", kept, ONE_SHOT)
    assert run(SMALL, out=tmp_path) == 0
    assert "1 of 3 runs are done" in " ".join(capsys.readouterr().out.split())
    continued = results(tmp_path)
    assert continued[: len(kept)] == kept
    assert sorted(map(str, without_time(continued))) == sorted(map(str, without_time(rows)))


def test_an_interrupt_keeps_what_was_finished(tmp_path, capsys):
    asked = dataclasses.replace(SMALL, seeds=tuple(range(300)), epochs=1, out=tmp_path)
    ended, handler = threading.Event(), signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupt():
        while not (tmp_path / "results.csv").exists():
            if ended.wait(0.01):
                return
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert run(asked) == 130
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, handler)
    rows = results(tmp_path)
    done = {row.unit for row in rows}
    assert 0 < len(done) < len(one_round.units(asked))
    per_unit = 3 + 1 + 2 * len(asked.merging.algorithms)
    assert len(rows) == sum(1 if split is None else per_unit for split, _ in done)
    assert commands.write(asked, one_shot.PROGRAM) in capsys.readouterr().out
    with records.folder(tmp_path):  # and lets the folder go
        pass


@pytest.mark.long
def test_a_run_leaves_its_label_table_and_its_curves_and_no_ceiling(tmp_path):
    data = Data(num_clients=10, partition="classes_per_client")
    few = Merging(("fedavg",))
    asked = dataclasses.replace(SMALL, data=data, merging=few, partition_seeds=(0,), epochs=1)
    assert run(asked, then_rounds=1, central=False, out=tmp_path) == 0
    with open(tmp_path / "label_counts.csv", newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == ["partition_seed", "client", *map(str, range(10))]
    counts = np.array(table[1:], int)[:, 2:]
    assert counts.shape == (10, 10)
    assert (np.count_nonzero(counts, axis=1) == 2).all()
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")
    assert "| fedavg |" in (tmp_path / "summary.md").read_text().split("after each round")[1]
    assert "central" not in {row.algorithm for row in results(tmp_path)}


@pytest.mark.long
def test_a_diverged_client_is_named_and_stops_the_run(tmp_path, capsys):
    fast = dataclasses.replace(SMALL.training, learning_rate=1e6)
    assert run(SMALL, training=fast, out=tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: client ")
    assert "--learning-rate (now 1e+06)" in error
    assert not (tmp_path / "results.csv").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model lenet", "at least 16 x 16 pixels"),
        ("--dataset minst", "did you mean 'mnist'"),
        ("--num-clients 2000", "expected 1 to 1437"),
        ("--algorithms fedfisher_full --num-clients 20", "8832 x 8832 numbers"),
        ("--partition classes_per_client --classes-per-client 11", "is 11, expected 1 to the 10"),
        ("--partition niid_bench --min-size 300", "ask for min_size up to 287"),
        ("--partition niid_bench --beta 0", "--beta is 0.0, expected a number above 0"),
        ("--algorithms fedprox --fedprox.mu -1", "--fedprox.mu is -1.0, expected 0 or more"),
        ("--fedlpa-ea.damping -1", "--fedlpa-ea.damping is -1.0, expected 0 or more"),
        ("--algorithms fedlpa --fedlpa.batch-size 0", "batch_size is 0; expected an integer"),
        ("--algorithms regmean --regmean.shrink 1", "shrink is 1.0; expected 0 <= shrink < 1"),
        ("--calibrate running_statistics", "This network has no running moments"),
        ("--dataset mnist --data-dir nowhere", "'nowhere' does not exist"),
    ],
)
def test_what_cannot_be_run_is_refused_before_training(tmp_path, capsys, words, message):
    assert one_shot.main([*words.split(), "--out", str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_shows_the_defaults_of_the_data_set(capsys):
    with pytest.raises(SystemExit) as stop:
        one_shot.main(["--dataset", "cifar10", "--help"])
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: cifar10)" in shown
    assert "(default: cnn)" in shown


@pytest.mark.long
def test_the_file_of_the_page_brings_a_method_a_network_and_data(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/how_to/own_files.md").read_text()
    section = page[page.index("## Bring your own") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    command = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    (tmp_path / "my_file.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", one_shot.PROGRAM]
    with own_choices():
        assert one_shot.main(words[3:]) == 0
    out = tmp_path / "runs/mine"
    found = results(out)
    assert {"fedavg", "median", "median@mean_share=0.5"} < {row.algorithm for row in found}
    # What config.json prints runs again, as after another process has forgotten the file.
    again = shlex.split(json.loads((out / "config.json").read_text())["command"])[3:]
    (out / "results.csv").unlink()
    with own_choices():
        assert one_shot.main(again) == 0
    assert without_time(results(out)) == without_time(found)
