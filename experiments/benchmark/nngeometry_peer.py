"""nngeometry's Fishers of the networks in PyTorch, and how far ours are from them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.benchmark import torch_peer
from experiments.benchmark.workloads import Workload

NAME = "nngeometry"
Factors = Sequence[tuple[np.ndarray, np.ndarray]]


def fisher(work: Workload, representation: str, batch_size: int) -> Callable[[], Any]:
    """Prepare a function that returns the exact Fisher of 10 classes, a PMatDiag or a PMatKFAC."""
    import torch
    from nngeometry import object as objects
    from nngeometry.metrics import FIM

    net, device = torch_peer.network(work), torch_peer.device()
    inputs, targets = torch_peer.tensors(work)

    class Batches(torch.utils.data.Dataset):
        """Whole minibatches, so that no time goes into collecting single examples."""

        def __len__(self) -> int:
            return len(targets)

        def __getitems__(self, batch: list[int]) -> tuple[Any, Any]:
            return inputs[batch], targets[batch]

    loader = torch.utils.data.DataLoader(Batches(), batch_size, collate_fn=lambda batch: batch)

    def run() -> Any:
        matrix = FIM(net, loader, getattr(objects, representation), 10, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        return matrix

    return run


def compare_diagonals(name: str, ours: Any, theirs: Any) -> dict[str, float]:
    """Return ||ours - theirs|| / ||theirs||."""
    own = np.concatenate([x.ravel() for x in torch_peer.weights(name, ours.entries)])
    other = _array(theirs.get_diag())
    return {"relative_error": np.linalg.norm(own - other) / np.linalg.norm(other)}


def compare_factors(name: str, ours: Any, theirs: Any) -> dict[str, float]:
    """Return how far the products of the Kronecker factors are apart; see `kronecker_error`."""
    layers = zip(
        (ours.factors[k] for k in sorted(ours.factors)), torch_peer.rows(name), strict=True
    )
    own = [(pair["input"][np.ix_(order, order)], pair["output"]) for pair, order in layers]
    other = [tuple(map(_array, pair)) for pair in theirs.data.values()]
    return {"relative_error": kronecker_error(own, other)}


def kronecker_error(ours: Factors, theirs: Factors) -> float:
    r"""Compare products of factors (A, G) and (B, H) of each layer, in the Frobenius norm.

    The factors themselves may split the scale differently; the products never appear:
    ||A (x) G - B (x) H||^2 = |A|^2 |G|^2 - 2 <A, B> <G, H> + |B|^2 |H|^2.

    Returns:
        ||ours - theirs|| / ||theirs|| over all layers.
    """
    difference = total = 0.0
    for own, other in zip(ours, theirs, strict=True):
        (a, g), (b, h) = ([np.asarray(x, np.float64) for x in pair] for pair in (own, other))
        norm = np.vdot(b, b) * np.vdot(h, h)
        difference += np.vdot(a, a) * np.vdot(g, g) - 2 * np.vdot(a, b) * np.vdot(g, h) + norm
        total += norm
    return float(np.sqrt(max(difference, 0.0) / total))


def _array(tensor: Any) -> np.ndarray:
    return tensor.detach().cpu().numpy().astype(np.float64)
