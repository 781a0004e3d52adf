"""Measure how well a model separates classes, by the inputs of its last layer."""

import math
from pathlib import Path

import jax
import numpy as np
from scipy.spatial.distance import cdist
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors

import fisherjax as fj
from experiments.harness import figures, kept_clients, one_round, steps, tables, tasks
from experiments.harness.config import MODELS, OneShot

_NEIGHBOURS = 10


def features(task: tasks.OneRound, params: fj.typing.Params, images: fj.typing.Array) -> np.ndarray:
    """Compute the inputs [n, width] of a network's last layer, for stored images."""
    last = max(name for name in params if name.startswith("dense"))
    width = params[last]["kernel"].shape[0]
    # Take the same network with the identity as its last layer.
    identity = {"kernel": np.eye(width, dtype=np.float32), "bias": np.zeros(width, np.float32)}
    layer = {name: identity[name] for name in params[last]}
    network = MODELS[task.config.data.model](num_classes=width)
    model = task.model._replace(apply=fj.networks.apply_fn(network, task.normalize))
    return np.asarray(fj.metrics.logits(model, {**params, last: layer}, images))


def purity(points: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean share of each point's nearest neighbours that have its label."""
    search = NearestNeighbors(n_neighbors=_NEIGHBOURS).fit(points)
    return float(np.mean(labels[search.kneighbors(return_distance=False)] == labels[:, None]))


def _embed(points: np.ndarray, seed: int) -> np.ndarray:
    """Embed more than 30 points in the plane by t-SNE of their first principal components.

    Source: van der Maaten and Hinton, "Visualizing data using t-SNE", JMLR 2008; with 9 components
        and perplexity 30 as in the authors' code of FedLPA.
    """
    reduced = PCA(min(9, *points.shape), random_state=seed).fit_transform(points)
    return TSNE(random_state=seed, init="pca").fit_transform(reduced)


def _clients(task: tasks.OneRound, unit: steps.Unit, number: int) -> dict[str, fj.typing.Params]:
    """Train the clients of a split, and return the models of the first ones."""
    if not number:
        return {}
    given = task, unit, *steps.start(task, unit[1]), lambda _: None, task.optimizer
    models = kept_clients.trained(*given)[0].models
    return {f"client {i}": jax.tree.map(lambda x, i=i: x[i], models) for i in range(number)}


def section(config: OneShot, num_points: int, shown_clients: int, path: Path) -> str:
    """Merge the clients of a split, draw the models' features, and return a description."""
    task, [split], [seed] = tasks.one_round(config), config.partition_seeds, config.seeds
    models = _clients(task, (split, seed), shown_clients)
    _, merged = one_round.train_and_merge(task, (split, seed))
    models |= {figures.label(name): model.params for name, model in merged.items()}
    images = task.central.inputs[:num_points]
    labels = np.asarray(task.central.targets[:num_points])
    pixels = np.asarray(images).reshape(len(labels), -1).astype(float)
    lines = [("the pixels themselves", "-", f"{100 * purity(pixels, labels):.1f}", "-")]
    drawn = {}
    for name, params in models.items():
        points = features(task, params, images)
        placed = _embed(points, seed)
        accuracy = float(task.accuracy(params, task.test))
        found = accuracy, purity(points, labels), purity(placed, labels)
        shares = [f"{100 * share:.1f}" for share in found]
        lines.append((name, *shares))
        drawn[f"{name}: purity {shares[1]} %"] = placed
    draw(drawn, labels, path)
    headings = ("model", "test accuracy", "purity", "purity of the picture")
    return f"""## What the last layer of a merged model sees

Share of the {_NEIGHBOURS} nearest neighbours with the same label, in %, among the inputs of the \
last layer and in the picture. {config.data.dataset}, {len(labels)} training images, \
{config.data.num_clients} clients, beta {config.data.beta:g}, {config.epochs} epochs, seed {seed}.

{tables.markdown(tables.Table("", headings, lines))}
![features of merged models]({path.name})
"""


def draw(drawn: dict[str, np.ndarray], labels: np.ndarray, path: Path) -> None:
    """Draw points [n, 2] under their titles, in the colours of their classes."""
    from matplotlib.patheffects import withStroke

    columns = min(3, len(drawn))
    rows, classes = math.ceil(len(drawn) / columns), np.unique(labels)
    figure, panels = figures.canvas(3 * columns, 3.1 * rows + 0.5, columns, rows, squeeze=False)
    # Numbers tell classes apart in greyscale and for colour-blind readers.
    outline = [withStroke(linewidth=4, foreground="white")]
    number = {"ha": "center", "va": "center", "size": 13, "weight": "bold", "path_effects": outline}
    for axes in panels.flat:
        axes.set_axis_off()
    for axes, (title, points) in zip(panels.flat, drawn.items(), strict=False):
        for name in classes:
            own = points[labels == name]
            axes.scatter(*own.T, color=f"C{name}", s=4, linewidths=0, label=str(name))
            axes.annotate(str(name), own[cdist(own, own).sum(0).argmin()], **number)
        axes.set_title(title, fontsize="medium")
    figures.save_with_legend(figure, path, columns=10, title="class", markerscale=3)
