"""What is learned: the network, the clients that train, and those that judge."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

import fisherjax as fj
from experiments.federated.config import Config
from fisherjax.clients import Federation
from fisherjax.typing import Key, Model, Params

_MODELS = {
    "digits": fj.networks.MLP,
    "mnist": fj.networks.LeNet,
    "cifar10": fj.networks.SimpleCNN,
}


class Task(NamedTuple):
    """A data set, split.

    Attributes:
        model: the network, on stored inputs.
        init: `key -> params`.
        train: the clients that train.
        validation: clients that choose options.
        held_out: clients that the model is personalised on.
        test: everybody's test data, as one client.
        positions: targets of an example, more than one for sequences.
        told: what the data are, in a sentence.
    """

    model: Model
    init: Callable[[Key], Params]
    train: Federation
    validation: Federation
    held_out: Federation
    test: Federation
    positions: int
    told: str


def prepare(config: Config) -> Task:
    """Read the data and split them.

    Args:
        config: a checked configuration.

    Returns:
        The task.

    Raises:
        ValueError: if the data do not have so many clients.
        FileNotFoundError: if the data set is not there.
    """
    return _plays(config) if config.dataset == "tiny_shakespeare" else _images(config)


def _images(config: Config) -> Task:
    train, test = fj.datasets.load(config.dataset, config.data_dir)
    number = config.num_clients + config.validation_clients + config.held_out_clients
    rows = fj.partition.fedfisher(train.targets, number, config.alpha, config.partition_seed)
    everybody = fj.clients.federation(train, rows)
    network = _MODELS[config.dataset](num_classes=train.num_classes)
    apply = fj.networks.apply_fn(network, fj.datasets.normalizer(train))
    return Task(
        model=Model(apply, fj.likelihoods.categorical),
        init=jax.jit(lambda key: fj.networks.init(network, key, train.inputs)),
        **_groups(everybody, _apart(config, np.arange(number), number)),
        test=fj.clients.federation(test, fj.partition.central(len(test.targets))),
        positions=1,
        told=f"{config.dataset}, {config.num_clients} clients, alpha {config.alpha:g}",
    )


def _plays(config: Config) -> Task:
    windows = fj.text.windows(fj.text.roles(fj.datasets.load_text(data_dir=config.data_dir)))
    everybody = fj.clients.federation(windows, windows.partition)
    number, roles = everybody.num_clients, np.arange(everybody.num_clients)
    transfer = ""
    if config.held_out_plays:
        plays = [role.play for role in windows.roles]
        names = list(dict.fromkeys(plays))
        _, chosen = fj.partition.hold_out(len(names), config.held_out_plays, config.partition_seed)
        away = np.isin(plays, [names[i] for i in chosen])
        trained, validation = _apart(config, roles[~away], number, personal=0)[:2]
        groups = trained, validation, roles[away]
        transfer = f", transfer to {' and '.join(names[i] for i in chosen)}"
    else:
        groups = _apart(config, roles, number)
    network = fj.networks.Transformer(num_classes=windows.num_classes)
    held_out = groups[2]
    test = [np.concatenate([windows.partition[client] for client in held_out])]
    parts = _groups(everybody, groups)
    if config.cohort > parts["train"].num_clients:
        raise ValueError(
            f"--cohort is {config.cohort}, expected 1 to the {parts['train'].num_clients} roles "
            "that train"
        )
    counts = f"{len(groups[0])} roles train, {len(held_out)} are held out"
    return Task(
        model=Model(fj.networks.apply_fn(network), fj.likelihoods.categorical),
        init=jax.jit(lambda key: fj.networks.init(network, key, windows.inputs)),
        **parts,
        test=fj.clients.federation(windows, test),
        positions=windows.inputs.shape[1],
        told=f"tiny Shakespeare, {counts}{transfer}",
    )


def _apart(
    config: Config, clients: np.ndarray, number: int, personal: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw who trains, who validates and who is held out."""
    personal = config.held_out_clients if personal is None else personal
    wanted = config.validation_clients + personal
    if wanted >= len(clients):
        raise ValueError(
            f"--validation-clients and --held-out-clients are {wanted} together, expected fewer "
            f"than the {len(clients)} of {number} clients there are"
        )
    rest, away = fj.partition.hold_out(len(clients), wanted, config.partition_seed)
    return (
        clients[rest],
        clients[away[: config.validation_clients]],
        clients[away[config.validation_clients :]],
    )


def _groups(
    everybody: Federation, groups: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> dict[str, Federation]:
    names = ("train", "validation", "held_out")
    # Each group is numbered from 0: what its clients draw does not depend on who they were.
    parts = (fj.clients.select(everybody, group)._replace(ids=None) for group in groups)
    return dict(zip(names, parts, strict=True))
