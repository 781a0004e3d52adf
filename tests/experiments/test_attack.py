"""Model inversion: what the attacker's networks compute, what it finds, and what is refused."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from experiments.attack import __main__ as attack
from experiments.attack import gan, inversion
from experiments.attack.inversion import Seen
from experiments.attack.runs import Config, split
from experiments.harness import tasks
from experiments.harness.config import Data

HOW = SimpleNamespace(
    digit=1, images=3, restarts=2, steps=20, learning_rate_of_noise=0.3, factor_weight=0.0
)
TINY = (
    *("--epochs", "1", "--num-clients", "2", "--known", "320", "--gan-epochs", "1"),
    *("--channels", "4", "2", "2", "--images", "4", "--restarts", "1", "--steps", "2"),
    *("--judge-epochs", "1", "--views", "aggregate+sum", "merged", "dp_sgd"),
)


def whole(images):
    return images


def test_a_transposed_convolution_is_the_transpose_of_lax(x64):
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 3))
    up = gan._Up(5)
    variables = jax.jit(up.init)(jax.random.key(1), x)
    kernel = variables["params"]["kernel"]
    numbers = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_transpose(
        x, kernel, (2, 2), "SAME", dimension_numbers=numbers, transpose_kernel=True
    )
    np.testing.assert_allclose(jax.jit(up.apply)(variables, x), expected, atol=1e-6)


@pytest.fixture(scope="module")
def world():
    """Images that noise is the logarithm of, and a network that reads them as they are."""
    weights = jax.random.normal(jax.random.key(0), (gan.NOISE, 2)) / 10

    def generate(noise):
        return jax.nn.sigmoid(noise)[:, :, None, None]

    network = gan.Gan(generate, lambda images: jnp.zeros(len(images)))
    model = fj.Model(lambda w, x: x[:, :, 0, 0] @ w, fj.likelihoods.categorical)
    return network, model, weights


@pytest.mark.long
def test_images_are_of_the_class_and_as_bright_as_noise_allows(world):
    network, model, weights = world
    images = inversion.inverted(HOW, model, network, Seen(weights), whole, jax.random.key(1))
    outputs = model.apply(weights, images)
    assert (outputs.argmax(1) == HOW.digit).all()
    # The best there is: noise of +-1, whichever each weight asks for.
    way = jnp.sign(weights[:, 1] - weights[:, 0])
    best = model.apply(weights, network.generate(way[None]))
    gap = (best[:, 1] - best[:, 0]) - (outputs[:, 1] - outputs[:, 0])
    start = model.apply(weights, network.generate(jnp.zeros((1, gan.NOISE))))
    assert (gap >= -1e-5).all()
    assert (gap < 0.2 * (best - start)[:, 1]).all()


def test_of_several_starts_the_surest_counts(world):
    network, model, weights = world

    def surprise(restarts):
        how = SimpleNamespace(**vars(HOW) | {"restarts": restarts, "steps": 1})
        images = inversion.inverted(how, model, network, Seen(weights), whole, jax.random.key(1))
        return -jax.nn.log_softmax(model.apply(weights, images))[:, HOW.digit]

    # The first starts are the same.
    one, several = surprise(1), surprise(4)
    assert (several <= one + 1e-6).all()
    assert (several < one - 1e-3).any()


def test_pixels_are_those_that_networks_train_on():
    train, _ = fj.datasets.load("digits")
    pixels = tasks.standardizer(train)
    expected = fj.datasets.normalizer(train)(train.inputs[:9])
    found = pixels(jnp.asarray(train.inputs[:9], jnp.float32) / train.scale)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.long
def test_factors_pull_images_to_those_that_have_them(world):
    network, model, weights = world
    noise = np.random.default_rng(5).normal(size=(3, gan.NOISE)).clip(-1, 1).astype(np.float32)
    examples = fj.Examples(network.generate(noise))
    seen = Seen(weights, fj.fisher.kfac(model, weights, examples).factors)

    def distance(weight):
        how = SimpleNamespace(**vars(HOW) | {"factor_weight": weight, "steps": 60})
        found = inversion.inverted(how, model, network, seen, whole, jax.random.key(1))
        own = fj.fisher.kfac(model, weights, fj.Examples(found))
        return float(inversion.mismatch(own, seen.factors))

    assert distance(1000.0) < 0.5 * distance(0.0)


def test_factors_of_one_client_are_what_their_sum_tells():
    source = jax.random.normal(jax.random.key(0), (3, 4, 4))
    square = jnp.einsum("iab,icb->iac", source, source)
    factors = {"w": {"input": square, "output": 2 * square[:, :2, :2]}}
    alone = inversion.marginals(factors, jnp.array([0.0, 1.0, 0.0]))
    np.testing.assert_allclose(alone["w"]["input"], square[1], rtol=1e-6)
    # What partial traces of sum_i p_i A_i (x) G_i give.
    weights = jnp.array([0.2, 0.3, 0.5])
    whole = jnp.einsum("i,iab,icd->acbd", weights, square, factors["w"]["output"])
    found = inversion.marginals(factors, weights)["w"]
    traced = jnp.einsum("acbc->ab", whole)
    scale = jnp.einsum("i,iaa->", weights, factors["w"]["output"])
    np.testing.assert_allclose(found["input"], traced / scale, rtol=1e-5)


def test_the_attacked_client_has_all_of_a_class_and_some_others():
    targets = np.random.default_rng(0).integers(0, 10, 3000)
    asked = Config(Data("mnist", "lenet", num_clients=4), others=100)
    own, *others = split(asked, targets, seed=0)
    assert (targets[own] == 3).sum() == (targets == 3).sum()
    assert (targets[own] != 3).sum() == 100
    everybody = np.concatenate([own, *others])
    assert len(others) == 3
    assert sorted(everybody) == list(range(3000))


@pytest.mark.slow
def test_a_run_leaves_each_view_and_continues(tmp_path, shared):
    data = "--data-dir", str(shared / "data")
    run = partial(attack.main, [*TINY, *data, "--out", str(tmp_path)])
    assert run() == 0
    path = tmp_path / "results.csv"
    whole = path.read_text()
    assert len(whole.splitlines()) == 1 + 3
    assert (tmp_path / "attack.png").read_bytes().startswith(b"\x89PNG")
    assert "| the client's model by DP-SGD |" in (tmp_path / "summary.md").read_text()
    path.write_text("".join(whole.splitlines(keepends=True)[:3]))
    assert run() == 0
    assert path.read_text() == whole


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--views models", "--views is 'models', did you mean 'model'"),
        ("--dataset digits", "--dataset is digits, expected mnist"),
        ("--digit 10", "--digit is 10, expected 0 to 9"),
        ("--num-clients 1", "--num-clients is 1, expected 2 or more"),
        ("--clip 0", "--clip is 0.0, expected a number above 0"),
        ("--known 319", "--known is 319, expected 320 or more"),
        ("--partition iid", "--partition is iid, expected dirichlet_of_client"),
        ("--learning-rate -1", "--learning-rate is -1.0, expected"),
        ("--restarts 0", "--restarts is 0, expected 1 or more"),
    ],
)
def test_what_cannot_be_attacked_is_refused(tmp_path, capsys, words, said):
    assert attack.main(["--out", str(tmp_path / "out"), *words.split()]) == 1
    assert said in capsys.readouterr().err
