"""A paper is one file and one row of the registry: commands, checkpoints and laws then know it."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.harness import records

ROOT = Path(__file__).parents[1]
TOY = '''
"""Toy: parameters count where they moved; something is kept on the server and on clients."""

import functools

import jax
import jax.numpy as jnp
import optax

import fisherjax as fj
from fisherjax.algorithms import METHODS, Algorithm, Link, Row
from fisherjax.algorithms._fisher_updates import fisher_sums, solve_sums
from fisherjax._core.caching import cached


@cached
def toy(mu: float = 0.0) -> Algorithm:
    def summarize(key, trained, examples, private):
        del key, examples
        moved = jax.tree.map(lambda w, start: (w - start) ** 2, trained.params, trained.start)
        update = {"params": trained.params, "fisher": fj.fisher.Diagonal(moved)}
        return update, private + trained.steps

    solve = solve_sums(fj.solvers.closed_form(1e-12))

    def aggregate(key, sums, params, state, cohort):
        merged, _, info = solve(key, sums, params, (), cohort)
        return merged, state + 1, info

    return Algorithm(
        summarize,
        aggregate,
        fisher_sums,
        optimizer=functools.cache(lambda base: optax.chain(optax.scale(1 - mu), base)),
        kind="params and where they moved",
        link=Link(
            init=lambda params, num_clients: jnp.asarray(0, jnp.int32),
            init_client=lambda params: jnp.asarray(0, jnp.int32),
        ),
    )


laws = "identity", "single client", "order", "weights", "empty", "shift", "equal curvatures"
laws += "layerwise", "statistics"
reads = {"fisher": fj.fisher.Diagonal}
METHODS["toy"] = Row("Toy", "nobody", "weights and where they moved", toy, laws, reads)
'''
COMMANDS = """
import json, sys
import toy
from experiments.one_shot import __main__ as one_shot
from experiments.federated.__main__ import main as federated
from experiments.harness.figures import label

assert label("toy") == "Toy"
commands = {"one_shot": one_shot.main, "federated": federated}
sys.exit(max(commands[name](words) for name, *words in json.loads(sys.argv[1])))
"""
ONE_SHOT = (
    *("--num-clients", "3", "--partition-seeds", "0", "1", "--seeds", "0", "--epochs", "1"),
    *("--batch-size", "64", "--algorithms", "fedavg", "toy", "--toy.mu", "0.5", "--no-central"),
)
FEDERATED = (
    *("--num-clients", "4", "--validation-clients", "1", "--held-out-clients", "1"),
    *("--cohort", "2", "--alpha", "1", "--batch-size", "40", "--rounds", "2"),
    *("--local-epochs", "1", "--algorithms", "toy", "--toy.mu", "0.25"),
    *("--checkpoint-seconds", "0", "--no-barrier"),
)
NAME = "toy-1epochs-server1-seed0"


def python(folder, *words):
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def run(folder, *commands):
    return python(folder, "-c", COMMANDS, json.dumps(commands))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("toy")
    (made / "toy.py").write_text(TOY)
    return made


def both(folder):
    return (
        ("one_shot", *ONE_SHOT, "--out", str(folder / "one_shot")),
        ("federated", *FEDERATED, "--out", str(folder / "federated")),
    )


@pytest.fixture(scope="module")
def finished(folder):
    done = run(folder, *both(folder))
    assert done.returncode == 0, done.stderr
    return folder


def left(folder):
    """All that both commands found out, but for the time that it took."""
    found = records.read_rows(folder / "one_shot" / "results.csv", records.ONE_SHOT)
    rows = [row for row in found if row.metric == "accuracy"]
    with open(folder / "federated" / "results.csv", newline="") as file:
        measured = list(csv.reader(file))
    model = (folder / "federated" / "models" / f"{NAME}.safetensors").read_bytes()
    return [row._replace(seconds=None) for row in rows], measured, model


@pytest.mark.slow
def test_both_commands_run_it(finished):
    rows, measured, _ = left(finished)
    found = {
        (row.algorithm, row.partition_seed): row
        for row in rows
        if row.algorithm in ("toy", "fedavg")
    }
    assert len(found) == 4
    for split in (0, 1):
        assert found["toy", split].upload_bytes == 2 * found["fedavg", split].upload_bytes
        assert found["toy", split].value != found["fedavg", split].value
    assert {int(row[4]) for row in measured[1:]} == {1, 2}
    one_shot, federated = (
        (finished / name / "summary.md").read_text() for name in ("one_shot", "federated")
    )
    assert "| toy |" in one_shot.replace("*", "")  # the best one is bold
    assert "of toy of all three" in one_shot
    assert "| Toy |" in federated
    assert "--toy.mu 0.25" in federated


@pytest.mark.slow
def test_the_same_commands_go_on_where_they_were_stopped(finished):
    before = left(finished)
    results = finished / "one_shot" / "results.csv"
    rows = records.read_rows(results, records.ONE_SHOT)
    records.write_rows(results, [r for r in rows if r.partition_seed == 0], records.ONE_SHOT)
    checkpoints = finished / "federated" / "checkpoints" / NAME
    shutil.rmtree(checkpoints / "2")
    shutil.rmtree(finished / "federated" / "models")
    (finished / "federated" / "results.csv").unlink()
    done = run(finished, *both(finished))
    assert done.returncode == 0, done.stderr
    assert "1 of 2 runs are done" in " ".join(done.stdout.split())  # lines are wrapped
    assert left(finished) == before
    assert {path.name for path in checkpoints.iterdir()} == {"1", "2"}


@pytest.mark.long
def test_a_name_like_it_is_refused_with_it_as_the_nearest(folder):
    words = ("--algorithms", "toyy", "--out", str(folder / "refused"))
    refused = run(folder, ("one_shot", *words), ("federated", *words))
    assert refused.returncode == 1
    assert refused.stderr.count("did you mean 'toy'") == 2


@pytest.mark.long
def test_the_battery_of_laws_runs_on_it(folder):
    """But for the one law that would train all other rows too."""
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "toy"]
    words += ["-k", "toy and not another_kind", "tests/algorithms/test_battery.py"]
    done = python(folder, *words)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
