"""Measure what a curious server reconstructs from what it sees of one client."""

import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image
from rich.console import Console

import fisherjax as fj
from experiments.attack import gan, inversion
from experiments.attack.inversion import Pixels, Seen
from experiments.harness import choices, commands, limits, records, steps, studies, tasks
from experiments.harness.config import Data, Group, Merging, OneShot, Training
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
"""Views: what the server sees, by name."""
NOISE = {True: "the seed, and is no secret", False: "a key of the operating system"}
"""What DP-SGD's noise is drawn from, by the option --seeded-noise."""
_SHOWN = 12
_FEW = 2000  # largest number of examples of a client for K-FAC


@dataclasses.dataclass(frozen=True)
class Config(commands.Imports):
    """The attacked client, what the attacker knows, and how long it tries."""

    data: Group[Data] = dataclasses.field(default=Data())
    training: Group[Training] = dataclasses.field(default=Training())
    epochs: int = 10
    """Passes of every client over its own data."""
    digit: int = 3
    """Class of which the attacked client has all images, and the other clients none."""
    others: int = 1000
    """Images of other classes that the attacked client has."""
    known: int = 5000
    """Images of the other clients that the attacker has."""
    channels: tuple[int, int, int] = (64, 32, 16)
    """Channels of the attacker's generative network at 4, 8 and 16 pixels."""
    gan_epochs: int = 60
    """Passes of the generative network over the images that the attacker has."""
    judge_epochs: int = 5
    """Epochs of the judge, an independent network trained on all training images."""
    images: int = 100
    """Images that are made from each view, side by side."""
    restarts: int = 3
    """Restarts of each image; the one of which the model is most confident counts."""
    steps: int = 500
    """Steps of descent of each restart."""
    learning_rate_of_noise: float = 0.03
    """Step size of the descent over the generator's input, with Nesterov's momentum 0.9."""
    factor_weight: float = 100.0
    """Weight of the relative squared error of K-FAC's factors; the class has weight 100."""
    clip: float = 1.0
    """Largest norm of the gradient of each example in DP-SGD."""
    noise_multiplier: float = 1.0
    """Noise multiplier of DP-SGD."""
    delta: float = 1e-5
    """Delta for which the epsilon of DP-SGD is computed."""
    seeded_noise: bool = False
    """Draw DP-SGD's noise from the seed, to repeat a run; otherwise from a key of the system."""
    views: Annotated[tuple[str, ...], commands.names(VIEWS)] = tuple(VIEWS)
    """Views of the server that are attacked."""
    seeds: tuple[int, ...] = (0,)
    """Seeds of the split, of training and of the attack."""
    out: commands.Folder = Path("runs/attack")
    """Folder for the results; an unfinished run there continues."""

    @classmethod
    def usual(cls, dataset: str | None = None) -> Self:
        """Return the default configuration."""
        data = Data(dataset or "mnist", "lenet", num_clients=10)
        return cls(data, Training(learning_rate=0.01, batch_size=64))


Unit = tuple[int, str]
"""Seed and view."""


class Measurement(NamedTuple):
    """One attack; see `studies`. Accuracies are fractions; epsilon is that of the seen model."""

    seed: int
    view: str
    recognized: float
    confidence: float
    model_accuracy: float
    epsilon: float
    judge_accuracy: float

    @property
    def unit(self) -> Unit:
        """The unit that the measurement belongs to."""
        return self.seed, self.view


class _Scene(NamedTuple):
    """Everything that the attacks of one seed share: clients, generative network and judge."""

    task: tasks.OneRound
    clients: fj.clients.Federation
    start: Params
    trained: fj.training.Trained
    network: gan.Gan
    judge: Callable[[Array], Array]
    judge_accuracy: float
    key: Key


def units(asked: Config) -> dict[Unit, int]:
    """Return the units, each computed and written as a whole, and their numbers of measurements."""
    return {(seed, view): 1 for seed in asked.seeds for view in asked.views}


def split(asked: Config, targets: np.ndarray, seed: int) -> list[np.ndarray]:
    """Return the rows [n] of each client: the first has all of a class and some other images.

    The rest is split over the other clients by Dirichlet shares.
    """
    random = np.random.default_rng(seed)
    own = np.flatnonzero(targets == asked.digit)
    rest = random.permutation(np.flatnonzero(targets != asked.digit))
    some, rest = rest[: asked.others], rest[asked.others :]
    number, alpha = asked.data.num_clients - 1, asked.data.alpha
    parts = fj.partition.dirichlet_of_client(targets[rest], number, alpha=alpha, seed=seed)
    return [np.concatenate([own, some]), *(rest[rows] for rows in parts)]


def strip(out: Path, seed: int, name: str) -> Path:
    """Return the path of images: of a view, of the client ("own") or the server ("known")."""
    return out / f"{seed}_{name.replace('+', '_')}.png"


