"""Two clients of one curve: their data, their training, their merged models and barriers."""

import csv
import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.function_space import __main__ as function_space
from experiments.function_space import barriers, toy_regression
from experiments.function_space.toy_regression import SUPPORTS, Setting, cells
from experiments.harness import figures
from experiments.harness.figures import label

METHODS = ("fedavg", "fisher_merge", "fedfish", "fedfisher_kfac", "fedfisher_full")
SETTING = Setting(num_points=12, width=6, steps=20, learning_rate=0.02)
SEEDS = (0, 3)


@pytest.fixture(scope="module")
def runs():
    return toy_regression.train(SETTING, SEEDS)


@pytest.fixture(scope="module")
def merged(runs):
    return {name: merge(name, runs) for name in METHODS}


def merge(name, runs):
    return toy_regression.merge(toy_regression.algorithm(name, SETTING), runs)


def select(stacked, *index):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], stacked)


def points(runs, run, client):
    federation = select(runs.federations, run)
    rows = federation.indices[client]
    return np.asarray(federation.inputs[rows]), np.asarray(federation.targets[rows])


def forward(params, x):
    """The network in NumPy."""
    for name in ("dense1", "dense2", "dense3"):
        layer = params[name]
        x = x @ np.asarray(layer["kernel"], float) + np.asarray(layer["bias"], float)
        x = np.tanh(x) if name != "dense3" else x
    return x


@pytest.mark.long
def test_clients_see_inputs_in_all_of_their_support_and_nowhere_else(runs):
    assert cells(runs) == [(overlap, seed) for overlap in SUPPORTS for seed in SEEDS]
    for run, (overlap, _) in enumerate(cells(runs)):
        for client, (low, high) in enumerate(SUPPORTS[overlap]):
            x = points(runs, run, client)[0]
            assert x.shape == (SETTING.num_points, 1)
            assert low <= x.min() < x.max() <= high
    for both in SUPPORTS.values():
        data = toy_regression.draw(jax.random.key(0), jnp.array(both), 500, 0.0)
        for rows, (low, high) in zip(data.indices, both, strict=True):
            assert data.inputs[rows].min() < low + 0.05
            assert data.inputs[rows].max() > high - 0.05


def test_overlaps_are_what_their_names_say():
    shared = {overlap: min(a[1], b[1]) - max(a[0], b[0]) for overlap, (a, b) in SUPPORTS.items()}
    assert shared["full"] == 2
    assert 0 < shared["partial"] < 1
    assert shared["disjoint"] < 0


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_targets_lie_around_the_curve(noise):
    supports = jnp.array(SUPPORTS["partial"])
    data = toy_regression.draw(jax.random.key(1), supports, 2000, noise)
    away = np.asarray(data.targets) - np.sin(2 * np.pi * np.asarray(data.inputs))
    assert np.allclose(away.std(), noise, rtol=0.05, atol=1e-5)
    assert np.allclose(away.mean(), 0, atol=0.03)


def test_a_seed_has_one_start_and_one_noise_at_every_overlap(runs):
    first, *others = (select(runs.starts, run) for run in (0, 2, 4))
    away = [
        fed.targets - np.sin(2 * np.pi * fed.inputs)
        for fed in (select(runs.federations, run) for run in (0, 2, 4, 1))
    ]
    for other in others:
        assert jax.tree.all(jax.tree.map(np.array_equal, first, other))
    assert np.allclose(away[0], away[1], atol=1e-5)
    assert np.allclose(away[0], away[2], atol=1e-5)
    assert not np.allclose(away[0], away[3], atol=1e-2)


@pytest.mark.long
@pytest.mark.parametrize(("start", "spread"), [("zero_biases", 0), ("uniform", 1)])
def test_initial_models_have_the_biases_that_were_asked_for(start, spread):
    network = toy_regression.Network(400, start)
    params = network.init(jax.random.key(0), jnp.zeros((1, 1)))["params"]
    for name, bound in (("dense1", 1.0), ("dense2", 0.05), ("dense3", 0.05)):
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        assert 0.9 * bound * spread <= jnp.abs(kernel).max()
        assert spread * jnp.abs(kernel).max() <= bound
        assert jnp.any(bias) == bool(spread)
        assert jnp.abs(bias).max() <= spread * bound


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
def test_clients_take_full_batch_steps_of_their_optimiser(optimizer):
    setting = dataclasses.replace(SETTING, optimizer=optimizer)
    runs = toy_regression.train(setting, SEEDS)
    apply = toy_regression.model(setting.width).apply
    x, y = points(runs, 3, 1)
    slope = jax.grad(lambda w: 0.5 * jnp.mean((apply(w, x) - y) ** 2))
    update = getattr(optax, optimizer)(setting.learning_rate)
    params = select(runs.starts, 3)
    state = update.init(params)

    @jax.jit
    def step(params, state):
        change, state = update.update(slope(params), state)
        return optax.apply_updates(params, change), state

    for _ in range(setting.steps):
        params, state = step(params, state)
    found = select(runs.locals, 3, 1)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        assert np.allclose(a, b, atol=1e-4)


