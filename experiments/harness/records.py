"""Read and write the files of a run: its options (config.json) and its results (results.csv).

A file is replaced as a whole or not at all. A folder belongs to one process at a time, and to one
experiment for ever.
"""

import contextlib
import csv
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
from rich.console import Console

import fisherjax as fj
from experiments.harness import commands, tables

try:
    import fcntl
except ImportError:  # systems without it do not lock folders
    fcntl = None

CONFIG, RESULTS = "config.json", "results.csv"
ONE_SHOT = (
    *("algorithm", "partition_seed", "seed", "round", "client", "split", "metric", "value"),
    *("seconds", "upload_bytes"),
)
FEDERATED = (
    *("algorithm", "local_epochs", "server_learning_rate", "seed", "round", "split", "fraction"),
    *("metric", "value"),
)
WHERE_AND_HOW = (
    *("data_dir", "out", "clients_per_chunk", "seeds_together", "checkpoint_seconds"),
    "keep_models",
)
"""Options that change results only by rounding, so that a run may continue with other values."""
_MOVED = {
    "algorithm": ("algorithms",),
    "mu": ("fedprox.mu",),
    "damping": ("fedfisher_diag.damping", "fedfisher_kfac.damping", "fedfisher_full.damping"),
    "fedlpa_damping": ("fedlpa.damping", "fedlpa_ea.damping", "fedlpa_gd.damping"),
    "fedlpa_balanced": ("fedlpa.balanced", "fedlpa_ea.balanced", "fedlpa_gd.balanced"),
}
"""Current names of options of version 0.1."""


class Row(NamedTuple):
    """One number of a run; a line of results.csv, which has the columns of its command.

    Seconds are those of the clients' summaries and the merge. They include the training if an
    algorithm trains its own clients, and in later rounds. For `local` and `central` they are the
    training of all clients together. The first run of a process includes compilation.
    """

    algorithm: str  # or `local` (a client's own model), `ensemble` (mean of outputs), `central`
    seed: int
    round: int
    split: str  # test, train, the cohort, validation or held_out clients; or traffic
    metric: str  # accuracies are fractions, losses nats of a prediction, traffic bytes of a client
    value: float
    partition_seed: int | None = None
    client: int | None = None  # owner of the model; None for a merged model
    seconds: float | None = None
    upload_bytes: int | None = None
    local_epochs: int | None = None
    server_learning_rate: float | None = None
    fraction: float | None = None  # share of a held-out client's data used for fine-tuning


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to an OSError, because the system's message of a full disk has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file as a whole or not at all; an OSError has the path."""
    partial = path.with_name(f".{path.name}.partial")
    with naming(path):
        try:
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file, like `write_bytes`."""
    write_bytes(path, text.encode())


def write_rows(path: Path, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Write rows with the given columns, like `write_bytes`."""
    write_text(path, tables.csv_text(columns, ([getattr(row, c) for c in columns] for row in rows)))


def read_rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """Read rows that `write_rows` wrote with these columns; return [] if there is no file."""
    if not path.exists():
        return []
    with damage(path), open(path, newline="") as file:
        first, *lines = list(csv.reader(file)) or [[]]
    if tuple(first) != tuple(columns):
        raise ValueError(
            f"{path} does not begin with the columns {','.join(columns)}: it is not of this "
            "command; choose another --out"
        )
    with damage(path):
        return [_row(dict(zip(columns, line, strict=True))) for line in lines]


