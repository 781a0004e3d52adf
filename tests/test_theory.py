"""experiments.theory: its figures, and the numbers that judge their claims."""

import csv
import dataclasses
from functools import partial
from typing import get_args

import jax
import numpy as np
import pytest

from experiments.theory import __main__ as theory
from experiments.theory import averaging, directions, parallel_runs, phases, theorem


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_every_figure_has_a_name_on_the_command_line():
    assert set(get_args(theory.Figure)) == set(theory.FIGURES)


@pytest.mark.slow
def test_figures_are_pictures_numbers_and_claims(tmp_path):
    """One test, as workers would each draw them: one figure of each kind, quickly."""
    figures = ("fedfisher1b", "features2", "features4", "phase", "directions", "constants")
    assert theory.main(["--quick", "--out", str(tmp_path), "--figure", *figures]) == 0
    assert not jax.config.jax_enable_x64
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{name}.{kind}" for name in figures for kind in ("png", "csv", "md")}
    for name in figures:
        text = (tmp_path / f"{name}.md").read_text()
        assert f"![{name}]({name}.png)" in text
        assert f"python -m experiments.theory --figure {name} --quick" in text
        assert "nan" not in text
    setting = theorem.FIGURES["fedfisher1b"][1]
    rows = rows_of(tmp_path / "fedfisher1b.csv")
    assert len(rows) == 7 * len(setting.steps) * setting.seeds
    assert {int(row["seed"]) for row in rows} == set(range(setting.seeds))
    left = {}
    for row in rows:
        roots = [float(row[term]) ** 0.5 for term in ("laplace", "server", "local")]
        assert float(row["loss"]) ** 0.5 <= sum(roots) * (1 + 1e-4)
        key = row["local_steps"], row["seed"]
        left.setdefault(key, {})[row["merge"]] = float(row["server"])
    # The more steps the server takes, the less of its quadratic is left.
    for of in left.values():
        steps = [of[f"descent_{steps}"] for steps in theorem.SERVER_STEPS]
        assert of["fedavg"] >= steps[0] >= steps[1] >= steps[2] >= of["optimum"]


@pytest.mark.long
def test_seeds_are_the_same_runs_whatever_their_number():
    setting = dataclasses.replace(averaging.FIGURES["features2"][1], rounds=2, ways=("fedavg",))
    few, more = (
        averaging.compute(dataclasses.replace(setting, seeds=seeds))["fedavg"] for seeds in (1, 2)
    )
    assert np.allclose(few.noise[0], more.noise[0], rtol=1e-5)


def test_the_progress_of_a_figure_is_told_its_parts_once_before_they_are_computed():
    told = []
    setting = dataclasses.replace(averaging.FIGURES["features2"][1], rounds=2)
    found = averaging.compute(setting, lambda parts: told.append(parts) or iter(parts))
    assert [list(parts) for parts in told] == [list(found)] == [list(setting.ways)]


def test_the_threshold_lies_where_the_accuracy_crosses():
    ratios = (0.1, 0.2, 0.4)
    assert phases.threshold(ratios, np.array([0.5, 0.8, 1.0])) == pytest.approx(0.2 * 2**0.5)
    assert phases.threshold(ratios, np.array([0.5, 0.6, 0.7])) is None
    assert phases.threshold(ratios, np.array([0.95, 0.96, 1.0])) is None
    # The last crossing: an accuracy that happens to be high below it says nothing.
    assert phases.threshold(ratios, np.array([0.95, 0.8, 1.0])) == pytest.approx(0.2 * 2**0.5)


def test_a_power_law_is_found():
    assert phases.power([(m, 3 * m**-0.25) for m in (1, 2, 5, 24)]) == pytest.approx(-0.25)


def test_an_exponential_law_is_found():
    strengths = np.array([0.5, 1.0, 3.0])
    slope, explained = directions.decay(strengths, 0.3 * np.exp(-0.7 * strengths))
    assert slope == pytest.approx(0.7)
    assert explained == pytest.approx(1)


def test_points_of_every_direction_have_the_strengths_that_they_are_compared_at():
    setting = directions.Setting()
    for _, _, examples, dim, owners in directions.points(setting):
        snr = directions.ratio(1.7, examples, dim, owners)
        # chi by its definition, from inner products of the clients' signals.
        mu = snr * dim**0.5 * np.eye(dim)[list(owners)]
        chi = (mu @ mu[0]).sum() / (mu[0] @ mu[0])
        strength = examples * chi**2 * (mu[0] @ mu[0]) ** 2 / (len(owners) * dim)
        assert strength == pytest.approx(1.7, rel=1e-4)


def test_what_a_mean_keeps_is_measured_over_rounds():
    # Two rounds of two steps, each of which gains 1; the mean keeps a quarter of a round's gain.
    own = np.array([[[1.0, 2.0, 0.5], [1.5, 2.5, 1.0]]])
    assert averaging.kept(own) == ["100.0", "0.250"]
    falling = np.array([[[1.0, 0.5, 0.5], [1.5, 2.5, 1.0]]])
    assert averaging.kept(falling)[0] == "75.0"


def test_runs_compile_once_for_equal_functions():
    def add(number, x, y):
        return number + x + y

    before = parallel_runs._spread._cache_size()
    for _ in range(2):
        found = parallel_runs.compute(partial(add, 1.0), np.arange(3.0), np.float32(2))
    assert np.array_equal(found, [3, 4, 5])
    assert parallel_runs._spread._cache_size() == before + 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "0"], "--seeds is 0, expected 1 or more"),
        (["--figure", "phase", "phase"], "expected each only once"),
    ],
)
def test_what_cannot_be_drawn_is_refused(arguments, said, capsys, tmp_path):
    assert theory.main([*arguments, "--out", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
