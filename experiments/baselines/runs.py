"""OTFusion, PFNM, DENSE and FedOV on small clients of digits: what happens inside each of them.

Clients are MLPs of 64-64-64-10, trained apart by gradient descent. Everything is drawn from the
seed.
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
from fisherjax.algorithms.distillation import _outliers
from fisherjax.typing import Array, Examples, Model, Params

METHODS = ("otfusion", "pfnm", "dense", "fedov")
CLIENTS = 5
ALPHA = 0.3
SHAPE = (8, 8, 1)
# Smaller minibatches and longer steps than the papers': digits are few and small.
DISTILLATION = fj.algorithms.Distillation(images=64, batch_size=16, learning_rate=0.05)
WAYS = {
    "stretched": _outliers._stretched,
    "blurred": _outliers._blurred,
    "erased": _outliers._erased,
    "cut": _outliers._cut,
    "rotated": _outliers._rotated,
}
"""What FedOV does to an image, in the order in which `make_outliers` draws one."""
_DESTROYED = (0, 3, 7)  # digits that are shown


@dataclasses.dataclass(frozen=True)
class Config:
    """What to draw."""

    algorithms: Annotated[tuple[str, ...], commands.names(METHODS)] = METHODS
    """Methods to look into, a picture for each."""
    seed: int = 0
    """Seed of all that is random."""
    epochs: int = 20
    """Passes of a client over its digits; for fedov, whose clients see few classes, open_epochs."""
    open_epochs: int = 60
    """Passes of a client over its digits that also learns what it does not know."""
    dense_epochs: int = 20
    """Epochs in which dense draws images and its student learns from them."""
    out: commands.Folder = Path("runs/comparators")
    """Folder for the pictures and the numbers."""


class Fused(NamedTuple):
    """Two clients: accuracies by method, and where the second's units go, [o, o] by layer."""

    same_start: bool
    accuracies: dict[str, float]
    transports: dict[str, np.ndarray]


class Widened(NamedTuple):
    """The first clients: accuracies by method, and how many units are of 1, 2, ... of them."""

    clients: int
    width: int
    accuracies: dict[str, float]
    shared: dict[str, np.ndarray]


class Drawn(NamedTuple):
    """DENSE's work: for some epochs an image for each class, and accuracies from before the first.

    The image for a class is the one that the teacher gives it most, and so are real digits.
    """

    images: dict[int, "Shown"]
    real: "Shown"
    accuracies: list[float]
    teacher: float


class Shown(NamedTuple):
    """An image [H, W] for each class, and which probability the teacher gives it."""

    images: np.ndarray
    shares: np.ndarray


class Voted(NamedTuple):
    """Open clients: digits, corrupted in each way, and p(unknown) of the first one's test images.

    Accuracies are of the vote, of the mean of their outputs, and of clients that know only classes.
    """

    digits: np.ndarray
    broken: dict[str, np.ndarray]
    own: np.ndarray
    others: np.ndarray
    accuracies: dict[str, float]


class _World(NamedTuple):
    train: fj.datasets.Dataset
    test: Examples
    init: Callable[[int], Params]
    model: Model


def _world(classes: int = 10) -> _World:
    train, test = fj.datasets.load("digits")
    network = fj.networks.MLP(num_classes=classes)
    apply = fj.networks.apply_fn(network, fj.datasets.normalizer(train), any_width=True)
    model = fj.Model(apply, fj.likelihoods.categorical)

    def init(seed: int) -> Params:
        return fj.networks.init(network, jax.random.key(seed), train.inputs)

    return _World(train, Examples(test.inputs, test.targets), init, model)


def _trained(
    world: _World, model: Model, seeds: Sequence[int], parts: Sequence, epochs: int
) -> list[Params]:
    """Train clients apart, each from the start of its own seed."""
    how = {"optimizer": optax.sgd(0.05, 0.9), "epochs": epochs, "batch_size": 32}
    found = []
    for seed, rows in zip(seeds, parts, strict=True):
        alone, key = fj.clients.federation(world.train, [rows]), jax.random.key(9)
        models = fj.training.train(model, world.init(seed), alone, key=key, **how).models
        found.append(jax.tree.map(lambda leaf: leaf[0], models))
    return found


def _merged(world: _World, models: list[Params], parts: Sequence, names: Sequence[str]) -> tuple:
    """Merge by methods; give accuracies by name, and what the last one reports."""
    federation, accuracies, info = fj.clients.federation(world.train, parts), {}, None
    for name in names:
        method = fj.algorithms.make(name, world.model)
        sent = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
        merged, _, info = fj.merging.merge(method, models[0], sent, federation.weights)
        accuracies[name] = float(fj.metrics.accuracy(world.model, merged, world.test))
    return accuracies, info


def _skewed(asked: Config, world: _World) -> list[np.ndarray]:
    return fj.partition.dirichlet_of_client(
        world.train.targets, CLIENTS, alpha=ALPHA, seed=asked.seed
    )


