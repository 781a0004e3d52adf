"""Define the methods that are compared, the options, and the runs that compare them."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import fisherjax as fj
from experiments.harness import commands, limits, tables
from experiments.harness.names import takes
from experiments.personalized.domains import LOOKS
from fisherjax.algorithms import Algorithm, Row

_WEIGHTED = "weighted_fedavg"
HEAD = "dense3"
"""The layer of the network that FedPer keeps."""
# Cheap Fisher information, with drawn labels and few examples, because there are many rounds.
_CHEAP: dict[str, Any] = {"kind": fj.fisher.sampled, "max_examples": 200}


def _by_fisher(structure: Callable, model: fj.typing.Model, temperature: float = 1.0) -> Algorithm:
    fisher = partial(structure, kind=_CHEAP["kind"])
    how = {"temperature": temperature, "max_examples": _CHEAP["max_examples"]}
    return fj.algorithms.weighted_fedavg(model, fisher=fisher, **how)


def _fedfisher_bn(model: fj.typing.Model, where: frozenset[str] | None = None) -> Algorithm:
    return fj.algorithms.fedbn(fj.algorithms.fedfisher(model, **_CHEAP), where)


def _part_of_fedbn(statistics: bool, model: fj.typing.Model, where: frozenset[str]) -> Algorithm:
    del model
    chosen = (name for name in where if name.startswith("moments/") == statistics)
    return fj.algorithms.fedbn(where=frozenset(chosen))


_HERE = "this study"
_row = partial(Row, reads=None, gives="model per client")
BEYOND = {
    "weighted_fisher": _row(
        *("Weighted FedAvg (diagonal Fishers)", _HERE, "weights and diagonal Fisher"),
        partial(_by_fisher, fj.fisher.diagonal),
    ),
    "weighted_kfac": _row(
        *("Weighted FedAvg (K-FAC)", _HERE, "weights and K-FAC factors"),
        partial(_by_fisher, fj.fisher.kfac),
    ),
    "fedfisher_bn": _row(
        *("FedFisher (K-FAC) + personal BN", _HERE, "weights but for BatchNorm, and K-FAC factors"),
        _fedfisher_bn,
    ),
    # The two halves of FedBN, to separate their effects; the first is SiloBN.
    "fedbn_statistics": _row(
        *("FedBN, scales averaged", "Andreux et al., 2020"),
        *("weights but for BatchNorm's statistics", partial(_part_of_fedbn, True)),
    ),
    "fedbn_scales": _row(
        *("FedBN, statistics averaged", _HERE, "weights but for BatchNorm's scales"),
        partial(_part_of_fedbn, False),
    ),
}
"""Methods that the paper does not have."""
_PAPERS = ("single_set", "fedavg", "fedper", "fedbn", "weighted_fedavg", "weighted_fedbn")
SPLITS = ("pathological", "dirichlet", "domains")


def methods() -> dict[str, Row]:
    """Return the methods: no communication, federated averaging, and the personal methods."""
    first = {name: fj.algorithms.METHODS[name] for name in _PAPERS[:2]}
    return first | fj.algorithms.personal() | BEYOND


@dataclasses.dataclass(frozen=True)
class Config(commands.Imports):
    """Clients, methods, rounds and training."""

    table: Literal["cifar10", "cifar100", "digits"] = "digits"
    """Table 1 of the paper, or tables 2 and 3 (digits); also sets the other defaults."""
    splits: tuple[Literal[*SPLITS], ...] = ("domains",)
    """Splits: some classes a client, Dirichlet shares of classes, or one domain a client."""
    algorithms: Annotated[tuple[str, ...], commands.names(methods())] = (
        *_PAPERS,
        *("weighted_fisher", "weighted_kfac", "fedfisher_bn"),
    )
    """Methods that are compared."""
    num_clients: int = 20
    """Number of clients of the splits by classes."""
    classes: int = 8
    """Number of classes of a client in the pathological split."""
    beta: float = 0.8
    """Dirichlet parameter of the split of each class over the clients."""
    domains: Annotated[tuple[str, ...], commands.names(LOOKS)] = LOOKS[:5]
    """Domains of digits, one for each client."""
    examples: int = 743
    """Largest number of training examples of a client."""
    tested: int = 2000
    """Largest number of test examples of a client."""
    rounds: int = 30
    """Rounds of training and averaging; every client takes part in each."""
    epochs: int = 1
    """Epochs of local training in a round."""
    learning_rate: float = 0.02
    """Step size of SGD."""
    momentum: float = 0.0
    """Momentum of SGD."""
    batch_size: int = 32
    """Examples of a minibatch."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the initial model and of training; splits after the first take the first seed."""
    temperatures: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    """Temperatures from which held-out training data choose; the paper's is 1."""
    choosing_rounds: int = 10
    """Rounds of the runs that choose temperatures."""
    table3: tuple[int, ...] = (5, 10, 15)
    """Local epochs of FedAvg in table 3; none leaves the table out."""
    table3_rounds: int = 10
    """Rounds of table 3."""
    own_statistics: bool = False
    """Test models with BatchNorm's statistics of the client's own training data."""
    data_dir: commands.FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: commands.Folder = Path("runs/personalized")
    """Folder for the results; an unfinished run there continues."""


