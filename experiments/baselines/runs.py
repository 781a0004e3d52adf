"""Run OTFusion, PFNM, DENSE and FedOV on small clients of digits, and return their inner workings.

Clients are MLPs of 64-64-64-10, trained independently by SGD. The seed determines all random
numbers.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import commands
from fisherjax.typing import Array, Examples, Model, Params

METHODS = ("otfusion", "pfnm", "dense", "fedov")
CLIENTS = 5
ALPHA = 0.3
SHAPE = (8, 8, 1)
# Minibatches are smaller and steps longer than in the papers, because digits are few and small.
DISTILLATION = fj.algorithms.Distillation(images=64, batch_size=16, learning_rate=0.05)
WAYS = {
    "stretched": fj.algorithms.distillation._outliers._stretched,
    "blurred": fj.algorithms.distillation._outliers._blurred,
    "erased": fj.algorithms.distillation._outliers._erased,
    "cut": fj.algorithms.distillation._outliers._cut,
    "rotated": fj.algorithms.distillation._outliers._rotated,
}
"""FedOV's corruptions of an image, in the order of `make_outliers`."""
_DESTROYED = (0, 3, 7)  # digits that are drawn corrupted


@dataclasses.dataclass(frozen=True)
class Config:
    """Methods that are drawn, and training."""

    algorithms: Annotated[tuple[str, ...], commands.names(METHODS)] = METHODS
    """Methods, with a picture for each."""
    seed: int = 0
    """Seed of everything that is random."""
    epochs: int = 20
    """Passes of a client over its digits; fedov takes open_epochs instead."""
    open_epochs: int = 60
    """Passes of a fedov client, which also learns an "unknown" class, over its digits."""
    dense_epochs: int = 20
    """Epochs in which dense generates images and its student learns from them."""
    out: commands.Folder = Path("runs/comparators")
    """Folder for the pictures and the numbers."""


class Fused(NamedTuple):
    """Two clients: accuracies by method, and transports [o, o] of the second's units by layer."""

    same_start: bool
    accuracies: dict[str, float]
    transports: dict[str, np.ndarray]


class Widened(NamedTuple):
    """The first clients: accuracies by method, and numbers of units shared by 1, 2, ... clients."""

    clients: int
    width: int
    accuracies: dict[str, float]
    shared: dict[str, np.ndarray]


class Drawn(NamedTuple):
    """Images of some epochs of DENSE for each class, and accuracies from before the first epoch.

    The image of a class, also of real digits, is the one with the teacher's highest probability.
    """

    images: dict[int, "Shown"]
    real: "Shown"
    accuracies: list[float]
    teacher: float


class Shown(NamedTuple):
    """An image [H, W] for each class, and the teacher's probability of it."""

    images: np.ndarray
    shares: np.ndarray


class Voted(NamedTuple):
    """Digits, their corruptions, and the first client's p(unknown) of test images.

    Accuracies are of the vote, of the mean outputs of usual networks, and of one usual network.
    """

    digits: np.ndarray
    broken: dict[str, np.ndarray]
    own: np.ndarray
    others: np.ndarray
    accuracies: dict[str, float]


class _Problem(NamedTuple):
    """Data, initialiser by seed, and the model."""

    train: fj.datasets.Dataset
    test: Examples
    init: Callable[[int], Params]
    model: Model


def _problem(classes: int = 10) -> _Problem:
    train, test = fj.datasets.load("digits")
    network = fj.networks.MLP(num_classes=classes)
    apply = fj.networks.apply_fn(network, fj.datasets.normalizer(train), any_width=True)
    model = fj.Model(apply, fj.likelihoods.categorical)

    def init(seed: int) -> Params:
        return fj.networks.init(network, jax.random.key(seed), train.inputs)

    return _Problem(train, Examples(test.inputs, test.targets), init, model)


def _trained(
    problem: _Problem, model: Model, seeds: Sequence[int], parts: Sequence, epochs: int
) -> list[Params]:
    """Train clients independently, each from the initial model of its seed."""
    how = {"optimizer": optax.sgd(0.05, 0.9), "epochs": epochs, "batch_size": 32}
    found = []
    for seed, rows in zip(seeds, parts, strict=True):
        alone, key = fj.clients.federation(problem.train, [rows]), jax.random.key(9)
        models = fj.training.train(model, problem.init(seed), alone, key=key, **how).models
        found.append(jax.tree.map(lambda leaf: leaf[0], models))
    return found


def _merged(
    problem: _Problem, models: list[Params], parts: Sequence, names: Sequence[str]
) -> tuple:
    """Merge by methods; return accuracies by name, and the info of the last merge."""
    federation, accuracies, info = fj.clients.federation(problem.train, parts), {}, None
    for name in names:
        method = fj.algorithms.make(name, problem.model)
        sent = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
        merged, _, info = fj.merging.merge(method, models[0], sent, federation.weights)
        accuracies[name] = float(fj.metrics.accuracy(problem.model, merged, problem.test))
    return accuracies, info


def _skewed(asked: Config, problem: _Problem) -> list[np.ndarray]:
    targets = problem.train.targets
    return fj.partition.dirichlet_of_client(targets, CLIENTS, alpha=ALPHA, seed=asked.seed)


