"""Rounds of the command whose clients stay on disk: those in memory, and what may go wrong."""

import csv
import subprocess
import sys

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.federated import plan, runs, streamed, tasks
from experiments.federated.__main__ import main
from experiments.harness import commands, config, limits
from tests.test_by_client import record, write

NUMBER = 11
SMALL = (
    *("--dataset", "emnist", "--model", "mlp", "--num-clients", "6", "--cohort", "3"),
    *("--validation-clients", "2", "--held-out-clients", "3", "--rounds", "4"),
    *("--local-epochs", "1", "--client-examples", "9", "--batch-size", "4", "--eval-every", "1"),
    *("--learning-rate", "0.1", "--server-optimizer", "none", "--server-learning-rate", "1"),
    *("--algorithms", "fedavg", "fedfish"),
)


@pytest.fixture(scope="module")
def writers(tmp_path_factory):
    """Eleven writers of EMNIST with 3 to 8 images."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    images = {
        f"f{k:04}": [
            record(pixels=random.random(784).tolist(), label=int(random.integers(62)))
            for _ in range(3 + k % 6)
        ]
        for k in range(NUMBER)
    }
    write(folder / "emnist_all.sqlite", images, "all_train")
    return folder


def rows_of(folder):
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def same_rows(one, other):
    assert len(one) == len(other) > 0
    for row, its in zip(one, other, strict=True):
        assert float(row.pop("value")) == pytest.approx(float(its.pop("value")), abs=1e-6), its
        assert row == its


@pytest.mark.slow
def test_a_run_on_disk_is_the_run_in_memory(writers, tmp_path):
    """All records are the same, on training, validation and held-out clients and in traffic."""
    for name, more in (("memory", []), ("disk", ["--stream"])):
        words = [*SMALL, "--data-dir", str(writers), "--out", str(tmp_path / name), *more]
        assert main(words) == 0
    same_rows(*(rows_of(tmp_path / name) for name in ("memory", "disk")))
    assert "emnist" in (tmp_path / "disk/summary.md").read_text()
    pictures = ({p.name for p in (tmp_path / name).glob("*.png")} for name in ("memory", "disk"))
    assert len({*map(frozenset, pictures)}) == 1


def asked(folder, out, *more):
    words = [*SMALL, "--stream", "--data-dir", str(folder), "--out", str(out), *more]
    return commands.read(words, "", "", config.federated, limits.check_federated)


def one_unit(folder, out, task=None):
    """Run FedAvg, whose rows are returned with what the run warned of."""
    task, said = task or tasks.rounds(asked(folder, out, "--algorithms", "fedavg")), []
    method = runs.prepare(task)["fedavg", 1]
    step = plan.Step(plan.Unit("fedavg", 1, 1.0, 0), 4)
    return runs.run(task, method, step, lambda *_: None, said.append), said


@pytest.mark.long
def test_a_file_that_vanishes_is_named_and_the_run_goes_on_from_its_last_round(writers, tmp_path):
    whole, _ = one_unit(writers, tmp_path / "whole")
    task = tasks.rounds(asked(writers, tmp_path / "out", "--algorithms", "fedavg", "--no-barrier"))
    file, away = writers / "emnist_all.sqlite", writers / "away"
    calls = []

    def read(client, most=None, seed=None):
        calls.append(client)
        if len(calls) > 9:  # the third round, as the arguments are checked with the first cohort
            file.rename(away)
        return task.train.read(client, most, seed)

    vanishing = task._replace(train=task.train._replace(read=read))
    with pytest.raises(FileNotFoundError, match=r"emnist_all.sqlite does not exist: put it back"):
        one_unit(writers, tmp_path / "out", vanishing)
    away.rename(file)
    calls.clear()

    def count(client, most=None, seed=None):
        calls.append(seed[:-1])
        return task.train.read(client, most, seed)

    counting = task._replace(train=task.train._replace(read=count))
    found, _ = one_unit(writers, tmp_path / "out", counting)
    assert len({*calls}) == 3  # rounds three and four, and the measurement of the last model
    assert found == [row for row in whole if not row.metric.startswith("barrier")]


@pytest.mark.slow
def test_a_domain_without_text_is_named_by_a_warning_of_its_round(tmp_path, capsys):
    pages = [(f"d{k:02}.org", f"{k}" * 150) for k in range(6)]
    fj.datasets.group([*pages, ("short.org", "x")], tmp_path / "c4", shards=2)
    words = [
        *("--dataset", "c4", "--data-dir", str(tmp_path), "--stream", "--num-clients", "6"),
        *("--cohort", "6", "--validation-clients", "0", "--held-out-clients", "1", "--rounds", "1"),
        *("--local-epochs", "1", "--personal-epochs", "1", "--algorithms", "fedavg"),
        *("--no-barrier", "--out", str(tmp_path / "out")),
    ]
    assert main(words) == 0
    assert "round 0: clients without an example: ['short.org']" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cohort", "7"], "--cohort is 7, expected 1 to the 6 clients"),
        (["--num-clients", "7"], "are 12 together, but emnist has 11 clients"),
        (["--client-examples", "0"], "--client-examples is 0, expected 1 or more with --stream"),
        (["--learning-rate", "0"], "--learning-rate is 0.0, expected a number above 0"),
        (["--local-learning-rate", "0.1"], "--local-learning-rate is 0.1, expected several"),
        (["--solver", "adam"], "--solver is adam, expected cg or gd with --stream"),
        (["--dataset", "digits"], "--dataset is digits, expected one of emnist,"),
        (["--algorithms", "scaffold"], "for each of the 6 clients; expected one without a memory"),
        (["--data-dir", "none"], "emnist_all.sqlite does not exist: download"),
    ],
)
def test_what_cannot_run_is_one_line(writers, tmp_path, capsys, words, message):
    given = [*SMALL, "--stream", "--data-dir", str(writers), "--out", str(tmp_path / "out")]
    assert main([*given, *words]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


def test_the_last_model_is_measured_on_a_bounded_number_of_clients(writers, tmp_path, monkeypatch):
    task = tasks.rounds(asked(writers, tmp_path, "--algorithms", "fedavg"))
    monkeypatch.setattr(streamed, "MOST_MEASURED", 4)
    params = task.init(jax.random.key(0))
    assert streamed.performance(task, params).sizes.shape == (4,)


MANY = """
import resource, sys
from pathlib import Path
import numpy as np
from experiments.federated.__main__ import main
from tests.experiments.test_streamed import SMALL
from tests.test_by_client import record, write

def run(number):
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    pixels = np.random.default_rng(0).random(784).tolist()
    own = [record(pixels=pixels, label=k) for k in range(20)]
    write(folder / "emnist_all.sqlite", {f"f{k:05}": own for k in range(number)}, "all_train")
    more = ["--num-clients", str(number - 5), "--data-dir", str(folder), "--out", f"{folder}/out"]
    assert main([*SMALL, *more, "--algorithms", "fedavg", "--stream"]) == 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

few, many = run(1100), run(4400)
print(many - few, 3300 * 20 * 784 * 4 / 2**20)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_clients(tmp_path):
    """Peak resident memory with 4,400 writers beside that with 1,100."""
    command = [sys.executable, "-c", MANY, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    more, size = map(float, result.stdout.splitlines()[-1].split())
    assert size > 150
    assert more < size / 10
