"""What a curious server makes of what it sees of one client."""

import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image
from rich.console import Console

import fisherjax as fj
from experiments.attack import gan, inversion
from experiments.attack.inversion import Pixels, Seen
from experiments.harness import commands, limits, records, steps, tasks
from experiments.harness.config import Data, Group, Merging, OneShot, Training
from experiments.harness.progress import bar
from fisherjax.typing import Array, Key, Params

VIEWS = {
    "model": "the client's model",
    "upload": "the client's model and K-FAC",
    "aggregate": "FedAvg of all",
    "aggregate+kfac": "FedAvg of all, the client's K-FAC",
    "aggregate+sum": "FedAvg of all, K-FAC summed",
    "merged": "FedFisher (K-FAC) of all",
    "dp_sgd": "the client's model by DP-SGD",
}
"""What the server sees, by name."""
_SHOWN = 12
_FEW = 2000  # examples of a client for K-FAC


@dataclasses.dataclass(frozen=True)
class Config:
    """Who is attacked, what the attacker knows, and how long it tries."""

    data: Group[Data] = dataclasses.field(default=Data())
    training: Group[Training] = dataclasses.field(default=Training())
    epochs: int = 10
    """Passes of every client over its own data."""
    digit: int = 3
    """The class that only the attacked client has, all of it."""
    others: int = 1000
    """Images of other classes that it has too."""
    known: int = 5000
    """Images of the other clients that the attacker has."""
    channels: tuple[int, int, int] = (64, 32, 16)
    """Of the attacker's generative network, at 4, 8 and 16 pixels."""
    gan_epochs: int = 60
    """Its passes over those images."""
    judge_epochs: int = 5
    """Of the network that judges, which is trained on all training images."""
    images: int = 100
    """Made of what is seen, side by side."""
    restarts: int = 3
    """Of each image; the one that what is seen takes most surely for the class counts."""
    steps: int = 500
    """Of descent, for each restart."""
    learning_rate_of_noise: float = 0.03
    """Of descent over what images are generated of, with Nesterov's momentum 0.9."""
    factor_weight: float = 100.0
    """Of the relative squared error of K-FAC's factors; the class has 100."""
    clip: float = 1.0
    """Of the gradient of each example, for DP-SGD."""
    noise_multiplier: float = 1.0
    """Of DP-SGD."""
    delta: float = 1e-5
    """Of its epsilon."""
    views: Annotated[tuple[str, ...], commands.names(VIEWS)] = tuple(VIEWS)
    """What the server sees."""
    seeds: tuple[int, ...] = (0,)
    """Of the split, training and the attack."""
    out: commands.Folder = Path("runs/attack")
    """Folder for the results; an unfinished run there continues."""


Unit = tuple[int, str]
"""Seed and view."""


class Point(NamedTuple):
    """A line of results.csv; accuracies are fractions, epsilon that of the model which is seen."""

    seed: int
    view: str
    recognized: float
    confidence: float
    model_accuracy: float
    epsilon: float
    judge_accuracy: float

    @property
    def unit(self) -> Unit:
        """What is measured as a whole."""
        return self.seed, self.view


class _World(NamedTuple):
    """One seed: who is attacked, with what, and who judges."""

    task: tasks.OneRound
    clients: fj.clients.Federation
    start: Params
    trained: fj.training.Trained
    network: gan.Gan
    judge: Callable[[Array], Array]
    judge_accuracy: float
    key: Key


def units(asked: Config) -> list[Unit]:
    """List what is computed, and written, as a whole."""
    return [(seed, view) for seed in asked.seeds for view in asked.views]


def split(asked: Config, targets: np.ndarray, seed: int) -> list[np.ndarray]:
    """Give the first client all of a class and some others, the rest to the others by Dirichlet."""
    random = np.random.default_rng(seed)
    own = np.flatnonzero(targets == asked.digit)
    rest = random.permutation(np.flatnonzero(targets != asked.digit))
    some, rest = rest[: asked.others], rest[asked.others :]
    number, alpha = asked.data.num_clients - 1, asked.data.alpha
    parts = fj.partition.dirichlet_of_client(targets[rest], number, alpha=alpha, seed=seed)
    return [np.concatenate([own, some]), *(rest[rows] for rows in parts)]


def strip(out: Path, seed: int, name: str) -> Path:
    """Say where images of a view are, or what client ("own") and server ("known") have."""
    return out / f"{seed}_{name.replace('+', '_')}.png"


def measured(asked: Config, console: Console, missing: Sequence[Unit]) -> Iterator[list[Point]]:
    """Train clients, the attacker's network and the judge, and attack every view."""
    merging = Merging(("fedavg", "fedfisher_kfac"))
    how = {"partition_seeds": asked.seeds, "seeds": asked.seeds, "central": False}
    whole = OneShot(asked.data, asked.training, merging, asked.epochs, **how)
    limits.check_one_shot(whole)
    train, test = fj.datasets.load(asked.data.dataset, asked.data.data_dir)
    task, world, latest = tasks.shared(whole, train, test), None, None
    # As `tasks` normalises stored images.
    pixels = Pixels(train.mean, train.std) if asked.data.normalize else Pixels((0.0,), (1.0,))
    with bar(console) as shown:
        watched = shown.add_task("", total=len(missing), speed="")
        for seed, view in missing:
            if seed != latest:
                say = partial(shown.update, watched)
                world, latest = _world(asked, task, train, seed, pixels, say), seed
            shown.update(watched, description=f"seed {seed}: {VIEWS[view]}")
            yield [_attacked(asked, world, pixels, seed, view)]
            shown.advance(watched)


