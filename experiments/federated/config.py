"""What a federated experiment can be told: options, defaults of each data set, checks."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments import commands
from experiments.choices import CHOICES, check_name

DATASETS = ("digits", "mnist", "cifar10", "tiny_shakespeare")
SERVER_OPTIMIZERS = ("none", "sgd", "momentum", "adam", "yogi", "adagrad")
_CHOICES = {
    "dataset": DATASETS,
    "algorithm": CHOICES["algorithms"],
    "server_optimizer": SERVER_OPTIMIZERS,
}
PROGRAM = "experiments.federated"
WHERE_AND_HOW = ("data_dir", "out", "clients_per_chunk", "checkpoint_seconds", "keep_models")
"""Options that change no result beyond rounding: a run may continue with others."""


def _names(field: str) -> Any:
    return tyro.conf.arg(metavar="{" + ",".join(_CHOICES[field]) + "}")


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment; the defaults are those of digits, `defaults` knows the others."""

    # tyro shows these strings as --help and keeps their line breaks: one line each.
    dataset: Annotated[str, _names("dataset")] = "digits"
    """What to learn; also chooses the other defaults: see `--dataset mnist --help`."""
    algorithm: Annotated[tuple[str, ...], _names("algorithm")] = ("fedavg", "fedfish")
    """How updates are merged; fedfish_last_epoch takes its squares while clients train."""
    rounds: int = 20
    """Of communication, for each algorithm."""
    total_epochs: int | None = None
    """In place of --rounds: so many local epochs in all, whatever --local-epochs is."""
    cohort: int = 10
    """Clients that take part in a round."""
    num_clients: int = 30
    """That train; tiny_shakespeare has as many as there are roles."""
    validation_clients: int = 5
    """That choose among server learning rates."""
    held_out_clients: int = 5
    """That the model is personalised on."""
    held_out_plays: int = 0
    """Of tiny_shakespeare: hold out all roles of so many plays instead (transfer)."""
    alpha: float = 0.1
    """Of the Dirichlet shares of the classes: 0.05 gives a client one or two, 100 all."""
    partition_seed: int = 3
    """Of the split and of who is held out."""
    local_epochs: tuple[int, ...] = (1, 4)
    """Passes of a client over its data in a round; each is an experiment of its own."""
    learning_rate: float = 0.05
    """Of the clients' stochastic gradient descent."""
    momentum: float = 0.0
    """Of the clients."""
    batch_size: int = 10
    """Examples of a local step."""
    server_optimizer: Annotated[str, _names("server_optimizer")] = "none"
    """On the pseudo-gradient; none takes the merged model as it is."""
    server_learning_rate: tuple[float, ...] = (1.0,)
    """Of several, validation clients choose one for each algorithm, with the first seed."""
    damping: float = 1.0
    """Of fedfisher_kfac, relative to each layer's scale."""
    mu: float = 1e-3
    """Of fedprox: how strongly clients are pulled back to where they started."""
    seeds: tuple[int, ...] = (0,)
    """Of the initial model, of cohorts and minibatches."""
    personal_epochs: int = 1
    """Of fine-tuning on held-out clients."""
    eval_every: int = 1
    """Local epochs between two measurements, over all rounds; after the last round always."""
    barrier: bool = True
    """Also measure the client-server barrier; each takes two passes over the cohort's data."""
    clients_per_chunk: int | None = None
    """Clients computed side by side; otherwise one on a CPU and all elsewhere."""
    checkpoint_seconds: float = 30.0
    """Between two checkpoints; 0 saves after every round."""
    keep_models: bool = True
    """Leave the final models in models/."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs/federated")
    """Folder for the results; an unfinished run there continues."""


_IMAGES = {
    "rounds": 40,
    "cohort": 20,
    "num_clients": 100,
    "validation_clients": 10,
    "held_out_clients": 10,
    "batch_size": 32,
}
_DEFAULTS = {
    "digits": {},
    "mnist": _IMAGES,
    "cifar10": _IMAGES,
    "tiny_shakespeare": {
        "rounds": 20,
        "cohort": 16,
        # The loss of a window is a sum over its 80 characters: 0.1 for their mean.
        "learning_rate": 0.00125,
        "momentum": 0.9,
        "batch_size": 8,
        "validation_clients": 10,
        "held_out_clients": 20,
        "personal_epochs": 4,
    },
}


def defaults(dataset: str) -> Config:
    """Return the configuration of a data set for which nothing else was asked.

    Args:
        dataset: its name.

    Returns:
        The configuration.

    Raises:
        ValueError: if the name is unknown; the message holds the nearest one.

    Example:
        >>> defaults("mnist").cohort
        20
    """
    check_name("dataset", dataset, DATASETS)
    return Config(dataset=dataset, **_DEFAULTS[dataset])


def parse(arguments: Sequence[str], description: str) -> Config:
    """Read the command line.

    Args:
        arguments: without the name of the program.
        description: what `--help` says first.

    Returns:
        The checked configuration.

    Raises:
        ValueError: if an option has a value that it cannot have.
        SystemExit: for `--help` and for options that do not exist.
    """
    config = commands.read(
        arguments, PROGRAM, description, lambda dataset: defaults(dataset or Config.dataset)
    )
    check(config)
    return config


def check(config: Config) -> None:
    """Refuse values that no experiment can have.

    Args:
        config: any configuration.

    Raises:
        ValueError: naming the option, what was given and what was expected.

    Example:
        >>> check(Config(cohort=31))
        Traceback (most recent call last):
        ValueError: --cohort is 31, expected 1 to the 30 clients
    """
    for field, known in _CHOICES.items():
        values = getattr(config, field)
        for value in values if isinstance(values, tuple) else (values,):
            check_name(field, value, known)
    counts = ["rounds", "cohort", "batch_size", "personal_epochs", "eval_every", "num_clients"]
    counts += ["validation_clients", "held_out_clients"]
    for field in counts:
        _check(config, field, "a whole number from 1 up", getattr(config, field) >= 1)
    for field in ("alpha", "learning_rate"):
        _check(config, field, "a number above 0", 0 < getattr(config, field) < math.inf)
    for field in ("mu", "damping", "checkpoint_seconds", "held_out_plays"):
        _check(config, field, "a number from 0 up", 0 <= getattr(config, field) < math.inf)
    _check(config, "momentum", "a number from 0 to below 1", 0 <= config.momentum < 1)
    for field in ("algorithm", "local_epochs", "server_learning_rate", "seeds"):
        values = getattr(config, field)
        _check(config, field, "one or more, each once", values and len({*values}) == len(values))
    _check(config, "local_epochs", "whole numbers from 1 up", min(config.local_epochs) >= 1)
    rates = config.server_learning_rate
    _check(config, "server_learning_rate", "numbers above 0", 0 < min(rates) <= max(rates) < 1e9)
    if config.server_optimizer == "none":
        expected = "1.0 alone, as --server-optimizer none takes no step"
        _check(config, "server_learning_rate", expected, rates == (1.0,))
    if config.total_epochs is not None:
        fits = all(config.total_epochs % own == 0 for own in config.local_epochs)
        expected = f"a multiple of each of --local-epochs {' '.join(map(str, config.local_epochs))}"
        _check(config, "total_epochs", expected, config.total_epochs >= 1 and fits)
    if config.dataset != "tiny_shakespeare":
        expected = f"1 to the {config.num_clients} clients"
        _check(config, "cohort", expected, config.cohort <= config.num_clients)
        _check(config, "held_out_plays", "0: these data have no plays", config.held_out_plays == 0)


def rounds(config: Config, local_epochs: int) -> int:
    """Count the rounds of an experiment with so many local epochs.

    Args:
        config: any configuration.
        local_epochs: of a round.

    Returns:
        The number.

    Example:
        >>> rounds(Config(total_epochs=160), 16)
        10
    """
    return config.rounds if config.total_epochs is None else config.total_epochs // local_epochs


def measured(config: Config, local_epochs: int, number: int) -> bool:
    """Say whether the model is measured after a round.

    Args:
        config: any configuration.
        local_epochs: of a round.
        number: of rounds played.

    Returns:
        Whether those rounds crossed a multiple of `eval_every` local epochs, or were the last.

    Example:
        >>> [n for n in range(1, 9) if measured(Config(rounds=8, eval_every=10), 4, n)]
        [3, 5, 8]
    """
    crossed = number * local_epochs % config.eval_every < local_epochs
    return crossed or number == rounds(config, local_epochs)


def command(config: Config) -> str:
    """Write the command that runs a configuration again, every option spelled out."""
    return commands.write(config, PROGRAM)


def _check(config: Config, field: str, expected: str, accepted: Any) -> None:
    if not accepted:
        value = getattr(config, field)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        raise ValueError(f"--{field.replace('_', '-')} is {shown}, expected {expected}")
