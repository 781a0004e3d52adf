"""Define the options of the benchmark, and the defaults of each suite."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import tyro

from experiments.benchmark import compile_tasks
from experiments.harness.commands import Folder, FolderOrNone, check, check_list, check_names

_Own = tyro.conf.arg(help_behavior_hint="(default: the suite's)")
_Number = Annotated[int | None, tyro.conf.arg(metavar="INT"), _Own]
_Numbers = Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ..."), _Own]
_Tasks = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="TASK ..."), _Own]
_Over = tuple[Literal["clients", "parameters", "layers"], ...] | None
_Networks = tuple[Literal["lenet", "cnn"], ...] | None


# tyro shows the strings under the fields as --help and keeps their line breaks: one line each.
@dataclasses.dataclass(frozen=True)
class Config:
    """One run of one suite; an option that is None takes the suite's default."""

    suite: Literal[
        *("train", "fisher", "server", "clients", "pipeline", "pfl", "rounds", "personal"),
        *("population", "devices", "compile", "growth"),
    ] = tyro.MISSING
    """Training, Fishers, server, clients, whole run, rounds, devices, compiling, growth."""
    out: Folder = tyro.MISSING
    """Folder for results.csv, results.json and plot.png; it must not hold results yet."""
    models: Annotated[_Networks, tyro.conf.arg(metavar="{lenet,cnn} ..."), _Own] = None
    """Networks: LeNet on 28 x 28 x 1 or the 940k CNN on 32 x 32 x 3 images."""
    num_clients: _Numbers = None
    """Numbers of clients, which are measured separately."""
    num_examples: _Number = None
    """Number of examples of all clients together, or of a Fisher pass."""
    batch_size: _Number = None
    """Examples of a minibatch."""
    epochs: _Number = None
    """Epochs of a timed training."""
    chunks: _Numbers = None
    """Numbers of clients computed side by side; the default compares one and all."""
    fisher_examples: _Number = None
    """Number of examples of each client for its K-FAC factors."""
    adam_steps: _Number = None
    """Steps of the paper's Adam; fewer than 2000 are extrapolated and marked."""
    uploads: _Numbers = None
    """Numbers of uploads that are merged as a stream."""
    over: Annotated[_Over, tyro.conf.arg(metavar="{clients,parameters,layers} ..."), _Own] = None
    """What grows."""
    widths: _Numbers = None
    """Widths of MLPs, whose numbers of parameters grow."""
    layers: _Numbers = None
    """Numbers of blocks of transformers."""
    dataset: Annotated[Literal["mnist", "digits"] | None, _Own] = None
    """Data of the whole run: MNIST with LeNet, or the digits with a small MLP."""
    data: Literal["auto", "synthetic"] = "auto"
    """Prepared MNIST and CIFAR-10 images if they exist (auto), or synthetic ones."""
    data_dir: FolderOrNone = None
    """Folder of the prepared data sets; otherwise the environment's TFDS_DATA_DIR."""
    repeats: _Number = None
    """Number of timed runs of each case, whose median counts, after one that compiles."""
    seconds_per_case: float = 60.0
    """Seconds after which a case is not repeated any more; the number of runs is reported."""
    tasks: _Tasks = None
    """Tasks whose programs are counted, of those in experiments/benchmark/compile_tasks.py."""
    task_seconds: _Number = None
    """Seconds after which a task is stopped, and left out."""
    matmul_size: _Number = None
    """Size of the matrix product that measures the peak; 2048 on a CPU, 8192 elsewhere."""


_NETWORKS = {"models": ("lenet", "cnn"), "num_examples": None, "batch_size": 64}
_CLIENTS = {"num_clients": (5, 20, 100, 500, 2_000), "uploads": (100, 1_000, 10_000)}
_PEAK = {"matmul_size": None}

# The options of each suite beside those of all suites; None is filled in later.
SUITES: dict[str, dict[str, Any]] = {
    "train": dict(_NETWORKS, num_clients=(5,), epochs=1, chunks=(), repeats=7, **_PEAK),
    "fisher": dict(_NETWORKS, repeats=5, **_PEAK),
    "server": dict(
        _NETWORKS, num_clients=(5,), epochs=1, fisher_examples=256, adam_steps=2_000, repeats=5
    ),
    "clients": dict(_CLIENTS, num_examples=20_000, batch_size=64, epochs=1, chunks=(), repeats=3),
    "pipeline": dict(dataset="mnist", num_clients=(5,), epochs=10, repeats=2),
    "pfl": dict(
        _PEAK, num_clients=(50,), num_examples=2_500, batch_size=10, epochs=1, chunks=(), repeats=5
    ),
    "rounds": dict(num_clients=(20,), num_examples=12_000, batch_size=64, epochs=1, repeats=5),
    "personal": dict(
        num_clients=(100,), num_examples=5_000, batch_size=32, epochs=1, chunks=(1, 10), repeats=5
    ),
    "population": dict(
        num_clients=(3_400,), num_examples=340_000, batch_size=10, epochs=1, repeats=200
    ),
    "devices": dict(_NETWORKS, num_clients=(20,), epochs=1, repeats=5),
    "growth": dict(
        num_clients=(10, 100, 1_000, 10_000),
        over=("clients", "parameters", "layers"),
        widths=(170, 600, 1_200, 4_950),
        layers=(2, 6, 12, 24, 48),
        repeats=2,
    ),
    "compile": dict(tasks=tuple(compile_tasks.STANDARD), task_seconds=600),
}
EXAMPLES = {
    "lenet": {"train": 20_000, "fisher": 5_120, "server": 10_000, "devices": 10_000},
    "cnn": {"train": 4_000, "fisher": 640, "server": 5_000, "devices": 1_000},
}
_ALL_KNOW = ("suite", "out", "data", "data_dir", "seconds_per_case")


def filled(config: Config) -> Config:
    """Check a configuration, and fill in the defaults of its suite."""
    known = SUITES[config.suite]
    given = {name: value for name, value in vars(config).items() if value is not None}
    for name in given:
        if name not in (*_ALL_KNOW, *known):
            options = ", ".join(f"--{option}" for option in known)
            error = f"--{name} means nothing to --suite {config.suite}, which knows {options}"
            raise ValueError(f"{error}. Leave it out".replace("_", "-"))
        check(config, name, "a number above 0", lambda x: not isinstance(x, int | float) or x > 0)
    config = dataclasses.replace(config, **known | given)
    lists = ("models", "num_clients", "uploads", "tasks", "over", "widths", "layers")
    check_list(config, *(name for name in lists if name in known))
    if config.tasks:
        check_names(config, "tasks", compile_tasks.TASKS)
    if config.suite in ("train", "pfl"):
        most = min(config.num_clients)
        check(config, "chunks", f"at most {most}, the number of clients", lambda n: n <= most)
    if config.suite == "devices":
        count = jax.device_count()
        expected = f"multiples of {count}, the number of devices"
        check(config, "num_clients", expected, lambda number: number % count == 0)
    return config
