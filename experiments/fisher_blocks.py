"""How much of the full empirical Fisher information its Kronecker blocks hold, layer by layer."""

from typing import NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from fisherjax.typing import Array


class Blocks(NamedTuple):
    """The Fisher information of one network, in full and of Kronecker factors.

    Attributes:
        layers: their names, in the order of the matrices.
        sizes: numbers of parameters, biases included.
        full: [d, d].
        kronecker: [d, d], zero between layers.
        accuracy: of the network on the examples, a fraction.
    """

    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    full: np.ndarray
    kronecker: np.ndarray
    accuracy: float


class ThreeConvolutions(flax.linen.Module):
    """Classify images: three times conv3 and pooling by 2, then a dense layer; all with biases.

    Args:
        num_classes: number of outputs.
        channels: of the convolutions.
    """

    num_classes: int = 10
    channels: tuple[int, ...] = (4, 8, 8)

    @flax.linen.compact
    def __call__(self, images: Array) -> Array:
        """Return the outputs [B, num_classes] of images [B, H, W, C] of at least 8 x 8 pixels."""
        for number, channels in enumerate(self.channels, start=1):
            images = flax.linen.Conv(
                channels,
                (3, 3),
                conv_general_dilated=fj.nn.conv_general_dilated,
                name=f"conv{number}",
            )(images)
            images = flax.linen.relu(fj.nn.max_pool(images, 2))
        return flax.linen.Dense(self.num_classes, name="dense")(images.reshape(len(images), -1))


def compute(data: fj.datasets.Dataset, num_examples: int, epochs: int, seed: int) -> Blocks:
    """Train a small network and compute its empirical Fisher information twice.

    Args:
        data: images.
        num_examples: the first so many are trained on and measured.
        epochs: of training.
        seed: of the network and of training.

    Returns:
        Both matrices, on the same parameters.
    """
    inputs = jnp.asarray(data.inputs[:num_examples])
    targets = jnp.asarray(data.targets[:num_examples])
    network = ThreeConvolutions(data.num_classes)
    apply = fj.networks.apply_fn(network, fj.datasets.normalizer(data))
    model = fj.Model(apply, fj.likelihoods.categorical)
    start, key = jax.random.split(jax.random.key(seed))
    federation = fj.clients.federation((inputs, targets), fj.partition.central(len(targets)))
    trained = fj.training.train(
        model,
        fj.networks.init(network, start, inputs),
        federation,
        key=key,
        optimizer=optax.sgd(0.02, 0.9),
        epochs=epochs,
        batch_size=32,
    )
    params = jax.tree.map(lambda leaf: leaf[0], trained.params)
    examples, kind = fj.Examples(inputs, targets), fj.fisher.empirical
    layers = {name: sum(leaf.size for leaf in layer.values()) for name, layer in params.items()}
    return Blocks(
        tuple(layers),
        tuple(layers.values()),
        np.asarray(fj.fisher.full(model, params, examples, kind=kind).matrix, float),
        np.asarray(fj.fisher.kfac(model, params, examples, kind=kind).dense(), float),
        float(fj.metrics.accuracy(model, params, examples)),
    )


def cosine(left: np.ndarray, right: np.ndarray) -> float:
    """Compute the cosine of the angle between two matrices, <L, R> / (|L| |R|).

    Example:
        >>> cosine(np.diag([3.0, 4.0]), np.diag([1.0, 0.0]))
        0.6
    """
    return float(np.vdot(left, right) / (np.linalg.norm(left) * np.linalg.norm(right)))


def similarities(blocks: Blocks) -> dict[str, dict[str, float]]:
    """Compare the blocks of each layer, and all of the matrix, with what approximates it.

    Args:
        blocks: what `compute` returned.

    Returns:
        By layer, and for "all layers", the cosine similarity of the full Fisher with the Kronecker
        one and with its own diagonal.
    """
    ends = np.cumsum(blocks.sizes)
    parts = {
        name: slice(end - size, end)
        for name, size, end in zip(blocks.layers, blocks.sizes, ends, strict=True)
    }
    parts["all layers"] = slice(None)
    found = {}
    for name, part in parts.items():
        full, kronecker = (matrix[part, part] for matrix in (blocks.full, blocks.kronecker))
        found[name] = {
            "Kronecker": cosine(full, kronecker),
            "diagonal": cosine(full, np.diag(np.diag(full))),
        }
    return found
