"""Draw why FedLPA and FedFisher merge as they do, each picture with the number that it shows.

    python -m experiments.fedlpa_pictures --out runs/pictures

gaussians.png: two correlated Gaussians fused by FedAvg, a diagonal, Kronecker factors and the full
precisions, and the distance to the mode of their product. fisher.png: the full empirical Fisher
information of a small network and its Kronecker blocks, and their cosine similarity. tsne.png: what
the last layer of each merged model sees, and how many of a point's ten nearest neighbours have its
label. summary.md holds the numbers.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console

import fisherjax as fj
from experiments import (
    commands,
    config,
    features,
    fisher_blocks,
    gaussians,
    niid_table,
    records,
    runs,
)
from experiments.choices import label
from experiments.experiment import prepare
from experiments.figures import canvas, save
from experiments.niid_report import Cell
from experiments.niid_table import Grid

COLOURS = ("#0b5fa5", "#c4501b", "#2a7f3f", "#7a3fa0", "#222222")


@dataclasses.dataclass(frozen=True)
class Config:
    """What to draw."""

    dataset: str = "mnist"
    """Of the networks; digits to try."""
    algorithms: tuple[str, ...] = ("fedavg", "fednova", "fedprox", "fedlpa", "fedfisher_kfac")
    """Whose merged models are looked at."""
    num_clients: int = 10
    """Of the merged models."""
    beta: float = 0.05
    """How their data are split, by Dirichlet shares of the classes."""
    epochs: int = 10
    """Of training."""
    seed: int = 0
    """Of all that is random."""
    num_points: int = 2000
    """Training images that t-SNE lays out."""
    num_examples: int = 2000
    """Training images of the Fisher information."""
    draws: int = 200
    """Of two random Gaussians over a layer."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/pictures")
    """Folder for the pictures."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: of the command line; those of this process if None.

    Returns:
        The exit status: 0 when all is drawn, 1 when something was refused.
    """
    console = Console(highlight=False)
    asked = tyro.cli(
        Config, prog="python -m experiments.fedlpa_pictures", args=arguments, description=__doc__
    )
    try:
        _check(asked)
        records.check_writable(asked.out)
        parts = []
        for name, draw in (
            ("gaussians", draw_gaussians),
            ("fisher", draw_fisher),
            ("tsne", draw_features),
        ):
            with console.status(name):
                parts.append(draw(asked, asked.out / f"{name}.png"))
            console.print(parts[-1], markup=False)
    except (ValueError, OSError) as error:
        return commands.refuse(error)
    text = "\n".join(["# Why curvature merges better than averaging", "", *parts])
    records.write_text(asked.out / "summary.md", text)
    names = "gaussians.png, fisher.png, tsne.png, summary.md"
    console.print(f"In {asked.out}/: {names}", soft_wrap=True)
    return 0


def draw_gaussians(asked: Config, path: Path) -> str:
    """Draw two Gaussians in the plane and the distances of many over a layer.

    Args:
        asked: how many.
        path: of the PNG file.

    Returns:
        The numbers, in Markdown.
    """
    pair = gaussians.plane()
    points = gaussians.fuse_plane(pair)
    layers = [
        gaussians.distances(gaussians.fuse_layers(*gaussians.draw_layers(asked.seed + draw)))
        for draw in range(asked.draws)
    ]
    spread = {name: [own[name] for own in layers] for name in layers[0] if name != "full"}
    figure, (left, right) = canvas(10, 4.2, columns=2)
    _draw_plane(left, pair, points)
    right.boxplot(list(spread.values()), tick_labels=list(spread), whis=(5, 95), showfliers=False)
    right.set_yscale("log")
    right.set_ylabel("distance to the mode of the product")
    right.set_title(f"layers of 2 × 2, {asked.draws} draws", fontsize="medium", loc="left")
    right.tick_params(axis="x", labelrotation=20)
    save(figure, path)
    plane = gaussians.distances(points)
    lines = [(name, f"{value:.3f}") for name, value in plane.items()]
    layer_lines = [
        (name, *(f"{x:.3f}" for x in np.quantile(values, (0.5, 0.25, 0.75))))
        for name, values in spread.items()
    ]
    return "\n".join(
        [
            "## Fusing two Gaussians",
            "",
            "Distance to the mode of the product. In the plane the two numbers are a layer with "
            "one output, whose Kronecker factor is the whole precision.",
            "",
            *_table(("in the plane", "distance"), lines),
            "",
            f"Over a layer of 2 × 2, {asked.draws} draws whose inputs and tangents are correlated; "
            "approximate is the expectation approximation.",
            "",
            *_table(("layer", "median distance", "lower quartile", "upper quartile"), layer_lines),
            "",
            "![two Gaussians](gaussians.png)",
            "",
        ]
    )