def measured(
    asked: Config, console: Console, missing: Sequence[Unit]
) -> Iterator[list[Measurement]]:
    """Train clients, the attacker's network and the judge, and attack every view."""
    merging = Merging(("fedavg", "fedfisher_kfac"))
    how = {"partition_seeds": asked.seeds, "seeds": asked.seeds, "central": False}
    whole = OneShot(asked.data, asked.training, merging, asked.epochs, **how)
    limits.check_one_shot(whole)
    if "dp_sgd" in asked.views:
        console.print(f"DP-SGD's noise is drawn from {NOISE[asked.seeded_noise]}.")
    train, test = choices.load(asked.data.dataset, asked.data.data_dir)
    task, scene, latest = tasks.shared(whole, train, test), None, None
    pixels = tasks.standardizer(train) if asked.data.normalize else lambda images: images
    for seed, view in studies.each(console, missing, lambda unit: f"seed {unit[0]}: {unit[1]}"):
        if seed != latest:
            scene, latest = _scene(asked, task, train, seed, pixels), seed
        yield [_attack(asked, scene, pixels, seed, view)]


def _scene(
    asked: Config, task: tasks.OneRound, train: fj.datasets.Dataset, seed: int, pixels: Pixels
) -> _Scene:
    rows = split(asked, np.asarray(train.targets), seed)
    clients = fj.clients.federation((task.central.inputs, task.central.targets), rows)
    start, key = steps.start(task, seed)
    trained = _train(task, task.model, start, clients, key, asked.epochs)
    others, random = np.concatenate(rows[1:]), np.random.default_rng((seed, 1))
    known = random.choice(others, min(asked.known, len(others)), replace=False)
    shown = {"known": known, "own": rows[0]}
    images = {n: jnp.asarray(train.inputs[x], jnp.float32) / train.scale for n, x in shown.items()}
    for name, some in images.items():
        records.write_bytes(strip(asked.out, seed, name), _png(some))
    how = {"epochs": asked.gan_epochs, "channels": asked.channels}
    network = gan.train(jax.random.fold_in(key, 2), images["known"], **how)
    module = fj.networks.SimpleCNNMNIST(num_classes=train.num_classes)
    first = fj.networks.init(module, jax.random.fold_in(key, 3), train.inputs)
    model = fj.networks.model(module, first, fj.likelihoods.categorical, normalize=task.normalize)
    judges = _train(task, model, first, task.central, key, asked.judge_epochs).models
    judge = _first(judges)
    accuracy = float(fj.metrics.accuracy(model, judge, task.test))
    judged = jax.jit(lambda images: model.apply(judge, pixels(images)))
    return _Scene(task, clients, start, trained, network, judged, accuracy, key)


def _first(stacked: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf[0], stacked)


def _train(
    task: tasks.OneRound,
    model: fj.Model,
    start: Params,
    clients: fj.clients.Federation,
    key: Key,
    epochs: int,
) -> fj.training.Trained:
    how = steps.training_options(task, clients) | {"epochs": epochs, "optimizer": task.optimizer}
    return fj.training.train(model, start, clients, key=key, **how)


def _see(asked: Config, scene: _Scene, view: str) -> Seen:
    """Return what the server sees in a view."""
    task, clients, key = scene.task, scene.clients, scene.key
    first = _first(scene.trained.models)
    mean = partial(_merged, scene, fj.algorithms.fedavg())
    if view == "model":
        return Seen(first)
    if view == "dp_sgd":
        noise, alone = asked.noise_multiplier, fj.clients.select(clients, [0])
        private = fj.privacy.dp_sgd(task.model, clip=asked.clip, noise_multiplier=noise)
        key = key if asked.seeded_noise else fj.privacy.system_key()
        found = _train(task, private, scene.start, alone, key, asked.epochs)
        cost = fj.privacy.epsilon(noise, rounds=asked.epochs, delta=asked.delta)
        return Seen(_first(found.models), epsilon=cost)
    if view == "aggregate":
        return Seen(mean())
    method = fj.algorithms.make("fedfisher_kfac", task.model, max_examples=_FEW)
    if view == "merged":
        return Seen(_merged(scene, method))
    sent = fj.merging.summarize(method, scene.trained, clients, key=key)
    factors = sent.values["fisher"].factors
    if view == "aggregate+sum":
        return Seen(mean(), inversion.marginals(factors, clients.weights))
    return Seen(first if view == "upload" else mean(), _first(factors))


def _merged(scene: _Scene, method: fj.algorithms.Algorithm) -> Params:
    sent = fj.merging.summarize(method, scene.trained, scene.clients, key=scene.key)
    return fj.merging.merge(method, scene.start, sent, scene.clients.weights)[0]


def _attack(asked: Config, scene: _Scene, pixels: Pixels, seed: int, view: str) -> Measurement:
    seen, task = _see(asked, scene, view), scene.task
    key = jax.random.fold_in(scene.key, 4)
    images = inversion.inverted(asked, task.model, scene.network, seen, pixels, key)
    outputs = jax.nn.softmax(scene.judge(images))
    recognized = float((outputs.argmax(1) == asked.digit).mean())
    records.write_bytes(strip(asked.out, seed, view), _png(images))
    accuracy = float(task.accuracy(seen.params, task.test))
    confidence = float(outputs[:, asked.digit].mean())
    numbers = recognized, confidence, accuracy, seen.epsilon, scene.judge_accuracy
    return Measurement(seed, view, *(round(x, 4) for x in numbers))


def _png(images: Array) -> bytes:
    """Return the first images beside one another as a PNG file."""
    shown = np.concatenate(np.asarray(images[:_SHOWN, ..., 0]), axis=1)
    file = io.BytesIO()
    Image.fromarray(np.round(255 * shown).astype(np.uint8)).save(file, format="png")
    return file.getvalue()
