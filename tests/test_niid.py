"""NIID-Bench's partitions and algorithms in the command, on digits, and rounds after the merge."""

import csv
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments import config, methods, one_shot, records, report, rounds, runs
from experiments.choices import MODELS
from experiments.config import Config
from experiments.experiment import Experiment, prepare, prepare_splits
from experiments.records import Row

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results"
SILENT = runs.Progress(lambda _: None, lambda _: None)
SMALL = Config(
    num_clients=3,
    partition="niid_bench",
    beta=0.5,
    partition_seeds=(0,),
    seeds=(0,),
    epochs=1,
    weight_decay=1e-5,
    mu=0.0,
    algorithms=("fedavg", "fednova", "fedprox", "scaffold", "fedlpa", "fedlpa_ea"),
    then_rounds=2,
)


def values(rows: list[Row], round_: int = 1) -> dict[str, float]:
    return {row.algorithm: row.value for row in rows if row.client is None and row.round == round_}


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    return prepare(SMALL)


@pytest.fixture(scope="module")
def rows(experiment) -> list[Row]:
    return runs.run(experiment, (0, 0), SILENT)


def test_fedprox_without_pull_and_one_round_of_scaffold_are_fedavg(rows):
    merged = values(rows)
    assert merged["fedprox"] == merged["scaffold"] == merged["fedavg"]
    assert merged["fedlpa"] != merged["fedavg"]


def test_a_pull_moves_fedprox_and_nothing_else(rows):
    few = dataclasses.replace(SMALL, mu=1.0, then_rounds=0, algorithms=("fedavg", "fedprox"))
    before, now = values(rows), values(runs.run(prepare(few), (0, 0), SILENT))
    assert {name for name in now if now[name] != before[name]} == {"fedprox"}


def test_clients_are_trained_once_and_once_more_for_those_that_train_their_own(experiment):
    told = []
    progress = runs.Progress(lambda _: told.append("epoch"), lambda _: told.append("step"))
    runs.run(experiment, (0, 0), progress)
    own = {name for name in SMALL.algorithms if methods.trains_its_own(name)}
    assert own == {"fednova", "fedprox", "scaffold"}
    rounds_after = SMALL.then_rounds * len(SMALL.algorithms)
    assert told.count("epoch") == (1 + len(own) + rounds_after) * SMALL.epochs
    assert len(told) == runs.steps(SMALL, (0, 0))


def test_rounds_follow_every_algorithm_and_leave_the_first_as_it_was(experiment, rows):
    alone = experiment._replace(config=dataclasses.replace(SMALL, then_rounds=0))
    assert values(runs.run(alone, (0, 0), SILENT)) == values(rows)
    for number in (2, 3):
        assert set(values(rows, number)) == set(SMALL.algorithms)
    assert values(rows, 3)["fedprox"] == values(rows, 3)["fedavg"]  # from equal first rounds
    assert values(rows, 3)["fedavg"] > values(rows)["fedavg"]


def test_the_table_is_of_the_first_round_and_the_curves_are_of_all(rows):
    (line,) = [x for x in report.lines(rows, SMALL.algorithms) if x.algorithm == "fedlpa"]
    curves = rounds.curves(rows, SMALL.algorithms)
    assert line.accuracies == curves["fedlpa"][0]
    assert {len(curve) for curve in curves.values()} == {1 + SMALL.then_rounds}
    last = f"{curves['fedlpa'][-1][0]:.1f} |"
    (written,) = [x for x in rounds.markdown(curves).splitlines() if x.startswith("| fedlpa |")]
    assert written.endswith(last)


def test_rounds_that_nobody_asked_for_make_no_curves(rows):
    assert rounds.curves([row for row in rows if row.round == 1], SMALL.algorithms) == {}


