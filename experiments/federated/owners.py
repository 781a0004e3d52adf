"""Read data with clients of their own: roles of plays, writers, users, domains, packages."""

from typing import Any, NamedTuple

import numpy as np

import fisherjax as fj
from experiments.federated.packages import packages
from experiments.harness import drawings
from experiments.harness.commands import check
from experiments.harness.config import OWNERS, PACKAGES, PLAYS, WRITERS, Federated
from experiments.harness.titles import title
from fisherjax.datasets import ByClient, Dataset

CONTEXT = 128


class Owned(NamedTuple):
    """The data of all clients, and which of them train, validate and are held out."""

    data: Any  # a Dataset of images, or inputs and targets
    rows: list[np.ndarray]
    num_classes: int
    groups: tuple[Any, np.ndarray, np.ndarray]  # the first a ByClient, if it stays on disk
    words: str  # for users, in one line


def read(config: Federated) -> Owned:
    """Read the clients of an experiment, of large data sets only as many as it has."""
    return {PLAYS: _plays, WRITERS: _writers}.get(config.data.dataset, _streamed)(config)


def draw_groups(
    config: Federated, clients: np.ndarray, number: int, personal: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw the clients that train, validate and are held out."""
    personal = config.held_out_clients if personal is None else personal
    wanted = config.validation_clients + personal
    if wanted >= len(clients):
        raise ValueError(
            f"--validation-clients and --held-out-clients are {wanted} together, expected fewer "
            f"than the {len(clients)} of {number} clients there are"
        )
    rest, away = np.arange(len(clients)), np.arange(0)
    if wanted:
        rest, away = fj.partition.hold_out(len(clients), wanted, config.partition_seed)
    validating, held_out = np.split(away, [config.validation_clients])
    return clients[rest], clients[validating], clients[held_out]


def _plays(config: Federated) -> Owned:
    text = fj.datasets.load_text(data_dir=config.data.data_dir)
    windows = fj.text.windows(fj.text.roles(text))
    number, roles = len(windows.roles), np.arange(len(windows.roles))
    if config.held_out_plays:
        plays = [role.play for role in windows.roles]
        names = list(dict.fromkeys(plays))
        _, chosen = fj.partition.hold_out(len(names), config.held_out_plays, config.partition_seed)
        away = np.isin(plays, [names[i] for i in chosen])
        trained, validating, _ = draw_groups(config, roles[~away], number, personal=0)
        groups = trained, validating, roles[away]
        transfer = f", transfer to {' and '.join(names[i] for i in chosen)}"
    else:
        groups, transfer = draw_groups(config, roles, number), ""
    trained, _, held_out = groups
    expected = f"1 to the {len(trained)} roles that train"
    check(config, "cohort", expected, lambda cohort: cohort <= len(trained))
    counts = f"{len(trained)} roles train, {len(held_out)} are held out"
    words = f"tiny Shakespeare, {counts}{transfer}"
    return Owned(windows, windows.partition, windows.num_classes, groups, words)


def _writers(config: Federated) -> Owned:
    """Read Greek and Latin characters of Omniglot; a client is a person who drew them."""
    drawn = drawings.omniglot(fj.datasets.data_folder(config.data.data_dir) / "omniglot")
    images = drawings.resized(drawn.images, (28, 28, 1))
    moments = [(float(of(images) / 255),) for of in (np.mean, np.std)]
    classes = int(drawn.labels.max()) + 1
    data = Dataset(images, drawn.labels, classes, 255.0, *moments, WRITERS)
    people = np.unique(drawn.people)
    rows = [np.flatnonzero(drawn.people == person) for person in people]
    groups = draw_groups(config, np.arange(len(people)), len(people))
    trained, _, held_out = groups
    expected = f"1 to the {len(trained)} people who train"
    check(config, "cohort", expected, lambda cohort: cohort <= len(trained))
    words = f"{title(config.data)}: {len(trained)} people train, {len(held_out)} are held out"
    return Owned(data, rows, classes, groups, words)


def _streamed(config: Federated) -> Owned:
    data, source = config.data, _opened(config)
    number = data.num_clients + config.validation_clients + config.held_out_clients
    if number > source.num_clients:
        raise ValueError(
            f"--num-clients, --validation-clients and --held-out-clients are {number} together, "
            f"but {data.dataset} has {source.num_clients} clients: ask for fewer"
        )
    seed = config.partition_seed
    places = np.sort(np.random.default_rng(seed).choice(source.num_clients, number, replace=False))
    groups = draw_groups(config, np.arange(number), number)
    if data.stream:
        # The others alone are read now, and numbered from 0.
        training, places = _part(source, places[groups[0]]), places[np.concatenate(groups[1:])]
        groups = (np.arange(0), *np.split(np.arange(len(places)), [config.validation_clients]))
    most = data.client_examples or None
    pairs = [source.read(int(k), most, (seed, int(k))) for k in places]
    inputs, targets = (np.concatenate(x) for x in zip(*pairs, strict=True))
    rows = np.split(np.arange(len(targets)), np.cumsum([len(y) for _, y in pairs])[:-1])
    if empty := [
        k for k, own in enumerate(groups) if len(own) and not sum(len(rows[c]) for c in own)
    ]:
        raise ValueError(
            f"of {data.dataset}, the clients that "
            f"{' and that '.join(('train', 'validate', 'are held out')[k] for k in empty)} have no "
            f"example: texts may be shorter than {CONTEXT} tokens; ask for more clients"
        )
    read = "take part, and those that train stay on disk" if data.stream else "are read"
    words = f"{data.dataset}, {number} of {source.num_clients} {OWNERS[data.dataset]}s {read}"
    if data.stream:
        groups = training, *groups[1:]
    if data.dataset == "emnist":
        images = Dataset(inputs, targets, 62, 255.0, (0.0,), (1.0,), data.dataset)
        return Owned(images, rows, 62, groups, words)
    return Owned((inputs, targets), rows, 256, groups, words)


def _part(source: ByClient, places: np.ndarray) -> ByClient:
    """Return clients of a source, numbered from 0."""

    def read(client: int, most: int | None = None, seed: Any = None) -> tuple[Any, np.ndarray]:
        return source.read(int(places[client]), most, seed)

    return ByClient(source.sizes[places], lambda client: source.name(int(places[client])), read)


def _opened(config: Federated) -> ByClient:
    name, folder = config.data.dataset, config.data.data_dir
    if name == "emnist":
        return fj.datasets.emnist(folder)
    if name == PACKAGES:
        return packages(folder, context=CONTEXT)
    if name == "stack_overflow":
        return fj.datasets.stack_overflow(folder, context=CONTEXT)
    return fj.datasets.texts(fj.datasets.data_folder(folder) / name, context=CONTEXT)
