"""A model for each client: what is compared, and by which runs."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import fisherjax as fj
from experiments.harness import commands
from experiments.harness.config import check_name
from experiments.harness.names import takes
from experiments.personalized.domains import LOOKS
from fisherjax.algorithms import Algorithm, Row
from fisherjax.typing import Model

_WEIGHTED = "weighted_fedavg"
HEAD = "dense3"
"""The layer of the network that FedPer keeps."""
# With drawn labels, of few examples: rounds are many.
_CHEAP: dict[str, Any] = {"kind": fj.fisher.sampled, "max_examples": 200}


def _by_fisher(structure: Callable, model: Model, temperature: float = 1.0) -> Algorithm:
    fisher = partial(structure, kind=_CHEAP["kind"])
    how = {"temperature": temperature, "max_examples": _CHEAP["max_examples"]}
    return fj.algorithms.weighted_fedavg(model, fisher=fisher, **how)


def _fedfisher_bn(model: Model, where: frozenset[str] | None = None) -> Algorithm:
    return fj.algorithms.fedbn(fj.algorithms.fedfisher(model, **_CHEAP), where)


def _part_of_fedbn(statistics: bool, model: Model, where: frozenset[str]) -> Algorithm:
    del model
    chosen = (name for name in where if name.startswith("moments/") == statistics)
    return fj.algorithms.fedbn(where=frozenset(chosen))


_HERE = "this study"
_OWN: dict[str, Any] = {"reads": None, "gives": "model per client"}
BEYOND = {
    "weighted_fisher": Row(
        "Weighted FedAvg (diagonal Fishers)",
        _HERE,
        "weights and diagonal Fisher",
        partial(_by_fisher, fj.fisher.diagonal),
        **_OWN,
    ),
    "weighted_kfac": Row(
        "Weighted FedAvg (K-FAC)",
        _HERE,
        "weights and K-FAC factors",
        partial(_by_fisher, fj.fisher.kfac),
        **_OWN,
    ),
    "fedfisher_bn": Row(
        "FedFisher (K-FAC) + personal BN",
        _HERE,
        "weights but for BatchNorm, and K-FAC factors",
        _fedfisher_bn,
        **_OWN,
    ),
    # Two halves of FedBN, to see which does what; the first is SiloBN.
    "fedbn_statistics": Row(
        "FedBN, scales averaged",
        "Andreux et al., 2020",
        "weights but for BatchNorm's statistics",
        partial(_part_of_fedbn, True),
        **_OWN,
    ),
    "fedbn_scales": Row(
        "FedBN, statistics averaged",
        _HERE,
        "weights but for BatchNorm's scales",
        partial(_part_of_fedbn, False),
        **_OWN,
    ),
}
"""What the paper does not have."""
_PAPERS = ("single_set", "fedavg", "fedper", "fedbn", "weighted_fedavg", "weighted_fedbn")
SPLITS = ("pathological", "dirichlet", "domains")


def methods() -> dict[str, Row]:
    """List what is compared: no communication, federated averaging, and the personal methods."""
    first = {name: fj.algorithms.METHODS[name] for name in _PAPERS[:2]}
    return first | fj.algorithms.personal() | BEYOND


@dataclasses.dataclass(frozen=True)
class Config:
    """Which clients learn what, in how many rounds."""

    table: Literal["cifar10", "cifar100", "digits"] = "digits"
    """Table 1 of the paper, or tables 2 and 3; also chooses the other defaults."""
    splits: tuple[Literal[*SPLITS], ...] = ("domains",)
    """Clients with some of the classes, with Dirichlet shares of them, or with a look of digits."""
    algorithms: Annotated[tuple[str, ...], commands.names(methods())] = (
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


def is_weighted(name: str) -> bool:
    """Say whether a method has a temperature."""
    return "temperature" in takes(methods()[name])


def _chooser(name: str) -> str:
    """Name the method whose temperature a method has: how alike clients are does not change.

    Of the paper's two methods, the one that keeps normalisations has the other's.
    """
    keeps = is_weighted(name) and "where" in takes(methods()[name])
    return _WEIGHTED if keeps else name


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
                values |= {1.0} if is_weighted(name) and name not in BEYOND else set()
                units += [
                    Unit(split, name, value, asked.epochs, seed, asked.rounds, False)
                    for value in sorted(values, reverse=True)
                ]
    units += [
        Unit(asked.splits[0], "fedavg", None, epochs, asked.seeds[0], asked.table3_rounds, False)
        for epochs in asked.table3
    ]
    return units


def method(unit: Unit, model: Model, norms: frozenset[str]) -> Algorithm:
    """Make what a unit trains by; `norms` are the leaves of normalisations."""
    taken = takes(methods()[unit.algorithm])
    options: dict[str, Any] = {"where": norms} if "where" in taken else {}
    if unit.temperature is not None:
        options["temperature"] = unit.temperature
    if unit.algorithm in BEYOND:
        return BEYOND[unit.algorithm].factory(model, **options)
    if "head" in taken:
        options["head"] = HEAD
    return fj.algorithms.make(unit.algorithm, model, **options)


def check(asked: Config) -> None:
    """Refuse what cannot be run."""
    commands.check_list(asked, "splits", "algorithms", "seeds", "temperatures", "domains")
    for name in asked.algorithms:
        check_name("algorithms", name, methods())
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
