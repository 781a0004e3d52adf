"""What an experiment can be told: the options of the command, their defaults and their checks."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from experiments import commands
from experiments.choices import CHOICES, check_name
from experiments.commands import contents

PROGRAM = "experiments.one_shot"
WHERE_AND_HOW = ("data_dir", "out", "clients_per_chunk")
"""Options that change no result beyond rounding: a run may continue with others."""


def _names(field: str) -> Any:
    return tyro.conf.arg(metavar="{" + ",".join(CHOICES[field]) + "}")


Names = tuple[str, ...]
_LATER = (
    *("beta", "min_size", "classes_per_client", "weight_decay", "augment_border", "normalize"),
    *("fedlpa_damping", "fedlpa_balanced", "mu", "then_rounds", "central"),
)
"""Options that the first runs did not have; their defaults are what those runs did."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment; the defaults are those of the digits demo, `defaults` knows the others."""

    # tyro shows these strings as --help and keeps their line breaks: one line each.
    dataset: Annotated[str, _names("dataset")] = "digits"
    """What to learn; also chooses the other defaults: see `--dataset mnist --help`."""
    model: Annotated[str, _names("model")] = "mlp"
    """The network; lenet and cnn take images of at least 16 x 16 pixels."""
    num_clients: int = 5
    """Over how many clients the training data are split."""
    partition: Annotated[str, _names("partition")] = "fedfisher"
    """How: Dirichlet shares of each client (fedfisher) or class (niid_bench), classes, or iid."""
    alpha: float = 0.1
    """Of fedfisher: 0.05 gives a client one or two classes, 100 nearly equal shares."""
    beta: float = 0.1
    """Of niid_bench: at 0.01 a class goes to one client or two, at 100 to all equally."""
    min_size: int = 10
    """Of niid_bench: it is drawn again until every client has so many examples."""
    classes_per_client: int = 2
    """Of classes_per_client: how many classes each client owns ("#C")."""
    partition_seeds: tuple[int, ...] = (0, 1, 2, 3)
    """One split for each; they have nothing to do with the seeds of training."""
    epochs: int = 30
    """Passes of every client over its own data."""
    learning_rate: float = 0.05
    """Of stochastic gradient descent."""
    momentum: float = 0.9
    """0 is plain stochastic gradient descent."""
    weight_decay: float = 0.0
    """Times the weights, added to every gradient."""
    batch_size: int = 32
    """Examples of a training step."""
    augment: bool = False
    """Crop and mirror training images at random; never for the Fisher information."""
    augment_border: Annotated[str, _names("augment_border")] = "constant"
    """What crops see beyond the edge: zeros, or the image mirrored there (reflect)."""
    normalize: bool = True
    """Subtract the mean of the pixels and divide by their deviation, after scaling to [0, 1]."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the initial model and of training; each is trained once on each split."""
    algorithms: Annotated[Names, _names("algorithms")] = (
        *("fedavg", "fisher_merge", "regmean", "fedfisher_diag", "fedfisher_kfac"),
    )
    """How to merge; fedfisher_full is for a few thousand parameters, fedlpa_gd is slow."""
    fisher_kind: Annotated[str, _names("fisher_kind")] = "true"
    """Labels of the Fisher: expected under the model (true), drawn from it, or the data's."""
    damping: float | Literal["default"] = "default"
    """Of fedfisher_*, relative to each layer's scale; default: 1 for K-FAC, 0 for others."""
    solver: Annotated[str, _names("solver")] = "cg"
    """Of fedfisher_*; adam is the paper's, which needs 500 validation images."""
    fedlpa_damping: float = 1e-3
    """Of fedlpa*, lambda: absolute, its square root reaches each Kronecker factor."""
    fedlpa_balanced: bool = False
    """Share the damping of fedlpa* out by the traces of the two factors; otherwise equally."""
    mu: float = 1e-3
    """Of fedprox: how strongly clients are pulled back to where they started."""
    then_rounds: int = 0
    """Rounds of federated averaging after each merged model."""
    central: bool = True
    """Also train a model on all the data, the ceiling."""
    on_nonfinite: Annotated[str, _names("on_nonfinite")] = "raise"
    """Stop when a client diverges, or leave it out of every merge."""
    clients_per_chunk: int | Literal["auto"] = "auto"
    """Clients computed side by side; auto is one on a CPU and all elsewhere."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder for the results, otherwise runs/NAME; an unfinished run there continues."""


_PAPER = {
    "partition_seeds": (3,),
    "epochs": 30,
    "learning_rate": 0.01,
    "momentum": 0.9,
    "batch_size": 64,
}
_DEFAULTS = {
    "digits": {},
    "mnist": _PAPER | {"model": "lenet"},
    "fashion_mnist": _PAPER | {"model": "lenet"},
    "cifar10": _PAPER | {"model": "cnn", "augment": True},
    "cifar100": _PAPER | {"model": "cnn", "augment": True},
    "svhn_cropped": _PAPER | {"model": "cnn"},
}


