"""The command for models of each client's own, and the looks of digits that it makes."""

import csv
import re
import types
from pathlib import Path

import chex
import flax.linen as nn
import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.personalized import __main__ as personalized
from experiments.personalized import domains, pictures, runs, settings

ONE = (
    *("--table", "digits", "--domains", "scans", "fonts", "--examples", "40", "--tested", "30"),
    *("--rounds", "2", "--choosing-rounds", "1", "--table3", "2", "--table3-rounds", "2"),
    *("--temperatures", "0.1", "1", "--seeds", "0", "1", "--algorithms", "fedbn"),
    "weighted_fedavg",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("personalized")
    assert personalized.main([*ONE, "--out", str(out)]) == 0
    return out


@pytest.mark.slow
def test_a_run_leaves_each_accuracy_and_the_figures(run):
    with open(run / "results.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    held = [x for x in lines if x["held"] == "True"]
    assert {x["temperature"] for x in held} == {"0.1", "1.0"}
    best = max((x for x in held if not x["client"]), key=lambda x: float(x["accuracy"]))
    judged = {
        (x["algorithm"], x["temperature"], x["epochs"], x["seed"])
        for x in lines
        if x["held"] == "False"
    }
    temperatures = {"1.0", best["temperature"]}
    expected = {("fedbn", "", "1", s) for s in "01"} | {("fedavg", "", "2", "0")}
    expected |= {("weighted_fedavg", t, "1", s) for t in temperatures for s in "01"}
    assert judged == expected
    # The mean over clients, of the last round, is that of the clients.
    for unit in judged:
        own = [
            x for x in lines if (x["algorithm"], x["temperature"], x["epochs"], x["seed"]) == unit
        ]
        own = [x for x in own if x["round"] == "2" and x["held"] == "False"]
        each = [float(x["accuracy"]) for x in own if x["client"]]
        [mean] = [float(x["accuracy"]) for x in own if not x["client"]]
        assert len(each) == 2
        np.testing.assert_allclose(mean, np.mean(each), atol=1e-5)
    for name in ("personalized", "temperatures", "weights", "domains"):
        assert (run / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    told = (run / "summary.md").read_text()
    assert "FedBN" in told
    assert "| 2 |" in told
    for matrix in pictures.read_weights(run / "weights.csv").values():
        np.testing.assert_allclose(matrix.sum(1), 1, atol=1e-3)


@pytest.mark.slow
def test_an_interrupted_run_continues_and_another_is_refused(run, capsys):
    path = run / "results.csv"
    whole = path.read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:-4]))
    assert personalized.main([*ONE, "--out", str(run)]) == 0
    assert path.read_text() == whole
    assert personalized.main([*ONE, "--epochs", "3", "--out", str(run)]) == 1
    assert "epochs was 1, is 3" in capsys.readouterr().err
    path.write_text(whole + "domains,fedbn\n")
    assert personalized.main([*ONE, "--out", str(run)]) == 0
    assert "results.csv is damaged: 1 of" in capsys.readouterr().out
    assert path.read_text() == whole


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--algorithms fedbm", "--algorithms is 'fedbm', did you mean 'fedbn'"),
        (
            "--table cifar10 --classes 11",
            "--classes is 11, expected 1 to the 10 classes of cifar10",
        ),
        ("--splits dirichlet", "--splits is dirichlet, expected domains for --table digits"),
        ("--table cifar100 --splits domains", "expected pathological or dirichlet"),
        ("--domains mnist usps", "did you mean"),
        ("--temperatures 0", "--temperatures is 0.0, expected a number above 0"),
        ("--seeds 1 1", "--seeds is 1 1, expected each only once"),
        ("--table cifar11", "did you mean"),
    ],
)
def test_what_cannot_be_run_is_refused(tmp_path, capsys, words, said):
    assert personalized.main(["--out", str(tmp_path / "out"), *words.split()]) == 1
    assert said in capsys.readouterr().err


def test_temperatures_are_chosen_by_what_is_held_aside():
    asked = settings.Config(algorithms=("weighted_fedavg",), temperatures=(0.1, 1.0))
    units = settings.choosing(asked)
    points = [
        settings.Measurement(*unit, unit.rounds, None, accuracy)
        for unit, accuracy in zip(units, (0.7, 0.6), strict=True)
    ]
    # Whatever the test data say.
    tested = [p._replace(held=False, accuracy=1 - p.accuracy) for p in points]
    assert settings.chosen(asked, points + tested) == {"weighted_fedavg": 0.1}


@pytest.mark.long
def test_what_is_held_aside_is_training_data_that_nobody_trains_on():
    asked = settings.Config(domains=("scans", "fonts"), examples=40, tested=30)
    whole, aside = (runs.population(asked, "domains", held) for held in (False, True))
    rows = fj.clients.view
    for client in range(2):
        kept, judged, everything = (
            set(np.asarray(x.indices)[np.asarray(x.weights) > 0].tolist())
            for x in (
                rows(aside.train, client),
                rows(aside.test, client),
                rows(whole.train, client),
            )
        )
        assert kept | judged == everything
        assert not kept & judged
    np.testing.assert_array_equal(aside.test.inputs, whole.train.inputs)


