"""The command end to end, on digits and small settings."""

import dataclasses
import os
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments import config, memory, one_shot, records, runs
from experiments.choices import CHOICES
from experiments.config import Config
from experiments.experiment import Experiment, prepare, validation
from experiments.methods import check_full, methods
from experiments.records import Row
from fisherjax.algorithms import TABLE

SMALL = Config(
    num_clients=3,
    partition_seeds=(0, 1),
    seeds=(0,),
    epochs=2,
    batch_size=64,
    algorithms=("fedavg", "fedfisher_diag", "fisher_merge"),
)
SILENT = runs.Progress(lambda _: None, lambda _: None)


def arguments(asked: Config) -> list[str]:
    return config.command(asked).split()[3:]


def without_time(rows: list[Row]) -> list[Row]:
    return [row._replace(seconds=None) for row in rows]


def accuracies(rows: list[Row]) -> dict[str, float]:
    """Merged models only: local ones appear once a client."""
    return {row.algorithm: row.value for row in rows if row.client is None}


@pytest.fixture(scope="module")
def experiment() -> Experiment:
    """The same, prepared; functions that are compiled once serve several tests."""
    return prepare(dataclasses.replace(SMALL, solver="adam", seeds=(0, 1)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    assert one_shot.main(arguments(dataclasses.replace(SMALL, out=out))) == 0
    return out


def test_a_run_leaves_one_row_for_each_number_and_all_five_files(whole):
    rows = records.read(whole / "results.csv")
    names = [(row.algorithm, row.partition_seed, row.client) for row in rows]
    merged = ("ensemble", *SMALL.algorithms)
    expected = [("central", None, None)]
    expected += [("local", split, client) for split in (0, 1) for client in range(3)]
    expected += [(name, split, None) for split in (0, 1) for name in merged]
    assert sorted(names, key=str) == sorted(expected, key=str)
    assert all(0 <= row.value <= 1 for row in rows)
    files = {path.name for path in whole.iterdir()}
    assert files == {"config.json", "results.csv", "label_counts.csv", "summary.md", "accuracy.png"}


def test_a_finished_run_prints_its_table_again_and_computes_nothing(whole, capsys, compilations):
    before = (whole / "results.csv").read_text()
    with compilations() as count:
        assert one_shot.main(arguments(dataclasses.replace(SMALL, out=whole))) == 0
    assert count() == 0
    assert (whole / "results.csv").read_text() == before
    assert "fedfisher_diag" in capsys.readouterr().out


def test_an_interrupted_run_continues_to_the_same_numbers(whole, tmp_path):
    asked = dataclasses.replace(SMALL, out=tmp_path)
    rows = records.read(whole / "results.csv")
    kept = [row for row in rows if row.partition_seed == 0]
    records.write_config(tmp_path, asked)
    records.write(tmp_path / "results.csv", kept)
    assert one_shot.main(arguments(asked)) == 0
    continued = records.read(tmp_path / "results.csv")
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
        assert one_shot.main(arguments(asked)) == 130
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGINT, handler)
    rows = records.read(tmp_path / "results.csv")
    done = records.finished(rows)
    assert 0 < len(done) < len(records.units(asked))
    per_unit = 3 + 1 + len(asked.algorithms)
    assert len(rows) == sum(1 if split is None else per_unit for split, _ in done)
    assert config.command(asked) in capsys.readouterr().out


def test_numbers_of_a_seed_do_not_depend_on_what_else_is_run(whole):
    alone = dataclasses.replace(SMALL, partition_seeds=(1,), algorithms=("fedfisher_diag",))
    rows = runs.run(prepare(alone), (1, 0), SILENT)
    before = [row for row in records.read(whole / "results.csv") if row.partition_seed == 1]
    assert set(without_time(rows)) <= set(without_time(before))


def test_the_prediction_compiles_the_programs_of_the_run_and_no_others(compilations):
    """Where older versions of JAX keep the two apart, the prediction only costs time."""
    fresh = prepare(SMALL)
    with compilations() as count:
        runs.run(fresh, (0, 0), SILENT)
    alone = count()
    fresh = prepare(SMALL)
    with compilations() as count:
        need = memory.predict(fresh)
        runs.run(fresh, (0, 0), SILENT)
    federation = fresh.federations[0]
    assert need.resident > federation.inputs.nbytes + federation.targets.nbytes
    if jax.__version_info__ >= (0, 10):
        assert count() <= alone


def test_nothing_compiles_again_for_another_split_or_seed(experiment, compilations):
    for unit in ((0, 0), (None, 0)):
        runs.run(experiment, unit, SILENT)
    with compilations() as count:
        for unit in ((1, 0), (0, 1), (None, 1)):
            runs.run(experiment, unit, SILENT)
    assert count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("solver", CHOICES["solver"])
def test_one_client_is_what_every_algorithm_and_the_central_model_give(solver):
    everything = dataclasses.replace(
        SMALL, num_clients=1, partition_seeds=(0,), solver=solver, algorithms=tuple(TABLE), mu=0.0
    )
    experiment = prepare(everything)
    rows = runs.run(experiment, (0, 0), SILENT)
    values = {row.value for row in rows}
    assert {row.algorithm for row in rows} == {"local", "ensemble", *TABLE}
    assert np.ptp(list(values)) < 2 / len(experiment.test[1])


def test_options_of_the_command_reach_the_methods_that_know_them():
    model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
    names = ("fedavg", "regmean", "fisher_merge", "fedfisher_diag", "fedlpa_ea", "fedfish")
    asked = Config(
        algorithms=(*names, "fedprox"),
        **{"fisher_kind": "sampled", "damping": 0.25, "mu": 0.5, "batch_size": 8},
        **{"fedlpa_damping": 0.125, "fedlpa_balanced": True},
    )
    sampled, ea = fj.fisher.sampled, fj.algorithms.expectation_approximation()
    diagonal = {"fisher": fj.fisher.diagonal, "damping": 0.25}
    expected = {
        "fedavg": fj.algorithms.fedavg(),
        "regmean": fj.algorithms.regmean(model),
        "fisher_merge": fj.algorithms.fisher_merge(model, kind=sampled),
        "fedfisher_diag": fj.algorithms.fedfisher(model, kind=sampled, **diagonal),
        "fedlpa_ea": fj.algorithms.fedlpa(model, solver=ea, damping=0.125, balanced=True),
        "fedfish": fj.algorithms.fedfish(model, batch_size=8),
        "fedprox": fj.algorithms.fedprox(mu=0.5),
    }
    made = methods(asked, model)
    assert list(made) == list(expected)
    assert all(made[name].clients is method for name, method in expected.items())


def test_methods_that_change_training_train_once_more_with_the_same_minibatches():
    """One epoch without momentum is as many steps as FedNova counts, and SCAFFOLD's first round."""
    names = ("fedavg", "fednova", "fedprox", "scaffold")
    asked = dataclasses.replace(SMALL, epochs=1, momentum=0.0, algorithms=names, mu=0.0)
    told = []
    rows = runs.run(prepare(asked), (0, 0), runs.Progress(told.append, lambda _: None))
    assert len(told) == runs.epochs(asked, (0, 0)) == 4
    assert len(set(told)) == 1
    merged = accuracies(rows)
    assert merged["fedprox"] == merged["scaffold"] == merged["fedavg"]


def test_the_central_model_is_the_ceiling(experiment):
    merged = accuracies(runs.run(experiment, (0, 0), SILENT))
    (central,) = accuracies(runs.run(experiment, (None, 0), SILENT)).values()
    assert central > max(merged.values())


def test_clients_of_an_iid_split_hold_the_same_mixture():
    experiment = prepare(dataclasses.replace(SMALL, partition="iid"))
    counts = experiment.label_counts[0]
    assert np.ptp(counts.sum(axis=1)) <= 1
    assert counts.min() > 25


def test_validation_images_belong_to_the_split(experiment):
    first, again, other = (validation(experiment, seed)[0] for seed in (0, 0, 1))
    assert first.shape == (500, 8, 8, 1)
    assert (first == again).all()
    assert not (first == other).all()


def test_a_diverged_client_is_named_and_stops_the_run(tmp_path, capsys):
    asked = dataclasses.replace(SMALL, learning_rate=1e6, out=tmp_path)
    assert one_shot.main(arguments(asked)) == 1
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
        ("--algorithms fedprox --mu -1", "--mu is -1.0, expected a number from 0 up"),
        ("--algorithms fedlpa --fedlpa-damping -1", "--fedlpa-damping is -1.0, expected"),
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
    shown = capsys.readouterr().out
    assert "(default: cifar10)" in shown
    assert "(default: cnn)" in shown


def test_a_full_fisher_on_a_small_network_is_allowed():
    check_full(Config(algorithms=("fedfisher_full",)), {"w": jax.ShapeDtypeStruct((100,), float)})
