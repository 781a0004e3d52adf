"""What the pages about one's own model say holds: their examples run, in order, and agree."""

import re
from pathlib import Path
from types import SimpleNamespace

import chex
import numpy as np
import pytest

pytestmark = pytest.mark.long  # the pages are executed once, for all of them

PAGES = Path(__file__).parents[1] / "docs/how_to"
NAMES = (
    *("your_model", "your_loss", "frameworks", "pytorch", "batch_norm", "stateful_modules"),
    *("sequences", "padding", "seeds", "learn_weights", "equal_blocks"),
)


def text_of(name):
    return (PAGES / f"{name}.md").read_text()


@pytest.fixture(scope="module")
def page(run_page):
    """The names of all pages; where several have a name, those of the first."""
    found = run_page(PAGES / "two_frameworks.md", PAGES / "other_names.md")
    for name in NAMES:
        found = run_page(PAGES / f"{name}.md") | found
    return SimpleNamespace(**found)


@pytest.mark.slow
def test_seeds_at_once_are_seeds_alone(page):
    together = page.jax.vmap(page.experiment, in_axes=(0, None))(page.seeds[:2], page.clients)
    alone = page.jax.jit(page.experiment)(page.seeds[1], page.clients)
    # One of the 360 test images may fall to the other side.
    np.testing.assert_allclose([found[1] for found in together], alone, atol=0.003)


@pytest.mark.slow
def test_every_framework_is_covered(page):
    for framework in ("", "linen_", "nnx_", "eqx_", "haiku_"):
        model, params = (getattr(page, framework + name) for name in ("model", "params"))
        found = page.fj.fisher.kfac(model, params, page.examples)
        assert found.coverage == 1
        assert [(layer.rows, layer.columns) for layer in found.layers] == [(64, 32), (32, 10)]
    assert page.normed_kfac.coverage == 1  # of what is trained
    names = page.fj.tree.names(page.normed_kfac.diagonal())
    assert names
    assert all(name.startswith("params/") for name in names)
    told = "Kronecker(2 leaves, 1 dense layers, 330 parameters, float32)"
    assert str(page.last_kfac) == told
    assert told in text_of("your_model")


def test_blocks_that_are_scanned_have_the_fisher_of_those_that_are_not(page):
    jnp, fj = page.jnp, page.fj

    def unrolled(params, x):
        hidden = jnp.tanh(x.reshape(len(x), -1) @ params["first"]["w"] + params["first"]["b"])
        for w, b in zip(params["blocks"]["w"], params["blocks"]["b"], strict=True):
            hidden = hidden + jnp.tanh(hidden @ w + b)
        return hidden @ params["last"]["w"] + params["last"]["b"]

    model = fj.Model(unrolled, fj.likelihoods.categorical)
    found = fj.fisher.kfac(model, page.deep_params, page.examples)
    chex.assert_trees_all_close(page.deep_kfac.diagonal(), found.diagonal(), rtol=1e-4, atol=1e-9)
    assert str(found) == str(page.deep_kfac)
    assert str(found) in text_of("equal_blocks")


def test_the_loss_of_ones_own_is_the_one_that_the_page_names(page):
    chex.assert_trees_all_close(page.softer_kfac.factors, page.smoothed_kfac.factors, rtol=1e-5)


def test_names_of_nnx_are_those_of_its_attributes(page):
    names = page.fj.tree.names(page.nnx_params)
    assert names == ("first/bias", "first/kernel", "last/bias", "last/kernel")
    kept = page.fj.algorithms.normalizations(page.stateful_model, page.stateful_params, page.images)
    found = {f"moments/norm/{name}" for name in ("mean", "second_moment", "within")}
    assert kept == found | {"params/norm/scale", "params/norm/bias"}