def defaults(dataset: str) -> Config:
    """Return the configuration of a data set for which nothing else was asked.

    Args:
        dataset: its name.

    Returns:
        The demo's configuration for digits, that of the FedFisher paper for the others.

    Raises:
        ValueError: if the name is unknown; the message holds the nearest one.

    Example:
        >>> defaults("mnist").model
        'lenet'
    """
    check_name("dataset", dataset)
    return Config(dataset=dataset, **_DEFAULTS[dataset])


def parse(arguments: Sequence[str], description: str) -> Config:
    """Read the command line.

    Args:
        arguments: without the name of the program.
        description: what `--help` says first.

    Returns:
        The checked configuration, with `out` filled in.

    Raises:
        ValueError: if an option has a value that it cannot have.
        SystemExit: for `--help` and for options that do not exist.
    """
    config = commands.read(
        arguments,
        PROGRAM,
        description,
        lambda dataset: defaults(dataset or Config.dataset),
    )
    check(config)
    if config.out is None:
        config = dataclasses.replace(config, out=Path("runs") / name(config))
    return config


def check(config: Config) -> None:
    """Refuse values that no experiment can have.

    Args:
        config: any configuration.

    Raises:
        ValueError: naming the option, what was given and what was expected.

    Example:
        >>> check(dataclasses.replace(Config(), model="lenett"))
        Traceback (most recent call last):
        ValueError: --model is 'lenett', did you mean 'lenet'? Known: mlp, ...
    """
    for field in CHOICES:
        values = getattr(config, field)
        for value in values if isinstance(values, tuple) else (values,):
            check_name(field, value)
    for field in ("alpha", "beta", "learning_rate"):
        _check_number(config, field, "a number above 0", lambda x: 0 < x < math.inf)
    for field in ("num_clients", "classes_per_client", "epochs", "batch_size"):
        _check_number(config, field, "a whole number from 1 up", lambda x: x >= 1)
    for field in ("min_size", "then_rounds"):
        _check_number(config, field, "a whole number from 0 up", lambda x: x >= 0)
    for field in ("weight_decay", "fedlpa_damping", "mu"):
        _check_number(config, field, "a number from 0 up", _is_not_negative)
    _check_number(config, "momentum", "a number from 0 to below 1", lambda x: 0 <= x < 1)
    if config.damping != "default":
        _check_number(config, "damping", "default or a number from 0 up", _is_not_negative)
    if config.clients_per_chunk != "auto":
        expected = f"auto or a whole number from 1 to the {config.num_clients} clients"
        within = range(1, config.num_clients + 1)
        _check_number(config, "clients_per_chunk", expected, lambda x: x in within)
    for field in ("partition_seeds", "seeds", "algorithms"):
        _check_list(field, getattr(config, field))


def name(config: Config) -> str:
    """Name an experiment by what it is and a digest of all that can change its result.

    Args:
        config: any configuration.

    Returns:
        A name for its folder.

    Example:
        >>> name(Config()).rpartition("-")[0]
        'digits-mlp-m5-fedfisher0.1'
    """
    values = {k: v for k, v in contents(config).items() if k not in WHERE_AND_HOW}
    # A run from before these options existed keeps its name.
    added = {field: values.pop(field) for field in _LATER}
    changed = {field: value for field, value in added.items() if value != getattr(Config, field)}
    told = json.dumps(values | changed, sort_keys=True)
    digest = hashlib.sha256(told.encode()).hexdigest()[:6]
    how = "".join(split(config))
    return f"{config.dataset}-{config.model}-m{config.num_clients}-{how}-{digest}"


def split(config: Config) -> tuple[str, str]:
    """Name how data are split, and by which number.

    Args:
        config: any configuration.

    Returns:
        The partition, and its number as text, empty where it has none.

    Example:
        >>> split(Config(partition="niid_bench", beta=0.5))
        ('niid_bench', '0.5')
    """
    number = {
        "fedfisher": f"{config.alpha:g}",
        "niid_bench": f"{config.beta:g}",
        "classes_per_client": str(config.classes_per_client),
    }
    return config.partition, number.get(config.partition, "")


def command(config: Config) -> str:
    """Write the command that runs a configuration again, every option spelled out."""
    return commands.write(config, PROGRAM)


def _is_not_negative(x: float) -> bool:
    return 0 <= x < math.inf


def _check_number(config: Config, field: str, expected: str, accept: Any) -> None:
    value = getattr(config, field)
    if not accept(value):
        raise ValueError(f"--{field.replace('_', '-')} is {value}, expected {expected}")


def _check_list(field: str, values: tuple) -> None:
    option = f"--{field.replace('_', '-')}"
    if not values:
        raise ValueError(f"{option} is empty, expected at least one")
    if len(set(values)) < len(values):
        raise ValueError(f"{option} is {' '.join(map(str, values))}, expected each only once")
    if field != "algorithms" and not all(0 <= value < 2**32 for value in values):
        raise ValueError(f"{option} is {' '.join(map(str, values))}, expected 0 to 2**32 - 1 each")
