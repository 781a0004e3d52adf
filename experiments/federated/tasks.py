"""Prepare experiments in rounds: the network, and clients that train, validate and are held out."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fisherjax as fj
from experiments.federated import owners, slanted
from experiments.harness import choices, tasks
from experiments.harness.config import OWNERS, SLANTED, Federated
from experiments.harness.methods import Images
from experiments.harness.titles import title
from fisherjax.clients import Federation
from fisherjax.datasets import ByClient, Dataset
from fisherjax.typing import Key, Model, Params


class Rounds(NamedTuple):
    """The model of experiments in rounds, and clients that train, validate and are held out."""

    config: Federated
    model: Model
    init: Callable[[Key], Params]
    optimizer: optax.GradientTransformation
    train: Any  # a Federation, or a ByClient whose clients stay on disk
    validation: Any  # a Federation, or None without such clients
    held_out: Any
    test: Federation  # the test data of all, as one client
    positions: int  # number of targets of an example, above one for sequences
    description: str  # of the data, in one line
    images: Images | None  # what DENSE needs; None if clients' data are not of one data set


def rounds(config: Federated) -> Rounds:
    """Read the data and split them over clients that train, validate and are held out."""
    read = _owned if config.data.dataset in OWNERS else _images
    model, init, everybody, groups, test, *words = read(config)
    # Each group is numbered from 0, so that random draws do not depend on the original numbers.
    federations = [_numbered(everybody, group) for group in groups]
    positions = math.prod(test.targets.shape[1:])
    return Rounds(
        config, model, init, tasks.optimizer(config.training), *federations, test, positions, *words
    )


def _numbered(everybody: Federation, group: Any) -> Any:
    if isinstance(group, ByClient):
        return group
    if not len(group):
        return None
    return tasks.on_all_devices(fj.clients.select(everybody, group)._replace(ids=None))


def _images(config: Federated) -> tuple[Any, ...]:
    data = config.data
    slants = data.dataset == SLANTED
    train, test = choices.load("mnist" if slants else data.dataset, data.data_dir)
    number = data.num_clients + config.validation_clients + config.held_out_clients
    rows = tasks.partition(data, train, number, config.partition_seed)
    if slants:
        hands = slanted.draw(jax.random.key(config.partition_seed), number)
        train = train._replace(inputs=slanted.written(train.inputs, rows, hands))
        # A test image is in the hand of some client.
        shares = fj.partition.iid(test.targets, number, seed=config.partition_seed)
        test = test._replace(inputs=slanted.written(test.inputs, shares, hands))
    everybody = fj.clients.federation(train, rows)
    model, _, init = tasks.build_network(data, train, config.training)
    tested = fj.clients.federation(test, fj.partition.central(len(test.targets)))
    groups = owners.draw_groups(config, np.arange(number), number)
    images = tasks.images(data, train, test)
    return model, init, everybody, groups, tested, title(data), images


def _owned(config: Federated) -> tuple[Any, ...]:
    """Read clients that are those of the data; the test data are those of held-out clients."""
    own = owners.read(config)
    if isinstance(own.data, Dataset):
        model, _, init = tasks.build_network(config.data, own.data, config.training)
    else:
        network = choices.MODELS[config.data.model](num_classes=own.num_classes)
        likelihood = tasks.likelihood_of(config.training)
        model, init = tasks.of_network(network, own.data[0], likelihood)
    test = [np.concatenate([own.rows[client] for client in own.groups[2]])]
    everybody, tested = (fj.clients.federation(own.data[:2], x) for x in (own.rows, test))
    return model, init, everybody, own.groups, tested, own.words, None
