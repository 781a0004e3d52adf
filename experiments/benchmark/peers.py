"""Make the other sides: a loop over clients in PyTorch, and nngeometry's Fishers.

PyTorch is imported only when it is needed, so that the rest runs without it.
"""

import copy
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, peak_bytes
from experiments.benchmark.workloads import Workload, normalize, split
from fisherjax.typing import Params

TORCH, NNGEOMETRY = "PyTorch loop", "nngeometry"
_CHANNELS = {"lenet": (1, 6, 16), "cnn": (3, 32, 64)}
_FEATURES = {"lenet": (256, 120, 84, 10), "cnn": (1600, 512, 128, 10)}
_Factors = Sequence[tuple[np.ndarray, np.ndarray]]


def are_there(note: Callable[[str], None], *packages: str) -> bool:
    """Return whether packages are installed; note how to install the first that is missing."""
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
    ours = _weights(work.name, work.params)
    with torch.no_grad():
        for theirs, own in zip(net.parameters(), ours, strict=True):
            theirs.copy_(torch.from_numpy(own.copy()).reshape(theirs.shape))
    return net.to(_device())


def tensors(work: Workload) -> tuple[Any, Any]:
    """Return normalised images [N, C, H, W] and labels, on the device."""
    import torch

    inputs = torch.from_numpy(normalize(work.images).transpose(0, 3, 1, 2).copy())
    return inputs.to(_device()), torch.from_numpy(work.labels).long().to(_device())


def training(work: Workload, config: Config, num_clients: int) -> Case:
    """Train every client from the start, one after another."""
    import torch

    inputs, targets = tensors(work)
    clients = [torch.from_numpy(own).to(_device()) for own in split(work, num_clients) if len(own)]
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
        # The mean loss of the last epoch is copied to the host, which waits for all work.
        return float(sum(train_client(own) for own in clients)) / len(work.labels)

    units = config.epochs * len(work.labels)
    return Case(TORCH, run, units, facts=lambda loss: {"loss": loss}, peak=_peak)


def vmapped_training(work: Workload, config: Config, rows: Sequence[np.ndarray]) -> Case:
    """Train clients of equal size side by side: `torch.func.vmap` of the gradient of one."""
    import torch

    inputs, targets = tensors(work)
    clients = torch.from_numpy(np.stack(rows)).to(_device())
    net = network(work)
    start = {name: value.detach() for name, value in net.named_parameters()}

    def loss(params: Any, images: Any, labels: Any) -> Any:
        outputs = torch.func.functional_call(net, params, (images,))
        return torch.nn.functional.cross_entropy(outputs, labels)

    step = torch.func.vmap(torch.func.grad_and_value(loss))

    def run() -> float:
        params = {name: x.expand(len(rows), *x.shape).clone() for name, x in start.items()}
        speeds = {name: torch.zeros_like(x) for name, x in params.items()}
        losses = torch.zeros(len(rows), device=clients.device)
        for _ in range(config.epochs):
            order = torch.rand(clients.shape, device=clients.device).argsort(1)
            for batch in clients.gather(1, order).split(config.batch_size, 1):
                gradients, losses = step(params, inputs[batch], targets[batch])
                for name, gradient in gradients.items():
                    speeds[name] = 0.9 * speeds[name] + gradient
                    params[name] = params[name] - 0.01 * speeds[name]
        return float(losses.mean())  # waits for all work

    facts = {"facts": lambda loss: {"loss of the last batch": loss}, "peak": _peak}
    return Case("torch.func.vmap", run, config.epochs * clients.numel(), **facts)


def fisher(work: Workload, representation: str, batch_size: int) -> Case:
    """Compute the exact Fisher of ten classes, a PMatDiag or a PMatKFAC."""
    import torch
    from nngeometry import object as objects
    from nngeometry.metrics import FIM

    net, device = network(work), _device()

    class Batches(torch.utils.data.TensorDataset):
        """Whole minibatches, so that collecting single examples takes no time."""

        __getitems__ = torch.utils.data.TensorDataset.__getitem__

    data = Batches(*tensors(work))
    loader = torch.utils.data.DataLoader(data, batch_size, collate_fn=lambda batch: batch)

    def run() -> Any:
        matrix = FIM(net, loader, getattr(objects, representation), 10, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        return matrix

    return Case(NNGEOMETRY, run, len(work.labels), peak=_peak)


def compare_diagonals(name: str, ours: Any, theirs: Any) -> dict[str, float]:
    """Return ||ours - theirs|| / ||theirs||."""
    own = np.concatenate([x.ravel() for x in _weights(name, ours.entries)])
    other = _array(theirs.get_diag())
    return {"relative_error": np.linalg.norm(own - other) / np.linalg.norm(other)}


def compare_factors(name: str, ours: Any, theirs: Any) -> dict[str, float]:
    """Return the relative error of the products of the factors; see `kronecker_error`."""
    pairs = [ours.factors[layer] for layer in sorted(ours.factors)]
    layers = zip(pairs, _rows(name), strict=True)
    own = [(pair["input"][np.ix_(order, order)], pair["output"]) for pair, order in layers]
    other = [tuple(map(_array, pair)) for pair in theirs.data.values()]
    return {"relative_error": kronecker_error(own, other)}


def kronecker_error(ours: _Factors, theirs: _Factors) -> float:
    """Return ||ours - theirs|| / ||theirs|| of the products of factors, in the Frobenius norm.

    Factors (A, G) and (B, H) may split the scale differently. Their products are never computed:
    ||A (x) G - B (x) H||^2 = |A|^2 |G|^2 - 2 <A, B> <G, H> + |B|^2 |H|^2.
    """
    difference = total = 0.0
    for own, other in zip(ours, theirs, strict=True):
        (a, g), (b, h) = ([np.asarray(x, np.float64) for x in pair] for pair in (own, other))
        norm = np.vdot(b, b) * np.vdot(h, h)
        difference += np.vdot(a, a) * np.vdot(g, g) - 2 * np.vdot(a, b) * np.vdot(g, h) + norm
        total += norm
    return float(np.sqrt(max(difference, 0.0) / total))


def _rows(name: str) -> list[np.ndarray]:
    """Return, layer by layer, which of our rows each of PyTorch's columns is.

    A kernel's rows are (height, width, channel) here and (channel, height, width) there, and so
    are the inputs of the first dense layer.
    """
    shapes = [(5, 5, channels) for channels in _CHANNELS[name][:-1]]
    channels, features = _CHANNELS[name][-1], _FEATURES[name]
    side = int((features[0] // channels) ** 0.5)
    shapes += [(side, side, channels), *((1, 1, width) for width in features[1:-1])]
    return [np.arange(np.prod(s)).reshape(s).transpose(2, 0, 1).ravel() for s in shapes]


def _weights(name: str, params: Params) -> list[np.ndarray]:
    """Return each layer's kernel as PyTorch has it, a matrix [outputs, inputs]."""
    leaves = [np.asarray(params[layer]["kernel"]) for layer in sorted(params)]
    kernels = [leaf.reshape(-1, leaf.shape[-1]) for leaf in leaves]
    return [kernel[order].T for kernel, order in zip(kernels, _rows(name), strict=True)]


def _device() -> str:
    """Return "cuda" if JAX computes on a GPU too, else "cpu"."""
    import torch

    return "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"


def _peak(_: Any) -> int:
    """Return the peak memory, as PyTorch reports it on a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if _device() == "cuda" else peak_bytes()


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy().astype(np.float64)
