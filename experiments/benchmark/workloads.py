"""What is measured: networks, images and clients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.benchmark.config import Config
from fisherjax.typing import Apply, Array, Params

CATEGORICAL = fj.likelihoods.categorical
OPTIMIZER = optax.sgd(0.01, momentum=0.9)
SHAPES = {"lenet": (28, 28, 1), "cnn": (32, 32, 3)}
_MODELS = {"lenet": fj.networks.LeNet(), "cnn": fj.networks.CNN()}
_DATASETS = {"lenet": "mnist", "cnn": "cifar10"}


class Workload(NamedTuple):
    """A network and what it learns.

    Attributes:
        name: of the network.
        apply: `(params, images [B, ...]) -> logits`.
        params: the start.
        images: [N, H, W, C] uint8, on the host.
        labels: [N].
        source: where the images are from.
    """

    name: str
    apply: Apply
    params: Params
    images: np.ndarray
    labels: np.ndarray
    source: str

    @property
    def model(self) -> fj.Model:
        """The network, which classifies."""
        return fj.Model(self.apply, CATEGORICAL)


def normalize(x: Any) -> Any:
    """Scale bytes to [-1, 1]; NumPy's and JAX's arrays alike."""
    return x.astype("float32") / 127.5 - 1


def workload(config: Config, name: str, num_examples: int) -> Workload:
    """Prepare a network and its images.

    Args:
        config: says where images may be from.
        name: of the network.
        num_examples: N; drawn with replacement where the data set has fewer.

    Returns:
        The workload; with real images where a data set is prepared.
    """
    images, labels, source = _images(config, name)
    rows = np.random.default_rng(0).choice(
        len(labels), num_examples, replace=num_examples > len(labels)
    )
    images, labels = images[rows], labels[rows]
    model = _MODELS[name]
    params = jax.jit(lambda key: fj.networks.init(model, key, images))(jax.random.key(0))
    return Workload(name, fj.networks.apply_fn(model, normalize), params, images, labels, source)


def _images(config: Config, name: str) -> tuple[np.ndarray, np.ndarray, str]:
    if config.data == "auto":
        try:
            train, _ = fj.datasets.load(_DATASETS[name], config.data_dir)
            return train.inputs, train.targets, train.name
        except FileNotFoundError:
            pass
    return *synthetic(SHAPES[name], 10_000), "synthetic"


def synthetic(shape: tuple[int, ...], num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Make images of ten classes, each a pattern under noise.

    Args:
        shape: of an image.
        num_examples: N.

    Returns:
        Images [N, ...] uint8 and labels [N].
    """
    random = np.random.default_rng(1)
    patterns = random.integers(0, 128, (10, *shape), np.uint8)
    labels = random.integers(0, 10, num_examples, np.int32)
    return patterns[labels] + random.integers(0, 128, (num_examples, *shape), np.uint8), labels


def split(work: Workload, num_clients: int) -> list[np.ndarray]:
    """Share the examples among clients of Dirichlet(0.1) sizes."""
    return fj.partition.fedfisher(work.labels, num_clients, alpha=0.1, seed=3)


def federate(work: Workload, num_clients: int) -> fj.clients.Federation:
    """Give the examples to clients of Dirichlet(0.1) sizes."""
    return fj.clients.federation((work.images, work.labels), split(work, num_clients))


def train(
    work: Workload,
    federation: fj.clients.Federation,
    *,
    epochs: int,
    batch_size: int,
    clients_per_chunk: int | None = None,
) -> fj.training.Trained:
    """Train the clients, always with the same key and optimiser."""
    return fj.training.train(
        work.model,
        work.params,
        federation,
        key=jax.random.key(1),
        optimizer=OPTIMIZER,
        epochs=epochs,
        batch_size=batch_size,
        clients_per_chunk=clients_per_chunk,
    )


def local_steps(federation: fj.clients.Federation, batch_size: int) -> np.ndarray:
    """Return how many minibatches an epoch is for each client, [M]."""
    sizes = np.asarray(federation.sizes)
    return -(-sizes // min(batch_size, sizes.max()))


def native_convolutions(params: Params, images: Array) -> Array:
    """Apply LeNet or the CNN with JAX's own convolution in place of patches."""
    hidden = normalize(images)
    for name in sorted(name for name in params if name.startswith("conv")):
        hidden = jax.lax.conv_general_dilated(
            hidden,
            params[name]["kernel"],
            (1, 1),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        hidden = jax.nn.relu(fj.nn.max_pool(hidden, 2))
    hidden = hidden.reshape(hidden.shape[0], -1)
    *names, last = sorted(name for name in params if name.startswith("dense"))
    for name in names:
        hidden = jax.nn.relu(hidden @ params[name]["kernel"])
    return hidden @ params[last]["kernel"]


def in_bfloat16(apply: Apply) -> Apply:
    """Compute in bfloat16 from float32 params, to float32 outputs."""

    def narrow(params: Params, images: Array) -> Array:
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return apply(params, images).astype(jnp.float32)

    return narrow


def gradient(apply: Apply) -> Callable[[Params, Array, Array], Params]:
    """Return `(params, images [B, ...], labels [B]) -> gradient` of the mean loss."""

    def loss(params: Params, images: Array, labels: Array) -> Array:
        return CATEGORICAL.negative_log_likelihood(apply(params, images), labels).mean()

    return jax.grad(loss)
