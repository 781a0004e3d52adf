"""Fuse two clients as Gaussians, and compare the results with the mode of their product.

A client is N(mu_k, P_k^-1), its precision P_k the curvature of its loss. The product of Gaussians
has its mode at (sum_k P_k)^-1 sum_k P_k mu_k; merging methods approximate P_k.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import figures, tables
from experiments.harness.figures import GREY, INK, label, style

_Fusions = dict[str, np.ndarray]
"""Fused means by algorithm; fedfisher_full finds the mode of the product."""


def plane() -> tuple[np.ndarray, np.ndarray]:
    """Make precisions and means of two narrow Gaussians whose product lies far from their middle.

    Source: the situation of figure 6 of Liu et al., "FedLPA", NeurIPS 2024, which gives no numbers.
    """
    angles, spread = np.deg2rad([35.0, 110.0]), np.diag([1.0, 0.02])
    turns = np.array([[[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]] for t in angles])
    covariances = turns @ spread @ turns.transpose(0, 2, 1)
    return np.linalg.inv(covariances), np.array([[-1.0, 0.0], [1.0, 0.0]])


def _fuse(precisions: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Return the mode [d] of a product of Gaussians with precisions [K, d, d] and means [K, d]."""
    return np.linalg.solve(precisions.sum(0), np.einsum("kij,kj->i", precisions, means))


def fuse_plane(precisions: np.ndarray, means: np.ndarray) -> _Fusions:
    """Fuse layers with one output, whose Kronecker factor is the whole precision."""
    return {
        "fedavg": means.mean(0),
        "fedfisher_diag": _fuse(precisions * np.eye(means.shape[-1]), means),
        "fedfisher_full": _fuse(precisions, means),
    }


def fuse_layers(inputs: np.ndarray, tangents: np.ndarray, means: np.ndarray) -> _Fusions:
    """Fuse layers whose precisions are empirical Fishers, E_n[vec(a g^T) vec(a g^T)^T].

    FedLPA takes the Kronecker factors E[a a^T] (x) E[g g^T] for them. Inputs are a_n [K, n, a],
    tangents g_n [K, n, o], and means the layers [K, a o] of K clients, row by row.
    """
    *shape, num_inputs = inputs.shape
    gradients = np.einsum("kni,knj->knij", inputs, tangents).reshape(*shape, -1)
    precisions, a, g = (
        np.einsum("kni,knj->kij", x, x) / shape[1] for x in (gradients, inputs, tangents)
    )
    layers = means.reshape(len(means), num_inputs, -1)
    right = np.einsum("kij,kjp,kpq->iq", a, layers, g) / len(means)
    approximate = np.linalg.solve(a.mean(0), right) @ np.linalg.inv(g.mean(0))
    exact = _fuse(np.stack([np.kron(*pair) for pair in zip(a, g, strict=True)]), means)
    return fuse_plane(precisions, means) | {"fedlpa_ea": approximate.ravel(), "fedlpa": exact}


def draw_layers(seed: int, num_examples: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw what `fuse_layers` takes: inputs and tangents [2, n, 2], correlated; layers [2, 4]."""
    random = np.random.default_rng(seed)
    mixing = random.normal(size=(2, 4, 4))
    drawn = np.einsum("kij,knj->kni", mixing, random.normal(size=(2, num_examples, 4)))
    return drawn[..., :2], drawn[..., 2:], random.normal(size=(2, 4))


def distances(fusions: _Fusions) -> dict[str, float]:
    """Return the distance of each fused mean from the mode of the product."""
    mode = fusions["fedfisher_full"]
    return {name: float(np.linalg.norm(x - mode)) for name, x in fusions.items()}


def section(seed: int, draws: int, path: Path) -> str:
    """Fuse two Gaussians in the plane and many over a layer, draw both, and describe them."""
    pair = plane()
    points = fuse_plane(*pair)
    layers = [distances(fuse_layers(*draw_layers(seed + draw))) for draw in range(draws)]
    spread = {name: [own[name] for own in layers] for name in layers[0]}
    spread.pop("fedfisher_full")
    figure, (left, right) = figures.canvas(9, 4.4, columns=2)
    _draw_plane(left, *pair, points)
    _draw_spread(right, spread)
    right.set_title(f"layers of 2 × 2, {draws} draws", fontsize="medium", loc="left")
    figures.save_with_legend(figure, path, columns=5)
    in_plane = [(label(name), f"{value:.3f}") for name, value in distances(points).items()]
    over_layer = [
        (label(name), *(f"{x:.3f}" for x in np.quantile(values, (0.5, 0.25, 0.75))))
        for name, values in spread.items()
    ]
    headings = ("layer", "median distance", "lower quartile", "upper quartile")
    return f"""## Fusing two Gaussians

Distance to the mode of the product, where FedFisher (full) lands: it takes the precisions \
themselves, the others a diagonal, Kronecker factors (FedLPA), or nothing (FedAvg). In the plane \
the two numbers are a layer with one output, whose Kronecker factor is the whole precision.

{tables.markdown(tables.Table("", ("in the plane", "distance"), in_plane))}
Over a layer of 2 × 2, {draws} draws whose inputs and tangents are correlated; EA is the \
expectation approximation.

{tables.markdown(tables.Table("", headings, over_layer))}
![two Gaussians]({path.name})
"""


def _draw_plane(axes: Any, precisions: np.ndarray, means: np.ndarray, points: _Fusions) -> None:
    side = np.linspace(-3, 3, 300)
    middles, shapes = [*means, points["fedfisher_full"]], [*precisions, precisions.sum(0)]
    for middle, shape, colour in zip(middles, shapes, (GREY, GREY, INK), strict=True):
        away = np.stack(np.meshgrid(side, side), axis=-1) - middle
        distance = np.einsum("xyi,ij,xyj->xy", away, shape, away)
        axes.contour(side, side, distance, levels=[1, 4], colors=colour, linewidths=1)
    for name, point in points.items():
        axes.plot(*point, lw=0, ms=8, **style(name))
    axes.set(aspect="equal", xlabel="first weight", ylabel="second weight")
    axes.set_title("two clients (grey), their product (black)", fontsize="medium", loc="left")


def _draw_spread(axes: Any, spread: dict[str, Sequence[float]]) -> None:
    how = {"whis": (5, 95), "showfliers": False, "widths": 0.5, "medianprops": {"color": INK}}
    names = [label(name).replace(" ", "\n") for name in spread]
    drawn = axes.boxplot([*spread.values()], tick_labels=names, patch_artist=True, **how)
    for place, (name, values) in enumerate(spread.items()):
        drawn["boxes"][place].set(facecolor=style(name)["color"], alpha=0.4)
        axes.plot(place + 1, np.median(values), lw=0, ms=8, **style(name))
    axes.set_yscale("log")
    axes.set_yticks(ticks := [0.1, 0.2, 0.5, 1, 2], [f"{tick:g}" for tick in ticks])
    axes.set_ylabel("distance to the mode of the product")
    axes.grid(axis="y", color=figures.GRID)
