"""A model for each client: who the clients are, what is compared, and one run of rounds."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fisherjax as fj
from experiments.harness import commands
from experiments.harness.config import check_name
from experiments.harness.domains import LOOKS, Domain, domains
from fisherjax.algorithms import PERSONAL, TABLE, Algorithm, Row
from fisherjax.clients import Federation
from fisherjax.typing import Model, Params

HEAD = "dense3"
"""The layer of the network that FedPer keeps."""
# With drawn labels, of few examples: rounds are many.
_CHEAP: dict[str, Any] = {"kind": fj.fisher.sampled, "max_examples": 200}


def _by_fisher(structure: Callable, model: Model, temperature: float = 1.0) -> Algorithm:
    fisher = partial(structure, kind=_CHEAP["kind"])
    how = {"temperature": temperature, "max_examples": _CHEAP["max_examples"]}
    return fj.algorithms.weighted_fedavg(model, fisher=fisher, **how)


def _fedfisher_bn(model: Model) -> Algorithm:
    return fj.algorithms.fedbn(fj.algorithms.fedfisher(model, **_CHEAP))


def _is_statistic(name: str) -> bool:
    return name.startswith("moments")


def _is_scale(name: str) -> bool:
    return name.startswith("params/norm")


def _part_of_fedbn(where: Callable[[str], bool], model: Model) -> Algorithm:
    del model
    return fj.algorithms.fedbn(where=where)


BEYOND = {
    "weighted_fisher": Row(
        "Weighted FedAvg (diagonal Fishers)", partial(_by_fisher, fj.fisher.diagonal), ()
    ),
    "weighted_kfac": Row("Weighted FedAvg (K-FAC)", partial(_by_fisher, fj.fisher.kfac), ()),
    "fedfisher_bn": Row("FedFisher (K-FAC) + personal BN", _fedfisher_bn, ()),
    # Two halves of FedBN, to see which does what; the first is SiloBN (Andreux et al., 2020).
    "fedbn_statistics": Row("FedBN, scales averaged", partial(_part_of_fedbn, _is_statistic), ()),
    "fedbn_scales": Row("FedBN, statistics averaged", partial(_part_of_fedbn, _is_scale), ()),
}
"""What the paper does not have."""
METHODS = {"single_set": PERSONAL["single_set"], "fedavg": TABLE["fedavg"]}
METHODS |= PERSONAL | BEYOND
_PAPERS = ("single_set", "fedavg", "fedper", "fedbn", "weighted_fedavg", "weighted_fedbn")
SPLITS = ("pathological", "dirichlet", "domains")


@dataclasses.dataclass(frozen=True)
class Config:
    """Which clients learn what, in how many rounds."""

    table: Literal["cifar10", "cifar100", "digits"] = "digits"
    """Table 1 of the paper, or tables 2 and 3; also chooses the other defaults."""
    splits: tuple[Literal[*SPLITS], ...] = ("domains",)
    """Clients with some of the classes, with Dirichlet shares of them, or with a look of digits."""
    algorithms: Annotated[tuple[str, ...], commands.names(METHODS)] = (
        *_PAPERS,
        *("weighted_fisher", "weighted_kfac", "fedfisher_bn"),
    )
    """Methods."""
    num_clients: int = 20
    """Of the splits by classes."""
    classes: int = 8
    """Of a client of the pathological split."""
    beta: float = 0.8
    """Of the Dirichlet split: of each class over the clients."""
    domains: Annotated[tuple[str, ...], commands.names(LOOKS)] = LOOKS[:5]
    """Of digits, a client each."""
    examples: int = 743
    """Of a client, to train on, at most."""
    tested: int = 2000
    """Of a client, to be judged by, at most."""
    rounds: int = 30
    """Of training and averaging; every client takes part."""
    epochs: int = 1
    """Of local training in a round."""
    learning_rate: float = 0.02
    """Of stochastic gradient descent."""
    momentum: float = 0.0
    """Of stochastic gradient descent."""
    batch_size: int = 32
    """Examples of a step."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the initial model and of training; the split stays, and the first split has them all."""
    temperatures: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    """Each weighted method takes what is best on training data held aside; 1 is the paper's."""
    choosing_rounds: int = 10
    """Of the runs that choose."""
    table3: tuple[int, ...] = (5, 10, 15)
    """Local epochs, with federated averaging; none leaves table 3 out."""
    table3_rounds: int = 10
    """Of table 3."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/personalized")
    """Folder for the results; an unfinished run there continues."""


def default(table: str | None = None) -> Config:
    """Return what is run if nothing else is asked."""
    table = table or "digits"
    check_name("table", table, ("cifar10", "cifar100", "digits"))
    if table == "digits":
        return Config()
    return Config(
        table,
        ("pathological", "dirichlet"),
        (*_PAPERS, "weighted_fisher"),
        classes=8 if table == "cifar10" else 20,
        examples=250,
        tested=500,
        rounds=30,
        learning_rate=0.05,
        table3=(),
    )


class Unit(NamedTuple):
    """What is computed, and written, as a whole."""

    split: str
    algorithm: str
    temperature: float | None
    epochs: int
    seed: int
    rounds: int
    held: bool  # judged by training data held aside


class Point(NamedTuple):
    """One accuracy, a fraction; a line of results.csv. Without a client: the mean over clients."""

    split: str
    algorithm: str
    temperature: float | None
    epochs: int
    seed: int
    rounds: int
    held: bool
    round: int
    client: int | None
    accuracy: float

    @property
    def unit(self) -> Unit:
        """Whose it is."""
        return Unit(*self[:7])


class World(NamedTuple):
    """Clients with their own training and test data, and the network."""

    model: Model
    init: Callable[[Any], Params]
    train: Federation
    test: Federation
    names: Sequence[str]
    shares: np.ndarray  # [M, C], of the classes in their training data
    looks: Sequence[Domain]


def is_weighted(name: str) -> bool:
    """Say whether a method has a temperature."""
    return name.startswith("weighted")


def _chooser(name: str) -> str:
    """Name the method whose temperature a method has: how alike clients are does not change."""
    return "weighted_fedavg" if name == "weighted_fedbn" else name


def choosing(asked: Config) -> list[Unit]:
    """List the runs that choose temperatures."""
    first = asked.splits[0], asked.seeds[0]
    several = len(asked.temperatures) > 1
    names = dict.fromkeys(_chooser(name) for name in asked.algorithms if is_weighted(name))
    return [
        Unit(first[0], name, value, asked.epochs, first[1], asked.choosing_rounds, True)
        for name in names
        for value in asked.temperatures * several
    ]


def chosen(asked: Config, points: Sequence[Point]) -> dict[str, float]:
    """Choose each weighted method's temperature: that of the best accuracy on data held aside."""
    ends = [p for p in points if p.held and p.client is None and p.round == p.rounds]
    best = {}
    for name in filter(is_weighted, asked.algorithms):
        own = {p.temperature: p.accuracy for p in ends if p.algorithm == _chooser(name)}
        best[name] = max(own, key=own.__getitem__) if own else asked.temperatures[0]
    return best


