"""The authors' clients, and any file like theirs: Fisher information, accuracies, refusals."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import fisherjax as fj
from experiments.harness import records
from experiments.harness import reference as harness
from experiments.harness.config import Merging
from experiments.harness.methods import methods
from experiments.harness.reference import LAYERS, Reference, channels, from_torch
from experiments.reference_clients import __main__ as reference_clients
from fisherjax.training import Trained
from fisherjax.typing import Array, Params

CLIENTS_ALONE = [50.7, 42.2, 78.1, 57.5, 73.2]


@pytest.fixture(scope="module")
def reference(shared: Path) -> Reference:
    return harness.load(shared / "reference" / reference_clients.FILE)


def images(shared: Path, split: str, rows: Iterable[int]) -> fj.Examples:
    """Read some images of MNIST: to decode all 70,000 takes longer than what they are for."""
    import tensorflow_datasets as tfds

    source = tfds.data_source("mnist", split=split, data_dir=shared / "data", download=False)
    records = source.__getitems__([int(row) for row in rows])
    inputs = np.stack([record["image"] for record in records])
    return fj.Examples(inputs, np.array([record["label"] for record in records], np.int32))


@pytest.fixture(scope="module")
def held_out(shared: Path) -> fj.Examples:
    return images(shared, "test", range(10_000))


@pytest.fixture(scope="module")
def model(few: Path):
    train, _ = fj.datasets.load("mnist", few)
    apply = fj.networks.apply_fn(fj.networks.LeNet(), fj.datasets.normalizer(train))
    return fj.Model(apply, fj.likelihoods.categorical)


# The authors' clients


@pytest.fixture
def optimised() -> Iterator[None]:
    """Optimise what is compiled: thousands of images take longer here than the compiler."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    before = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    jax.config.update("jax_disable_most_optimizations", before)


def kronecker_error(
    factors: dict[str, Array], reference: Reference, client: int, name: str
) -> float:
    """Compare a layer's Kronecker product with the authors', ||A (x) G - B (x) H|| / ||B (x) H||.

    The product is never formed, and how a scale is split between its factors does not matter.
    """
    theirs = [
        reference.arrays[f"client{client}/kfac_{side}/{name}"] for side in ("input", "output")
    ]
    order = input_order(name, len(theirs[0]))
    a, g = (np.asarray(factors[side], np.float64) for side in ("input", "output"))
    b, h = (factor.astype(np.float64) for factor in theirs)
    b = b[np.ix_(order, order)]
    scale = np.linalg.norm(b) / np.linalg.norm(a)
    a, g = a * scale, g / scale
    # A (x) G - B (x) H = (A - B) (x) G + B (x) (G - H), without the cancellation of large squares.
    da, dg = a - b, g - h
    square = (da**2).sum() * (g**2).sum() + (b**2).sum() * (dg**2).sum()
    square += 2 * (da * b).sum() * (g * dg).sum()
    return float(np.sqrt(max(square, 0) / ((b**2).sum() * (h**2).sum())))


