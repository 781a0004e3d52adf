"""Merge the clients that the FedFisher authors' PyTorch code trained, and compare with that code.

The file mnist_lenet_m5_alpha01.npz holds five LeNets trained on MNIST, their K-FAC factors and
diagonal Fishers. Nothing is trained here: the same weights and data must give the same Fisher
information, and the merged models the same accuracy or a better one.
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich import box
from rich.console import Console
from rich.table import Table

import fisherjax as fj
from experiments.methods import validated_adam
from fisherjax.algorithms import TABLE
from fisherjax.typing import Array, Params

LAYERS = {"conv1": "conv1", "conv2": "conv2", "fc1": "dense1", "fc2": "dense2", "fc3": "dense3"}
"""The authors' names of LeNet's layers, and ours."""
AUTHORS = {
    "fedavg": 66.31,
    "fisher_merge": 86.64,
    "regmean": 84.53,
    "fedfisher_diag": 86.28,
    "fedfisher_kfac": None,
    "fedfisher_kfac, paper's Adam": 91.48,
}
"""Accuracies in % that their code reports; with compressed uploads."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Where the files are."""

    reference: Path = Path("../shared/reference/mnist_lenet_m5_alpha01.npz")
    """The authors' clients."""
    data_dir: Path | None = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""


class Reference(NamedTuple):
    """The authors' clients, in our layout.

    Attributes:
        params: client models, leaves [M, ...].
        partition: rows of the training data, for each client.
        validation: the 500 rows that their code selects by.
        arrays: the file, by name.
    """

    params: Params
    partition: list[np.ndarray]
    validation: np.ndarray
    arrays: dict[str, np.ndarray]


def load(path: Path) -> Reference:
    """Read the authors' clients.

    Args:
        path: of the .npz file.

    Returns:
        The clients.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    arrays = fj.files.load_arrays(path)
    sizes = arrays["partition_sizes"]
    partition = np.split(arrays["partition_indices"], np.cumsum(sizes)[:-1])
    models = [
        {
            ours: {"kernel": from_torch(arrays[f"client{i}/{name}"], name)}
            for name, ours in LAYERS.items()
        }
        for i in range(len(sizes))
    ]
    return Reference(fj.tree.stack(models), partition, arrays["validation_indices"], arrays)


def from_torch(weight: np.ndarray, name: str) -> np.ndarray:
    """Bring a weight, or anything of its shape, from PyTorch's layout to flax's.

    Args:
        weight: (out, in), or (out, in, height, width) of a convolution.
        name: the authors' name of the layer.

    Returns:
        (in, out), or (height, width, in, out).
    """
    if weight.ndim == 4:
        return weight.transpose(2, 3, 1, 0)
    return weight.T[_input_order(name, weight.shape[1])]


def kronecker_error(
    factors: dict[str, Array], reference: Reference, client: int, name: str
) -> float:
    """Compare a layer's Kronecker product with the authors', ||A (x) G - B (x) H|| / ||B (x) H||.

    The product is never formed, and how a scale is split between its factors does not matter.

    Args:
        factors: {"input": A [a, a], "output": G [o, o]} in our layout.
        reference: holds theirs, B and H.
        client: whose.
        name: the authors' name of the layer.

    Returns:
        The relative error in Frobenius norm.
    """
    theirs = [
        reference.arrays[f"client{client}/kfac_{side}/{name}"] for side in ("input", "output")
    ]
    order = _input_order(name, len(theirs[0]))
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
    """Compare a layer's diagonal Fisher with the authors', ||f - f'|| / ||f'||.

    Args:
        entries: our diagonal of one client, in the structure of params.
        reference: holds theirs.
        client: whose.
        name: the authors' name of the layer.

    Returns:
        The relative error.
    """
    shapes = {layer: reference.arrays[f"client{client}/{layer}"].shape for layer in LAYERS}
    ends = dict(zip(LAYERS, np.cumsum([np.prod(shape) for shape in shapes.values()]), strict=True))
    size = int(np.prod(shapes[name]))
    flat = reference.arrays[f"client{client}/fisher_diagonal"][ends[name] - size : ends[name]]
    theirs = from_torch(flat.reshape(shapes[name]), name)
    ours = np.asarray(entries[LAYERS[name]]["kernel"], np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def _input_order(name: str, size: int) -> np.ndarray:
    """Say which of PyTorch's inputs, (channel, row, column), is our first, second, and so on."""
    if name.startswith("conv"):
        shape = (size // 25, 5, 5)
    else:
        shape = (16, 4, 4) if name == "fc1" else (size, 1, 1)
    return np.arange(size).reshape(shape).transpose(1, 2, 0).reshape(-1)


class Merged(NamedTuple):
    """How good one way of merging is: accuracy as a fraction, seconds with compilation."""

    accuracy: float
    seconds: float


def merge_all(
    reference: Reference, train: fj.datasets.Dataset, test: fj.datasets.Dataset
) -> dict[str, Merged]:
    """Merge the reference clients in every way.

    Args:
        reference: the clients.
        train: MNIST.
        test: its test images.

    Returns:
        The results, by the names of `AUTHORS`.
    """
    apply = fj.networks.apply_fn(fj.networks.LeNet(), fj.datasets.normalizer(train))
    model = fj.Model(apply, fj.likelihoods.categorical)
    federation = fj.clients.federation(train, reference.partition)
    rows = reference.validation
    chosen = fj.Examples(jnp.asarray(train.inputs[rows]), jnp.asarray(train.targets[rows]))
    adam = validated_adam(model, chosen, epsilon_inside_root=True)
    methods = {name: fj.algorithms.make(name, model) for name in AUTHORS if name in TABLE}
    methods["fedfisher_kfac, paper's Adam"] = fj.algorithms.fedfisher(model, solver=adam)
    trained = fj.training.Trained(reference.params)
    params = jax.tree.map(lambda leaf: leaf[0], reference.params)
    updates, results = {}, {}
    for name, method in methods.items():
        start = time.perf_counter()
        if method.kind not in updates:
            key = jax.random.key(0)  # the true Fisher draws nothing
            updates[method.kind] = fj.merging.summarize(method, trained, federation, key=key)
        merged = fj.merging.merge(method, params, updates[method.kind], federation.weights)[0]
        examples = fj.Examples(test.inputs, test.targets)
        accuracy = float(fj.metrics.accuracy(model, merged, examples))
        results[name] = Merged(accuracy, time.perf_counter() - start)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the accuracies of the merged reference clients; return the exit status."""
    config = tyro.cli(Config, args=arguments, description=__doc__)
    try:
        reference = load(config.reference)
        train, test = fj.datasets.load("mnist", config.data_dir)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    table = Table(title="Test accuracy in % of the authors' clients, merged", box=box.SIMPLE_HEAD)
    table.add_column("algorithm")
    for heading in ("fisherjax", "authors' code", "seconds"):
        table.add_column(heading, justify="right")
    for name, merged in merge_all(reference, train, test).items():
        authors = "-" if AUTHORS[name] is None else f"{AUTHORS[name]:.1f}"
        table.add_row(name, f"{100 * merged.accuracy:.1f}", authors, f"{merged.seconds:.1f}")
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
