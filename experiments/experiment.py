"""What the units of an experiment share: the split data, the network, the methods."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.choices import MODELS
from experiments.config import Config
from experiments.methods import Method, check_full, methods
from fisherjax.clients import Federation
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params

NUM_VALIDATION = 500
_SPLIT = (
    *("partition", "alpha", "beta", "min_size", "classes_per_client"),
    *("partition_seeds", "seeds", "out"),
)


class Experiment(NamedTuple):
    """Everything that the units of an experiment share.

    They hold the same function objects and arrays of equal shapes, so that nothing compiles twice.

    Attributes:
        config: what was asked.
        model: the network, on stored images; training may crop and mirror them.
        normalize: what it does to them first.
        init: `key -> params`.
        optimizer: of every client.
        methods: by the name of the algorithm.
        federations: by partition seed.
        central: all training data at one client.
        label_counts: by partition seed, [M, C].
        test: images and labels that nobody trains on.
        local_accuracies: `(stacked params, examples) -> [M]`.
        accuracy: `(params, examples) -> scalar`.
        ensemble_accuracy: `(stacked params, weights, examples) -> scalar`.
    """

    config: Config
    model: Model
    normalize: Callable[[Array], Array]
    init: Callable[[Key], Params]
    optimizer: optax.GradientTransformation
    methods: dict[str, Method]
    federations: dict[int, Federation]
    central: Federation
    label_counts: dict[int, np.ndarray]
    test: Examples
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
        ValueError: if the data cannot be split so, the network does not take these images, or a
            method would need too much memory.
        FileNotFoundError: if the data set is not there.
    """
    return prepare_splits([config])[0]


def prepare_splits(configs: Sequence[Config]) -> list[Experiment]:
    """Prepare experiments that differ in how the data are split, and in seeds and folders.

    They share all that is compiled.

    Args:
        configs: checked configurations.

    Returns:
        An experiment for each.

    Raises:
        ValueError: if they differ in more, or as `prepare`.
        FileNotFoundError: as `prepare`.
    """
    config = configs[0]
    for other in configs:
        if _without_split(other) != _without_split(config):
            raise ValueError(
                f"{other} and {config} differ in more than {', '.join(_SPLIT)}: prepare each alone"
            )
    train, test = fj.datasets.load(config.dataset, config.data_dir)
    partitions = [
        {seed: _partition(own, train, seed) for seed in own.partition_seeds} for own in configs
    ]
    network = MODELS[config.model](num_classes=train.num_classes)
    normalize = fj.datasets.normalizer(train if config.normalize else _raw(train))
    model = _model(config, fj.networks.apply_fn(network, normalize), normalize)
    init = jax.jit(lambda key: fj.networks.init(network, key, train.inputs))
    check_full(config, jax.eval_shape(init, jax.random.key(0)))

    data = jnp.asarray(train.inputs), jnp.asarray(train.targets)
    federations = _federations(data, partitions)
    first = Experiment(
        config=config,
        model=model,
        normalize=normalize,
        init=init,
        optimizer=_optimizer(config),
        methods=methods(config, model),
        federations=federations[0],
        central=fj.clients.federation(data, fj.partition.central(len(train.targets))),
        label_counts={},
        test=Examples(jnp.asarray(test.inputs), jnp.asarray(test.targets)),
        local_accuracies=jax.jit(partial(fj.metrics.accuracy, model, stacked=True)),
        accuracy=jax.jit(partial(fj.metrics.accuracy, model)),
        ensemble_accuracy=jax.jit(partial(fj.metrics.ensemble_accuracy, model)),
    )
    return [
        first._replace(
            config=own,
            federations=ready,
            label_counts={
                seed: fj.partition.label_counts(train.targets, rows) for seed, rows in split.items()
            },
        )
        for own, ready, split in zip(configs, federations, partitions, strict=True)
    ]


def validation(experiment: Experiment, partition_seed: int) -> Examples:
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
    return Examples(inputs[rows], targets[rows])


def _without_split(config: Config) -> Config:
    return dataclasses.replace(config, **{field: getattr(Config, field) for field in _SPLIT})


def _partition(config: Config, train: fj.datasets.Dataset, seed: int) -> list[np.ndarray]:
    targets, num_clients = train.targets, config.num_clients
    if config.partition == "iid":
        return fj.partition.iid(targets, num_clients, seed)
    if config.partition == "niid_bench":
        return fj.partition.niid_bench(
            targets, num_clients, config.beta, seed, min_size=config.min_size
        )
    if config.partition == "classes_per_client":
        if config.classes_per_client > train.num_classes:
            raise ValueError(
                f"--classes-per-client is {config.classes_per_client}, expected 1 to the "
                f"{train.num_classes} classes of {train.name}"
            )
        return fj.partition.classes_per_client(
            targets, num_clients, config.classes_per_client, seed
        )
    return fj.partition.fedfisher(targets, num_clients, config.alpha, seed)


def _raw(dataset: fj.datasets.Dataset) -> fj.datasets.Dataset:
    """Leave pixels as they are, but for their scale."""
    channels = len(dataset.mean)
    return dataset._replace(mean=(0.0,) * channels, std=(1.0,) * channels)


def _optimizer(config: Config) -> optax.GradientTransformation:
    descent = optax.sgd(config.learning_rate, config.momentum or None)
    if config.weight_decay == 0:
        return descent
    return optax.chain(optax.add_decayed_weights(config.weight_decay), descent)


def _model(config: Config, apply: Apply, normalize: Callable[[Array], Array]) -> Model:
    model = Model(apply, fj.likelihoods.categorical)
    if not config.augment:
        return model
    augment = fj.datasets.crop_and_flip(normalize, mode=config.augment_border)
    return model._replace(apply_train=fj.networks.augmented(apply, augment))


def _federations(
    data: tuple[Array, Array], partitions: Sequence[dict[int, list[np.ndarray]]]
) -> list[dict[int, Federation]]:
    """Make federations of equal shapes: padding costs nothing, another shape a compilation."""
    ready = [
        {seed: fj.clients.federation(data, rows) for seed, rows in split.items()}
        for split in partitions
    ]
    longest = max(own.indices.shape[1] for split in ready for own in split.values())

    def padded(federation: Federation) -> Federation:
        more = longest - federation.indices.shape[1]
        return federation._replace(indices=jnp.pad(federation.indices, ((0, 0), (0, more))))

    return [{seed: padded(own) for seed, own in split.items()} for split in ready]
