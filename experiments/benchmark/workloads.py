"""Make the workloads: networks, images and clients."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.benchmark.config import EXAMPLES, Config
from fisherjax.training import Trained
from fisherjax.typing import Array, Model, Params

OPTIMIZER = optax.sgd(0.01, momentum=0.9)
# Networks, the data sets they learn, and the shapes of their images.
NETWORKS = {
    "lenet": (fj.networks.LeNet(), "mnist", (28, 28, 1)),
    "cnn": (fj.networks.CNN(), "cifar10", (32, 32, 3)),
}


class Workload(NamedTuple):
    """A network and its data."""

    name: str
    model: Model
    params: Params
    images: np.ndarray  # [N, H, W, C] uint8, on the host
    labels: np.ndarray


def workloads(config: Config, note: Callable[[str], None]) -> Iterator[Workload]:
    """Yield the workload of each chosen network, and note the source of its images."""
    for name in config.models:
        yield workload(config, name, config.num_examples or EXAMPLES[name][config.suite], note)


def workload(
    config: Config, name: str, num_examples: int, note: Callable[[str], None] = lambda _: None
) -> Workload:
    """Return the workload of a network; too few images are drawn with replacement."""
    network, dataset, shape = NETWORKS[name]
    train = None
    if config.data == "auto":
        with contextlib.suppress(FileNotFoundError):
            train, _ = fj.datasets.load(dataset, config.data_dir)
    if train is None:
        images, labels, source = *synthetic(shape, 10_000), "synthetic"
    else:
        images, labels, source = train.inputs, train.targets, train.name
    note(f"{name}: {source} images")
    with_replacement = num_examples > len(labels)
    rows = np.random.default_rng(0).choice(len(labels), num_examples, replace=with_replacement)
    images, labels = images[rows], labels[rows]
    params = jax.jit(lambda key: fj.networks.init(network, key, images))(jax.random.key(0))
    return Workload(name, classifier(network), params, images, labels)


def synthetic(shape: tuple[int, ...], num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Make images [N, ...] uint8 and labels [N] of ten classes, each a pattern under noise."""
    random = np.random.default_rng(1)
    patterns = random.integers(0, 128, (10, *shape), np.uint8)
    labels = random.integers(0, 10, num_examples, np.int32)
    return patterns[labels] + random.integers(0, 128, (num_examples, *shape), np.uint8), labels


def normalize(x: Any) -> Any:
    """Scale bytes of a NumPy or JAX array to [-1, 1]."""
    return x.astype("float32") / 127.5 - 1


def classifier(network: Any) -> Model:
    """Make the model of a flax network whose inputs are bytes."""
    return Model(fj.networks.apply_fn(network, normalize), fj.likelihoods.categorical)


def native_convolutions(model: Model) -> Model:
    """Replace patches by JAX's own convolutions."""

    def convolve(_: Array, images: Array, kernel: Array, **settings: Any) -> Array:
        return jax.lax.conv_general_dilated(images, kernel, **settings)

    def native(params: Params, images: Array) -> Array:
        with fj.nn.observe_convolutions(convolve):
            return model.apply(params, images)

    return model._replace(apply=native)


def in_bfloat16(model: Model) -> Model:
    """Return a model that computes in bfloat16, with float32 params and outputs."""
    cast = optax.tree_utils.tree_cast
    return model._replace(
        apply=lambda w, x: cast(model.apply(cast(w, jnp.bfloat16), x), jnp.float32)
    )


def gradient(model: Model) -> Callable[[Params, Array, Array], Params]:
    """Return `(params, images [B, ...], labels [B]) -> gradient` of the mean loss."""

    def loss(params: Params, images: Array, labels: Array) -> Array:
        return model.likelihood.negative_log_likelihood(model.apply(params, images), labels).mean()

    return jax.grad(loss)


def split(work: Workload, num_clients: int) -> list[np.ndarray]:
    """Partition the examples over clients of Dirichlet(0.1) sizes."""
    return fj.partition.dirichlet_of_client(work.labels, num_clients, alpha=0.1, seed=3)


def federate(work: Workload, num_clients: int) -> fj.clients.Federation:
    """Return the federation of clients of Dirichlet(0.1) sizes."""
    return fj.clients.federation((work.images, work.labels), split(work, num_clients))


def train(work: Workload, config: Config, federation: fj.clients.Federation, **how: Any) -> Trained:
    """Train the clients, by default with key 1; `how` are options of `fj.training.train`."""
    how = {"key": jax.random.key(1), "optimizer": OPTIMIZER, **how}
    how |= {"epochs": config.epochs, "batch_size": config.batch_size}
    return fj.training.train(work.model, work.params, federation, **how)
