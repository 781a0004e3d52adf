"""The other side: the same networks in PyTorch, and a loop over clients.

Everything of PyTorch is imported when it is needed, so that the rest runs without it.
"""

import copy
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, peak_bytes
from experiments.benchmark.workloads import Workload, normalize, split
from fisherjax.typing import Params

NAME = "PyTorch loop"
_CHANNELS = {"lenet": (1, 6, 16), "cnn": (3, 32, 64)}
_FEATURES = {"lenet": (256, 120, 84, 10), "cnn": (1600, 512, 128, 10)}


def is_there(note: Callable[[str], None], *packages: str) -> bool:
    """Tell whether packages are installed; if not, note how to install the first that is not."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError as error:
            note(
                f"{package} cannot be imported ({error}), so its side is left out. "
                "Install it with: pip install 'fisherjax[bench]'"
            )
            return False
    return True


def device() -> str:
    """Choose cuda where JAX computes on a GPU too."""
    import torch

    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def peak() -> int:
    """Return the peak memory, PyTorch's own where it computes on a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if device() == "cuda" else peak_bytes()


def network(work: Workload) -> Any:
    """Make the network of `fisherjax.networks`, without biases and with our weights."""
    import torch

    layers: list[Any] = []
    for widths in itertools.pairwise(_CHANNELS[work.name]):
        layers += [torch.nn.Conv2d(*widths, 5, bias=False), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    layers.append(torch.nn.Flatten())
    for widths in itertools.pairwise(_FEATURES[work.name]):
        layers += [torch.nn.Linear(*widths, bias=False), torch.nn.ReLU()]
    net = torch.nn.Sequential(*layers[:-1])
    ours = weights(work.name, work.params)
    with torch.no_grad():
        for theirs, own in zip(net.parameters(), ours, strict=True):
            theirs.copy_(torch.from_numpy(own.copy()).reshape(theirs.shape))
    return net.to(device())


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


def weights(name: str, params: Params) -> list[np.ndarray]:
    """Return each layer's kernel as PyTorch has it, a matrix [outputs, inputs]."""
    leaves = [np.asarray(params[layer]["kernel"]) for layer in sorted(params)]
    kernels = [leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves]
    return [kernel[order].T for kernel, order in zip(kernels, rows(name), strict=True)]


def tensors(work: Workload) -> tuple[Any, Any]:
    """Return normalised images [N, C, H, W] and labels, on the device."""
    import torch

    inputs = torch.from_numpy(normalize(work.images).transpose(0, 3, 1, 2).copy())
    return inputs.to(device()), torch.from_numpy(work.labels).long().to(device())


def training(work: Workload, config: Config, num_clients: int) -> Case:
    """Train every client from the start, one after another."""
    import torch

    inputs, targets = tensors(work)
    partition = split(work, num_clients)
    clients = [torch.from_numpy(own).to(device()) for own in partition if len(own)]
    start = network(work)

    def train_client(own: Any) -> Any:
        net = copy.deepcopy(start)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        for _ in range(config.epochs):
            total = torch.zeros((), device=own.device)
            for batch in own[torch.randperm(len(own), device=own.device)].split(config.batch_size):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(net(inputs[batch]), targets[batch])
                loss.backward()
                optimizer.step()
                total += len(batch) * loss.detach()
        return total

    def run() -> float:
        # The mean loss of the last epoch leaves the device, so that everything before it is done.
        return float(sum(train_client(own) for own in clients)) / len(work.labels)

    units = config.epochs * len(work.labels)
    return Case(NAME, run, units, facts=lambda loss: {"loss": loss}, peak=peak)