def test_a_run_depends_on_no_other_and_compiles_nothing_anew(runs, compilations):
    with compilations() as count:
        others = toy_regression.train(SETTING, (3, 5))
    assert count() == 0
    for before, now in zip(
        jax.tree.leaves(runs.locals), jax.tree.leaves(others.locals), strict=True
    ):
        assert np.allclose(before[1::2], now[::2], atol=1e-6)
        assert not np.allclose(before[::2], now[1::2], atol=1e-3)


@jax.jit
def squares_of_the_gradient(w, x, y):
    """Of the loss: all points are one minibatch."""
    apply = toy_regression.model(SETTING.width).apply
    slopes = jax.grad(lambda w: 0.5 * jnp.mean((apply(w, x) - y) ** 2))(w)
    return jax.tree.map(jnp.square, slopes)


@jax.jit
def squares_of_derivatives(w, x, y):
    """Of the function, at each point."""
    apply = toy_regression.model(SETTING.width).apply
    slopes = jax.jacrev(lambda w: apply(w, x)[:, 0])(w)
    return jax.tree.map(lambda slope: jnp.mean(slope**2, axis=0), slopes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "squares"),
    [("fisher_merge", squares_of_derivatives), ("fedfish", squares_of_the_gradient)],
    ids=["fisher_merge", "fedfish"],
)
def test_means_are_weighted_by_squares_of_what_their_names_say(runs, merged, name, squares):
    for run in (0, 5):
        fishers = []
        for client in range(2):
            x, y = points(runs, run, client)
            fishers.append(squares(select(runs.locals, run, client), x, y))
        expected = jax.tree.map(
            lambda f, g, v, w: (f * v + g * w) / (f + g),
            *fishers,
            *(select(runs.locals, run, client) for client in range(2)),
        )
        found = select(merged[name], run)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_one_clients_model_at_both_clients_has_no_barrier(runs, name):
    models = jax.tree.map(lambda leaf: np.repeat(leaf[:, :1], 2, axis=1), runs.locals)
    twice = runs._replace(locals=models)
    measured = barriers.measure(SETTING.width, twice, {name: merge(name, twice)})
    assert measured[name].shape == (6, 2)
    assert np.allclose(measured[name], measured["local"], atol=1e-5)
    assert np.allclose(barriers.barriers(measured)[name], 0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedfish"])
def test_equal_data_and_equal_derivatives_make_every_method_the_mean(runs, name):
    """Functions that differ by a constant c have the same derivatives; (c / 2)^2 is then won."""

    def both(leaf):
        return np.concatenate([np.asarray(leaf)[:, : SETTING.num_points]] * 2, axis=1)

    models = jax.tree.map(lambda leaf: np.repeat(leaf[:, :1], 2, axis=1), runs.locals)
    bias = models["dense3"]["bias"]
    models["dense3"]["bias"] = bias + np.array([0.0, 0.6], np.float32)[None, :, None]
    data = runs.federations
    same = runs._replace(
        federations=data._replace(inputs=both(data.inputs), targets=both(data.targets)),
        locals=models,
    )
    measured = barriers.measure(SETTING.width, same, {name: merge(name, same)})
    assert np.allclose(barriers.barriers(measured)[name], -(0.3**2), atol=1e-5)


def test_the_barriers_in_the_file_are_those_of_the_models(runs, merged):
    text = barriers.csv(runs, barriers.measure(SETTING.width, runs, merged))
    lines = list(csv.DictReader(io.StringIO(text)))
    for run, (overlap, seed) in enumerate(cells(runs)):
        for name in METHODS:
            own = []
            for client in range(2):
                x, y = points(runs, run, client)
                models = select(merged[name], run), select(runs.locals, run, client)
                after, before = (np.mean((forward(model, x) - y) ** 2) for model in models)
                own.append(after - before)
            found = {
                line["client"]: float(line["value"])
                for line in lines
                if (line["overlap"], line["seed"]) == (overlap, str(seed))
                and (line["algorithm"], line["metric"]) == (name, "barrier")
            }
            expected = {"0": own[0], "1": own[1], "": np.mean(own)}
            assert found.keys() == expected.keys()
            for client, value in expected.items():
                assert np.isclose(found[client], value, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_command_leaves_pictures_numbers_and_the_table_of_them(tmp_path, capsys):
    words = "--num-seeds 2 --num-points 12 --width 6 --steps 20 --learning-rate 0.02 --drawn-seed 1"
    words += f" --others fedfisher_kfac --out {tmp_path}"
    assert function_space.main(words.split()) == 0
    names = {"functions.png", "barriers.png", "barriers.csv", "summary.md"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.glob("*.png"))
    with open(tmp_path / "barriers.csv", newline="") as file:
        lines = [x for x in csv.DictReader(file) if x["metric"] == "barrier" and not x["client"]]
    text = (tmp_path / "summary.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \w+ \| F", line)]
    table = [line.strip("| ").split(" | ") for line in rows]
    assert len(table) == 3 * 4
    assert text in capsys.readouterr().out
    for overlap, name, median, _, _, lower, _ in table:
        own, average = (
            [
                float(line["value"])
                for line in lines
                if line["overlap"] == overlap and label(line["algorithm"]) == algorithm
            ]
            for algorithm in (name, "FedAvg")
        )
        assert len(own) == 2
        assert np.isclose(float(median), np.median(own), atol=1e-4)
        if name != "FedAvg":
            share = sum(a < b for a, b in zip(own, average, strict=True)) / 2
            assert lower == f"{100 * share:.0f}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-seeds 0", "--num-seeds is 0, expected 1 or more"),
        ("--num-points 0", "--num-points is 0, expected 1 or more"),
        ("--steps -5", "--steps is -5, expected 1 or more"),
        ("--width 0", "--width is 0, expected 1 or more"),
        ("--fedfish-batch 0", "--fedfish-batch is 0, expected 1 or more"),
        ("--num-seeds 3 --drawn-seed 3", "expected one of the --num-seeds 3 seeds, 0 to 2"),
        ("--noise -1", "--noise is -1.0, expected 0 or more"),
        ("--learning-rate 0", "--learning-rate is 0.0, expected a number above 0"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_anything_is(tmp_path, capsys, words, message):
    assert function_space.main([*words.split(), "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert function_space.main(["--out", str(tmp_path / "file" / "out")]) == 1
    assert "choose another folder" in capsys.readouterr().err


@pytest.mark.long
def test_clients_that_diverge_are_named():
    wild = dataclasses.replace(SETTING, optimizer="sgd", learning_rate=1e30, steps=3)
    with pytest.raises(ValueError, match=r"clients diverged, the first with overlap full and seed"):
        toy_regression.train(wild, [0])


def test_a_merge_that_is_not_finite_is_named(runs):
    broken = jax.tree.map(lambda leaf: leaf.at[3].set(jnp.nan), runs.starts)
    with pytest.raises(ValueError, match="fedfish gave no finite model with overlap partial, seed"):
        barriers.measure(SETTING.width, runs, {"fedavg": runs.starts, "fedfish": broken})


def test_panels_share_their_axes_and_one_legend_names_every_line_once(
    tmp_path, monkeypatch, runs, merged
):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    measured = barriers.measure(SETTING.width, runs, merged)
    barriers.draw_functions(SETTING.width, SEEDS[0], runs, merged, measured, tmp_path / "x.png")
    barriers.draw_barriers(measured, tmp_path / "y.png")
    functions, dots = drawn
    assert len({(panel.get_xlim(), panel.get_ylim()) for panel in functions.axes}) == 1
    for figure in drawn:
        assert not any(panel.get_legend() for panel in figure.axes)
        [legend] = figure.legends
        names = [text.get_text() for text in legend.get_texts()]
        assert len(names) == len(set(names))
        assert [name for name in names if "client" not in name] == list(map(label, METHODS))
    # An algorithm looks the same in both.
    for name in METHODS:
        looks = {
            (line.get_color(), line.get_marker())
            for panel in (*functions.axes, *dots.axes)
            for line in panel.lines
            if line.get_label() == label(name)
        }
        assert len(looks) == 1
