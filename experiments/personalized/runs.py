"""Make the clients of a split, and run rounds that train a model for each client."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.harness import config, tasks
from experiments.personalized import settings
from experiments.personalized.domains import Domain, domains
from experiments.personalized.settings import Config, Measurement, Unit


class Population(NamedTuple):
    """Clients with their own training and test data, and the network."""

    model: fj.typing.Model
    init: Callable[[Any], fj.typing.Params]
    norms: frozenset[str]  # names of the leaves of normalisations
    train: fj.clients.Federation
    test: fj.clients.Federation
    names: Sequence[str]  # of the clients
    shares: np.ndarray  # [M, C], shares of the classes in the training data of each client
    looks: Sequence[Domain]


Populations = Callable[[str, bool], Population]
"""The clients of a split, with their test data, or with held-out training data in its place."""


def population(asked: Config, split: str, held: bool) -> Population:
    """Read and split the data; with `held`, a tenth of the training data replaces the test data."""
    looks: list[Domain] = []
    if split == "domains":
        number = asked.examples, asked.tested
        looks = domains(asked.domains, *number, 0, asked.data_dir)
        sides = zip(*((look.train, look.test) for look in looks), strict=True)
        pairs, rows = [], []
        for side in sides:
            images, labels = (np.concatenate(x) for x in zip(*side, strict=True))
            pairs.append((images, labels))
            ends = np.cumsum([len(labels_of_one) for _, labels_of_one in side])[:-1]
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
        test_rows = [rows[::10] for rows in train_rows]
        train_rows = [np.delete(rows, np.s_[::10]) for rows in train_rows]
        pairs[1] = pairs[0]
    sides = map(fj.clients.federation, pairs, (train_rows, test_rows))
    counts = fj.partition.label_counts(pairs[0][1], train_rows)
    network = fj.networks.NormedCNN(num_classes=num_classes)
    images, likelihood = pairs[0][0], fj.likelihoods.categorical
    model, init = tasks.of_network(network, images, likelihood, normalize=normalize)
    shapes = jax.eval_shape(init, jax.random.key(0))
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    norms = fj.algorithms.normalizations(model, shapes, images)
    return Population(model, init, norms, *sides, names, shares, looks)


def _centred(pixels: Any) -> Any:
    """Scale pixels to [-1, 1], as FedBN's code does for its digits."""
    return pixels.astype(jnp.float32) / 127.5 - 1


def _by_classes(asked: Config, split: str, train: Any, test: Any) -> list[list[np.ndarray]]:
    if split == "pathological":
        rows = fj.partition.pathological(train, asked.num_clients, asked.classes, seed=0)
    else:
        rows = fj.partition.niid_bench(train, asked.num_clients, asked.beta, seed=0)
    # First draw test data of each client's own distribution, then take as many as asked for.
    counts = fj.partition.label_counts(train, rows)
    both = [(rows, asked.examples), (fj.partition.in_proportion(test, counts, 0), asked.tested)]
    source = np.random.default_rng(0)
    return [[source.permutation(own)[:most] for own in side] for side, most in both]


def measured(asked: Config, unit: Unit, of: Population) -> Iterator[tuple[list[Measurement], Any]]:
    """Run the rounds of a unit; yield after each its measurements and the algorithm's info."""
    number = of.train.num_clients
    experiment = fj.rounds.federated(
        of.model,
        settings.method(unit, of.model, of.norms),
        cohort=number,
        optimizer=tasks.optimizer(config.Training(asked.learning_rate, asked.momentum)),
        epochs=unit.epochs,
        batch_size=asked.batch_size,
    )
    key, start_key = jax.random.split(jax.random.key(unit.seed))
    first = experiment.init(of.init(start_key), of.train)
    tested_after = settings.rounds_measured(unit)
    for state, done in fj.rounds.run(experiment, first, of.train, key=key, rounds=unit.rounds):
        count, found = int(done.number) + 1, []
        if count in tested_after:
            models = experiment.models(state, number)
            models = own_statistics(of.model, models, of.train) if asked.own_statistics else models
            how = {"stacked": True, "batch_size": 250}
            tested = fj.metrics.performance(of.model, models, of.test, **how)
            values = {None: tested.mean().accuracy}
            # The accuracy of each client is measured after the last round only.
            values |= dict(enumerate(tested.accuracy)) if count == unit.rounds else {}
            found = [
                Measurement(*unit, count, client, round(float(value), 6))
                for client, value in values.items()
            ]
        yield found, done.info


def own_statistics(
    model: fj.typing.Model, models: fj.typing.Params, federation: fj.clients.Federation
) -> fj.typing.Params:
    """Compute the running statistics of each client's model [M, ...] on that client's examples.

    A server that averages models averages their statistics too. These are of other networks than
    the mean, and of all clients' data; what is computed here is of the mean and of one client's.
    """
    method, trained = fj.algorithms.running_statistics(model), fj.training.Trained(models)
    # The network draws nothing, so that any key will do.
    found = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
    return fj.leaves.replace(models, found.statistics)
