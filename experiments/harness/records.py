"""Read and write the files of a run, and hold its folder.

A file is replaced as a whole or not at all, and a folder belongs to one process at a time. Rows of
results.csv are NamedTuples of text and numbers, whose property `unit` is what was computed at once.
The last column, `checksum`, is one of all rows of a unit: damaged rows are left out when a file is
read, so that their unit is computed again.
"""

import contextlib
import csv
import hashlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

from experiments.harness import hosts, tables

try:
    import fcntl
except ImportError:  # systems without it do not lock folders
    fcntl = None

CONFIG, RESULTS = "config.json", "results.csv"
CHECKSUM = "checksum"
"""The last column of results.csv, which files of version 0.2 do not have."""
ONE_SHOT = (
    *("algorithm", "partition_seed", "seed", "round", "client", "split", "metric", "value"),
    *("seconds", "upload_bytes"),
)
FEDERATED = (
    *("algorithm", "local_epochs", "server_learning_rate", "seed", "round", "split", "fraction"),
    *("metric", "value"),
)
GRID = (*FEDERATED, "learning_rate")
"""The columns of rounds, and of rounds with a grid of the clients' learning rates."""


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
    learning_rate: float | None = None  # of clients, if a grid chooses it

    @property
    def unit(self) -> tuple:
        """What was computed at once: a seed on a split, or the rounds of one method."""
        if self.local_epochs is None:
            return self.partition_seed, self.seed
        rates = self.server_learning_rate, self.seed, self.learning_rate
        return self.algorithm, self.local_epochs, *rates


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


def write_rows(path: Path, rows: Sequence[Any], columns: Sequence[str]) -> None:
    """Write rows with the given columns and the checksum of their unit, like `write_bytes`."""
    cells = ((row.unit, [getattr(row, name) for name in columns]) for row in rows)
    write_units(path, tables.gathered(cells).values(), columns)


def write_units(
    path: Path, units: Iterable[Sequence[Sequence[Any]]], columns: Sequence[str]
) -> None:
    """Write units of lines of cells, each line with the checksum of its unit in the end."""
    lines: list[list[Any]] = []
    for own in units:
        _, *written = tables.csv_text(columns, own).splitlines()
        lines += [[*line, _checksum(written)] for line in own]
    write_text(path, tables.csv_text((*columns, CHECKSUM), lines))


def read_rows(
    path: Path,
    columns: Sequence[str],
    kind: Callable[..., Any] = Row,
    warn: Callable[[str], Any] = print,
) -> list[Any]:
    """Read rows that `write_rows` wrote with these columns; return [] if there is no file.

    Rows that are not as they were written are left out, and `warn` is called with one line. Files
    of version 0.2 have no checksums: there, only lines that are no rows are left out.

    Raises:
        ValueError: If the file has other columns, so that it is not of this command.
    """
    if not path.exists():
        return []
    (found, *lines), number = read_units(path)
    heading = ",".join(columns)
    # A file that was cut inside its heading has no rows to lose.
    if found != heading and (lines or not f"{heading},{CHECKSUM}".startswith(found)):
        raise ValueError(
            f"{path} does not begin with the columns {heading}: it is not of this command; choose "
            "another --out"
        )
    rows = [row for line in lines if (row := _row(line, columns, kind)) is not None]
    if len(rows) < number or found != heading:
        lost = f"{number - len(rows)} of {number} rows are not as they were written"
        warn(damaged(path, lost if number else "all rows are gone"))
    return rows


def frame(out: Path) -> dict[str, list[Any]]:
    """Return the numbers of a run as columns by name, which pandas and polars take.

    A column is of integers, of numbers, of truth values or of text; an empty cell is None. Rows
    that are not as they were written are left out, see `read_rows`.

    Args:
        out: Folder of the run, which has results.csv.

    Raises:
        FileNotFoundError: If the folder has no results.csv.

    Example:
        >>> columns = frame(Path(__file__).parents[1] / "results/digits_mlp")
        >>> "fedavg" in columns["algorithm"], columns["seed"][0], None in columns["client"]
        (True, 0, True)
    """
    path = out / RESULTS
    if not path.exists():
        raise FileNotFoundError(f"{out} has no {RESULTS}: expected the folder of a run, its --out")
    lines, _ = read_units(path)
    names, *rows = csv.reader(lines)
    rows = [row for row in rows if len(row) == len(names)]
    columns = zip(*rows, strict=True) if rows else ((),) * len(names)
    return {name: _column(cells) for name, cells in zip(names, columns, strict=True)}


def _column(cells: Sequence[str]) -> list[Any]:
    """Read cells by the first type that all of them have; empty ones are None."""
    for kind in (int, float, bool, str):
        with contextlib.suppress(ValueError, KeyError):
            return [_cell(kind | None, text) for text in cells]
    raise AssertionError("every cell is text")


def damaged(path: Path, lost: str) -> str:
    """Say what of a file of rows is not read."""
    return f"{path} is damaged: {lost}, and what they held is computed again."


def has_checksums(path: Path) -> bool:
    """Return whether a file of rows is written with checksums; one that is not there will be."""
    if not path.exists():
        return True
    heading, *_ = path.read_bytes().decode(errors="replace").splitlines() or [CHECKSUM]
    return heading.rpartition(",")[2] == CHECKSUM


def read_units(path: Path) -> tuple[list[str], int]:
    """Return the heading and the lines that are as they were written, and the number of all lines.

    They come without their checksums.
    """
    first, *lines = path.read_bytes().decode(errors="replace").splitlines() or [""]
    heading, _, last = first.rpartition(",")
    if last != CHECKSUM:  # version 0.2 wrote it
        return [first, *lines], len(lines)
    pairs = [line.rpartition(",")[::2] for line in lines]
    units = tables.gathered((mark, own) for own, mark in pairs)
    sound = {mark for mark, own in units.items() if _checksum(own) == mark}
    return [heading, *(own for own, mark in pairs if mark in sound)], len(lines)


def _checksum(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _row(line: str, columns: Sequence[str], kind: Callable[..., Any]) -> Any | None:
    """Return the row of a line by the types of its fields; None if it is no such row."""
    types = inspect.get_annotations(kind)
    try:
        (cells,) = csv.reader([line])
        return kind(**{n: _cell(types[n], x) for n, x in zip(columns, cells, strict=True)})
    except (ValueError, KeyError, csv.Error):
        return None


def _cell(kind: Any, text: str) -> Any:
    kind, *optional = get_args(kind) or (kind,)
    if not text and optional:
        return None
    if not text:
        raise ValueError("empty")
    return {"True": True, "False": False}[text] if kind is bool else kind(text)


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
        # A process that was killed while it wrote leaves parts of files and checkpoints.
        for part in (*out.glob(".*.partial"), *out.glob("models/.*.partial")):
            part.unlink(missing_ok=True)
        for part in out.glob("*/*/*.orbax-checkpoint-tmp*"):
            shutil.rmtree(part, ignore_errors=True)
        hosts.copy(out)
        yield
