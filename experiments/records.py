"""The files of a run: what was asked (config.json) and what came out (results.csv)."""

import csv
import importlib.metadata
import io
import json
import os
import platform
import tempfile
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import fisherjax as fj
from experiments.commands import contents
from experiments.config import WHERE_AND_HOW, Config, command

CONFIG, RESULTS, LABELS = "config.json", "results.csv", "label_counts.csv"


class Row(NamedTuple):
    """One number of a run; a line of results.csv.

    Attributes:
        algorithm: how models were merged, or what they are compared with: `local` (each client's
            own model), `ensemble` (the mean of their outputs), `central` (trained on all data).
        partition_seed: of the split; None for `central`, which has none.
        seed: of the initial model and of training.
        round: communication rounds until then.
        client: whose model; None for a merged one.
        split: of the data that were used to measure.
        metric: what was measured.
        value: accuracy is a fraction.
        seconds: of the clients' summaries and the merge, and of the training where an algorithm
            trains its own clients or in a later round; for `local` and `central` of the training,
            of all clients together. The first run of a session includes compilation.
        upload_bytes: what one client sends.
    """

    algorithm: str
    partition_seed: int | None
    seed: int
    round: int
    client: int | None
    split: str
    metric: str
    value: float
    seconds: float | None
    upload_bytes: int | None


Unit = tuple[int | None, int]
"""(partition seed, seed): what is computed, and written, as a whole."""


def units(config: Config) -> list[Unit]:
    """List what has to be computed: each seed on each split, then each seed on all the data.

    The ceilings, if wanted, come last: an interrupted run has merged what it could.

    Args:
        config: the experiment.

    Returns:
        Pairs of a partition seed, None for all the data, and a seed.
    """
    splits = [(split, seed) for seed in config.seeds for split in config.partition_seeds]
    return splits + [(None, seed) for seed in config.seeds if config.central]


def finished(rows: Iterable[Row]) -> set[Unit]:
    """Return the units that rows belong to; files never hold a part of one."""
    return {(row.partition_seed, row.seed) for row in rows}


def resume(out: Path, config: Config) -> list[Row]:
    """Open the folder of a run, before anything expensive happens.

    Args:
        out: the folder; made if it does not exist.
        config: what is going to be run.

    Returns:
        The rows that the same experiment has left there.

    Raises:
        ValueError: if the folder holds another experiment; the message names what differs.
        OSError: if nothing can be written there.
    """
    check_writable(out)
    rows = read(out / RESULTS) if (out / RESULTS).exists() else []
    if not rows:
        return []
    check_config(out, config, RESULTS)
    return rows


def check_writable(out: Path) -> None:
    """Make the folder of a run, and try whether anything can be written there.

    Args:
        out: the folder; made if it does not exist.

    Raises:
        OSError: if nothing can be written there.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OSError(f"cannot write to --out {out} ({error}): choose another folder") from error


def check_config(
    out: Path, config: Any, found: str, ignored: Collection[str] = WHERE_AND_HOW
) -> None:
    """Refuse to continue what another experiment has begun.

    Args:
        out: the folder of a run that has finished something.
        config: what is going to be run; a dataclass whose fields all have defaults.
        found: what was found there, for the message.
        ignored: fields that change no result.

    Raises:
        ValueError: if the folder holds another experiment; the message names what differs.
    """
    if not (out / CONFIG).exists():
        raise ValueError(
            f"{out} holds a {found} without a {CONFIG}, so nobody knows what it is of: choose "
            "another --out"
        )
    # Options that did not exist then have done what their defaults do.
    before = contents(type(config)()) | json.loads((out / CONFIG).read_text())["configuration"]
    differing = _differences(before, contents(config), ignored)
    if differing:
        raise ValueError(
            f"{out} holds results of another experiment: {'; '.join(differing)}. Choose another "
            "--out, or delete that folder"
        )


def write_config(out: Path, config: Any, command: Callable[[Any], str] = command) -> None:
    """Write what is needed to run an experiment again.

    Args:
        out: the folder of the run.
        config: the experiment; a dataclass.
        command: writes the command that runs it again.
    """
    document = {
        "configuration": contents(config),
        "command": command(config),
        "environment": environment(),
    }
    write_text(out / CONFIG, json.dumps(document, indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Return the versions and the device that results depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    versions = {package: importlib.metadata.version(package) for package in packages}
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "fisherjax": fj.__version__,
        **versions,
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "backend": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }


def read_environment(out: Path) -> dict[str, Any]:
    """Return the environment that started a run."""
    return json.loads((out / CONFIG).read_text())["environment"]


def environment_changes(out: Path) -> list[str]:
    """Say what is different from the environment that started a run."""
    return _differences(read_environment(out), environment(), ignored=())


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows; the file changes as a whole or not at all.

    Args:
        path: of the CSV file.
        rows: all of them.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Row._fields)
    writer.writerows(rows)  # None becomes an empty cell
    write_text(path, text.getvalue())


def write_labels(path: Path, label_counts: dict[int, np.ndarray]) -> None:
    """Write how many examples of each class each client holds.

    Args:
        path: of the CSV file.
        label_counts: by partition seed, [M, C].
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    num_classes = next(iter(label_counts.values())).shape[1]
    writer.writerow(("partition_seed", "client", *range(num_classes)))
    for seed, counts in label_counts.items():
        writer.writerows((seed, client, *own) for client, own in enumerate(counts.tolist()))
    write_text(path, text.getvalue())


def read(path: Path) -> list[Row]:
    """Read rows.

    Args:
        path: of the CSV file.

    Returns:
        The rows, in the order of the file.

    Raises:
        ValueError: if the file is not one that `write` wrote.
    """
    with open(path, newline="") as file:
        lines = list(csv.reader(file))
    if not lines or tuple(lines[0]) != Row._fields:
        raise ValueError(
            f"{path} does not begin with the columns {','.join(Row._fields)}: it is not of this "
            "command; choose another --out"
        )
    try:
        return [_row(line) for line in lines[1:]]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): delete it, or choose another --out"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a text file, as a whole or not at all.

    Args:
        path: its folder exists.
        text: what it will hold.
    """
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _row(cells: Sequence[str]) -> Row:
    algorithm, partition_seed, seed, round_, client, split, metric, value, seconds, upload = cells
    return Row(
        algorithm,
        int(partition_seed) if partition_seed else None,
        int(seed),
        int(round_),
        int(client) if client else None,
        split,
        metric,
        float(value),
        float(seconds) if seconds else None,
        int(upload) if upload else None,
    )


def _differences(
    before: dict[str, Any], now: dict[str, Any], ignored: Collection[str]
) -> list[str]:
    return [
        f"{key} was {before.get(key)}, is {now.get(key)}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and key not in ignored
    ]
