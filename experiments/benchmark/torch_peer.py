"""The other side: the same networks in PyTorch, a loop over clients, nngeometry's Fishers.

Everything of PyTorch is imported when it is needed, so that the rest runs without it.
"""

import copy
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.benchmark.measure import peak_bytes
from experiments.benchmark.workloads import Workload, normalize
from fisherjax.typing import Params

NAME = "PyTorch loop"
_CHANNELS = {"lenet": (1, 6, 16), "cnn": (3, 32, 64)}
_FEATURES = {"lenet": (256, 120, 84, 10), "cnn": (1600, 512, 128, 10)}


def missing(package: str) -> str | None:
    """Say that a package is not installed, and how to install it; None if it is there."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        return (
            f"{package} cannot be imported ({error}), so its side is left out. "
            "Install it with: pip install 'fisherjax[bench]'"
        )
    return None


def device() -> str:
    """Choose cuda where JAX computes on a GPU too."""
    import torch

    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def network(name: str) -> Any:
    """Make the network of `fisherjax.networks`, without biases."""
    import torch

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = torch.nn.ModuleList(
                torch.nn.Conv2d(a, b, 5, bias=False) for a, b in itertools.pairwise(_CHANNELS[name])
            )
            self.dense = torch.nn.ModuleList(
                torch.nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(_FEATURES[name])
            )

        def forward(self, x: Any) -> Any:
            for convolution in self.convolutions:
                x = torch.nn.functional.max_pool2d(torch.relu(convolution(x)), 2)
            x = x.flatten(1)
            for dense in self.dense[:-1]:
                x = torch.relu(dense(x))
            return self.dense[-1](x)

    return Network().to(device())


def rows(name: str) -> list[np.ndarray]:
    """Return, layer by layer, which of our rows each of PyTorch's columns is.

    A kernel's rows are (height, width, channel) here and (channel, height, width) there, and so
    are the inputs of the first dense layer.
    """
    shapes = [(5, 5, channels) for channels in _CHANNELS[name][:-1]]
    channels, features = _CHANNELS[name][-1], _FEATURES[name]
    side = int((features[0] // channels) ** 0.5)
    shapes += [(side, side, channels), *((1, 1, width) for width in features[1:-1])]
    return [np.arange(np.prod(s)).reshape(s).transpose(2, 0, 1).ravel() for s in shapes]


def kernels(params: Params) -> list[np.ndarray]:
    """Return each layer's kernel as a matrix [inputs, outputs], in the order of the network."""
    leaves = [np.asarray(params[name]["kernel"]) for name in sorted(params)]
    return [leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves]


def load(net: Any, name: str, params: Params) -> None:
    """Give PyTorch's network our weights."""
    import torch

    with torch.no_grad():
        for weight, kernel, order in zip(
            net.parameters(), kernels(params), rows(name), strict=True
        ):
            values = torch.from_numpy(kernel[order].T.copy()).to(weight.device)
            weight.copy_(values.reshape(weight.shape))


def tensors(work: Workload) -> tuple[Any, Any]:
    """Return normalised images [N, C, H, W] and labels, on the device."""
    import torch

    inputs = torch.from_numpy(normalize(work.images).transpose(0, 3, 1, 2).copy())
    return inputs.to(device()), torch.from_numpy(work.labels).long().to(device())


def training(
    work: Workload, partition: Sequence[np.ndarray], epochs: int, batch_size: int
) -> Callable[[], float]:
    """Prepare a function that trains every client from the start, one after another.

    Args:
        work: network and images.
        partition: the rows of each client.
        epochs: of each client.
        batch_size: examples of a step.

    Returns:
        A function that returns the mean loss of the last epoch, over all examples.
    """
    import torch

    inputs, targets = tensors(work)
    clients = [torch.from_numpy(own).to(device()) for own in partition if len(own)]
    start = network(work.name)
    load(start, work.name, work.params)

    def train_client(own: Any) -> Any:
        net = copy.deepcopy(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        for _ in range(epochs):
            total = torch.zeros((), device=own.device)
            for batch in own[torch.randperm(len(own), device=own.device)].split(batch_size):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(inputs[batch]), targets[batch])
                loss.backward()
                optimizer.step()
                total += len(batch) * loss.detach()
        return total

    # The last number leaves the device, so that everything before it is done.
    return lambda: float(sum(train_client(own) for own in clients)) / len(work.labels)


def fisher(work: Workload, representation: str, batch_size: int) -> Callable[[], Any]:
    """Prepare nngeometry's exact Fisher of 10 classes.

    Args:
        work: network and images.
        representation: "PMatDiag" or "PMatKFAC".
        batch_size: examples of a minibatch.

    Returns:
        A function that returns nngeometry's matrix.
    """
    import torch
    from nngeometry import object as objects
    from nngeometry.metrics import FIM

    net = network(work.name)
    load(net, work.name, work.params)
    inputs, targets = tensors(work)

    class Batches(torch.utils.data.Dataset):
        """Whole minibatches, so that no time goes into collecting single examples."""

        def __len__(self) -> int:
            return len(targets)

        def __getitems__(self, batch: list[int]) -> tuple[Any, Any]:
            return inputs[batch], targets[batch]

    loader = torch.utils.data.DataLoader(Batches(), batch_size, collate_fn=lambda batch: batch)

    def run() -> Any:
        matrix = FIM(net, loader, getattr(objects, representation), 10, device=device())
        if device() == "cuda":
            torch.cuda.synchronize()
        return matrix

    return run


def diagonal(name: str, matrix: Any) -> list[np.ndarray]:
    """Return nngeometry's diagonal layer by layer, as matrices [inputs, outputs] in our order."""
    flat = matrix.get_diag().detach().cpu().numpy().astype(np.float64)
    widths = (*_CHANNELS[name][1:], *_FEATURES[name][1:])
    layers = []
    for order, outputs in zip(rows(name), widths, strict=True):
        size = outputs * len(order)
        layers.append(flat[:size].reshape(outputs, -1).T[np.argsort(order)])
        flat = flat[size:]
    return layers


def factors(name: str, matrix: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return nngeometry's Kronecker factors (A, G) layer by layer, in our order of rows."""
    pairs = [[f.detach().cpu().numpy().astype(np.float64) for f in p] for p in matrix.data.values()]
    back = [np.argsort(order) for order in rows(name)]
    return [(a[np.ix_(i, i)], g) for (a, g), i in zip(pairs, back, strict=True)]


def peak() -> int:
    """Return the peak memory, PyTorch's own where it computes on a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if device() == "cuda" else peak_bytes()
