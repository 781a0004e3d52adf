"""Two clients as Gaussians: where each way to fuse them lands, against the mode of their product.

A client is N(mu_k, P_k^-1), its precision P_k the curvature of its loss. The product of Gaussians
has its mode at (sum_k P_k)^-1 sum_k P_k mu_k; merging methods put something simpler for P_k.
"""

from typing import NamedTuple

import numpy as np

Fusions = dict[str, np.ndarray]
"""Fused means, by the name of the method; "full" is the mode of the product."""


class Plane(NamedTuple):
    """Two Gaussians in the plane.

    Attributes:
        means: [2, 2].
        covariances: [2, 2, 2].
    """

    means: np.ndarray
    covariances: np.ndarray


def plane() -> Plane:
    """Make two narrow Gaussians, turned differently, whose product lies far from their middle.

    Source: the situation of figure 6 of Liu et al., "FedLPA", NeurIPS 2024, which gives no numbers.
    """
    angles, spread = np.deg2rad([35.0, 110.0]), np.diag([1.0, 0.02])
    turns = np.array([[[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]] for t in angles])
    return Plane(np.array([[-1.0, 0.0], [1.0, 0.0]]), turns @ spread @ turns.transpose(0, 2, 1))


def fuse(precisions: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Find the mode of a product of Gaussians.

    Args:
        precisions: [K, d, d].
        means: [K, d].

    Returns:
        The mode [d].

    Example:
        >>> fuse(np.array([[[1.0]], [[3.0]]]), np.array([[0.0], [1.0]]))
        array([0.75])
    """
    return np.linalg.solve(precisions.sum(0), np.einsum("kij,kj->i", precisions, means))


def fuse_plane(gaussians: Plane) -> Fusions:
    """Fuse two Gaussians in the plane.

    Their two numbers are a layer with one output, where a Kronecker factor is the whole precision.

    Args:
        gaussians: means and covariances.

    Returns:
        Points [2] for FedAvg, a diagonal, and the full precisions.
    """
    means, precisions = gaussians.means, np.linalg.inv(gaussians.covariances)
    return {
        "FedAvg": means.mean(0),
        "diagonal": fuse(_diagonals(precisions), means),
        "full": fuse(precisions, means),
    }


def fuse_layers(inputs: np.ndarray, tangents: np.ndarray, means: np.ndarray) -> Fusions:
    """Fuse layers V [a, o] whose precisions are empirical Fishers, E_n[vec(a g^T) vec(a g^T)^T].

    Args:
        inputs: a_n of each client, [K, n, a].
        tangents: g_n of each client, [K, n, o].
        means: V of each client, row by row, [K, a o].

    Returns:
        Points [a o] for FedAvg, the diagonal, Kronecker factors E[a a^T] (x) E[g g^T] by the
        expectation approximation and exactly, and the full precision.
    """
    num_clients, num_examples, num_inputs = inputs.shape
    gradients = np.einsum("kni,knj->knij", inputs, tangents).reshape(num_clients, num_examples, -1)
    precisions, a, g = (_second_moments(x) for x in (gradients, inputs, tangents))
    layers = means.reshape(num_clients, num_inputs, -1)
    right = np.einsum("kij,kjp,kpq->iq", a, layers, g)
    approximate = np.linalg.solve(a.mean(0), right / num_clients) @ np.linalg.inv(g.mean(0))
    return {
        "FedAvg": means.mean(0),
        "diagonal": fuse(_diagonals(precisions), means),
        "Kronecker, approximate": approximate.ravel(),
        "Kronecker": fuse(np.stack([np.kron(*pair) for pair in zip(a, g, strict=True)]), means),
        "full": fuse(precisions, means),
    }


def draw_layers(seed: int, num_examples: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw two clients' inputs, tangents and layers of 2 x 2, inputs and tangents correlated.

    Args:
        seed: of `numpy.random.default_rng`.
        num_examples: n.

    Returns:
        Inputs [2, n, 2], tangents [2, n, 2] and layers [2, 4], as `fuse_layers` takes them.
    """
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(2, 4, 4))
    drawn = np.einsum("kij,knj->kni", mixing, random.normal(size=(2, num_examples, 4)))
    return drawn[..., :2], drawn[..., 2:], random.normal(size=(2, 4))


def distances(fusions: Fusions) -> dict[str, float]:
    """Measure how far each fused mean is from the mode of the product.

    Args:
        fusions: with "full" among them.

    Returns:
        Euclidean distances.
    """
    return {name: float(np.linalg.norm(x - fusions["full"])) for name, x in fusions.items()}


def _second_moments(x: np.ndarray) -> np.ndarray:
    return np.einsum("kni,knj->kij", x, x) / x.shape[1]


def _diagonals(matrices: np.ndarray) -> np.ndarray:
    return matrices * np.eye(matrices.shape[-1])
