"""What the benchmark can be told, and what each suite measures when it is told nothing."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro

Model = Literal["lenet", "cnn"]
Suite = Literal["train", "fisher", "server", "clients", "pipeline", "pfl", "rounds", "devices"]


@dataclasses.dataclass(frozen=True)
class Config:
    """One run of one suite; what is None takes the suite's own value."""

    # tyro shows these strings as --help and keeps their line breaks: one line each.
    suite: Suite
    """Training, Fisher passes, the server, growth with clients, a whole run, rounds, devices."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """Folder for results.csv, results.json and plot.png; it must not hold results yet."""
    models: tuple[Model, ...] | None = None
    """LeNet on 28 x 28 x 1 or the 940k CNN on 32 x 32 x 3 images."""
    num_clients: tuple[int, ...] | None = None
    """How many clients; each number is measured on its own."""
    num_examples: int | None = None
    """Examples of all clients together, or of a Fisher pass."""
    batch_size: int | None = None
    """Examples of a minibatch."""
    epochs: int | None = None
    """Epochs of a timed training."""
    chunks: tuple[int, ...] | None = None
    """Clients computed side by side; otherwise one, and all of them."""
    fisher_examples: int | None = None
    """Examples of each client for its K-FAC factors."""
    adam_steps: int | None = None
    """Steps of the paper's Adam; fewer than its 2000 are extrapolated, and marked."""
    uploads: tuple[int, ...] | None = None
    """How many uploads to merge as a stream."""
    dataset: Literal["mnist", "digits"] | None = None
    """What the whole run learns: MNIST with LeNet, or the digits with a small MLP."""
    data: Literal["auto", "synthetic"] = "auto"
    """Prepared MNIST and CIFAR-10 images where they are there, or made-up ones."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    repeats: int | None = None
    """Timed runs of each case, whose median counts; one more comes before, to compile."""
    seconds_per_case: float = 60.0
    """A case that has taken this long is repeated no more; the number of runs is reported."""
    matmul_size: int | None = None
    """Of the matrix product that measures the peak; otherwise 2048 on a CPU, 8192 elsewhere."""


# Every option that a suite knows, beside those that all know.
SUITES: dict[str, dict[str, Any]] = {
    "train": {
        "models": ("lenet", "cnn"),
        "num_clients": (5,),
        "num_examples": {"lenet": 20_000, "cnn": 4_000},
        "batch_size": 64,
        "epochs": 1,
        "chunks": (),
        "repeats": 7,
        "matmul_size": None,
    },
    "fisher": {
        "models": ("lenet", "cnn"),
        "num_examples": {"lenet": 5_120, "cnn": 640},
        "batch_size": 64,
        "repeats": 5,
        "matmul_size": None,
    },
    "server": {
        "models": ("lenet", "cnn"),
        "num_clients": (5,),
        "num_examples": {"lenet": 10_000, "cnn": 5_000},
        "batch_size": 64,
        "epochs": 1,
        "fisher_examples": 256,
        "adam_steps": 2_000,
        "repeats": 5,
    },
    "clients": {
        "num_clients": (5, 20, 100, 500, 2_000),
        "num_examples": 20_000,
        "batch_size": 64,
        "epochs": 1,
        "chunks": (),
        "uploads": (100, 1_000, 10_000),
        "repeats": 3,
    },
    "pipeline": {"dataset": "mnist", "num_clients": (5,), "epochs": 10, "repeats": 2},
    "pfl": {
        "num_clients": (50,),
        "num_examples": 2_500,
        "batch_size": 10,
        "epochs": 1,
        "chunks": (),
        "repeats": 5,
        "matmul_size": None,
    },
    "devices": {
        "models": ("lenet", "cnn"),
        "num_clients": (20,),
        "num_examples": {"lenet": 10_000, "cnn": 1_000},
        "batch_size": 64,
        "epochs": 1,
        "repeats": 5,
    },
    "rounds": {
        "num_clients": (20,),
        "num_examples": 12_000,
        "batch_size": 64,
        "epochs": 1,
        "repeats": 5,
    },
}
_ALL_KNOW = ("suite", "out", "data", "data_dir", "seconds_per_case")


def parse(arguments: Sequence[str], description: str) -> Config:
    """Read the command line.

    Args:
        arguments: without the name of the program.
        description: what `--help` says first.

    Returns:
        The checked configuration, without None but where the machine decides.

    Raises:
        ValueError: if an option has a value that it cannot have, or the suite does not know it.
        SystemExit: for `--help` and for options that do not exist.
    """
    config = tyro.cli(
        Config,
        prog="python -m experiments.benchmark",
        args=list(arguments),
        description=description,
    )
    return filled(config)


def filled(config: Config) -> Config:
    """Check a configuration and fill in what the suite measures by itself.

    Args:
        config: any configuration.

    Returns:
        The same, with the suite's values in place of None.

    Raises:
        ValueError: naming the option, what was given and what was expected.
    """
    known = SUITES[config.suite]
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        if field.name not in (*_ALL_KNOW, *known) and value is not None:
            raise ValueError(
                f"{_option(field.name)} means nothing to --suite {config.suite}, which knows "
                f"{', '.join(map(_option, known))}. Leave it out"
            )
        _check(field.name, value)
    if config.suite in ("train", "pfl"):
        _check_chunks(config.chunks or (), config.num_clients or known["num_clients"])
    if config.suite == "devices":
        _check_devices(config.num_clients or known["num_clients"])
    missing = {name: value for name, value in known.items() if getattr(config, name) is None}
    examples = missing.get("num_examples")
    if isinstance(examples, dict):  # each model has its own number: see `num_examples`
        del missing["num_examples"]
    return dataclasses.replace(config, **missing)


def num_examples(config: Config, model: str) -> int:
    """Return how many examples a model is measured with."""
    return config.num_examples or SUITES[config.suite]["num_examples"][model]


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def _check_chunks(chunks: tuple[int, ...], num_clients: tuple[int, ...]) -> None:
    if chunks and max(chunks) > min(num_clients):
        raise ValueError(
            f"--chunks is {' '.join(map(str, chunks))}, expected at most {min(num_clients)}, the "
            "number of clients"
        )


def _check_devices(num_clients: tuple[int, ...]) -> None:
    devices = jax.device_count()
    if any(number % devices for number in num_clients):
        raise ValueError(
            f"--num-clients is {' '.join(map(str, num_clients))}, expected multiples of {devices}, "
            "the number of devices"
        )


def _check(field: str, value: Any) -> None:
    if field == "models" and value is not None and len(set(value)) != len(value):
        raise ValueError(f"--models is {' '.join(value)}, expected each only once")
    if field in ("models", "num_clients", "uploads") and value == ():
        raise ValueError(f"{_option(field)} is empty, expected at least one")
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, (int, float)) and number <= 0:
            raise ValueError(f"{_option(field)} is {number}, expected a number above 0")
