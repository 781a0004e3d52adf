"""Prepare experiments: networks, clients that train, and test data."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import choices, votes
from experiments.harness.commands import check
from experiments.harness.config import Data, OneShot, Training
from experiments.harness.methods import Images, Method, check_full, methods
from experiments.harness.names import is_vote
from fisherjax.clients import Federation
from fisherjax.datasets import Dataset
from fisherjax.typing import AnyArray, Array, Examples, Key, Likelihood, Model, Params

_NUM_VALIDATION = 500
_SPLIT = ("partition", "alpha", "beta", "min_size", "classes_per_client")
_accuracy_on_device = jax.jit(fj.metrics.accuracy, static_argnums=0, static_argnames="stacked")


class OneRound(NamedTuple):
    """The functions and data that all units of an experiment share, so that they compile once."""

    config: OneShot
    model: Model  # takes stored images; training may crop and mirror them
    normalize: Callable[[Array], Array]  # the first operation of the model on images
    init: Callable[[Key], Params]
    optimizer: optax.GradientTransformation
    methods: dict[str, Method]
    federations: dict[int, Federation]  # by partition seed
    central: Federation  # all training data at one client
    label_counts: dict[int, np.ndarray]  # by partition seed, [M, C]
    validation: Callable[[int], Examples]  # by partition seed, for solvers that choose by it
    test: Examples
    accuracy: Callable[..., Array]  # compiled `fj.metrics.accuracy` of this model
    voting: votes.Voting | None = None  # None without FedOV
    references: bool = True  # whether the clients' own models and their ensemble are measured


def one_round(config: OneShot) -> OneRound:
    """Read the data, split them and build the network; options are refused here."""
    return one_rounds([config])[0]


def one_rounds(configs: Sequence[OneShot]) -> list[OneRound]:
    """Prepare experiments that differ in splits, seeds and folders, and share compiled programs."""
    config = configs[0]
    for other in configs:
        split = {option: getattr(other.data, option) for option in _SPLIT}
        data = dataclasses.replace(config.data, **split)
        units = {"partition_seeds": other.partition_seeds, "seeds": other.seeds, "out": other.out}
        if other != dataclasses.replace(config, data=data, **units):
            raise ValueError(
                f"{other} and {config} differ in more than how data are split: prepare each alone"
            )
    train, test = choices.load(config.data.dataset, config.data.data_dir)
    partitions = [
        {s: partition(own.data, train, own.data.num_clients, s) for s in own.partition_seeds}
        for own in configs
    ]
    task = shared(config, train, test)
    # Federations have equal shapes: padding costs nothing, but another shape is compiled again.
    longest = max(len(rows) for own in partitions for split in own.values() for rows in split)
    return [
        split_up(task._replace(config=own), splits, longest)
        for own, splits in zip(configs, partitions, strict=True)
    ]


def shared(config: OneShot, train: Dataset, test: Dataset) -> OneRound:
    """Build everything that does not depend on the split: network, methods, measurements."""
    names = [name.partition("+")[0] for name in config.merging.algorithms]
    wide = any(fj.algorithms.METHODS[name].gives == "wider model" for name in names)
    model, normalize, init = build_network(config.data, train, config.training, wide)
    params = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    check_full(config.merging.algorithms, params, config.data.num_clients)
    made = images(config.data, train, test)
    return OneRound(
        config=config,
        model=model,
        normalize=normalize,
        init=init,
        optimizer=optimizer(config.training),
        methods=methods(config.merging, model, config.training.batch_size, made),
        federations={},
        central=fj.clients.federation(train, fj.partition.central(len(train.targets))),
        label_counts={},
        validation=partial(draw_validation, Examples(train.inputs, train.targets)),
        test=made.test,
        accuracy=partial(_accuracy, model),
        voting=_voting(config, train, model, normalize, init),
    )


def images(data: Data, train: Dataset, test: Dataset) -> Images:
    """Return what methods need that generate images, or choose by test images."""
    tested = Examples(*jax.device_put((test.inputs, test.targets)))
    normal = standardizer(train) if data.normalize else None
    return Images(train.inputs.shape[1:], data.augment, tested, normal)


def _accuracy(model: Model, params: Params, test: Examples, *, stacked: bool = False) -> AnyArray:
    # One model is a stack of one, which runs the program of the model trained on all the data.
    models = params if stacked else jax.tree.map(lambda x: np.asarray(x)[None], params)
    found = np.asarray(_accuracy_on_device(model, models, test, stacked=True))
    return found if stacked else found[0]


def _voting(
    config: OneShot,
    train: Dataset,
    model: Model,
    normalize: Callable[[Array], Array],
    init: Callable[[Key], Params],
) -> votes.Voting | None:
    """Make the networks of FedOV if it is chosen; they have an additional "unknown" class."""
    asked = tuple(filter(is_vote, config.merging.algorithms))
    if not asked:
        return None
    network = choices.MODELS[config.data.model](num_classes=train.num_classes + 1)
    likelihood = fj.likelihoods.categorical
    # `open_set` refuses models with their own training function, which BatchNorm needs.
    plain, open_init = of_network(network, train.inputs, likelihood, normalize=normalize)
    student = Model(model.apply, likelihood)
    given = asked, plain, open_init, normalize, student, init
    voting = votes.Voting(*given, config.merging.aside, config.merging.options)
    votes.check(voting, config.data.num_clients)
    return voting


def split_up(
    task: OneRound, splits: dict[int, list[np.ndarray]], longest: int | None = None
) -> OneRound:
    """Return a task with its clients by partition seed; indices are padded to `longest`."""
    data = task.central.inputs, task.central.targets

    def federation(rows: list[np.ndarray]) -> Federation:
        ready = fj.clients.federation(data, rows)
        more = max((longest or 0) - ready.indices.shape[1], 0)
        padded = jax.device_put(np.pad(ready.indices, ((0, 0), (0, more))))
        return on_all_devices(ready._replace(indices=padded))

    targets = np.asarray(task.central.targets)
    return task._replace(
        federations={seed: federation(rows) for seed, rows in splits.items()},
        label_counts={s: fj.partition.label_counts(targets, rows) for s, rows in splits.items()},
    )


def on_all_devices(federation: Federation) -> Federation:
    """Return clients that are spread over the devices, if there are several."""
    return fj.clients.shard(federation) if jax.device_count() > 1 else federation


def partition(data: Data, train: Dataset, num_clients: int, seed: int) -> list[np.ndarray]:
    """Partition training data over clients by the options; return the rows of each client."""
    if data.partition == "classes_per_client":
        expected = f"1 to the {train.num_classes} classes of {train.name}"
        check(data, "classes_per_client", expected, lambda owned: owned <= train.num_classes)
    options = {
        "iid": {},
        "dirichlet_of_client": {"alpha": data.alpha},
        "niid_bench": {"beta": data.beta, "min_size": data.min_size},
        "classes_per_client": {"num_classes": data.classes_per_client},
        "pachinko": {
            "num_examples": len(train.targets) // num_clients,
            "coarse": fj.datasets.CIFAR100_COARSE,
            "alpha": data.alpha,
        },
    }[data.partition]
    return getattr(fj.partition, data.partition)(train.targets, num_clients, seed=seed, **options)


@fj._core.caching.cached
def optimizer(training: Training) -> optax.GradientTransformation:
    """Return the clients' optimiser; equal options give the same object, compiled once."""
    descent = optax.sgd(training.learning_rate, training.momentum or None)
    if training.weight_decay == 0:
        return descent
    return optax.chain(optax.add_decayed_weights(training.weight_decay), descent)


