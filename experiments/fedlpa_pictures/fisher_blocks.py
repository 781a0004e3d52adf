"""Compare the full empirical Fisher information with its Kronecker blocks, layer by layer."""

from pathlib import Path
from typing import NamedTuple

import flax.linen
import jax
import numpy as np
import optax
from scipy.spatial.distance import cosine

import fisherjax as fj
from experiments.harness import figures, tables


class Blocks(NamedTuple):
    """The Fisher information of a network's d parameters."""

    sizes: dict[str, int]  # numbers of parameters of layers, in the order of the matrices
    full: np.ndarray  # [d, d]
    kronecker: np.ndarray  # [d, d], of Kronecker factors
    accuracy: float  # as a fraction


class _ThreeConvolutions(flax.linen.Module):
    """Classify images of 8 x 8 pixels or more: three times conv3 and pooling by 2, then dense."""

    num_classes: int

    @flax.linen.compact
    def __call__(self, images: fj.typing.Array) -> fj.typing.Array:
        fast = {"conv_general_dilated": fj.nn.conv_general_dilated}
        for name, channels in {"conv1": 4, "conv2": 8, "conv3": 8}.items():
            images = flax.linen.Conv(channels, (3, 3), name=name, **fast)(images)
            images = flax.linen.relu(fj.nn.max_pool(images, 2))
        return flax.linen.Dense(self.num_classes, name="dense")(images.reshape(len(images), -1))


def compute(data: fj.datasets.Dataset, num_examples: int, epochs: int, seed: int) -> Blocks:
    """Train a small network on the first examples and compute its empirical Fisher twice."""
    examples = fj.Examples(data.inputs[:num_examples], data.targets[:num_examples])
    network = _ThreeConvolutions(data.num_classes)
    apply = fj.networks.apply_fn(network, fj.datasets.normalizer(data))
    model = fj.Model(apply, fj.likelihoods.categorical)
    start, key = jax.random.split(jax.random.key(seed))
    params = fj.networks.init(network, start, examples.inputs)
    one_client = fj.clients.federation(examples, fj.partition.central(len(examples.targets)))
    how = {"optimizer": optax.sgd(0.02, 0.9), "epochs": epochs, "batch_size": 32}
    trained = fj.training.train(model, params, one_client, key=key, **how)
    params, kind = jax.tree.map(lambda leaf: leaf[0], trained.params), fj.fisher.empirical
    return Blocks(
        {name: sum(leaf.size for leaf in layer.values()) for name, layer in params.items()},
        np.asarray(fj.fisher.full(model, params, examples, kind=kind).matrix, float),
        np.asarray(fj.fisher.kfac(model, params, examples, kind=kind).dense(), float),
        float(fj.metrics.accuracy(model, params, examples)),
    )


def similarities(blocks: Blocks) -> dict[str, tuple[float, float]]:
    """Return cosines of the full Fisher with the Kronecker one and its diagonal, layer by layer."""
    found, end = {}, 0
    for name, size in (*blocks.sizes.items(), ("all layers", len(blocks.full))):
        begin, end = (end, end + size) if name in blocks.sizes else (0, size)
        full, kronecker = (x[begin:end, begin:end] for x in (blocks.full, blocks.kronecker))
        both = kronecker, np.diag(np.diag(full))
        found[name] = tuple(1 - float(cosine(full.ravel(), x.ravel())) for x in both)
    return found


def section(
    dataset: str, data_dir: Path | None, num_examples: int, epochs: int, seed: int, path: Path
) -> str:
    """Compute both matrices, draw them, and return a description with their similarity."""
    data, _ = fj.datasets.load(dataset, data_dir)
    blocks = compute(data, num_examples, epochs, seed)
    draw(blocks, path)
    counts = blocks.sizes | {"all layers": len(blocks.full)}
    lines = [
        (name, str(counts[name]), *(f"{x:.3f}" for x in cosines))
        for name, cosines in similarities(blocks).items()
    ]
    return f"""## The empirical Fisher information and its Kronecker blocks

Cosine similarity with the full matrix, of Kronecker factors and of its own diagonal. \
{dataset}, {min(num_examples, len(data.targets))} images, {epochs} epochs, \
{100 * blocks.accuracy:.1f} % of them right.

{tables.markdown(tables.Table("", ("layer", "parameters", "Kronecker", "diagonal"), lines))}
![Fisher information]({path.name})
"""


def draw(blocks: Blocks, path: Path) -> None:
    """Draw both matrices on one scale; black is a millionth of the largest entry, or less."""
    from matplotlib.colors import LogNorm

    figure, panels = figures.canvas(9, 4.4, columns=2)
    largest, sizes = np.abs(blocks.full).max(), np.array([*blocks.sizes.values()])
    scale = LogNorm(1e-6 * largest, largest)
    shown = {"full": blocks.full, "Kronecker blocks": blocks.kronecker}
    for axes, (title, matrix) in zip(panels, shown.items(), strict=True):
        image = axes.imshow(np.maximum(np.abs(matrix), scale.vmin), cmap="magma", norm=scale)
        for end in np.cumsum(sizes)[:-1]:
            axes.axhline(end, color="white", linewidth=0.5)
            axes.axvline(end, color="white", linewidth=0.5)
        axes.set_title(title, fontsize="medium", loc="left")
        axes.set(xticks=[], yticks=[])
    panels[0].set_yticks(np.cumsum(sizes) - sizes / 2, [*blocks.sizes])
    figure.colorbar(image, ax=panels, extend="min", shrink=0.9, label="absolute value")
    figures.save(figure, path)