def _world(
    asked: Config,
    task: tasks.OneRound,
    train: fj.datasets.Dataset,
    seed: int,
    pixels: Pixels,
    say: Callable[..., None],
) -> _World:
    rows = split(asked, np.asarray(train.targets), seed)
    data = task.central.inputs, task.central.targets
    clients = fj.clients.federation(data, rows)
    start, key = steps.start(task, seed)
    say(description=f"seed {seed}: clients")
    trained = _trained(asked, task.model, task.optimizer, start, clients, key, asked.epochs)
    others = np.concatenate(rows[1:])
    random = np.random.default_rng((seed, 1))
    known = random.choice(others, min(asked.known, len(others)), replace=False)
    images = jnp.asarray(train.inputs[known], jnp.float32) / train.scale
    records.write_bytes(strip(asked.out, seed, "known"), _png(images))
    own = jnp.asarray(train.inputs[rows[0]], jnp.float32) / train.scale
    records.write_bytes(strip(asked.out, seed, "own"), _png(own))
    epochs = iter(range(1, asked.gan_epochs + 1))

    def told(distance: float) -> None:
        now = f"network, epoch {next(epochs)} of {asked.gan_epochs}: {distance:.2f}"
        say(description=f"seed {seed}: {now}")

    network = gan.train(
        jax.random.fold_in(key, 2),
        images,
        epochs=asked.gan_epochs,
        channels=asked.channels,
        told=told,
    )
    say(description=f"seed {seed}: judge")
    module = fj.networks.SimpleCNNMNIST(num_classes=train.num_classes)
    first = fj.networks.init(module, jax.random.fold_in(key, 3), train.inputs)
    model = fj.networks.model(module, first, fj.likelihoods.categorical, normalize=task.normalize)
    central = task.central
    judge = _trained(asked, model, task.optimizer, first, central, key, asked.judge_epochs).models
    judge = jax.tree.map(lambda leaf: leaf[0], judge)
    accuracy = float(fj.metrics.accuracy(model, judge, task.test))
    judged = jax.jit(lambda images: model.apply(judge, pixels(images)))
    return _World(task, clients, start, trained, network, judged, accuracy, key)


def _trained(
    asked: Config,
    model: fj.Model,
    optimizer: optax.GradientTransformation,
    start: Params,
    clients: fj.clients.Federation,
    key: Key,
    epochs: int,
) -> fj.training.Trained:
    how = {"batch_size": asked.training.batch_size, "epochs": epochs, "optimizer": optimizer}
    side_by_side = asked.training.clients_per_chunk
    how["clients_per_chunk"] = side_by_side and min(side_by_side, clients.num_clients)
    return fj.training.train(model, start, clients, key=key, **how)


def _seen(asked: Config, world: _World, view: str) -> Seen:
    """Give what the server sees."""
    task, clients, key = world.task, world.clients, world.key
    first = jax.tree.map(lambda leaf: leaf[0], world.trained.models)
    mean = partial(_merged, world, fj.algorithms.fedavg())
    if view == "model":
        return Seen(first)
    if view == "dp_sgd":
        how = {"clip": asked.clip, "noise_multiplier": asked.noise_multiplier}
        private = fj.privacy.dp_sgd(task.model, **how)
        alone = fj.clients.select(clients, [0])
        found = _trained(asked, private, task.optimizer, world.start, alone, key, asked.epochs)
        noise = asked.noise_multiplier
        cost = fj.privacy.epsilon(noise, rounds=asked.epochs, delta=asked.delta)
        return Seen(jax.tree.map(lambda leaf: leaf[0], found.models), epsilon=cost)
    if view == "aggregate":
        return Seen(mean())
    method = fj.algorithms.make("fedfisher_kfac", task.model, max_examples=_FEW)
    if view == "merged":
        return Seen(_merged(world, method))
    sent = fj.merging.summarize(method, world.trained, clients, key=key)
    factors = sent.values["fisher"].factors
    if view == "aggregate+sum":
        return Seen(mean(), inversion.marginals(factors, clients.weights))
    own = jax.tree.map(lambda leaf: leaf[0], factors)
    return Seen(first if view == "upload" else mean(), own)


def _merged(world: _World, method: fj.algorithms.Algorithm) -> Params:
    sent = fj.merging.summarize(method, world.trained, world.clients, key=world.key)
    return fj.merging.merge(method, world.start, sent, world.clients.weights)[0]


def _attacked(asked: Config, world: _World, pixels: Pixels, seed: int, view: str) -> Point:
    seen = _seen(asked, world, view)
    key = jax.random.fold_in(world.key, 4)
    images = inversion.inverted(asked, world.task.model, world.network, seen, pixels, key)
    outputs = jax.nn.softmax(world.judge(images))
    recognized = float((outputs.argmax(1) == asked.digit).mean())
    records.write_bytes(strip(asked.out, seed, view), _png(images))
    accuracy = float(world.task.accuracy(seen.params, world.task.test))
    sure = float(outputs[:, asked.digit].mean())
    found = [round(x, 4) for x in (recognized, sure, accuracy, seen.epsilon, world.judge_accuracy)]
    return Point(seed, view, *found)


def _png(images: Array) -> bytes:
    """Write the first images beside one another."""
    shown = np.concatenate(np.asarray(images[:_SHOWN, ..., 0]), axis=1)
    file = io.BytesIO()
    Image.fromarray(np.round(255 * shown).astype(np.uint8)).save(file, format="png")
    return file.getvalue()