def test_clients_of_classes_are_judged_on_their_own(monkeypatch):
    source = np.random.default_rng(0)
    images = source.integers(0, 256, (900, 32, 32, 3)).astype(np.uint8)
    data = fj.datasets.Dataset(
        *(images, np.arange(900, dtype=np.int32) % 10, 10, 255.0),
        *((0.5,) * 3, (0.25,) * 3, "cifar10"),
    )
    monkeypatch.setattr(fj.datasets, "load", lambda *_: (data, data))
    for split in ("pathological", "dirichlet"):
        asked = settings.Config("cifar10", (split,), num_clients=5, examples=10**6, tested=10**6)
        of = runs.population(asked, split, held=False)
        counts = []
        for side in (of.train, of.test):
            rows = [np.asarray(own)[:n] for own, n in zip(side.indices, side.sizes, strict=True)]
            counts.append(fj.partition.label_counts(np.asarray(side.targets), rows))
        np.testing.assert_array_equal(*counts)
        np.testing.assert_allclose(of.shares.sum(1), 1)


def test_the_looks_of_digits_are_what_they_say(monkeypatch):
    source = np.random.default_rng(0)

    def load(name, _=None):
        size = 32 if name == "cifar10" else 28
        channels = 3 if name == "cifar10" else 1
        # Each image is known by its first pixel.
        images = source.integers(1, 256, (300, size, size, channels)).astype(np.uint8)
        targets = np.arange(300, dtype=np.int32) % 10
        images[:, 0, 0, 0] = np.arange(300) % 256 if channels == 1 else images[:, 0, 0, 0]
        return (types.SimpleNamespace(inputs=images, targets=targets),) * 2

    real = fj.datasets.load
    monkeypatch.setattr(
        fj.datasets, "load", lambda name, *x: real("digits") if name == "digits" else load(name)
    )
    names = domains.LOOKS[:5]
    found = domains.domains(names, 90, 40, 0, None)
    assert [one.name for one in found] == list(names)
    for one in found:
        for (images, labels), most in ((one.train, 90), (one.test, 40)):
            assert images.shape == (most, 28, 28, 3)
            assert images.dtype == np.uint8
            assert set(labels) == set(range(10))
    by_name = {one.name: one for one in found}
    grey = by_name["mnist"].train[0]
    np.testing.assert_array_equal(grey[..., 0], grey[..., 1])
    # The same request gives the same images, another seed others.
    again = domains.domains(("fonts",), 90, 40, 0, None)[0].train
    np.testing.assert_array_equal(again[1], by_name["fonts"].train[1])
    np.testing.assert_array_equal(again[0], by_name["fonts"].train[0])
    other = domains.domains(("fonts",), 90, 40, 1, None)[0].train
    assert not np.array_equal(again[0], other[0])


def test_no_two_domains_share_an_image():
    data = types.SimpleNamespace(inputs=np.arange(50), targets=np.zeros(50))
    shares = domains._shares((data, data), ("a", "b", "c"), 0)
    for side in (0, 1):
        rows = np.concatenate([shares[kind][side][0] for kind in "abc"])
        assert sorted(rows) == list(range(50))


def test_colours_of_a_digit_can_be_told_apart():
    back, ink = domains._two_colours(np.random.default_rng(0), 5000)
    assert (np.abs(back.mean(-1) - ink.mean(-1)) >= 50).all()
    for colours in (back, ink):
        assert colours.min() >= 0
        assert colours.max() <= 255


def test_the_recipe_of_mnist_m_is_the_difference_of_a_photograph_and_the_digit():
    source = np.random.default_rng(0)
    photos = types.SimpleNamespace(
        inputs=np.full((3, 32, 32, 3), 200, np.uint8), targets=np.zeros(3)
    )
    digits = source.integers(0, 256, (4, 28, 28, 1)).astype(np.uint8)
    found = domains._blended(source, digits, None, photos)
    np.testing.assert_array_equal(found, np.abs(200.0 - np.repeat(digits, 3, -1)))


@pytest.mark.long
def test_the_examples_of_the_page_run_and_print_what_it_says(run_page, capsys):
    page = Path(__file__).parents[2] / "docs/methods/personal.md"
    run_page(page)
    printed, text = capsys.readouterr().out, page.read_text()
    assert re.search(r"It prints (\d+ of \d+)", text).group(1) in printed
    found = [float(word) for word in re.findall(r"0\.\d+", printed)]
    said = re.search(r"It prints (0\.\d+) and (0\.\d+)", text).groups()
    # Other versions of JAX round differently.
    np.testing.assert_allclose(found, [float(word) for word in said], atol=0.02)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.BatchNorm(not train, name="norm")(nn.Dense(4, name="dense")(x)))
        return nn.Dense(2)(x)


def test_own_statistics_are_those_of_each_clients_model_on_its_own_examples(key):
    inputs = np.random.default_rng(0).normal([[1]] * 5 + [[4]] * 7, 1, (12, 3)).astype(np.float32)
    federation = fj.clients.federation((inputs, np.arange(12) % 2), [range(5), range(5, 12)])
    params = fj.networks.init(Normed(), key, inputs)
    model = fj.networks.model(Normed(), params, fj.likelihoods.categorical)
    models = jax.tree.map(lambda x: np.stack([x, 2 * x]), params)
    found = runs.own_statistics(model, models, federation)
    for client, rows in enumerate((range(5), range(5, 12))):
        dense = jax.tree.map(lambda x, of=client: x[of], models["params"]["dense"])
        hidden = inputs[rows] @ dense["kernel"] + dense["bias"]
        own = jax.tree.map(lambda x, of=client: x[of], found["moments"]["norm"])
        np.testing.assert_allclose(own["mean"], hidden.mean(0), rtol=1e-5)
        np.testing.assert_allclose(own["second_moment"], (hidden**2).mean(0), rtol=1e-4)
    chex.assert_trees_all_equal(found["params"], models["params"])