def judging(asked: Config, temperatures: dict[str, float]) -> list[Unit]:
    """List the runs that tables are of; only the first split has all seeds."""
    units = []
    for place, split in enumerate(asked.splits):
        for seed in asked.seeds if place == 0 else asked.seeds[:1]:
            for name in asked.algorithms:
                values = {temperatures[name]} if is_weighted(name) else {None}
                # The paper's.
                values |= {1.0} if is_weighted(name) and name in PERSONAL else set()
                units += [
                    Unit(split, name, value, asked.epochs, seed, asked.rounds, False)
                    for value in sorted(values, reverse=True)
                ]
    units += [
        Unit(asked.splits[0], "fedavg", None, epochs, asked.seeds[0], asked.table3_rounds, False)
        for epochs in asked.table3
    ]
    return units


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
    return World(model, init, *sides, names, shares, looks)


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


def method(unit: Unit, model: Model) -> Algorithm:
    """Make what a unit trains by."""
    options: dict[str, Any] = {}
    if unit.temperature is not None:
        options["temperature"] = unit.temperature
    if unit.algorithm in BEYOND:
        return BEYOND[unit.algorithm].factory(model, **options)
    if unit.algorithm == "fedper":
        options["head"] = HEAD
    return fj.algorithms.make(unit.algorithm, model, **options)


# One object: programs are known by it.
@fj.configuration.cached
def _sgd(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum or None)


def measured(asked: Config, unit: Unit, of: World) -> Iterator[tuple[Point | None, Any]]:
    """Play a run; yield after each round, with every accuracy that is measured, and the info."""
    number = of.train.num_clients
    experiment = fj.rounds.federated(
        of.model,
        method(unit, of.model),
        cohort=number,
        optimizer=_sgd(asked.learning_rate, asked.momentum),
        epochs=unit.epochs,
        batch_size=asked.batch_size,
    )
    key, start_key = jax.random.split(jax.random.key(unit.seed))
    first = experiment.init(of.init(start_key), number)
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


def check(asked: Config) -> None:
    """Refuse what cannot be run."""
    commands.check_list(asked, "splits", "algorithms", "seeds", "temperatures", "domains")
    for name in asked.algorithms:
        check_name("algorithms", name, METHODS)
    for name in asked.domains:
        check_name("domains", name, LOOKS)
    fits = ("domains",) if asked.table == "digits" else SPLITS[:2]
    expected = f"{' or '.join(fits)} for --table {asked.table}"
    commands.check(asked, "splits", expected, lambda split: split in fits)
    total = {"digits": 10, "cifar10": 10, "cifar100": 100}[asked.table]
    expected = f"1 to the {total} classes of {asked.table}"
    commands.check(asked, "classes", expected, lambda number: 1 <= number <= total)
    for option in ("num_clients", "examples", "tested", "rounds", "epochs", "batch_size"):
        commands.check(asked, option, "1 or more", lambda number: number >= 1)
    for option in ("choosing_rounds", "table3", "table3_rounds"):
        commands.check(asked, option, "1 or more", lambda number: number >= 1)
    for option in ("beta", "learning_rate", "temperatures"):
        commands.check(asked, option, "a number above 0", lambda x: 0 < x < float("inf"))
    commands.check(asked, "momentum", "a number from 0 to below 1", lambda x: 0 <= x < 1)
