"""The pictures' numbers: Gaussians fused, Fisher blocks compared, neighbours counted."""

import dataclasses
import shlex
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fisherjax as fj
from experiments.fedlpa_pictures import __main__ as fedlpa_pictures
from experiments.fedlpa_pictures import features, fisher_blocks, gaussians
from experiments.harness import figures, tasks
from experiments.harness.config import MODELS, Merging, OneShot
from fisherjax.training import Trained

LAYERS = gaussians.draw_layers(0)


def linear(params, x):
    return x @ params["w"]


@pytest.fixture(scope="module")
def blocks():
    return fisher_blocks.compute(fj.datasets.load("digits")[0], num_examples=40, epochs=1, seed=0)


def test_a_product_of_gaussians_is_least_where_its_gradient_vanishes():
    precisions, means = gaussians.plane()
    mode = gaussians.fuse_plane(precisions, means)["fedfisher_full"]
    gradient = sum(p @ (mode - mean) for p, mean in zip(precisions, means, strict=True))
    assert np.allclose(gradient, 0)


def test_a_diagonal_is_enough_for_gaussians_that_lie_along_the_axes():
    precisions, means = gaussians.plane()
    along = gaussians.fuse_plane(precisions * np.eye(2), means)
    assert np.isclose(gaussians.distances(along)["fedfisher_diag"], 0)
    turned = gaussians.fuse_plane(precisions, means)
    assert gaussians.distances(turned)["fedfisher_diag"] > 0.5


def test_equal_precisions_make_the_mean_of_every_fusion():
    inputs, tangents, means = LAYERS
    same = np.stack([inputs[0]] * 2), np.stack([tangents[0]] * 2)
    for fused in gaussians.fuse_layers(*same, means).values():
        assert np.allclose(fused, means.mean(0))


def test_the_approximation_is_exact_where_clients_agree_on_the_inputs():
    inputs, tangents, means = LAYERS
    fused = gaussians.fuse_layers(np.stack([inputs[0]] * 2), tangents, means)
    assert np.allclose(fused["fedlpa_ea"], fused["fedlpa"])
    assert not np.allclose(fused["fedlpa"], fused["fedfisher_full"])


@pytest.mark.long
def test_fused_layers_are_what_the_library_merges(x64):
    """Residuals of a linear model are the tangents of the Gaussian likelihood."""
    inputs, tangents, means = gaussians.draw_layers(3, num_examples=20)
    params = [{"w": jnp.asarray(mean.reshape(2, 2))} for mean in means]
    model = fj.Model(linear, fj.likelihoods.gaussian)
    data = [
        fj.Examples(jnp.asarray(x), x @ w["w"] - g)
        for x, g, w in zip(inputs, tangents, params, strict=True)
    ]
    options = {"damping": 0.0, "kind": fj.fisher.empirical}
    exact = options | {"solver": fj.solvers.conjugate_gradients(tolerance=1e-10)}
    made = partial(fj.algorithms.make, model=model)
    methods = {
        "fedavg": fj.algorithms.fedavg(),
        "fedfisher_diag": made("fedfisher_diag", **options),
        "fedlpa": made("fedlpa", **exact),
        "fedlpa_ea": made("fedlpa_ea", **options),
        "fedfisher_full": made("fedfisher_full", **exact),
    }
    fused = gaussians.fuse_layers(inputs, tangents, means)
    assert methods.keys() == fused.keys()
    for name, method in methods.items():
        updates = [
            fj.algorithms.Update(method.summarize(None, Trained(w), d, ())[0], method.kind)
            for w, d in zip(params, data, strict=True)
        ]
        merged = fj.merging.merge(method, params[0], updates)[0]
        assert np.allclose(merged["w"].ravel(), fused[name], atol=1e-6), name


@pytest.mark.long
def test_kronecker_blocks_couple_no_two_layers_and_full_ones_have_the_true_diagonal(blocks):
    ends = np.cumsum([*blocks.sizes.values()])
    assert blocks.full.shape == blocks.kronecker.shape == (ends[-1], ends[-1])
    for end in ends[:-1]:
        assert not blocks.kronecker[:end, end:].any()
    assert blocks.full[: ends[0], ends[0] :].any()
    assert np.allclose(blocks.full, blocks.full.T)
    assert np.linalg.eigvalsh(blocks.full).min() > -1e-6 * np.abs(blocks.full).max()


@pytest.mark.long
def test_kronecker_factors_of_one_example_are_exact_in_a_dense_layer_only():
    one = fisher_blocks.compute(fj.datasets.load("digits")[0], num_examples=1, epochs=1, seed=0)
    found = fisher_blocks.similarities(one)
    kronecker, diagonal = found["dense"]
    assert np.isclose(kronecker, 1, atol=1e-5)
    assert diagonal < 0.9
    assert found["conv1"][0] < 0.99


