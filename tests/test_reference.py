"""The authors' clients: their weights and data give their Fisher information and accuracies."""

from pathlib import Path

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments import reference_clients
from experiments.reference_clients import LAYERS, Reference

CLIENTS_ALONE = [50.7, 42.2, 78.1, 57.5, 73.2]
FILE = "mnist_lenet_m5_alpha01.npz"


@pytest.fixture(scope="module")
def reference(shared: Path) -> Reference:
    return reference_clients.load(shared / "reference" / FILE)


@pytest.fixture(scope="module")
def mnist(shared: Path):
    return fj.datasets.load("mnist", shared / "data")


@pytest.fixture(scope="module")
def model(mnist):
    apply = fj.networks.apply_fn(fj.networks.LeNet(), fj.datasets.normalizer(mnist[0]))
    return fj.Model(apply, fj.likelihoods.categorical)


def error_of(
    structure, model: fj.Model, reference: Reference, train: fj.datasets.Dataset, client: int
) -> float:
    """Compute one client's Fisher by the library's pass; return the largest error of a layer."""
    params = jax.tree.map(lambda leaf: leaf[client], reference.params)
    rows = jax.numpy.asarray(reference.partition[client])
    examples = fj.Examples(jax.numpy.asarray(train.inputs), indices=rows)
    ours = structure(model, params, examples)
    if structure is fj.fisher.diagonal:
        return max(
            reference_clients.diagonal_error(ours.entries, reference, client, name)
            for name in LAYERS
        )
    return max(
        reference_clients.kronecker_error(ours.factors[f"{layer}/kernel"], reference, client, name)
        for name, layer in LAYERS.items()
    )


def test_the_authors_weights_classify_as_they_report(reference, mnist, model):
    _, test = mnist
    examples = fj.Examples(test.inputs, test.targets)
    alone = fj.metrics.accuracy(model, reference.params, examples, stacked=True)
    assert np.allclose(100 * np.asarray(alone), CLIENTS_ALONE, atol=0.06)


def test_the_partition_is_the_authors(reference, mnist):
    train, _ = mnist
    ours = fj.partition.fedfisher(train.targets, num_clients=5, alpha=0.1, seed=3)
    for own, theirs in zip(ours, reference.partition, strict=True):
        assert set(own.tolist()) == set(theirs.tolist())


@pytest.mark.parametrize("structure", [fj.fisher.kfac, fj.fisher.diagonal])
def test_fisher_information_of_the_smallest_client_is_the_authors(
    reference, mnist, model, structure
):
    assert error_of(structure, model, reference, mnist[0], client=3) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("client", [0, 1, 2, 4])
@pytest.mark.parametrize("structure", [fj.fisher.kfac, fj.fisher.diagonal])
def test_fisher_information_is_the_authors(reference, mnist, model, structure, client):
    assert error_of(structure, model, reference, mnist[0], client) < 1e-4


def test_the_error_of_kronecker_products_is_that_of_the_products_themselves():
    random = np.random.default_rng(0)
    a, g = random.normal(size=(3, 3)), random.normal(size=(2, 2))
    b, h = a + 0.01 * random.normal(size=(3, 3)), 7 * g
    arrays = {"client0/kfac_input/fc2": b, "client0/kfac_output/fc2": h}
    error = reference_clients.kronecker_error(
        {"input": a, "output": g}, Reference(None, [], None, arrays), 0, "fc2"
    )
    direct = np.kron(a, g) - np.kron(b, h)
    assert np.isclose(error, np.linalg.norm(direct) / np.linalg.norm(np.kron(b, h)), rtol=1e-10)


@pytest.mark.slow
def test_merged_reference_clients_are_as_good_as_the_authors(reference, mnist):
    merged = reference_clients.merge_all(reference, *mnist)
    percent = {name: 100 * result.accuracy for name, result in merged.items()}
    assert abs(percent["fedavg"] - 66.3) < 0.1
    assert percent["fisher_merge"] >= 86.3
    assert percent["regmean"] >= 84.5
    assert percent["fedfisher_diag"] >= 86.3
    assert percent["fedfisher_kfac"] >= 92.0
    assert abs(percent["fedfisher_kfac, paper's Adam"] - 91.5) <= 1


def test_a_missing_file_is_told_without_a_traceback(tmp_path, capsys):
    assert reference_clients.main(["--reference", str(tmp_path / "none.npz")]) == 1
    assert "there is no file" in capsys.readouterr().err