def default(table: str | None = None) -> Config:
    """Return the default configuration of a table."""
    table = table or "digits"
    commands.check_name("table", table, ("cifar10", "cifar100", "digits"))
    if table == "digits":
        return Config()
    how = {"classes": 8 if table == "cifar10" else 20, "learning_rate": 0.05, "table3": ()}
    methods = (*_PAPERS, "weighted_fisher")
    return Config(table, ("pathological", "dirichlet"), methods, examples=250, tested=500, **how)


class Unit(NamedTuple):
    """One run of rounds, which is computed and written as a whole."""

    split: str
    algorithm: str
    temperature: float | None
    epochs: int
    seed: int
    rounds: int
    held: bool  # whether clients are tested on held-out training data


class Measurement(NamedTuple):
    """One accuracy, a fraction; see `studies`. Without a client it is the mean over clients."""

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
        """The unit that the measurement belongs to."""
        return Unit(*self[:7])


def is_weighted(name: str) -> bool:
    """Return whether a method has a temperature."""
    return "temperature" in takes(methods()[name])


def _chooser(name: str) -> str:
    """Return the name of the method whose temperature is also that of the given method.

    A method that keeps normalisations takes the temperature of weighted FedAvg, because both
    measure the similarity of clients alike.
    """
    keeps = is_weighted(name) and "where" in takes(methods()[name])
    return _WEIGHTED if keeps else name


def choosing(asked: Config) -> list[Unit]:
    """List the runs that choose temperatures, on held-out training data."""
    first = asked.splits[0], asked.seeds[0]
    several = len(asked.temperatures) > 1
    names = dict.fromkeys(_chooser(name) for name in asked.algorithms if is_weighted(name))
    return [
        Unit(first[0], name, value, asked.epochs, first[1], asked.choosing_rounds, True)
        for name in names
        for value in asked.temperatures * several
    ]


def chosen(asked: Config, measured: Sequence[Measurement]) -> dict[str, float]:
    """Return each weighted method's temperature, the best on held-out training data."""
    ends = [x for x in measured if x.held and x.client is None and x.round == x.rounds]
    best = {}
    for name in filter(is_weighted, asked.algorithms):
        found = {x.temperature: x.accuracy for x in ends if x.algorithm == _chooser(name)}
        best[name] = max(found, key=lambda x: tables.rank(found[x]), default=asked.temperatures[0])
    return best


def rounds_measured(unit: Unit) -> list[int]:
    """Return the rounds of a unit after which models are tested, about ten and the last."""
    every = max(1, unit.rounds // 10)
    numbers = range(1, unit.rounds + 1)
    return [n for n in numbers if n == 1 or n % every == 0 or n == unit.rounds]


def sizes(asked: Config, units: Sequence[Unit]) -> dict[Unit, int]:
    """Return the number of measurements of each unit: means, and all clients in the end."""
    number = {"domains": len(asked.domains)}
    each = {unit: number.get(unit.split, asked.num_clients) for unit in units}
    return {unit: len(rounds_measured(unit)) + clients for unit, clients in each.items()}


def testing(asked: Config, temperatures: dict[str, float]) -> list[Unit]:
    """List the runs of the tables; only the first split has all seeds."""
    units = []
    for place, split in enumerate(asked.splits):
        for seed in asked.seeds if place == 0 else asked.seeds[:1]:
            for name in asked.algorithms:
                values = {temperatures[name]} if is_weighted(name) else {None}
                # The paper's methods also run with the paper's temperature.
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


def method(unit: Unit, model: fj.typing.Model, norms: frozenset[str]) -> Algorithm:
    """Make the algorithm of a unit; `norms` are names of the leaves of normalisations."""
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
    """Refuse options that cannot be run."""
    limits.check_options(asked)
    commands.check_names(asked, "algorithms", methods())
    commands.check_names(asked, "domains", LOOKS)
    fits = ("domains",) if asked.table == "digits" else SPLITS[:2]
    expected = f"{' or '.join(fits)} for --table {asked.table}"
    commands.check(asked, "splits", expected, lambda split: split in fits)
    total = {"digits": 10, "cifar10": 10, "cifar100": 100}[asked.table]
    expected = f"1 to the {total} classes of {asked.table}"
    commands.check(asked, "classes", expected, lambda number: 1 <= number <= total)