def otfusion(asked: Config) -> list[Fused]:
    """Fuse two clients of all classes, from one initial model and from two."""
    problem, found = _problem(), []
    parts = [np.arange(n, len(problem.train.targets), 2) for n in (0, 1)]
    for seeds in ((asked.seed, asked.seed), (asked.seed, asked.seed + 1)):
        models = _trained(problem, problem.model, seeds, parts, asked.epochs)
        accuracies, info = _merged(problem, models, parts, ("fedavg", "otfusion"))
        *hidden, _ = info.transports
        moves = {name.split("/")[0]: np.asarray(info.transports[name][1]) for name in hidden}
        found.append(Fused(seeds[0] == seeds[1], accuracies, moves))
    return found


def pfnm(asked: Config) -> list[Widened]:
    """Match the first two, three, ... clients of skewed classes and different initial models."""
    problem, found = _problem(), []
    parts = _skewed(asked, problem)
    seeds = range(asked.seed, asked.seed + CLIENTS)
    models = _trained(problem, problem.model, seeds, parts, asked.epochs)
    for number in range(2, CLIENTS + 1):
        few = models[:number], parts[:number]
        accuracies, info = _merged(problem, *few, ("fedavg", "pfnm"))
        shared = {
            name.split("/")[0]: np.bincount(np.bincount(np.concatenate(places)))[1:]
            for name, places in info.places.items()
        }
        width = len(next(iter(info.places.values()))[0])
        found.append(Widened(number, width, accuracies, shared))
    return found


def dense(asked: Config) -> Drawn:
    """Distil clients of skewed classes and one initial model; record images and the student."""
    problem, accuracies = _problem(), []
    parts = _skewed(asked, problem)
    models = _trained(problem, problem.model, [asked.seed] * CLIENTS, parts, asked.epochs)
    federation = fj.clients.federation(problem.train, parts)
    stacked = fj.tree.stack(models)

    def after(_: int, work: fj.algorithms.distillation.synthesis.Distilling) -> None:
        accuracies.append(float(fj.metrics.accuracy(problem.model, work.student, problem.test)))

    start, _ = _merged(problem, models, parts, ("fedavg",))
    options = {"shape": SHAPE, "epochs": asked.dense_epochs, "how": DISTILLATION}
    method = fj.algorithms.in_stages(fj.algorithms.dense(problem.model, **options), after)
    key = jax.random.key(asked.seed)
    sent = fj.merging.summarize(method, models, federation, key=key)
    _, _, info = fj.merging.merge(method, models[0], sent, federation.weights, key=key)
    by_epoch = np.asarray(info.images).reshape(asked.dense_epochs, -1, *SHAPE) / 255.0

    def surest(images: Array) -> Shown:
        pixels = jnp.asarray(images, jnp.float32)
        z = fj.metrics.logits(problem.model, stacked, pixels, stacked=True)
        p = np.asarray(jax.nn.softmax(jnp.tensordot(federation.weights, z, 1)))
        return Shown(images[p.argmax(0), ..., 0], p.max(0))

    shown = sorted({1, (asked.dense_epochs + 1) // 2, asked.dense_epochs})
    ensemble = stacked, federation.weights, problem.test
    return Drawn(
        images={number: surest(by_epoch[number - 1]) for number in shown},
        real=surest(problem.train.inputs[:200] / problem.train.scale),
        accuracies=[start["fedavg"], *accuracies],
        teacher=float(fj.metrics.ensemble_accuracy(problem.model, *ensemble)),
    )


def fedov(asked: Config) -> Voted:
    """Train open-set clients of two classes each, and compute their vote."""
    problem, plain = _problem(11), _problem()
    normalize = fj.datasets.normalizer(problem.train)
    opened = fj.algorithms.open_set(problem.model, normalize)
    parts = [np.flatnonzero(problem.train.targets // 2 == n) for n in range(CLIENTS)]
    seeds = range(asked.seed, asked.seed + CLIENTS)
    models = _trained(problem, opened, seeds, parts, asked.open_epochs)
    federation = fj.clients.federation(problem.train, parts)
    method, vote = fj.algorithms.fedov(problem.model), fj.algorithms.voting(problem.model)
    sent = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
    stacked, _, _ = fj.merging.merge(method, models[0], sent, federation.weights)
    usual = fj.tree.stack(_trained(plain, plain.model, seeds, parts, asked.open_epochs))
    weights, test = federation.weights, problem.test
    accuracies = {
        "vote": float(fj.metrics.accuracy(vote, stacked, test)),
        "ensemble": float(fj.metrics.ensemble_accuracy(plain.model, usual, weights, test)),
        "one client": float(fj.metrics.accuracy(plain.model, usual, test, stacked=True).mean()),
    }
    unknown = np.exp(np.asarray(fj.metrics.logits(opened, models[0], test.inputs))[:, -1])
    own = np.isin(test.targets, (0, 1))
    rows = [np.flatnonzero(problem.train.targets == digit)[0] for digit in _DESTROYED]
    digits = normalize(problem.train.inputs[np.array(rows)])
    keys = jax.random.split(jax.random.key(asked.seed), len(rows))
    broken = {name: np.asarray(jax.vmap(way)(keys, digits))[..., 0] for name, way in WAYS.items()}
    return Voted(np.asarray(digits)[..., 0], broken, unknown[own], unknown[~own], accuracies)