def otfusion(asked: Config) -> list[Fused]:
    """Fuse two clients of all classes, from one start and from two."""
    world, found = _world(), []
    parts = [np.arange(n, len(world.train.targets), 2) for n in (0, 1)]
    for seeds in ((asked.seed, asked.seed), (asked.seed, asked.seed + 1)):
        models = _trained(world, world.model, seeds, parts, asked.epochs)
        accuracies, info = _merged(world, models, parts, ("fedavg", "otfusion"))
        *hidden, _ = info.transports
        moves = {name.split("/")[0]: np.asarray(info.transports[name][1]) for name in hidden}
        found.append(Fused(seeds[0] == seeds[1], accuracies, moves))
    return found


def pfnm(asked: Config) -> list[Widened]:
    """Match the first two, three, ... of clients of unlike classes, each from its own start."""
    world, found = _world(), []
    parts = _skewed(asked, world)
    seeds = range(asked.seed, asked.seed + CLIENTS)
    models = _trained(world, world.model, seeds, parts, asked.epochs)
    for number in range(2, CLIENTS + 1):
        few = models[:number], parts[:number]
        accuracies, info = _merged(world, *few, ("fedavg", "pfnm"))
        shared = {
            name.split("/")[0]: np.bincount(np.bincount(np.concatenate(places)))[1:]
            for name, places in info.places.items()
        }
        width = len(next(iter(info.places.values()))[0])
        found.append(Widened(number, width, accuracies, shared))
    return found


def dense(asked: Config) -> Drawn:
    """Distil clients of unlike classes, from one start, and watch the student."""
    world, accuracies = _world(), []
    parts = _skewed(asked, world)
    models = _trained(world, world.model, [asked.seed] * CLIENTS, parts, asked.epochs)
    federation = fj.clients.federation(world.train, parts)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)

    def after(_: int, work: fj.algorithms.distillation.synthesis.Distilling) -> None:
        accuracies.append(float(fj.metrics.accuracy(world.model, work.student, world.test)))

    start, _ = _merged(world, models, parts, ("fedavg",))
    options = {"shape": SHAPE, "epochs": asked.dense_epochs, "how": DISTILLATION}
    method = fj.algorithms.in_stages(fj.algorithms.dense(world.model, **options), after)
    key = jax.random.key(asked.seed)
    sent = fj.merging.summarize(method, models, federation, key=key)
    _, _, info = fj.merging.merge(method, models[0], sent, federation.weights, key=key)
    by_epoch = np.asarray(info.images).reshape(asked.dense_epochs, -1, *SHAPE) / 255.0

    def surest(images: Array) -> Shown:
        z = fj.metrics.logits(world.model, stacked, jnp.asarray(images, jnp.float32), stacked=True)
        p = np.asarray(jax.nn.softmax(jnp.tensordot(federation.weights, z, 1)))
        return Shown(images[p.argmax(0), ..., 0], p.max(0))

    shown = sorted({1, (asked.dense_epochs + 1) // 2, asked.dense_epochs})
    real = world.train.inputs[:200] / world.train.scale
    return Drawn(
        images={number: surest(by_epoch[number - 1]) for number in shown},
        real=surest(real),
        accuracies=[start["fedavg"], *accuracies],
        teacher=float(
            fj.metrics.ensemble_accuracy(world.model, stacked, federation.weights, world.test)
        ),
    )


def fedov(asked: Config) -> Voted:
    """Train clients of two classes each to know what they do not know, and let them vote."""
    world, plain = _world(11), _world()
    normalize = fj.datasets.normalizer(world.train)
    opened = fj.algorithms.open_set(world.model, normalize)
    parts = [np.flatnonzero(world.train.targets // 2 == n) for n in range(CLIENTS)]
    seeds = range(asked.seed, asked.seed + CLIENTS)
    models = _trained(world, opened, seeds, parts, asked.open_epochs)
    federation = fj.clients.federation(world.train, parts)
    method, vote = fj.algorithms.fedov(world.model), fj.algorithms.voting(world.model)
    sent = fj.merging.summarize(method, models, federation, key=jax.random.key(0))
    stacked, _, _ = fj.merging.merge(method, models[0], sent, federation.weights)
    usual = _trained(plain, plain.model, seeds, parts, asked.open_epochs)
    usual = jax.tree.map(lambda *leaves: jnp.stack(leaves), *usual)
    weights, test = federation.weights, world.test
    accuracies = {
        "vote": float(fj.metrics.accuracy(vote, stacked, test)),
        "ensemble": float(fj.metrics.ensemble_accuracy(plain.model, usual, weights, test)),
        "one client": float(fj.metrics.accuracy(plain.model, usual, test, stacked=True).mean()),
    }
    unknown = np.exp(np.asarray(fj.metrics.logits(opened, models[0], test.inputs))[:, -1])
    own = np.isin(test.targets, (0, 1))
    rows = [np.flatnonzero(world.train.targets == digit)[0] for digit in _DESTROYED]
    digits, keys = (
        normalize(world.train.inputs[np.array(rows)]),
        jax.random.split(jax.random.key(asked.seed), len(rows)),
    )
    broken = {name: np.asarray(jax.vmap(way)(keys, digits))[..., 0] for name, way in WAYS.items()}
    return Voted(np.asarray(digits)[..., 0], broken, unknown[own], unknown[~own], accuracies)