def test_nnx_trains_what_it_changes_when_it_is_called(page):
    """BatchNorm, dropout and a recurrent layer: as nnx alone, and as the key says."""
    assert (page.trained_nnx.loss[:, 1] < page.trained_nnx.loss[:, 0]).all()
    model, params, key = page.stateful_model, page.stateful_params, page.jax.random.key
    x, few = page.images[:8], np.float32([1, 1, 1, 1, 1, 0, 0, 0])
    step = page.jax.jit(model.apply_train)
    (first, new), (again, _), (other, _) = (step(params, x, key(i), few) for i in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(np.asarray(first) != other)
    # Rows without weight do not count.
    module = page.merged_module(params)
    module.train()
    hidden = np.asarray(module.rows(x[..., 0])[:5, -1], float)
    statistics = page.fj.networks.from_moments(new["moments"])["norm"]
    np.testing.assert_allclose(statistics["mean"], 0.01 * hidden.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(statistics["var"], 0.99 + 0.01 * hidden.var(0), rtol=1e-5)


def test_a_dense_layer_after_pytorchs_flatten_gives_what_pytorch_gives(page):
    """Channels first throughout, in NumPy's float64: nothing of the page's way."""
    images = np.asarray(page.images[:7], np.float64).transpose(0, 3, 1, 2)
    params = {name: np.asarray(leaf, np.float64) for name, leaf in page.torch_params.items()}
    # Bias and kernel of zeros would hide an order of the channels.
    params["conv.bias"] = np.array([0.3, -0.2, 0.1])
    params["fc.bias"] = np.arange(10.0)
    windows = np.lib.stride_tricks.sliding_window_view(images, (3, 3), (2, 3))
    maps = np.einsum("bchwij,ocij->bohw", windows, params["conv.weight"])
    maps = np.maximum(maps + params["conv.bias"][:, None, None], 0)
    expected = maps.reshape(7, -1) @ params["fc.weight"].T + params["fc.bias"]
    found = page.torch_apply({k: np.float32(v) for k, v in params.items()}, page.images[:7])
    np.testing.assert_allclose(found, expected, atol=1e-4)
    layers = {(layer.leaf, layer.bias) for layer in page.torch_kfac.layers}
    assert layers == {("conv.weight", "conv.bias"), ("fc.weight", "fc.bias")}
    assert page.torch_kfac.coverage == 1
    said = re.search(r"It prints `(Kronecker\(.*?\))`", text_of("your_model")).group(1)
    assert repr(page.kfac) == said


def test_the_merges_are_as_good_as_the_page_says(page):
    text = text_of("two_frameworks")
    said = re.search(r"It prints (0\.\d+), (0\.\d+) and (0\.\d+)", text).groups()
    fj, model = page.fj, page.linen_model
    methods = fj.algorithms.fedavg(), fj.algorithms.regmean(model), page.fedfisher
    for method, number in zip(methods, said, strict=True):
        merged = page.merge(method, page.models)
        found = fj.metrics.accuracy(model, merged, page.held_out)
        # Other versions of JAX round differently: two of the 360 test images.
        assert abs(float(found) - float(number)) < 0.006


def test_the_exact_fisher_of_sequences_needs_the_memory_that_the_page_says(page):
    said = float(re.search(r"It prints (\d+) MB", text_of("sequences")).group(1))
    # Compilers of other versions place arrays otherwise.
    assert 0.5 < page.need.scratch / 1e6 / said < 2
    assert page.tokens_kfac.coverage == 1


def test_files_of_two_frameworks_are_one_model(page):
    # The second client's was written in half precision.
    chex.assert_trees_all_close(page.models, [page.first, page.second], atol=1e-3)
    expected = page.merge(page.fj.algorithms.regmean(page.linen_model), page.models)
    for number, name in enumerate(("first", "last")):
        layer = page.eqx_merged.layers[number]
        np.testing.assert_allclose(layer.weight.T, expected[name]["kernel"], atol=1e-4)
        np.testing.assert_allclose(layer.bias, expected[name]["bias"], atol=1e-4)


def test_updates_from_files_merge_like_those_that_never_left(page):
    expected = page.merge(page.fedfisher, page.models)
    chex.assert_trees_all_equal(page.merged, expected)


def test_learning_the_weights_lowers_the_loss_as_the_page_says(page):
    said = re.search(r"from (0\.\d+) to (0\.\d+) nats", text_of("learn_weights")).groups()
    np.testing.assert_allclose([page.losses[0], page.losses[-1]], np.float64(said), atol=0.01)
    assert page.loss(page.free) < page.losses[0]