def draw_validation(
    data: Examples, partition_seed: int, rows: np.ndarray | None = None
) -> Examples:
    """Draw from some rows of training images, or from all; all seeds of training get the same."""
    rows = np.arange(len(data.targets)) if rows is None else rows
    random = np.random.default_rng((partition_seed, _NUM_VALIDATION))
    drawn = rows[random.integers(len(rows), size=_NUM_VALIDATION)]
    return Examples(data.inputs[drawn], data.targets[drawn])


def likelihood_of(training: Training) -> Likelihood:
    """Return the likelihood that clients fit, of labels or of smoothed labels."""
    smooth = training.label_smoothing
    return fj.likelihoods.smoothed(smooth) if smooth else fj.likelihoods.categorical


def build_network(
    data: Data, train: Dataset, training: Training, any_width: bool = False
) -> tuple[Model, Callable[[Array], Array], Callable[[Key], Params]]:
    """Return the model of stored images, its normalisation, and its initialiser."""
    network = choices.MODELS[data.model](num_classes=train.num_classes)
    # Without --normalize, pixels are only scaled.
    channels = len(train.mean)
    raw = train._replace(mean=(0.0,) * channels, std=(1.0,) * channels)
    normalize = fj.datasets.normalizer(train if data.normalize else raw)
    augment = None
    if data.augment:
        augment = fj.datasets.crop_and_flip(normalize, mode=data.augment_border)
    how = {"normalize": normalize, "augment": augment, "any_width": any_width}
    model, init = of_network(network, train.inputs, likelihood_of(training), **how)
    return model, normalize, init


def of_network(
    network: Any, inputs: AnyArray, likelihood: Likelihood, **how: Any
) -> tuple[Model, Callable[[Key], Params]]:
    """Return the model of a flax network, see `fj.networks.model`, and its initialiser."""
    init = jax.jit(lambda key: fj.networks.init(network, key, inputs))
    shapes = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    return fj.networks.model(network, shapes, likelihood, **how), init


def standardizer(data: Dataset) -> Callable[[Array], Array]:
    """Return the normalisation of pixels between 0 and 1, as stored images are normalised."""
    return partial(_standardized, mean=tuple(data.mean), deviation=tuple(data.std))


def _standardized(images: Array, mean: Sequence[float], deviation: Sequence[float]) -> Array:
    """Normalise generated pixels between 0 and 1 as stored images are normalised."""
    return (images - np.float32(mean)) / np.float32(deviation)