def test_a_run_leaves_its_label_table_and_its_curves_and_no_ceiling(tmp_path):
    asked = dataclasses.replace(
        SMALL,
        partition="classes_per_client",
        num_clients=10,
        algorithms=("fedavg",),
        then_rounds=1,
        central=False,
        out=tmp_path,
    )
    assert one_shot.main(config.command(asked).split()[3:]) == 0
    with open(tmp_path / "label_counts.csv", newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == ["partition_seed", "client", *map(str, range(10))]
    counts = np.array(table[1:], int)[:, 2:]
    assert counts.shape == (10, 10)
    assert (np.count_nonzero(counts, axis=1) == 2).all()
    assert (tmp_path / "rounds.png").read_bytes().startswith(b"\x89PNG")
    assert "| fedavg |" in (tmp_path / "summary.md").read_text().split("after each round")[1]
    assert "central" not in {row.algorithm for row in records.read(tmp_path / "results.csv")}


def test_experiments_that_differ_in_their_split_compile_once_and_give_what_they_give_alone(
    compilations,
):
    asked = dataclasses.replace(SMALL, then_rounds=0, algorithms=("fedavg", "fednova"))
    other = dataclasses.replace(asked, partition="classes_per_client", classes_per_client=3)
    first, second = prepare_splits([asked, other])
    runs.run(first, (0, 0), SILENT)
    with compilations() as count:
        together = runs.run(second, (0, 0), SILENT)
    assert count() == 0
    assert values(together) == values(runs.run(prepare(other), (0, 0), SILENT))


def test_experiments_that_differ_in_more_than_their_split_are_not_prepared_together():
    with pytest.raises(ValueError, match="differ in more than partition, alpha, beta"):
        prepare_splits([SMALL, dataclasses.replace(SMALL, mu=1.0)])


def test_weight_decay_is_that_of_one_gradient_step():
    decayed = prepare(dataclasses.replace(SMALL, weight_decay=0.5, momentum=0.0)).optimizer
    params, gradient = {"w": np.full(1, 2.0)}, {"w": np.full(1, 3.0)}
    updates, _ = decayed.update(gradient, decayed.init(params), params)
    assert np.allclose(updates["w"], -SMALL.learning_rate * (3 + 0.5 * 2))


def test_raw_images_are_pixels_between_zero_and_one(experiment):
    raw = prepare(dataclasses.replace(SMALL, normalize=False))
    params, _ = runs.start(raw, 0)
    images = experiment.test[0][:5]
    outputs = (raw.model.apply(params, x) for x in (images, images / np.float32(16)))
    assert np.array_equal(*outputs)


ONE_SHOT = sorted(
    path.parent.name
    for path in RESULTS.glob("*/config.json")
    if "experiments.one_shot" in path.read_text()
)


@pytest.mark.parametrize("name", ONE_SHOT)
def test_runs_from_before_these_options_continue(tmp_path, name):
    shutil.copytree(RESULTS / name, tmp_path / name)
    stored = json.loads((tmp_path / name / "config.json").read_text())
    asked = config.parse(stored["command"].split()[3:], "")
    rows = records.resume(tmp_path / name, asked)
    assert rows == records.read(RESULTS / name / "results.csv")
    changed = dataclasses.replace(asked, mu=0.5)
    with pytest.raises(ValueError, match=r"another experiment: mu was 0\.001, is 0\.5"):
        records.resume(tmp_path / name, changed)


def test_runs_from_before_these_options_keep_their_folder():
    stored = json.loads((RESULTS / "mnist_lenet" / "config.json").read_text())["configuration"]
    asked = config.parse([], "")
    before = {k: v for k, v in config.contents(asked).items() if k in stored}
    before = {k: v for k, v in before.items() if k not in config.WHERE_AND_HOW}
    digest = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:6]
    assert config.name(asked) == f"digits-mlp-m5-fedfisher0.1-{digest}"


@pytest.mark.parametrize("model", ["simple_cnn", "simple_cnn_mnist"])
def test_niid_benchs_networks_have_biases(model):
    network = MODELS[model](num_classes=10)
    shape = (1, 28, 28, 1) if model == "simple_cnn_mnist" else (1, 32, 32, 3)
    params = jax.eval_shape(lambda: fj.networks.init(network, jax.random.key(0), np.zeros(shape)))
    assert all("bias" in layer for layer in params.values())
