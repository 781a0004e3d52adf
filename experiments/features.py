"""Whether a model separates the classes: what its last layer sees, and the labels of neighbours."""

import numpy as np
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from sklearn.neighbors import NearestNeighbors

import fisherjax as fj
from experiments.choices import MODELS
from experiments.experiment import Experiment
from fisherjax.typing import Array, Params

NEIGHBOURS = 10


def features(experiment: Experiment, params: Params, images: Array) -> np.ndarray:
    """Compute the inputs of a network's last layer.

    Args:
        experiment: whose network.
        params: of it.
        images: [n, ...], as they are stored.

    Returns:
        Activations [n, width].
    """
    last = max(name for name in params if name.startswith("dense"))
    width = params[last]["kernel"].shape[0]
    # The same network with a last layer that changes nothing.
    layer = {"kernel": np.eye(width, dtype=np.float32)}
    if "bias" in params[last]:
        layer["bias"] = np.zeros(width, np.float32)
    network = MODELS[experiment.config.model](num_classes=width)
    apply = fj.networks.apply_fn(network, experiment.normalize)
    model = fj.Model(apply, fj.likelihoods.categorical)
    return np.asarray(fj.metrics.logits(model, {**params, last: layer}, images))


def purity(points: np.ndarray, labels: np.ndarray, neighbours: int = NEIGHBOURS) -> float:
    """Average the share of each point's nearest neighbours that have its label.

    Args:
        points: [n, d].
        labels: [n].
        neighbours: how many, itself not counted.

    Returns:
        A fraction; what mere chance gives is the sum of the squared class shares.

    Example:
        >>> purity(np.array([[0.0], [1.0], [5.0], [6.0]]), np.array([0, 0, 1, 1]), neighbours=1)
        1.0
    """
    search = NearestNeighbors(n_neighbors=neighbours).fit(points)
    return float(np.mean(labels[search.kneighbors(return_distance=False)] == labels[:, None]))


def embed(points: np.ndarray, seed: int, dimensions: int = 9) -> np.ndarray:
    """Lay points out in the plane by t-SNE, of their first principal components.

    Args:
        points: [n, d], more than 30.
        seed: of t-SNE.
        dimensions: principal components, at most.

    Returns:
        [n, 2].

    Source: van der Maaten and Hinton, "Visualizing data using t-SNE", JMLR 2008; with 9 components
        and perplexity 30 as in the authors' code of FedLPA.
    """
    components = min(dimensions, *points.shape)
    reduced = PCA(components, random_state=seed).fit_transform(points)
    return TSNE(random_state=seed, init="pca").fit_transform(reduced)
