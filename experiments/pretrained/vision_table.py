"""Fine-tune networks for images on clients of few classes, and merge the clients in one round.

The protocol is that of FedFisher's Table 3 with other networks: five clients whose shares of the
classes are drawn from Dirichlet(0.1) start from a network that was trained on other images, and
beside it from the same network without training. Where the classes are others, the last layer is
new. Beside the methods stand the start, the clients' own models and their ensemble.

Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, Table 3.
"""

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import jax
import numpy as np
import optax
from rich.console import Console

import fisherjax as fj
from experiments.harness import (
    commands,
    decoded,
    drawings,
    folders,
    records,
    studies,
)
from experiments.pretrained import models, paired, vision_rows, weights
from experiments.pretrained.networks import NETWORKS
from experiments.pretrained.vision_rows import REFERENCES, Measurement, Unit
from fisherjax.clients import Federation
from fisherjax.training import Trained
from fisherjax.typing import Examples, Model, Params


class Case(NamedTuple):
    """A network, and the images on which it is fine-tuned.

    `same` says whether its classes are those of the images, so that the last layer stays.
    """

    network: str
    dataset: str
    classes: int
    same: bool = False


CASES = {
    "svhn-mnist": Case("svhn", "mnist", 10, same=True),
    "resnet20-mnist": Case("resnet20", "mnist", 10),
    "resnet20-omniglot": Case("resnet20", "omniglot", 50),
    "efficientnet_lite0-mnist": Case("efficientnet_lite0", "mnist", 10),
    "efficientnet_lite0-omniglot": Case("efficientnet_lite0", "omniglot", 50),
}
Start = Literal["pretrained", "scratch"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Networks, clients that fine-tune them, and methods that merge."""

    cases: Annotated[tuple[str, ...], commands.names(CASES)] = tuple(CASES)
    """Networks, and the images on which they are fine-tuned."""
    starts: tuple[Start, ...] = ("pretrained", "scratch")
    """What the clients start from: the weights, or the same network without training."""
    algorithms: Annotated[tuple[str, ...], commands.names(fj.algorithms.merges())] = (
        *("fedavg", "fedfisher_diag", "fedfisher_kfac"),
    )
    """Methods that merge."""
    running_statistics: bool = False
    """Whether clients compute running statistics again after each merge, before its exchanges."""
    exchanges: int = 0
    """Exchanges after each merge: a head, then natural gradients. Rows have the last one's name."""
    num_clients: int = 5
    """Number of clients over which the training images are split."""
    alpha: float = 0.1
    """Parameter of the Dirichlet shares of each client: at 0.05 it has one or two classes."""
    most_images: int = 10_000
    """Largest number of training images of all clients together."""
    tested: int = 2_000
    """Largest number of test images."""
    epochs: int = 2
    """Passes of every client over its own images."""
    learning_rate: float = 0.01
    """Step size of SGD."""
    momentum: float = 0.9
    """Momentum of SGD."""
    batch_size: int = 32
    """Examples of a minibatch."""
    fisher_kind: Literal["true", "sampled", "empirical"] = "sampled"
    """Labels of the Fisher information: exact, sampled, or the data's."""
    max_examples: int = 500
    """Largest number of a client's images in its Fisher information or Gram matrices."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the images, the split, new layers and training."""
    folder: commands.FolderOrNone = None
    """Folder of the weights; None takes FISHERJAX_WEIGHTS, else a folder in the user's cache."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; None takes the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/vision")
    """Folder for the results; an unfinished run there continues."""


class Clients(NamedTuple):
    """The clients of a case, start and seed, trained in so many seconds."""

    model: Model
    start: Params
    federation: Federation
    test: Examples
    trained: Trained
    seconds: float


def units(asked: Config) -> dict[Unit, int]:
    """Return the units, each computed and written as a whole, and their numbers of measurements."""
    after = ["", *(f"+{last}" for last in _exchanges(asked))]
    merged = [name + last for name in asked.algorithms for last in after]
    return {
        (case, start, seed, name): 1
        for seed in asked.seeds
        for case in asked.cases
        for start in asked.starts
        for name in (*REFERENCES, *merged)
    }


def _exchanges(asked: Config) -> dict[str, tuple[str, ...]]:
    """Return the exchanges that follow every merge, by the name of the last one."""
    first = ("running_statistics",) * asked.running_statistics
    steps = ("analytic_head", *("natural_gradient",) * (asked.exchanges - 1))
    plans = [first, (*first, *steps)] if asked.exchanges else [first]
    return {plan[-1]: plan for plan in plans if plan}


def run(asked: Config, program: str, console: Console) -> None:
    """Measure what is missing in the folder of the results, and report all of it."""
    with records.folder(asked.out):
        asked, found = folders.resume(asked, Config(), Measurement._fields, Measurement)
        one = partial(measured, asked, console)
        found = studies.completed(asked, program, found, units(asked), one, console)
        heading = "Fine-tuned networks for images, merged in one round: accuracy %"
        how = {"words": paired.words("seeds and cases"), "heading": heading}
        studies.report(asked, program, vision_rows.summary(asked.starts, found), {}, console, **how)


def measured(
    asked: Config, console: Console, missing: Sequence[Unit]
) -> Iterator[list[Measurement]]:
    """Merge the clients of a case by a method, and test the merged network."""
    # Units of the same clients follow one another, and those of one merge.
    clients_of = lru_cache(1)(partial(_clients, asked))
    merged_of = lru_cache(1)(lambda *unit: _merged(asked, clients_of(*unit[:-1]), unit[-1]))
    for unit in studies.each(console, missing, "{0[0]}, {0[1]}, seed {0[2]}, {0[3]}".format):
        *which, name = unit
        of = clients_of(*which)
        if name in REFERENCES:
            accuracy, size, seconds = _reference(of, name)
        else:
            first, _, last = name.partition("+")
            params, size, seconds = merged_of(*which, first)
            if last:
                steps = _exchanges(asked)[last]
                params, size, seconds = _exchanged(asked, of, steps, params, size, seconds)
            accuracy = _accuracy(of, params)
        found = Measurement(*unit, round(accuracy, 6), size, round(seconds, 3))
        console.print(f"{', '.join(map(str, unit))}: {100 * found.accuracy:.1f}")
        yield [found]


def data(asked: Config, case: str, seed: int) -> tuple[Examples, Examples]:
    """Return the training and the test images of a case, as large as its network takes them."""
    network, random = NETWORKS[CASES[case].network], np.random.default_rng(seed)
    if CASES[case].dataset == "mnist":
        parts = [(part.inputs, part.targets) for part in decoded.load("mnist", asked.data_dir)]
    else:
        folder = Path(asked.data_dir or os.environ.get("TFDS_DATA_DIR", ".")) / "omniglot"
        drawn = drawings.omniglot(folder)
        # Five of twenty people of each alphabet draw the test images.
        held = np.isin(drawn.people, random.permutation(20)[:5] + 1)
        parts = [(drawn.images[rows], drawn.labels[rows]) for rows in (~held, held)]
    found = []
    for (pixels, labels), most in zip(parts, (asked.most_images, asked.tested), strict=True):
        rows = random.permutation(len(labels))[:most]
        found.append(Examples(drawings.resized(pixels[rows], network.shape), labels[rows]))
    return found[0], found[1]


def _start(asked: Config, case: str, start: str, seed: int) -> Params:
    """Return what all clients start from; the last layer is new where the classes are others."""
    of, key = CASES[case], jax.random.key(seed)
    network = NETWORKS[of.network]
    if start == "scratch":
        return models.init(network, key, of.classes)
    params = models.load(network, weights.path(network.file, asked.folder))
    return params if of.same else models.with_new_head(network, params, key, of.classes)


def _clients(asked: Config, case: str, start: str, seed: int) -> Clients:
    train, test = data(asked, case, seed)
    first = _start(asked, case, start, seed)
    model = models.model(NETWORKS[CASES[case].network], first)
    split = fj.partition.dirichlet_of_client(train.targets, asked.num_clients, asked.alpha, seed)
    federation = fj.clients.federation((train.inputs, train.targets), split)
    how = {"epochs": asked.epochs, "batch_size": asked.batch_size}
    how |= {"optimizer": _sgd(asked.learning_rate, asked.momentum), "key": jax.random.key(seed)}
    begun = time.perf_counter()
    trained = jax.block_until_ready(fj.training.train(model, first, federation, **how))
    return Clients(model, first, federation, test, trained, time.perf_counter() - begun)


@cache
def _sgd(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    # The same object for all clients, so that nothing compiles again.
    return optax.sgd(learning_rate, momentum)


def _reference(of: Clients, name: str) -> tuple[float, int, float]:
    """Return the accuracy of a reference, the mean of the clients' for their own models."""
    if name == "start":
        return _accuracy(of, of.start), 0, 0.0
    if name == "own":
        how = {"stacked": True, "batch_size": 250}
        found = fj.metrics.accuracy(of.model, of.trained.models, of.test, **how)
        return float(found.mean()), 0, of.seconds
    how = of.trained.models, of.federation.weights, of.test
    return float(fj.metrics.ensemble_accuracy(of.model, *how, batch_size=250)), 0, of.seconds


def _merged(asked: Config, of: Clients, name: str) -> tuple[Params, int, float]:
    known = fj.algorithms.options(name)
    chosen = {"max_examples": asked.max_examples, "kind": getattr(fj.fisher, asked.fisher_kind)}
    chosen = {option: value for option, value in chosen.items() if option in known}
    method, key = fj.algorithms.make(name, of.model, **chosen), jax.random.key(0)
    begun = time.perf_counter()
    update = fj.merging.summarize(method, of.trained, of.federation, key=key)
    merged, *_ = fj.merging.merge(method, of.start, update, of.federation.weights, key=key)
    merged = jax.block_until_ready(merged)
    seconds = time.perf_counter() - begun
    return merged, fj.compression.size(update) // asked.num_clients, seconds


def _exchanged(
    asked: Config, of: Clients, steps: Sequence[str], params: Params, size: int, seconds: float
) -> tuple[Params, int, float]:
    """Improve merged params by exchanges without training; return all bytes and seconds too."""
    begun = time.perf_counter()
    for number, step in enumerate(steps):
        method, key = fj.algorithms.make(step, of.model), jax.random.key(number)
        for message in fj.merging.messages(method, params, of.federation, key=key):
            params = message.params
            size += fj.compression.size(message.sent) // asked.num_clients
    return jax.block_until_ready(params), size, seconds + time.perf_counter() - begun


def _accuracy(of: Clients, params: Params) -> float:
    return float(fj.metrics.accuracy(of.model, params, of.test, batch_size=250))