def draw_fisher(asked: Config, path: Path) -> str:
    """Draw the full empirical Fisher information beside its Kronecker blocks.

    Args:
        asked: of which data.
        path: of the PNG file.

    Returns:
        The numbers, in Markdown.
    """
    train, _ = fj.datasets.load(asked.dataset, asked.data_dir)
    blocks = fisher_blocks.compute(train, asked.num_examples, asked.epochs, asked.seed)
    found = fisher_blocks.similarities(blocks)
    figure, both = canvas(10, 5, columns=2)
    largest = np.abs(blocks.full).max()
    for axes, matrix, title in zip(
        both, (blocks.full, blocks.kronecker), ("full", "Kronecker blocks"), strict=True
    ):
        shown = np.log10(np.maximum(np.abs(matrix), 1e-6 * largest))
        axes.imshow(shown, cmap="magma", vmin=np.log10(largest) - 6, vmax=np.log10(largest))
        for end in np.cumsum(blocks.sizes)[:-1]:
            axes.axhline(end, color="white", linewidth=0.5)
            axes.axvline(end, color="white", linewidth=0.5)
        axes.set_title(f"{title}, log10 of absolute values", fontsize="medium", loc="left")
        middles = np.cumsum(blocks.sizes) - np.array(blocks.sizes) / 2
        axes.set_yticks(middles, blocks.layers)
        axes.set_xticks([])
    save(figure, path)
    sizes = dict(zip(blocks.layers, blocks.sizes, strict=True))
    lines = [
        (name, str(sizes.get(name, sum(blocks.sizes))), *(f"{x:.3f}" for x in own.values()))
        for name, own in found.items()
    ]
    return "\n".join(
        [
            "## The empirical Fisher information and its Kronecker blocks",
            "",
            "Cosine similarity with the full matrix, of Kronecker factors and of its own "
            f"diagonal. {asked.dataset}, {min(asked.num_examples, len(train.targets))} images, "
            f"{asked.epochs} epochs, {100 * blocks.accuracy:.1f} % of them right.",
            "",
            *_table(("layer", "parameters", "Kronecker", "diagonal"), lines),
            "",
            "![Fisher information](fisher.png)",
            "",
        ]
    )


def draw_features(asked: Config, path: Path) -> str:
    """Draw what the last layers of merged models see.

    Args:
        asked: which models.
        path: of the PNG file.

    Returns:
        The numbers, in Markdown.
    """
    experiment = prepare(_experiment(asked))
    unit = (asked.seed, asked.seed)
    silent = runs.Progress(lambda _: None, lambda _: None)
    _, merged = runs.train_and_merge(experiment, unit, silent)
    images = experiment.central.inputs[: asked.num_points]
    labels = np.asarray(experiment.central.targets[: asked.num_points])
    figure, panels = canvas(3.2 * len(merged), 3.5, columns=len(merged))
    pixels = np.asarray(images).reshape(len(labels), -1).astype(float)
    lines = [("the pixels themselves", "-", f"{100 * features.purity(pixels, labels):.1f}", "-")]
    for axes, (name, model) in zip(np.atleast_1d(panels), merged.items(), strict=True):
        points = features.features(experiment, model.params, images)
        placed = features.embed(points, asked.seed)
        pure = [features.purity(x, labels) for x in (points, placed)]
        accuracy = float(experiment.accuracy(model.params, experiment.test))
        lines.append((label(name), *(f"{100 * x:.1f}" for x in (accuracy, *pure))))
        axes.scatter(*placed.T, c=labels, cmap="tab10", s=2, linewidths=0)
        axes.set_title(f"{label(name)}\npurity {100 * pure[0]:.1f} %", fontsize="medium")
        axes.set_xticks([])
        axes.set_yticks([])
    save(figure, path)
    return "\n".join(
        [
            "## What the last layer of a merged model sees",
            "",
            f"Share of the {features.NEIGHBOURS} nearest neighbours with the same label, in %, "
            f"among the inputs of the last layer and in the picture. {asked.dataset}, "
            f"{len(labels)} training images, {asked.num_clients} clients, beta {asked.beta:g}, "
            f"{asked.epochs} epochs, seed {asked.seed}.",
            "",
            *_table(("model", "test accuracy", "purity", "purity of the picture"), lines),
            "",
            "![features of merged models](tsne.png)",
            "",
        ]
    )


def _experiment(asked: Config) -> config.Config:
    grid = Grid(
        epochs=asked.epochs,
        algorithms=asked.algorithms,
        num_clients=asked.num_clients,
        data_dir=asked.data_dir,
        out=asked.out,
    )
    cell = Cell(asked.dataset, "niid_bench", f"{asked.beta:g}")
    return niid_table.configuration(grid, cell, asked.seed)


def _check(asked: Config) -> None:
    if asked.dataset not in niid_table.DATASETS:
        known = ", ".join(niid_table.DATASETS)
        raise ValueError(f"--dataset is {asked.dataset!r}, expected one of {known}")
    least = {"num_points": 31, "num_examples": 1, "draws": 1}  # t-SNE's perplexity is 30
    for field, smallest in least.items():
        if getattr(asked, field) < smallest:
            option = f"--{field.replace('_', '-')}"
            raise ValueError(f"{option} is {getattr(asked, field)}, expected {smallest} or more")
    config.check(_experiment(asked))


def _draw_plane(axes: Any, pair: gaussians.Plane, points: gaussians.Fusions) -> None:
    side = np.linspace(-3, 3, 300)
    grid = np.stack(np.meshgrid(side, side), axis=-1)
    for mean, covariance in zip(pair.means, pair.covariances, strict=True):
        away = grid - mean
        distance = np.einsum("xyi,ij,xyj->xy", away, np.linalg.inv(covariance), away)
        axes.contour(side, side, distance, levels=[1, 4], colors="#8a8a8a", linewidths=0.8)
    product = np.linalg.inv(np.linalg.inv(pair.covariances).sum(0))
    away = grid - points["full"]
    distance = np.einsum("xyi,ij,xyj->xy", away, np.linalg.inv(product), away)
    axes.contour(side, side, distance, levels=[1, 4], colors="#222222", linewidths=0.8)
    for colour, (name, point) in zip(COLOURS, points.items(), strict=False):
        axes.plot(*point, "o", color=colour, label=name)
    axes.set_aspect("equal")
    axes.legend(frameon=False, loc="upper left")
    axes.set_title("two clients (grey) and their product (black)", fontsize="medium", loc="left")


def _table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rows = [f"| {' | '.join(line)} |" for line in (headings, *lines)]
    return [rows[0], "| --- |" + " ---: |" * (len(headings) - 1), *rows[1:]]


if __name__ == "__main__":
    sys.exit(main())
