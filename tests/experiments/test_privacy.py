"""The command of private merges: what a run leaves, that it continues, what its ledgers say."""

import csv

import numpy as np
import pytest

from experiments.privacy import __main__ as private
from experiments.privacy import costs
from fisherjax import privacy

# Of equal sizes, so that the second seed compiles nothing again.
FEW = ("--dataset", "digits", "--partition", "iid", "--clients", "2", "--pilots", "2", "--epochs")
NOISE = (
    "1",
    "--seeds",
    "0",
    "1",
    "--noise-multipliers",
    "0",
    "2",
    "--draws",
    "2",
    "--seeded-noise",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("private")
    assert private.main([*FEW, *NOISE, "--out", str(out)]) == 0
    return out


def lines_of(run):
    with open(run / "results.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_run_leaves_each_accuracy_and_what_it_cost(run):
    lines = lines_of(run)
    # Without noise a draw is all there is.
    assert len(lines) == 2 * 4 * (1 + 2)
    for line in lines:
        noise = float(line["noise_multiplier"])
        expected = privacy.epsilon(noise, delta=1e-5)
        assert float(line["epsilon"]) == pytest.approx(expected, rel=2e-3)
        # However many groups and methods: their multipliers compose to the one that was asked for.
        groups = line["ledger"].replace("; ", ", ").replace("1: ", "").split(", ")
        numbers = [list(map(float, group.split()[1].split("|"))) for group in groups]
        squares = sum(np.divide(clip, deviation) ** 2 for clip, deviation in numbers if noise)
        assert squares == pytest.approx(1 / noise**2 if noise else 0, rel=1e-2)
    assert (run / "private.png").read_bytes().startswith(b"\x89PNG")
    assert "| FedAvg, then ridge head |" in (run / "summary.md").read_text()


@pytest.mark.slow
def test_noise_comes_from_the_system_unless_a_run_is_to_be_repeated(run, tmp_path, capsys):
    few = "--algorithms", "fedavg", "--seeds", "0"
    text = (run / "summary.md").read_text()
    assert "The noise comes from the seeds, and is no secret." in text
    found = []
    for how in ("--seeded-noise", "--no-seeded-noise", "--no-seeded-noise"):
        out = tmp_path / str(len(found))
        assert private.main([*FEW, *NOISE, *few, how, "--out", str(out)]) == 0
        found.append([(x["noise_multiplier"], x["accuracy"]) for x in lines_of(out)])
    assert "The noise is drawn from keys of the operating system." in capsys.readouterr().out
    seeded = [x for x in lines_of(run) if x["seed"] == "0" and x["algorithm"] == "fedavg"]
    assert found[0] == [(x["noise_multiplier"], x["accuracy"]) for x in seeded]
    # Without noise all are alike; with noise none.
    assert found[0][0] == found[1][0] == found[2][0]
    assert len({str(x[1:]) for x in found}) == 3


def test_the_table_of_costs_has_what_epsilon_returns(tmp_path):
    how = ("--rates", "0.25", "1", "--noise-multipliers", "2", "--rounds", "3", "--delta", "1e-4")
    assert costs.main([*how, "--out", str(tmp_path)]) == 0
    with open(tmp_path / "results.csv", newline="") as file:
        lines = {line["rate"]: line for line in csv.DictReader(file)}
    sampled = privacy.epsilon(2.0, delta=1e-4, rounds=3, cohort=(1, 4))
    assert float(lines["0.25"]["epsilon"]) == sampled
    assert float(lines["1.0"]["epsilon"]) == privacy.epsilon(2.0, delta=1e-4, rounds=3)
    assert all(0 <= float(x["seconds"]) < 5 > float(x["megabytes"]) for x in lines.values())
    text = (tmp_path / "summary.md").read_text()
    assert f"| 0.25 | 2 | {sampled:.4g} |" in text
    assert costs.main(["--rates", "0", "--out", str(tmp_path)]) == 1


@pytest.mark.slow
def test_an_interrupted_run_continues_and_another_is_refused(run, capsys):
    path = run / "results.csv"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:13]))
    assert private.main([*FEW, *NOISE, "--out", str(run)]) == 0
    assert path.read_text() == whole
    assert private.main([*FEW, *NOISE, "--ridge", "1", "--out", str(run)]) == 1
    assert "ridge was 0.01, is 1.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--algorithms fedprox", "--algorithms is 'fedprox', did you mean"),
        ("--clients 0", "--clients is 0, expected 1 or more"),
        ("--noise-multipliers -1", "--noise-multipliers is -1.0, expected 0 or more"),
        ("--delta 1", "--delta is 1.0, expected above 0 and below 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path, capsys, words, said):
    assert private.main(["--out", str(tmp_path / "out"), *words.split()]) == 1
    assert said in capsys.readouterr().err
