"""The federated command: what it writes, how it chooses, and that killing it changes nothing."""

import contextlib
import csv
import json
import math
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.federated import __main__ as federated
from experiments.federated import curves, plan, runs, tasks
from experiments.federated.__main__ import main
from experiments.harness import commands, config, figures, limits, records
from experiments.harness import tasks as one_round_tasks
from experiments.harness.config import AnyData, Federated, Merging

ROOT = Path(__file__).parents[2]
SMALL = (
    *("--num-clients", "8", "--validation-clients", "2", "--held-out-clients", "2"),
    *("--cohort", "3", "--alpha", "1", "--batch-size", "40", "--rounds", "3"),
    *("--local-epochs", "1", "--algorithms", "fedavg"),
)


def parse(words):
    return commands.read(words, "", "", config.federated, limits.check_federated)


def rows_of(folder):
    with open(folder / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


def values(rows, **where):
    return [
        float(row["value"])
        for row in rows
        if all(row[field] == str(value) for field, value in where.items())
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two algorithms, two numbers of local epochs, two server rates, two seeds."""
    out = tmp_path_factory.mktemp("federated")
    status = main(
        [
            *SMALL,
            *("--algorithms", "fedavg", "fedfish_last_epoch", "--local-epochs", "1", "2"),
            *("--server-optimizer", "adam", "--server-learning-rate", "0.0001", "0.01"),
            *("--seeds", "0", "1", "--total-epochs", "4", "--out", str(out)),
        ]
    )
    assert status == 0
    return out


@pytest.mark.long
def test_a_run_leaves_its_configuration_numbers_table_pictures_and_models(finished):
    for name in ("config.json", "results.csv", "summary.md", "curves.png", "barrier.png"):
        assert (finished / name).stat().st_size > 0, name
    chosen = len(list((finished / "models").iterdir()))
    assert chosen == 2 * 2 * 2 + 2 * 2  # both rates of the first seed, one of the second
    text = (finished / "summary.md").read_text()
    assert "| FedFish (last epoch) |" in text
    assert "python -m experiments.federated" in text


@pytest.mark.slow
def test_total_epochs_are_shared_out_over_rounds(finished):
    rows = rows_of(finished)
    assert max(int(row["round"]) for row in rows if row["local_epochs"] == "1") == 4
    assert max(int(row["round"]) for row in rows if row["local_epochs"] == "2") == 2


def test_validation_clients_choose_the_rate_that_other_seeds_use(finished):
    rows = rows_of(finished)
    for algorithm in ("fedavg", "fedfish_last_epoch"):
        for epochs, last in (("1", "4"), ("2", "2")):
            where = {"algorithm": algorithm, "local_epochs": epochs, "round": last}
            where |= {"split": "validation", "metric": "accuracy"}
            rates = ("0.0001", "0.01")
            tried = [values(rows, **where, seed=0, server_learning_rate=rate)[0] for rate in rates]
            used = {
                r["server_learning_rate"]
                for r in rows
                if r["seed"] == "1" and (r["algorithm"], r["local_epochs"]) == (algorithm, epochs)
            }
            assert used == {rates[int(np.argmax(tried))]}


def test_the_numbers_are_those_of_the_model_that_was_left(finished):
    command = json.loads((finished / "config.json").read_text())["command"]
    prepared = tasks.rounds(parse(shlex.split(command)[3:]))
    like = prepared.init(jax.random.key(0))
    params = fj.files.load_arrays(finished / "models" / f"{NAME}.safetensors", like)
    found = fj.metrics.performance(prepared.model, params, prepared.test)
    where = {"algorithm": "fedavg", "local_epochs": 1, "seed": 0, "server_learning_rate": 0.01}
    where |= {"round": 4, "split": "test"}
    rows = rows_of(finished)
    assert values(rows, **where, metric="accuracy") == [
        pytest.approx(float(found.accuracy[0]), abs=1e-5)
    ]
    assert values(rows, **where, metric="loss") == [pytest.approx(float(found.loss[0]), abs=1e-4)]


def test_both_algorithms_have_the_same_clients_train_alike_in_the_first_round(finished):
    rows = rows_of(finished)
    where = {"round": 1, "split": "cohort", "metric": "loss", "seed": 0, "local_epochs": 1}
    (first,) = {*values(rows, **where)}
    assert first > 0


def test_traffic_is_the_bytes_of_a_client(finished):
    rows = rows_of(finished)
    model = 4 * (64 * 64 * 2 + 64 * 10)
    for algorithm, times in (("fedavg", 1), ("fedfish_last_epoch", 2)):
        where = {"algorithm": algorithm, "split": "traffic"}
        assert {*values(rows, **where, metric="up")} == {times * model}
        assert {*values(rows, **where, metric="down")} == {model}


def test_measurements_stand_at_the_same_local_epochs_whatever_a_round_has(finished):
    for epochs, every, expected in ((1, 3, [3, 6, 8]), (2, 3, [2, 3, 4]), (4, 3, [1, 2])):
        asked = Federated(total_epochs=8, eval_every=every)
        numbers = range(1, plan.number(asked, epochs) + 1)
        assert [n for n in numbers if plan.measured(asked, epochs, n)] == expected
    rows = rows_of(finished)
    where = {"split": "test", "metric": "accuracy", "seed": 1, "algorithm": "fedavg"}
    assert len(values(rows, **where, local_epochs=1)) == 4
    assert len(values(rows, **where, local_epochs=2)) == 2


def made_up(algorithm, epochs=1, seed=0):
    numbers = {("test", "loss"): math.log(8 + seed), ("test", "accuracy"): 0.5}
    numbers |= {("traffic", "down"): 8, ("traffic", "up"): 8}
    where = {"local_epochs": epochs, "server_learning_rate": 1.0}
    return [
        records.Row(algorithm, seed, 1, *what, value, **where) for what, value in numbers.items()
    ]


def test_the_perplexity_of_text_is_exp_of_the_loss_of_a_character():
    rows = made_up("fedavg") + made_up("fedavg", seed=1)
    for dataset, shown in (("tiny_shakespeare", True), ("digits", False)):
        merging = Merging(("fedavg",))
        once = {"merging": merging, "rounds": 1, "local_epochs": (1,)}
        asked = Federated(AnyData(dataset), seeds=(0, 1), **once)
        table = curves.table(asked, rows)
        cells = dict(zip(table.headings, table.lines[0], strict=True))
        assert cells.get("perplexity") == ("8.50 ± 0.71" if shown else None)


def test_an_algorithm_looks_the_same_in_any_order_and_panels_share_axis_and_legend(monkeypatch):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    for names in (("fedavg", "fedfish"), ("fedfish", "fedavg")):
        asked = Federated(merging=Merging(names), local_epochs=(1, 4))
        rows = [row for epochs in (1, 4) for name in names for row in made_up(name, epochs)]
        rows[1] = rows[1]._replace(value=0.9)
        curves.figure(asked, rows, ("test", "accuracy"), "test accuracy, %", "curves.png")
    for figure in drawn:
        assert {panel.get_ylim() for panel in figure.axes} == {figure.axes[0].get_ylim()}
        (legend,) = figure.legends
        assert {text.get_text() for text in legend.get_texts()} == {"FedAvg", "FedFish"}
        assert not any(panel.get_legend() for panel in figure.axes)
        for panel in figure.axes:
            for line, name in zip(panel.lines, ("fedavg", "fedfish"), strict=True):
                if line.get_label() != figures.label(name):  # the other order
                    continue
                assert line.get_color() == figures.style(name)["color"]
                assert line.get_marker() == figures.style(name)["marker"]
                assert 50 in line.get_ydata() or 90 in line.get_ydata()


def model_bytes(folder):
    (path,) = (folder / "models").iterdir()
    return path.read_bytes()


NAME = "fedavg-1epochs-server0.01-seed0"
LONG = (*SMALL, "--rounds", "25", "--server-optimizer", "adam", "--server-learning-rate", "0.01")


def start(out):
    words = [sys.executable, "-m", "experiments.federated", *LONG]
    words += ["--checkpoint-seconds", "0", "--out", str(out)]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL)


def newest(checkpoints):
    found = checkpoints.iterdir() if checkpoints.exists() else ()
    return max((int(path.name) for path in found if path.name.isdecimal()), default=0)


def wait_for(condition, process):
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupted."""
    out = tmp_path_factory.mktemp("whole")
    assert main([*LONG, "--checkpoint-seconds", "0", "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_killing_it_at_any_moment_changes_no_bit_of_the_result(tmp_path, whole, capsys):
    checkpoints = tmp_path / "checkpoints" / NAME
    for least in (2, 9):
        process = start(tmp_path)
        wait_for(lambda least=least: newest(checkpoints) >= least, process)
        # While it is at work nobody else is let in; who was killed lets go.
        assert main([*LONG, "--out", str(tmp_path)]) == 1
        assert "another process is writing to --out" in capsys.readouterr().err
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "models").exists()
    assert main([*LONG, "--out", str(tmp_path)]) == 0
    assert model_bytes(tmp_path) == model_bytes(whole)
    assert rows_of(tmp_path) == rows_of(whole)


@pytest.fixture
def unfinished(tmp_path, whole):
    """What a process killed in the last round would have left."""
    out = shutil.copytree(whole, tmp_path / "unfinished")
    shutil.rmtree(out / "models")
    shutil.rmtree(out / "checkpoints" / NAME / "25")
    (out / "results.csv").unlink()
    return out


@contextlib.contextmanager
def largest_file(size):
    """Let no file grow beyond so many bytes, as if the disk were full then."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.long
def test_a_full_disk_is_one_line_with_the_path_and_leaves_the_last_good_state(
    unfinished, whole, capfd
):
    with largest_file(9000):
        assert main([*LONG, "--out", str(unfinished)]) == 1
    path = re.escape(f"{unfinished}/checkpoints/{NAME}/25")
    assert re.fullmatch(rf"error: \[Errno 27\] .*: '{path}'\n", capfd.readouterr().err)
    assert newest(unfinished / "checkpoints" / NAME) == 24
    assert main([*LONG, "--out", str(unfinished)]) == 0
    assert model_bytes(unfinished) == model_bytes(whole)
    assert rows_of(unfinished) == rows_of(whole)


def test_what_is_finished_is_reported_again_without_data_or_training(tmp_path, whole, monkeypatch):
    again = shutil.copytree(whole, tmp_path / "again")
    left = ("summary.md", "curves.png", "barrier.png")
    for name in left:
        (again / name).unlink()
    monkeypatch.setattr(federated.tasks, "rounds", None)
    assert main([*LONG, "--checkpoint-seconds", "0", "--out", str(again)]) == 0
    for name in (*left, "results.csv"):
        before = (whole / name).read_bytes().replace(bytes(whole), bytes(again))
        assert (again / name).read_bytes() == before


def test_a_run_whose_rows_are_not_all_there_is_finished_from_its_checkpoint(tmp_path, whole):
    cut = shutil.copytree(whole, tmp_path / "cut")
    lines = (cut / "results.csv").read_text().splitlines(keepends=True)
    (cut / "results.csv").write_text("".join(lines[:-3]))
    shutil.rmtree(cut / "models")
    assert main([*LONG, "--out", str(cut)]) == 0
    assert model_bytes(cut) == model_bytes(whole)
    assert rows_of(cut) == rows_of(whole)


@pytest.mark.slow
def test_a_folder_that_takes_more_rounds_and_seeds_is_that_of_the_larger_run(tmp_path):
    """The last round of the smaller run was measured, which the larger run does not do."""
    words = (*SMALL, "--eval-every", "2", "--no-barrier", "--checkpoint-seconds", "0")
    larger = (*words, "--rounds", "4", "--seeds", "0", "1")
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    assert main([*larger, "--out", str(whole)]) == 0
    assert main([*words, "--rounds", "3", "--out", str(grown)]) == 0
    before = rows_of(grown)
    assert main([*larger, "--out", str(grown)]) == 0
    fields = [name for name in before[0] if name != "checksum"]
    assert {row["round"] for row in rows_of(grown)} == {"1", "2", "3", "4"}
    found, expected = (
        sorted([row[name] for name in fields] for row in rows_of(out)) for out in (grown, whole)
    )
    assert found == expected
    for path in (whole / "models").iterdir():
        assert (grown / "models" / path.name).read_bytes() == path.read_bytes()
    # Who asks for less gets all, and nothing is computed.
    text = (grown / "results.csv").read_text()
    assert main([*words, "--rounds", "2", "--out", str(grown)]) == 0
    assert (grown / "results.csv").read_text() == text


OLD = ROOT / "experiments" / "results" / "federated_fedfisher"  # version 0.1 left it
OLD_COMMAND = (
    *("--algorithms", "fedavg", "fedfisher_diag", "fedfisher_kfac", "--rounds", "5"),
    *("--num-clients", "5", "--validation-clients", "1", "--held-out-clients", "1"),
    *("--cohort", "5", "--local-epochs", "30", "--momentum", "0.9", "--batch-size", "32"),
    *("--seeds", "0", "1", "2", "3", "4"),
)


def test_a_folder_of_version_0_1_is_reported_again(tmp_path, monkeypatch):
    old = shutil.copytree(OLD, tmp_path / "old")
    document = json.loads((old / "config.json").read_text())
    assert {"algorithm", "mu", "damping"} <= document["configuration"].keys()
    document["configuration"]["mu"] = 0.1  # of FedProx, which did not run
    (old / "config.json").write_text(json.dumps(document))
    monkeypatch.setattr(federated.tasks, "rounds", None)
    assert main([*OLD_COMMAND, "--out", str(old)]) == 0
    assert (old / "results.csv").read_bytes() == (OLD / "results.csv").read_bytes()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("damping", 3.0, "fedfisher_kfac.damping was 3.0, is the default"),
        ("momentum", 0.0, "momentum was 0.0, is 0.9"),
    ],
)
def test_a_folder_of_version_0_1_keeps_its_options(tmp_path, capsys, option, value, message):
    old = shutil.copytree(OLD, tmp_path / "old")
    document = json.loads((old / "config.json").read_text())
    document["configuration"][option] = value
    (old / "config.json").write_text(json.dumps(document))
    assert main([*OLD_COMMAND, "--out", str(old)]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_that_says_not_what_it_is_of_is_refused(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert main([*SMALL, "--out", str(tmp_path)]) == 1
    assert "holds a checkpoint without a config.json" in capsys.readouterr().err


@pytest.mark.long
def test_a_corrupt_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path, whole, capsys):
    spoilt = tmp_path / "spoilt"
    shutil.copytree(whole, spoilt)
    shutil.rmtree(spoilt / "models")
    (spoilt / "results.csv").unlink()
    files = (spoilt / "checkpoints" / NAME / "25").rglob("*")
    victim = max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-5])
    assert main([*LONG, "--out", str(spoilt)]) == 0
    assert "corrupt" in capsys.readouterr().out
    assert model_bytes(spoilt) == model_bytes(whole)
    assert rows_of(spoilt) == rows_of(whole)


def test_a_changed_configuration_is_refused_by_name(whole, capsys):
    assert main([*LONG, "--learning-rate", "0.5", "--out", str(whole)]) == 1
    assert "learning_rate was 0.05, is 0.5" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm", ["scaffold", pytest.param("fedfisher_kfac", marks=pytest.mark.slow)]
)
def test_other_algorithms_run_in_the_same_loop(tmp_path, algorithm):
    asked = [*SMALL, "--algorithms", algorithm, "--rounds", "1", "--out", str(tmp_path)]
    assert main(asked) == 0
    assert values(rows_of(tmp_path), algorithm=algorithm, split="test", metric="accuracy")


@pytest.mark.long
def test_who_is_left_out_of_a_round_is_named_with_the_leaf(tmp_path, capsys):
    asked = [*SMALL, "--rounds", "1", "--learning-rate", "1e30", "--out", str(tmp_path)]
    assert main(asked) == 0
    assert values(rows_of(tmp_path), split="cohort", metric="diverged") == [3]
    said = re.search(r"round 1: left out, as updates not finite: (.*)\.", capsys.readouterr().out)
    assert len(re.findall(r"client \d+ for leaf 'params/\w+/\w+'", said[1])) == 3


@pytest.mark.long
def test_rounds_take_the_solver_and_the_options_that_were_asked_for():
    def algorithm(*words):
        asked = parse([*SMALL, "--algorithms", name, *words])
        return runs.prepare(task._replace(config=asked))[name, 1].algorithm

    name, task = "fedfisher_diag", tasks.rounds(parse(SMALL))
    made = [algorithm(), algorithm("--solver", "gd"), algorithm("--solver", "adam")]
    made += [algorithm("--fedfisher-diag.damping", "2"), algorithm("--fisher-kind", "sampled")]
    assert len(set(made)) == 5
    assert algorithm("--fedprox.mu", "1") == made[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedfisher_diag", ["--solver", "adam"]),
        (
            "dense",
            [
                *("--choose", "validation", "--dense.learning-rate", "1", "--dense.width", "8"),
                *("--dense.epochs", "3", "--dense.steps", "1"),
            ],
        ),
    ],
)
@pytest.mark.long
def test_servers_choose_in_rounds_as_in_one_round(name, options):
    """By the same images if all clients train."""
    words = ["--algorithms", name, *options, "--num-clients", "3"]
    alone = ["--validation-clients", "0", "--held-out-clients", "0", "--cohort", "3"]
    rounds = tasks.rounds(parse([*words, *alone, "--local-epochs", "1", "--partition-seed", "2"]))
    asked = commands.read(
        [*words, "--partition-seeds", "2"], "", "", config.one_shot, limits.check_one_shot
    )
    shot = one_round_tasks.one_round(asked)
    images = shot.validation(2)
    chex.assert_trees_all_equal(tuple(runs.validation(rounds)[:2]), tuple(images[:2]))
    # Clients that are read from disk have no images in memory that could choose.
    on_disk = rounds._replace(images=None, train=None)
    assert name != "dense" or runs.validation(on_disk) is None
    models = [shot.init(jax.random.key(seed)) for seed in range(3)]
    method, federation = shot.methods[name], shot.federations[2]
    sent = fj.merging.summarize(method.clients, models, federation, key=jax.random.key(0))
    found, expected, last = (
        fj.merging.merge(algorithm, models[0], sent, federation.weights)[0]
        for algorithm in (
            runs.prepare(rounds)[name, 1].algorithm,
            method.server(images),
            method.server(None),
        )
    )
    chex.assert_trees_all_equal(found, expected)
    assert any(map(np.any, jax.tree.leaves(jax.tree.map(np.subtract, found, last))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cohort", "9"], "--cohort is 9, expected 1 to the 8 clients"),
        (["--rounds", "0"], "--rounds is 0, expected 1 or more"),
        (["--held-out-clients", "-1"], "--held-out-clients is -1"),
        (["--algorithms", "fedfisch"], "did you mean 'fedfish'"),
        (["--total-epochs", "5", "--local-epochs", "2"], "--total-epochs is 5"),
        (["--server-learning-rate", "0.1"], "--server-learning-rate is 0.1"),
        (["--held-out-plays", "1"], "--held-out-plays is 1"),
        (["--algorithms", "fedavg", "fedov"], "--algorithms names fedov, a vote of models"),
        (["--local-learning-rate", "0.05"], "--local-learning-rate is 0.05, expected several"),
        (["--local-learning-rate", "0", "0.1"], "--local-learning-rate is 0.0 0.1, expected a num"),
        (
            [*("--local-learning-rate", "0.01", "0.1"), *("--server-optimizer", "adam")],
            "--server-learning-rate is 1.0, expected several",
        ),
        (
            ["--algorithms", "fedfisher_full", "--num-clients", "30", "--cohort", "20"],
            "fedfisher_full needs a matrix of",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, options, message):
    assert main([*SMALL, *options, "--out", str(tmp_path)]) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.long
def test_roles_of_held_out_plays_take_no_part_in_training(shared):
    words = ["--dataset", "tiny_shakespeare", "--held-out-plays", "2"]
    prepared = tasks.rounds(parse([*words, "--data-dir", str(shared / "data")]))
    rows = [
        {
            row
            for own, size in zip(part.indices.tolist(), part.sizes.tolist(), strict=True)
            for row in own[:size]
        }
        for part in (prepared.train, prepared.validation, prepared.held_out)
    ]
    assert all(rows)
    assert sum(map(len, rows)) == len(set.union(*rows))
    assert rows[2] == set(prepared.test.indices[0, : prepared.test.sizes[0]].tolist())


@pytest.mark.long
def test_all_clients_may_train(tmp_path):
    options = ["--num-clients", "3", "--cohort", "3", "--rounds", "2", "--local-epochs", "1"]
    options += ["--validation-clients", "0", "--held-out-clients", "0", "--algorithms", "fedavg"]
    options += ["--no-barrier", "--seeds", "0", "1", "--out", str(tmp_path / "run")]
    assert main(options) == 0
    with open(tmp_path / "run/results.csv") as file:
        rows = [*csv.DictReader(file)]
    assert {row["split"] for row in rows} == {"cohort", "test", "clients", "traffic"}
    assert {row["seed"] for row in rows} == {"0", "1"}


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("validation", ["--server-optimizer", "sgd", "--server-learning-rate", "0.5", "1"]),
        ("validation", ["--patience", "2"]),
        ("held-out", ["--personal-points", "2"]),
    ],
)
def test_clients_that_something_is_measured_on_are_needed(tmp_path, capsys, name, more):
    options = [f"--{name}-clients", "0", *more, "--out", str(tmp_path / "run")]
    assert main(options) == 1
    assert f"--{name}-clients is 0, expected 1 or more" in capsys.readouterr().err


@pytest.mark.long
def test_clients_that_were_left_out_are_counted_in_the_rows_and_the_table(tmp_path):
    words = (*SMALL, "--learning-rate", "5", "--no-barrier", "--must-improve")
    assert main([*words, "--out", str(tmp_path)]) == 0
    counts = values(rows_of(tmp_path), split="cohort", metric="worse")
    assert len(counts) == 3
    assert sum(counts) > 0
    heading, _, row = (tmp_path / "summary.md").read_text().splitlines()[2:5]
    cells = dict(zip(*(line.strip("| ").split(" | ") for line in (heading, row)), strict=True))
    assert int(cells["worse"]) == sum(counts)
