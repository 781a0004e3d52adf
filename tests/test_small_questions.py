"""The answers to small questions hold as the page gives them."""

import re
from pathlib import Path
from types import SimpleNamespace

import chex
import numpy as np
import pytest

pytestmark = pytest.mark.long

PAGE = Path(__file__).parents[1] / "docs/how_to/small_questions.md"


@pytest.fixture(scope="module")
def page(run_page):
    """The names of the page."""
    return SimpleNamespace(**run_page(PAGE))


def test_each_class_has_the_accuracy_of_its_images(page):
    np.testing.assert_allclose(page.found.mean().accuracy, page.found.accuracy.mean(), rtol=1e-6)
    hits = page.model.apply(page.merged, page.test.inputs).argmax(1) == page.test.targets
    of_seven = np.asarray(hits)[np.asarray(page.test.targets) == 7]
    np.testing.assert_allclose(page.found.accuracy[7], of_seven.mean(), rtol=1e-6)


def test_kept_clients_send_what_they_sent_before(page):
    chex.assert_trees_all_equal(page.updates, page.again)


def test_clients_with_other_networks_are_refused_by_the_leaf(page):
    wider = page.fj.networks.MLP(features=(33,), num_classes=10)
    other = page.fj.networks.init(wider, page.jax.random.key(0), page.train.inputs)
    with pytest.raises(ValueError, match="kernel"):
        page.fj.merging.summarize(
            page.fedfisher, [page.models[0], other], page.clients, key=page.jax.random.key(2)
        )


def test_the_memory_of_the_page_is_predicted(page):
    said = re.search(r"FedAvg needs (\d+) KiB, K-FAC (\d+)", PAGE.read_text()).groups()
    for method, kib in zip((page.fj.algorithms.fedavg(), page.fedfisher), said, strict=True):
        how = {"key": page.jax.random.key(2)}
        need = page.fj.merging.summarize_memory(method, page.params, page.clients, **how)
        assert need.resident // 1024 == int(kib)


def test_the_numbers_of_the_page_come(page):
    text = PAGE.read_text()
    low, high, mean = re.search(r"from ([\d.]+) to ([\d.]+), and ([\d.]+), their", text).groups()
    accuracy = page.found.accuracy
    assert abs(float(accuracy.min()) - float(low)) < 0.03
    assert abs(float(accuracy.max()) - float(high)) < 0.03
    assert abs(float(page.found.mean().accuracy) - float(mean)) < 0.02
    said = float(re.search(r"It prints (0\.\d+)\.", text).group(1))
    assert abs(float((page.votes.argmax(1) == page.test.targets).mean()) - said) < 0.02
