"""A model for each client: who the clients are, and a run of rounds among them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.personalized import settings
from experiments.personalized.domains import Domain, domains
from experiments.personalized.settings import Config, Point, Unit
from fisherjax.clients import Federation
from fisherjax.typing import Model, Params


class World(NamedTuple):
    """Clients with their own training and test data, and the network."""

    model: Model
    init: Callable[[Any], Params]
    norms: frozenset[str]  # leaves of normalisations
    train: Federation
    test: Federation
    names: Sequence[str]
    shares: np.ndarray  # [M, C], of the classes in their training data
    looks: Sequence[Domain]


def world(asked: Config, split: str, held: bool) -> World:
    """Read the data and split them; with `held` a tenth of everybody's training data judges."""
    looks: list[Domain] = []
    if split == "domains":
        number = asked.examples, asked.tested
        looks = domains(asked.domains, *number, 0, asked.data_dir)
        sides = zip(*((look.train, look.test) for look in looks), strict=True)
        pairs, rows = [], []
        for side in sides:
            images, labels = (np.concatenate(x) for x in zip(*side, strict=True))
            pairs.append((images, labels))
            ends = np.cumsum([len(own) for _, own in side])[:-1]
            rows.append(np.split(np.arange(len(labels)), ends))
        names = [look.name for look in looks]
        normalize, num_classes = _centred, 10
    else:
        train, test = fj.datasets.load(asked.table, asked.data_dir)
        pairs = [(train.inputs, train.targets), (test.inputs, test.targets)]
        rows = _by_classes(asked, split, train.targets, test.targets)
        names = [str(place) for place in range(asked.num_clients)]
        normalize, num_classes = fj.datasets.normalizer(train), train.num_classes
    train_rows, test_rows = rows
    if held:
        test_rows = [own[::10] for own in train_rows]
        train_rows = [np.delete(own, np.s_[::10]) for own in train_rows]
        pairs[1] = pairs[0]
    sides = map(fj.clients.federation, pairs, (train_rows, test_rows))
    counts = fj.partition.label_counts(pairs[0][1], train_rows)
    network = fj.networks.NormedCNN(num_classes=num_classes)
    init = jax.jit(lambda key: fj.networks.init(network, key, pairs[0][0]))
    shapes = jax.eval_shape(init, jax.random.key(0))
    model = fj.networks.model(network, shapes, fj.likelihoods.categorical, normalize=normalize)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    norms = fj.algorithms.normalizations(model, shapes, pairs[0][0])
    return World(model, init, norms, *sides, names, shares, looks)


def _centred(pixels: Any) -> Any:
    """Scale to [-1, 1], as FedBN's code does for its digits."""
    return pixels.astype(jnp.float32) / 127.5 - 1


def _by_classes(asked: Config, split: str, train: Any, test: Any) -> list[list[np.ndarray]]:
    if split == "pathological":
        rows = fj.partition.pathological(train, asked.num_clients, asked.classes, seed=0)
    else:
        rows = fj.partition.niid_bench(train, asked.num_clients, asked.beta, seed=0)
    # Of everybody's own distribution, and only then as many as fit.
    counts = fj.partition.label_counts(train, rows)
    both = [(rows, asked.examples), (fj.partition.in_proportion(test, counts, 0), asked.tested)]
    source = np.random.default_rng(0)
    return [[source.permutation(own)[:most] for own in side] for side, most in both]


# One object: programs are known by it.
@fj._core.caching.cached
def _sgd(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum or None)


def measured(asked: Config, unit: Unit, of: World) -> Iterator[tuple[Point | None, Any]]:
    """Play a run; yield after each round, with every accuracy that is measured, and the info."""
    number = of.train.num_clients
    experiment = fj.rounds.federated(
        of.model,
        settings.method(unit, of.model, of.norms),
        cohort=number,
        optimizer=_sgd(asked.learning_rate, asked.momentum),
        epochs=unit.epochs,
        batch_size=asked.batch_size,
    )
    key, start_key = jax.random.split(jax.random.key(unit.seed))
    first = experiment.init(of.init(start_key), of.train)
    every = max(1, unit.rounds // 10)
    for state, done in fj.rounds.run(experiment, first, of.train, key=key, rounds=unit.rounds):
        play, points = int(done.number) + 1, []
        if play == 1 or play % every == 0 or play == unit.rounds:
            models = experiment.models(state, number)
            judged = fj.metrics.performance(of.model, models, of.test, stacked=True, batch_size=250)
            values = [float(judged.mean().accuracy)]
            # Each client's own at the end only.
            values += map(float, judged.accuracy) if play == unit.rounds else []
            points = [
                Point(*unit, play, place - 1 if place else None, round(value, 6))
                for place, value in enumerate(values)
            ]
        yield points, done.info
