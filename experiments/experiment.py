"""What the units of an experiment share: the split data, the network, the methods."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.config import MODELS, Config
from experiments.methods import Method, check_full, methods
from fisherjax.clients import Federation
from fisherjax.typing import Apply, Array, Key, Params

NUM_VALIDATION = 500


class Experiment(NamedTuple):
    """Everything that the units of an experiment share.

    They hold the same function objects and arrays of equal shapes, so that nothing compiles twice.

    Attributes:
        config: what was asked.
        apply: the network.
        init: `key -> params`.
        optimizer: of every client.
        augment: of training images, or None.
        methods: by the name of the algorithm.
        federations: by partition seed.
        central: all training data at one client.
        label_counts: by partition seed, [M, C].
        test: images and labels.
        local_accuracies: `(stacked params, images, labels) -> [M]`.
        accuracy: `(params, images, labels) -> scalar`.
        ensemble_accuracy: `(stacked params, weights, images, labels) -> scalar`.
    """

    config: Config
    apply: Apply
    init: Callable[[Key], Params]
    optimizer: optax.GradientTransformation
    augment: Callable[[Key, Array], Array] | None
    methods: dict[str, Method]
    federations: dict[int, Federation]
    central: Federation
    label_counts: dict[int, np.ndarray]
    test: tuple[Array, Array]
    local_accuracies: Callable[..., Array]
    accuracy: Callable[..., Array]
    ensemble_accuracy: Callable[..., Array]


def prepare(config: Config) -> Experiment:
    """Read the data, split them and build the network; everything that can be refused is here.

    Args:
        config: a checked configuration.

    Returns:
        The experiment.

    Raises:
        ValueError: if there are more clients than examples, the network does not take these
            images, or a method would need too much memory.
        FileNotFoundError: if the data set is not there.
    """
    train, test = fj.data.load(config.dataset, config.data_dir)
    partitions = {seed: _partition(config, train.targets, seed) for seed in config.partition_seeds}
    model = MODELS[config.model](num_classes=train.num_classes)
    normalize = fj.data.normalizer(train)
    apply = fj.models.apply_fn(model, normalize)
    init = jax.jit(lambda key: fj.models.init(model, key, train.inputs))
    check_full(config, jax.eval_shape(init, jax.random.key(0)))

    data = jnp.asarray(train.inputs), jnp.asarray(train.targets)
    return Experiment(
        config=config,
        apply=apply,
        init=init,
        optimizer=optax.sgd(config.learning_rate, config.momentum or None),
        augment=fj.data.crop_and_flip(normalize) if config.augment else None,
        methods=methods(config, apply),
        federations=_federations(data, partitions),
        central=fj.clients.federation(data, fj.partition.central(len(train.targets))),
        label_counts={
            seed: fj.partition.label_counts(train.targets, rows)
            for seed, rows in partitions.items()
        },
        test=(jnp.asarray(test.inputs), jnp.asarray(test.targets)),
        local_accuracies=jax.jit(partial(fj.metrics.local_accuracies, apply)),
        accuracy=jax.jit(partial(fj.metrics.accuracy, apply)),
        ensemble_accuracy=jax.jit(partial(fj.metrics.ensemble_accuracy, apply)),
    )


def validation(experiment: Experiment, partition_seed: int) -> tuple[Array, Array]:
    """Draw images for the solvers that need some from the training data, with replacement.

    Args:
        experiment: whose data.
        partition_seed: of the split; the draw is the same for all seeds of training.

    Returns:
        Images and labels.
    """
    inputs, targets = experiment.central.inputs, experiment.central.targets
    random = np.random.default_rng((partition_seed, NUM_VALIDATION))
    rows = random.integers(len(targets), size=NUM_VALIDATION)
    return inputs[rows], targets[rows]


def _partition(config: Config, targets: np.ndarray, seed: int) -> list[np.ndarray]:
    if config.partition == "iid":
        return fj.partition.iid(targets, config.num_clients, seed)
    return fj.partition.fedfisher(targets, config.num_clients, config.alpha, seed)


def _federations(
    data: tuple[Array, Array], partitions: dict[int, list[np.ndarray]]
) -> dict[int, Federation]:
    """Make federations of equal shapes: padding costs nothing, another shape a compilation."""
    ready = {seed: fj.clients.federation(data, rows) for seed, rows in partitions.items()}
    longest = max(federation.indices.shape[1] for federation in ready.values())

    def padded(federation: Federation) -> Federation:
        more = longest - federation.indices.shape[1]
        return federation._replace(indices=jnp.pad(federation.indices, ((0, 0), (0, more))))

    return {seed: padded(federation) for seed, federation in ready.items()}
