"""experiments.pretrained --table vision: clients fine-tune a network, and are merged."""

import csv

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.pretrained import __main__ as pretrained
from experiments.pretrained import models, vision_table, weights
from experiments.pretrained.networks import NETWORKS
from experiments.pretrained.vision_table import Case, Config
from fisherjax.typing import Examples
from tests.harness.test_drawings import archive

TINY = Case("usps", "drawn", 10, same=True)


@pytest.fixture
def state(monkeypatch, tmp_path):
    """Stand in for the weights and the images; return the state dict of the weights."""
    params = models.init(NETWORKS["usps"], jax.random.key(7), 10)
    path = tmp_path / "usps.safetensors"
    fj.files.save_arrays(path, models.to_state(params))
    monkeypatch.setattr(weights, "path", lambda *_: path)
    monkeypatch.setattr(
        vision_table, "CASES", {"tiny": TINY, "new": TINY._replace(classes=4, same=False)}
    )
    random = np.random.RandomState(0)
    drawn = random.randint(0, 256, (24, 16, 16, 1)).astype("uint8"), np.int32(np.arange(24) % 10)
    monkeypatch.setattr(vision_table, "data", lambda *_: (Examples(*drawn), Examples(*drawn)))
    return models.to_state(params)


def test_the_last_layer_is_new_where_the_classes_are_others(state):
    start = vision_table._start(Config(), "tiny", "pretrained", 0)
    assert all((models.to_state(start)[name] == x).all() for name, x in state.items())
    for new in (vision_table._start(Config(), "new", x, 0) for x in ("pretrained", "scratch")):
        assert new["params"]["classifier.4.bias"].shape == (4,)
    first, other = (vision_table._start(Config(), "tiny", "scratch", seed) for seed in (0, 1))
    kernels = [x["params"]["features.0.weight"] for x in (first, start, other)]
    assert all((kernels[0] != x).all() for x in kernels[1:])


@pytest.mark.long
def test_a_table_has_every_row_from_both_starts_and_goes_on(state, monkeypatch, tmp_path, capsys):
    options = ["--table", "vision", "--cases", "tiny", "--algorithms", "fedavg", "--seeds", "0"]
    options += ["--num-clients", "2", "--epochs", "1", "--batch-size", "8"]
    options += ["--out", str(tmp_path / "run")]
    assert pretrained.main(options) == 0
    with open(tmp_path / "run/results.csv") as file:
        rows = {
            (row["start"], row["algorithm"]): float(row["accuracy"]) for row in csv.DictReader(file)
        }
    names = ("start", "own", "ensemble", "fedavg")
    assert rows.keys() == {(x, name) for x in ("pretrained", "scratch") for name in names}
    network, drawn = NETWORKS["usps"], vision_table.data()[0]
    params = models.from_state(network, state)
    outputs = models.model(network, params).apply(params, drawn.inputs)
    expected = (np.asarray(outputs).argmax(-1) == drawn.targets).mean()
    assert rows["pretrained", "start"] == pytest.approx(expected, abs=1e-6)
    assert "| FedAvg |" in (tmp_path / "run/summary.md").read_text()
    monkeypatch.setattr(vision_table, "_clients", lambda *_: pytest.fail("it trains again"))
    assert pretrained.main(options) == 0
    assert "FedAvg" in capsys.readouterr().out


def test_rows_have_the_name_of_their_last_exchange():
    how = {"cases": ("svhn-mnist",), "starts": ("scratch",), "algorithms": ("ties",), "seeds": (0,)}
    for more, last in [
        ({}, []),
        ({"exchanges": 1}, ["analytic_head"]),
        ({"exchanges": 2}, ["natural_gradient"]),
        ({"running_statistics": True}, ["running_statistics"]),
        ({"running_statistics": True, "exchanges": 3}, ["running_statistics", "natural_gradient"]),
    ]:
        units = vision_table.units(Config(**how, **more))
        names = [name for *_, name in units if name not in vision_table.REFERENCES]
        assert names == ["ties", *(f"ties+{name}" for name in last)]


def test_people_who_draw_the_test_images_draw_no_training_images(monkeypatch, tmp_path):
    (tmp_path / "omniglot").mkdir()
    archive(tmp_path / "omniglot", "images_background_small1.zip", ["Greek", "Latin"])
    asked = Config(data_dir=tmp_path, most_images=3, tested=8)
    for seed in range(6):
        train, test = vision_table.data(asked, "resnet20-omniglot", seed)
        held = sum(
            person in np.random.default_rng(seed).permutation(20)[:5] + 1 for person in (1, 2)
        )
        assert len(test.targets) == 4 * held
        assert train.inputs.shape == (min(3, 8 - 4 * held), 32, 32, 3)


def test_a_table_that_does_not_exist_is_refused(capsys):
    assert pretrained.main(["--table", "visio"]) == 1
    assert "--table is 'visio', did you mean 'vision'" in capsys.readouterr().err