@pytest.mark.slow
def test_similarity_lies_between_none_and_all(blocks):
    found = fisher_blocks.similarities(blocks)
    assert found.keys() == {*blocks.sizes, "all layers"}
    assert all(0 < value <= 1 for own in found.values() for value in own)
    same = blocks._replace(kronecker=3 * blocks.full)
    for kronecker, _ in fisher_blocks.similarities(same).values():
        assert np.isclose(kronecker, 1)


@pytest.mark.parametrize(
    ("dataset", "model"), [("digits", "mlp"), ("random", "lenet"), ("random", "simple_cnn_mnist")]
)
def test_the_last_layer_makes_a_models_outputs_of_its_features(dataset, model):
    config = OneShot(partition_seeds=(0,), merging=Merging(("fedavg",)))
    task = tasks.one_round(config)
    images = task.test[0][:7]
    if dataset == "random":
        shape = (7, 28, 28, 1)
        images = np.random.default_rng(0).integers(16, size=shape).astype(np.uint8)
        network = MODELS[model](num_classes=10)
        apply = fj.networks.apply_fn(network, task.normalize)
        data = dataclasses.replace(config.data, model=model)
        task = task._replace(
            config=dataclasses.replace(config, data=data),
            init=jax.jit(lambda key: fj.networks.init(network, key, images)),
            model=fj.Model(apply, fj.likelihoods.categorical),
        )
    params = task.init(jax.random.key(0))
    seen = features.features(task, params, jnp.asarray(images))
    last = params["dense3"]
    outputs = seen @ np.asarray(last["kernel"]) + np.asarray(last.get("bias", 0))
    assert np.allclose(outputs, jax.jit(task.model.apply)(params, images), atol=1e-5)
    assert (seen >= 0).all()


def test_purity_is_one_for_clusters_and_chance_for_labels_at_random():
    random = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 100)
    points = random.normal(size=(400, 3)) + 100 * labels[:, None]
    assert features.purity(points, labels) == 1
    assert abs(features.purity(points, random.permutation(labels)) - 1 / 4) < 0.05


def test_pictures_say_what_their_colours_mean(tmp_path, monkeypatch, blocks):
    drawn = []
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    labels = np.repeat(np.arange(4), 5)
    points = np.random.default_rng(0).normal(size=(20, 2))
    for number in (1, 2, 5):
        features.draw({f"model {i}": points for i in range(number)}, labels, tmp_path / "x.png")
        assert sum(bool(panel.get_title()) for panel in drawn[-1].axes) == number
    fisher_blocks.draw(blocks, tmp_path / "y.png")
    gaussians.section(0, draws=2, path=tmp_path / "z.png")
    *_, classes, matrices, fused = drawn
    names = [[text.get_text() for text in f.legends[0].get_texts()] for f in (classes, fused)]
    assert names[0] == ["0", "1", "2", "3"]
    assert sorted(names[1]) == sorted(map(figures.label, gaussians.fuse_layers(*LAYERS)))
    *both, bar = matrices.axes
    assert bar.get_ylabel() == "absolute value"
    assert len({panel.images[0].norm for panel in both}) == 1


@pytest.mark.slow
def test_the_command_leaves_every_picture_and_its_numbers(tmp_path, capsys):
    words = (
        "--dataset digits --epochs 1 --num-clients 3 --num-points 60 --num-examples 60 --draws 4"
    )
    words += f" --beta 0.5 --algorithms fedavg fedlpa --shown-clients 2 --out {tmp_path}"
    assert fedlpa_pictures.main(words.split()) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("gaussians.png", "fisher.png", "tsne.png"),
        "summary.md",
    }
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in tmp_path.glob("*.png"))
    summary = (tmp_path / "summary.md").read_text()
    rows = [line.split(" | ") for line in summary.splitlines() if line.startswith("| Fed")]
    fused = ["FedAvg", "FedFisher (diagonal)", "FedFisher (full)"]
    over_layers = [*fused[:2], "FedLPA (EA)", "FedLPA"]
    assert [row[0][2:] for row in rows] == [*fused, *over_layers, "FedAvg", "FedLPA"]
    assert all(0 <= float(cell.strip(" |")) <= 100 for cell in rows[-1][1:])
    clients = [line.split(" | ")[0] for line in summary.splitlines() if "| client" in line]
    assert clients == ["| client 0", "| client 1"]
    command = shlex.split(summary.split("```")[1])
    assert command[:3] == ["python", "-m", "experiments.fedlpa_pictures"]
    assert set(words.split()) <= set(command)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--dataset minst", "--dataset is 'minst', did you mean 'mnist'"),
        ("--num-points 5", "--num-points is 5, expected 31 or more"),
        ("--draws 0", "--draws is 0, expected 1 or more"),
        ("--beta 0", "--beta is 0.0, expected a number above 0"),
        ("--algorithms fedlap", "did you mean 'fedlpa'"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_anything_is_computed(
    tmp_path, capsys, words, message
):
    assert fedlpa_pictures.main([*words.split(), "--out", str(tmp_path / "out")]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
