"""Orders of training, merges and exchanges: what they are made of, and what they cost."""

import csv
from dataclasses import replace

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.harness import steps, tasks
from experiments.orders import runs
from experiments.orders.__main__ import main

ALONE = ("--num-clients", "3", "--alpha", "1", "--seeds", "0")
LONG, SHORT = "2 fedavg analytic_head 1 fedfisher_kfac", "2 fedavg analytic_head"


def rows_of(folder):
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("orders")
    assert main([*ALONE, "--orders", LONG, SHORT, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("", "has '' in ''"),
        ("2 fedawg", "has 'fedawg' in '2 fedawg'"),
        ("0 fedavg", "has '0' in '0 fedavg'"),
        ("fedavg", "expected to begin with training"),
        ("analytic_head", "expected to begin with training"),
        ("2", "a merge behind each training"),
        ("2 analytic_head", "a merge behind each training"),
        ("2 fedavg fedavg", "a merge behind each training"),
        ("2 pfnm", "has 'pfnm' in '2 pfnm'"),
    ],
)
def test_what_is_no_order_is_refused(tmp_path, capsys, order, message):
    assert main(["--orders", order, "--out", str(tmp_path / "out")]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_orders_are_alike_as_long_as_their_steps_are(folder):
    found = {order: [] for order in (LONG, SHORT)}
    for row in rows_of(folder):
        found[row["order"]].append((row["step"], row["epochs"], row["bytes"], row["accuracy"]))
    assert [step for step, *_ in found[LONG]] == [
        "train",
        "fedavg",
        "analytic_head",
        "train",
        "fedfisher_kfac",
    ]
    assert found[LONG][:3] == found[SHORT]


@pytest.mark.long
def test_a_step_is_the_librarys(folder):
    """Training, a merge and an exchange one after another by functions of the library."""
    asked = runs.Config.usual("digits")
    data = replace(asked.data, num_clients=3, alpha=1.0)
    task = tasks.one_round(runs.one_shot(replace(asked, data=data, orders=(SHORT,))))
    params, key = steps.start(task, 0)
    how = {"optimizer": task.optimizer, "epochs": 2, "batch_size": asked.training.batch_size}
    keys = [jax.random.fold_in(key, number) for number in range(1, 4)]
    trained = fj.training.train(task.model, params, task.federations[0], key=keys[0], **how)
    averaged = fj.tree.weighted_sum(trained.params, task.federations[0].weights)
    method = fj.algorithms.analytic_head(task.model)
    moved = [*fj.merging.messages(method, averaged, task.federations[0], key=keys[2])]
    expected = [task.accuracy(own, task.test) for own in (params, averaged, moved[-1].params)]
    found = [float(row["accuracy"]) for row in rows_of(folder) if row["order"] == SHORT]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    sent = [int(row["bytes"]) for row in rows_of(folder) if row["order"] == SHORT]
    assert sent[:2] == [0, fj.compression.size(params)]


@pytest.mark.long
def test_a_folder_goes_on_with_further_orders(folder):
    before = rows_of(folder)
    assert main([*ALONE, "--orders", LONG, SHORT, "1 fedavg x2", "--out", str(folder)]) == 0
    assert rows_of(folder)[: len(before)] == before
    assert "1 fedavg x2" in (folder / "summary.md").read_text()