def diagonal_error(entries: Params, reference: Reference, client: int, name: str) -> float:
    """Compare a layer's diagonal Fisher with the authors', ||f - f'|| / ||f'||."""
    shapes = {layer: reference.arrays[f"client{client}/{layer}"].shape for layer in LAYERS}
    ends = dict(zip(LAYERS, np.cumsum([np.prod(shape) for shape in shapes.values()]), strict=True))
    size = int(np.prod(shapes[name]))
    flat = reference.arrays[f"client{client}/fisher_diagonal"][ends[name] - size : ends[name]]
    theirs = from_torch(flat.reshape(shapes[name]), channels(reference.arrays, name))
    ours = np.asarray(entries[LAYERS[name]]["kernel"], np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def input_order(name: str, size: int) -> np.ndarray:
    """Say which of PyTorch's inputs, (channel, row, column), is our first, second, and so on."""
    if name.startswith("conv"):
        shape = (size // 25, 5, 5)
    else:
        shape = (16, 4, 4) if name == "fc1" else (size, 1, 1)
    return np.arange(size).reshape(shape).transpose(1, 2, 0).reshape(-1)


def error_of(structure, model: fj.Model, reference: Reference, shared: Path, client: int) -> float:
    """Compute one client's Fisher by the library's pass; return the largest error of a layer."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[client], reference.params)
    examples = images(shared, "train", reference.partition[client])
    ours = structure(model, params, fj.Examples(jax.numpy.asarray(examples.inputs)))
    if structure is fj.fisher.diagonal:
        return max(diagonal_error(ours.entries, reference, client, name) for name in LAYERS)
    return max(
        kronecker_error(ours.factors[f"{layer}/kernel"], reference, client, name)
        for name, layer in LAYERS.items()
    )


# One client is a fifth of the time of all, and two show which weights are whose.
@pytest.mark.long
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(
    "client", [1, 2, *(pytest.param(other, marks=pytest.mark.slow) for other in (0, 3, 4))]
)
def test_the_authors_weights_classify_as_they_report(reference, held_out, model, client):
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[client], reference.params)
    alone = fj.metrics.accuracy(model, params, held_out)
    assert np.isclose(100 * float(alone), CLIENTS_ALONE[client], atol=0.06)


# The split of this file is also that of a fast test of tests/test_partition.py.
@pytest.mark.slow
def test_the_partition_is_the_authors(reference, shared):
    train, _ = fj.datasets.load("mnist", shared / "data")
    ours = fj.partition.dirichlet_of_client(train.targets, num_clients=5, alpha=0.1, seed=3)
    for own, theirs in zip(ours, reference.partition, strict=True):
        assert set(own.tolist()) == set(theirs.tolist())


@pytest.mark.long
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize("structure", [fj.fisher.kfac, fj.fisher.diagonal])
def test_fisher_information_of_the_smallest_client_is_the_authors(
    reference, shared, model, structure
):
    assert error_of(structure, model, reference, shared, client=3) < 1e-4


@pytest.mark.usefixtures("optimised")
@pytest.mark.slow
@pytest.mark.parametrize("client", [0, 1, 2, 4])
@pytest.mark.parametrize("structure", [fj.fisher.kfac, fj.fisher.diagonal])
def test_fisher_information_is_the_authors(reference, shared, model, structure, client):
    assert error_of(structure, model, reference, shared, client) < 1e-4


def test_the_error_of_kronecker_products_is_that_of_the_products_themselves():
    random = np.random.default_rng(0)
    a, g = random.normal(size=(3, 3)), random.normal(size=(2, 2))
    b, h = a + 0.01 * random.normal(size=(3, 3)), 7 * g
    arrays = {"client0/kfac_input/fc2": b, "client0/kfac_output/fc2": h}
    known = Reference(None, [], None, arrays)
    error = kronecker_error({"input": a, "output": g}, known, 0, "fc2")
    direct = np.kron(a, g) - np.kron(b, h)
    assert np.isclose(error, np.linalg.norm(direct) / np.linalg.norm(np.kron(b, h)), rtol=1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_weights_and_factors_are_brought_into_our_layout_alike(name):
    """A dense layer's rows are permuted as its input factor is, a convolution's taps too."""
    shapes = {"conv1": (6, 1, 5, 5), "conv2": (16, 6, 5, 5), "fc1": (120, 256), "fc2": (84, 120)}
    shape = shapes.get(name, (10, 84))
    arrays = {f"client0/{own}": np.empty(shapes[own]) for own in shapes}
    arrays["client0/fc3"] = np.empty((10, 84))
    weight = np.arange(np.prod(shape), dtype=float).reshape(shape)
    ours = from_torch(weight, channels(arrays, name)).reshape(-1, shape[0])
    flat = weight.reshape(shape[0], -1)
    assert np.array_equal(ours, flat[:, input_order(name, flat.shape[1])].T)


@pytest.fixture(scope="module")
def uploads(reference: Reference, shared: Path, model: fj.Model) -> fj.algorithms.Update:
    """What the authors' clients send: their models and K-FAC factors, all of them of the file."""
    rows = images(shared, "train", range(5))
    federation = fj.clients.federation(rows, [[client] for client in range(5)])
    method, key = fj.algorithms.fedfisher(model), jax.random.key(0)
    # Of one example a client, for the layers: the factors are replaced.
    sent = fj.merging.summarize(method, Trained(reference.params), federation, key=key)
    factors = {}
    for name, ours in LAYERS.items():
        sides = {
            side: np.stack([reference.arrays[f"client{i}/kfac_{side}/{name}"] for i in range(5)])
            for side in ("input", "output")
        }
        order = input_order(name, sides["input"].shape[-1])
        sides["input"] = sides["input"][:, order][:, :, order]
        factors[f"{ours}/kernel"] = sides
    fisher = dataclasses.replace(sent.values["fisher"], factors=factors)
    return fj.algorithms.Update({"params": reference.params, "fisher": fisher}, sent.kind)


# A core takes 15 seconds for the 2,000 steps of each.
@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
@pytest.mark.parametrize(("compressed", "theirs"), [(False, 91.36), (True, 91.48)])
def test_the_papers_adam_has_no_damping(
    reference, shared, model, held_out, uploads, compressed, theirs
):
    """`--solver adam` is what the authors' code does; with its codec, to the digit what it says."""
    images_of_file = images(shared, "train", reference.validation)
    method = methods(Merging(("fedfisher_kfac",), solver="adam"), model, 64)["fedfisher_kfac"]
    server, sent = method.server(images_of_file), uploads
    if compressed:
        # The rank rule counts with the text's 8 bits where the code rounds to 9.
        rounded = fj.compression.quantized({"params": 16, "fisher": 9})
        codec = fj.compression.compose(fj.compression.truncated(bits=8), rounded)
        server = fj.compression.compressed(server, codec)
        sent = fj.compression.encode(sent, codec)
    start = jax.tree.map(lambda leaf: leaf[0], reference.params)
    merged, *_ = fj.merging.merge(server, start, sent, reference.arrays["weights"])
    found = 100 * float(fj.metrics.accuracy(model, merged, held_out))
    # Two images of 10,000, for other processors' rounding.
    assert abs(found - theirs) <= 0.021
    if compressed:
        assert theirs == reference_clients.AUTHORS["fedfisher_kfac"]


@pytest.mark.parametrize("solver", ["gd", "adam"])
def test_the_papers_solvers_have_no_damping_unless_it_is_asked_for(solver):
    """On a diagonal in closed form: damping would pull the answer to the mean."""
    apply = fj.Model(lambda w, x: x @ w["w"], fj.likelihoods.gaussian)
    matrix = np.eye(2)
    factors = {"w": {"input": np.stack([matrix, 3 * matrix]), "output": np.ones((2, 1, 1))}}
    data = np.eye(2, dtype=np.float32), np.ones((2, 1), np.float32)
    federation = fj.clients.federation(data, [[0], [1]])
    models = [{"w": np.zeros((2, 1), np.float32)}, {"w": np.full((2, 1), 4, np.float32)}]
    # sum F_i W_i / sum F_i, and with damping 1, which is of the mean eigenvalue, halfway to Wbar.
    for options, expected in (((), 3.0), ((("fedfisher_kfac.damping", 1.0),), 2.5)):
        merging = Merging(("fedfisher_kfac",), solver=solver, options=options)
        method = methods(merging, apply, 2)["fedfisher_kfac"]
        sent = fj.merging.summarize(method.clients, models, federation, key=jax.random.key(0))
        fisher = dataclasses.replace(sent.values["fisher"], factors=factors)
        sent = fj.algorithms.Update(sent.values | {"fisher": fisher}, sent.kind)
        merged, *_ = fj.merging.merge(method.server(None), models[0], sent, [1, 1])
        np.testing.assert_allclose(merged["w"], expected, atol=1e-3)


@pytest.mark.usefixtures("optimised")
@pytest.mark.slow
def test_merged_reference_clients_are_as_good_as_the_authors(reference, shared):
    """Their Adam selects by the validation images of the file; K-FAC is computed once for both."""
    task = reference_clients.prepare(reference_clients.Config(data_dir=shared / "data"), reference)
    adam = methods(Merging(("fedfisher_kfac",), solver="adam"), task.model, batch_size=32)
    both = task._replace(methods=task.methods | {"adam": adam["fedfisher_kfac"]})
    rows = reference_clients.merge(both, reference)
    percent = {row.algorithm: 100 * row.value for row in rows}
    assert abs(percent["fedavg"] - 66.3) < 0.1
    assert percent["fisher_merge"] >= 86.3
    assert percent["regmean"] >= 84.5
    assert percent["fedfisher_diag"] >= 86.3
    assert percent["fedfisher_kfac"] >= 92.0
    assert abs(percent["adam"] - 91.36) <= 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_matching_finds_what_the_authors_found(reference, shared):
    """Clients of one start keep their units; PFNM's network is wider."""
    names = "fedavg", "otfusion", "pfnm"
    how = reference_clients.Config(merging=Merging(names), data_dir=shared / "data")
    rows = reference_clients.merge(reference_clients.prepare(how, reference), reference)
    percent = {row.algorithm: 100 * row.value for row in rows}
    assert percent["otfusion"] == pytest.approx(percent["fedavg"], abs=0.02)
    assert abs(percent["pfnm"] - reference_clients.AUTHORS["pfnm"]) < 0.3


# Any file like theirs


SHAPES = {"conv1": (6, 1, 5, 5), "conv2": (16, 6, 5, 5), "fc1": (120, 256), "fc2": (84, 120)}
SIZES = (30, 20)


def made_up() -> dict[str, np.ndarray]:
    """Make two clients of LeNet that nobody trained."""
    random = np.random.default_rng(0)
    shapes = SHAPES | {"fc3": (10, 84)}
    arrays = {
        f"client{client}/{name}": random.normal(0, 0.1, shape).astype(np.float32)
        for client in range(len(SIZES))
        for name, shape in shapes.items()
    }
    rows = {"partition_indices": np.arange(sum(SIZES)), "partition_sizes": np.array(SIZES)}
    return arrays | rows | {"validation_indices": np.arange(50, 60)}


@pytest.fixture(scope="module")
def few(shared: Path, tmp_path_factory) -> Path:
    """A folder with the first images of MNIST, in the format of the whole."""
    from array_record.python import array_record_module as array_record

    (source,) = (shared / "data" / "mnist").iterdir()
    folder = tmp_path_factory.mktemp("data") / "mnist" / source.name
    folder.mkdir(parents=True)
    about = json.loads((source / "dataset_info.json").read_text())
    for split in about["splits"]:
        split["shardLengths"] = ["60"]
        name = f"mnist-{split['name']}.array_record-00000-of-00001"
        reader = array_record.ArrayRecordReader(str(source / name))
        writer = array_record.ArrayRecordWriter(str(folder / name), "group_size:1")
        for record in reader.read(0, 60):
            writer.write(record)
        writer.close()
        reader.close()
    (folder / "dataset_info.json").write_text(json.dumps(about))
    (folder / "features.json").write_bytes((source / "features.json").read_bytes())
    return folder.parents[1]


@pytest.fixture
def merged(few: Path, tmp_path: Path):
    """Merge the clients of a file; return the exit status."""

    def merge(*words: str, **changes: np.ndarray) -> int:
        np.savez(tmp_path / "clients.npz", **(made_up() | changes))
        places = {"reference": tmp_path / "clients.npz", "data-dir": few, "out": tmp_path / "out"}
        options = [word for name, place in places.items() for word in (f"--{name}", str(place))]
        return reference_clients.main([*options, *words])

    return merge


FEW = ("--algorithms", "fisher_merge")


@pytest.mark.slow
def test_any_file_leaves_what_one_shot_does(merged, tmp_path, capsys):
    out = tmp_path / "out"
    assert merged(*FEW, "--max-examples", "10") == 0
    files = {path.name for path in out.iterdir()}
    assert files == {"config.json", "results.csv", "label_counts.csv", "summary.md", "accuracy.png"}
    rows = records.read_rows(out / "results.csv", records.ONE_SHOT)
    names = [(row.algorithm, row.client) for row in rows]
    assert names == [("local", 0), ("local", 1), *((x, None) for x in ("ensemble", *FEW[1:]))]
    shown = capsys.readouterr().out
    assert "MNIST, LeNet, 2 clients of a file" in shown
    assert "authors" not in shown  # this is not their file

    # The same again is the same, another number of examples is refused.
    again = [row._replace(seconds=None) for row in rows]
    assert merged(*FEW, "--max-examples", "10") == 0
    rows = records.read_rows(out / "results.csv", records.ONE_SHOT)
    assert [row._replace(seconds=None) for row in rows] == again
    assert merged(*FEW, "--max-examples", "25") == 1
    assert "max_examples was 10, is 25" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        ("--algorithms fedavg fedprox", {}, "--algorithms has fedprox, which change how clients"),
        ("--max-examples -1", {}, "--max-examples is -1, expected 0 or more"),
        ("--algorithms fedlpq", {}, "did you mean 'fedlpa'"),
        ("--model cnn", {}, "apply failed on inputs of shape (60, 28, 28, 1)"),
        ("", {"partition_sizes": np.array([30, 21])}, "50 partition_indices and partition_sizes"),
        ("", {"partition_indices": np.arange(50) + 20}, "expected 0 to 59"),
        ("", {"validation_indices": np.arange(51, 61)}, "validation_indices 51 to 60, expected 0"),
        ("", {"validation_indices": np.arange(-1, 9)}, "validation_indices -1 to 8, expected 0 to"),
    ],
)
def test_what_cannot_be_merged_is_refused(merged, tmp_path, capsys, words, changes, said):
    assert merged(*words.split(), **changes) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.rglob("results.csv"))


@pytest.mark.parametrize(
    "missing", ["client1/fc1", "partition_sizes", "partition_indices", "validation_indices"]
)
def test_a_file_of_another_layout_is_refused_by_what_is_missing(tmp_path, capsys, missing):
    path = tmp_path / "clients.npz"
    np.savez(path, **{name: array for name, array in made_up().items() if name != missing})
    assert reference_clients.main(["--reference", str(path), "--out", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert f"{path} has no {missing}" in error
    assert "expected the layout of the reference clients" in error
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_told_without_a_traceback(tmp_path, capsys):
    assert reference_clients.main(["--reference", str(tmp_path / "none.npz")]) == 1
    assert "there is no file" in capsys.readouterr().err


def test_a_file_that_is_no_archive_names_itself(tmp_path, capsys):
    path = tmp_path / "clients.npz"
    path.write_text("not an archive")
    assert reference_clients.main(["--reference", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