@contextlib.contextmanager
def folder(out: Path) -> Iterator[None]:
    """Make the folder of a run and lock it, so that no other process writes there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        # The lock is on the folder itself, so no file is left and a killed process frees it.
        held = os.open(out, os.O_RDONLY) if fcntl else None
    except OSError as error:
        raise OSError(f"cannot write to --out {out} ({error}): choose another folder") from error
    with contextlib.ExitStack() as stack:
        if held is not None:
            stack.callback(os.close, held)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise ValueError(
                    f"another process is writing to --out {out}: wait for it, or choose another "
                    "folder"
                ) from error
        yield


def resume(out: Path, config: Any, default: Any, columns: Sequence[str]) -> list[Row]:
    """Return the rows that an unfinished run of the same experiment wrote; see `check_config`."""
    rows = read_rows(out / RESULTS, columns)
    if rows:
        check_config(out, config, default)
    return rows


def check_config(out: Path, config: Any, default: Any, found: str = RESULTS) -> None:
    """Refuse a folder of another experiment, and name the options that differ.

    The default configuration of the data set gives the values of options that did not exist yet;
    `found` names the file in the folder.
    """
    if not (out / CONFIG).exists():
        raise ValueError(
            f"{out} holds a {found} without a {CONFIG}, so its options are unknown: choose "
            "another --out"
        )
    before = commands.contents(default) | _modern(_document(out)["configuration"])
    now = commands.contents(config)

    def counts(name: str) -> bool:  # options of methods count only if the method runs
        method, dot, _ = name.rpartition(".")
        ran = {one for name in now.get("algorithms", ()) for one in name.split("+")}
        return name not in WHERE_AND_HOW and (not dot or method in ran)

    if differing := _differences(before, now, counts):
        raise ValueError(
            f"{out} holds results of another experiment: {'; '.join(differing)}. Choose another "
            "--out, or delete that folder"
        )


def begin(config: Any, program: str, console: Console, done: str) -> None:
    """Print what a continued run has done already, or write the configuration of a new run."""
    if not done:
        write_config(config.out, config, program)
        return
    console.print(f"Continuing {config.out}: {done}.")
    for change in _differences(_document(config.out)["environment"], environment()):
        console.print(f"[yellow]It was started in another environment: {change}.[/]")


def write_config(out: Path, config: Any, program: str) -> None:
    """Write config.json, which is needed to run an experiment again."""
    document = {
        "configuration": commands.contents(config),
        "command": commands.write(config, program),
        "environment": environment(),
    }
    write_text(out / CONFIG, json.dumps(document, indent=2) + "\n")


def write_summary(config: Any, parts: Sequence[str], program: str) -> None:
    """Write summary.md: the results, the command that repeats them, and the environment."""
    environment = _document(config.out)["environment"]
    where = ", ".join(f"{name} {value}" for name, value in environment.items())
    end = ["```", commands.write(config, program), "```", "", f"Run with {where}.", ""]
    write_text(config.out / "summary.md", "\n".join([*parts, *end]))


def environment() -> dict[str, Any]:
    """Return the versions and the device that results depend on."""
    packages, devices = ("jax", "jaxlib", "flax", "optax", "kfac-jax", "numpy"), jax.devices()
    return {
        "python": platform.python_version(),
        "fisherjax": fj.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "backend": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Add the path to an error of a file that cannot be read."""
    try:
        yield
    except (ValueError, csv.Error) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, or choose another --out"
        ) from error


def _document(out: Path) -> dict[str, Any]:
    try:
        document = json.loads((out / CONFIG).read_text())
        return {name: dict(document[name]) for name in ("configuration", "environment")}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{out / CONFIG} is not a configuration that was written here ({error!r}): delete that "
            "folder, or choose another --out"
        ) from error


def _modern(configuration: dict[str, Any]) -> dict[str, Any]:
    """Rename options of earlier versions; a method's option is kept if it is no default."""
    found = {old: value for old, value in configuration.items() if old not in _MOVED}
    if "fisher_kind" in configuration:
        found.setdefault("max_examples", 0)  # earlier versions took all examples
    for old in configuration.keys() & _MOVED.keys():
        value, names, default = configuration[old], _MOVED[old], "default"
        if old == "damping" and "cohort" in configuration:
            # Experiments in rounds had only K-FAC's damping, with the library's default of 1.
            names, default = ("fedfisher_kfac.damping",), 1
        for name in names:
            method, _, option = name.rpartition(".")
            if not method or value not in (default, fj.algorithms.options(method)[option]):
                found[name] = value
    if found.get("partition") == "fedfisher":
        found["partition"] = "dirichlet_of_client"
    return found


def _row(cells: dict[str, str]) -> Row:
    values = {}
    for name, cell in cells.items():
        kind, *_ = get_args(Row.__annotations__[name] | None)
        if not cell and name not in Row._field_defaults:
            raise ValueError(f"a line without {name}")
        values[name] = kind(cell) if cell else None
    return Row(**values)


def _differences(
    before: dict[str, Any], now: dict[str, Any], counts: Callable[[str], Any] = bool
) -> list[str]:
    return [
        f"{name} was {before.get(name, 'the default')}, is {now.get(name, 'the default')}"
        for name in sorted(filter(counts, before.keys() | now.keys()))
        if before.get(name) != now.get(name)
    ]
