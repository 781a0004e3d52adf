"""Read clients that the FedFisher authors' PyTorch code trained, in the layout of flax.

A file holds `client{i}/L` for each client i and each layer L of LeNet or the CNN, weights in
PyTorch's layout; `partition_indices` and `partition_sizes`, the training examples of each client
one after another; and `validation_indices`, the examples that their code selects by.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

import fisherjax as fj

LAYERS = {"conv1": "conv1", "conv2": "conv2", "fc1": "dense1", "fc2": "dense2", "fc3": "dense3"}
"""Names of layers in the authors' code and here."""


class Reference(NamedTuple):
    """The authors' clients: models [M, ...], rows of the training data, and all arrays."""

    params: fj.typing.Params
    partition: list[np.ndarray]
    validation: np.ndarray
    arrays: dict[str, np.ndarray]


def load(path: Path) -> Reference:
    """Read the authors' clients; a ValueError names arrays that are missing or do not fit."""
    arrays = fj.files.load_arrays(path)
    needed = ["partition_indices", "partition_sizes", "validation_indices"]
    sizes = arrays.get("partition_sizes", [])
    needed += [f"client{i}/{name}" for i in range(len(sizes)) for name in LAYERS]
    missing = [name for name in needed if name not in arrays]
    if missing:
        raise ValueError(
            f"{path} has no {', '.join(missing[:3])}; expected the layout of the reference "
            f"clients: {', '.join(needed[:3])} and client{{i}}/L for L in {', '.join(LAYERS)}"
        )
    rows = arrays["partition_indices"]
    if len(sizes) == 0 or sum(sizes) != len(rows):
        raise ValueError(
            f"{path} has {len(rows)} partition_indices and partition_sizes {np.asarray(sizes)}; "
            "expected one size for each client, which add up to the indices"
        )
    partition = np.split(rows, np.cumsum(sizes)[:-1])
    models = [
        {
            ours: {"kernel": from_torch(arrays[f"client{i}/{name}"], channels(arrays, name))}
            for name, ours in LAYERS.items()
        }
        for i in range(len(sizes))
    ]
    return Reference(fj.tree.stack(models), partition, arrays["validation_indices"], arrays)


def channels(arrays: dict[str, np.ndarray], name: str) -> int:
    """Return the channels of a layer's inputs; the first dense layer flattens images."""
    return arrays["client0/conv2"].shape[0] if name == "fc1" else arrays[f"client0/{name}"].shape[1]


def from_torch(weight: np.ndarray, channels: int) -> np.ndarray:
    """Convert a weight, or an array of its shape, from PyTorch's layout to flax's.

    (out, in) becomes (in, out), and (out, in, height, width) becomes (height, width, in, out). The
    inputs of a dense layer may be images with so many channels, flattened: PyTorch does so by
    (channel, row, column), flax by (row, column, channel).

    Example:
        >>> from_torch(np.arange(8).reshape(1, 8), channels=2).ravel()
        array([0, 4, 1, 5, 2, 6, 3, 7])
    """
    if weight.ndim == 4:
        return weight.transpose(2, 3, 1, 0)
    images = weight.reshape(len(weight), channels, -1)
    return images.transpose(2, 1, 0).reshape(-1, len(weight))
