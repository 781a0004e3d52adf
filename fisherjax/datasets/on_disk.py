"""Clients whose examples stay on disk: a data set larger than memory, read client by client.

The form on disk is that in which TensorFlow Federated distributes its data sets, SQLite with the
tables `examples (split_name, client_id, serialized_example_proto)` and `client_metadata (client_id,
split_name, num_examples)`: one file, or a folder with one file for each shard. `datasets.group`
writes such folders. M is the number of clients.
"""

import contextlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fisherjax._core import checks

Decode: TypeAlias = Callable[[Iterable[bytes], int | None], tuple[Any, np.ndarray]]
"""Function of records, and of the most examples, that returns inputs and targets."""


class ByClient(NamedTuple):
    """Clients whose examples are read when they are asked for.

    Attributes:
        sizes: The number of records of each client, integers [M].
        name: Function of a client's place from 0 to M - 1 that returns its name.
        read: Function of a place, `most=None` and `seed=None` that returns the client's inputs
            [n, ...] and targets [n, ...], at most so many; a client may have none. If it has more
            and there is a seed, an integer or a sequence of them, they are drawn; else they are
            the first, in order.

    Example:
        >>> rows = [np.arange(3), np.arange(2)]
        >>> own = ByClient(
        ...     np.array([3, 2]), str, lambda k, most=None, seed=None: (rows[k][:most],) * 2
        ... )
        >>> own.num_clients, own.read(0, 2)[1]
        (2, array([0, 1]))
    """

    sizes: np.ndarray
    name: Callable[[int], str]
    read: Callable[..., tuple[Any, np.ndarray]]

    @property
    def num_clients(self) -> int:
        """The number of clients M."""
        return len(self.sizes)


def by_client(
    path: str | os.PathLike, split: str, decode: Decode, min_records: int = 1
) -> ByClient:
    """Open clients that are stored in the form of TensorFlow Federated.

    Only 20 bytes a client are held in memory; a file is open only while it is read.

    Args:
        path: A SQLite file, or a folder of them: its shards, whose names end in .sqlite. If they
            end in -00003-of-00016.sqlite, all 16 must be there.
        split: Name of the split, such as "train".
        decode: Function `decode(records, most) -> (inputs [n, ...], targets [n, ...])` of an
            iterable of serialised records, of which it takes no more than it needs.
        min_records: Clients with fewer records are left out (default 1).

    Returns:
        The clients, in the order of the shards and of their names.

    Raises:
        FileNotFoundError: If the path or a shard does not exist, also later, when it is read.
        ValueError: If a file is damaged or incomplete, also later, or no client is in the split.

    Source: the tables of TensorFlow Federated's `SqlClientData`.
    """
    checks.count("min_records", min_records, 0)
    files = _shards(Path(path).expanduser())
    found = [_clients(file, split, min_records) for file in files]
    shards = np.repeat(np.arange(len(files), dtype=np.int32), [len(own) for own in found])
    rows, sizes = np.concatenate(found).T
    if not len(shards):
        raise ValueError(
            f"{path} has no client with {min_records} records in the split {split!r}; it has the "
            f"splits {sorted({name for file in files for name in _splits(file)})}"
        )

    def name(client: int) -> str:
        checks.place("client", client, len(shards))
        with _opened(files[shards[client]]) as base:
            return _name(base, int(rows[client]))

    def read(client: int, most: int | None = None, seed: Any = None) -> tuple[Any, np.ndarray]:
        checks.place("client", client, len(shards))
        if most is not None:
            checks.count("most", most)
        with _opened(files[shards[client]]) as base:
            own = _name(base, int(rows[client]))
            where = f"client {own!r} of {files[shards[client]]}"
            records = _rows(base, split, own)
            if len(records) != sizes[client]:
                raise ValueError(
                    f"{where} has {len(records)} of its {sizes[client]} records: the file is "
                    "incomplete, copy or make it again"
                )

            def first(rows: np.ndarray, number: int | None) -> tuple[Any, np.ndarray]:
                try:
                    return decode(map(partial(_record, base), rows.tolist()), number)
                except ValueError as error:
                    raise ValueError(f"{where} cannot be read: {error}") from error

            if most is None or seed is None:
                return first(records, most)
            # All examples of a client are read in order, as they are without a seed.
            found = first(records, most + 1)
            if len(found[1]) <= most:
                return found
            return first(np.random.default_rng(seed).permutation(records), most)

    return ByClient(sizes, name, read)


def _shards(path: Path) -> list[Path]:
    """Return the files of a path; raise if some are missing."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.sqlite"))
    if not files:
        raise FileNotFoundError(f"the folder {path} has no file *.sqlite: see datasets.group")
    numbered = [re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)\.sqlite", file.name) for file in files]
    wanted = {
        path / f"{x[1]}{number:0{len(x[2])}}{x[3]}{x[4]}.sqlite"
        for x in numbered
        if x
        for number in range(int(x[4]))
    }
    for file in sorted(wanted - {*files}):
        raise FileNotFoundError(_gone(file))
    return files


def _gone(file: Path) -> str:
    return (
        f"the file {file} does not exist: put it back, or make the data set again. Rounds go on "
        "from the last state that they yielded."
    )


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[sqlite3.Connection]:
    if not file.is_file():
        raise FileNotFoundError(_gone(file))
    try:
        address = f"{file.absolute().as_uri()}?mode=ro"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as base:
            yield base
    except sqlite3.Error as error:
        raise ValueError(
            f"{file} cannot be read as SQLite with the tables of TensorFlow Federated ({error}): "
            "copy, decompress or make it again"
        ) from error


def _clients(file: Path, split: str, least: int) -> np.ndarray:
    """Return the row and the number of records of each client, [M, 2]."""
    query = (
        "SELECT rowid, num_examples FROM client_metadata "
        "WHERE split_name = ? AND num_examples >= ? ORDER BY client_id"
    )
    with _opened(file) as base:
        return np.fromiter(base.execute(query, (split, least)), np.dtype((np.int64, 2)))


def _splits(file: Path) -> Sequence[str]:
    with _opened(file) as base:
        return [x for (x,) in base.execute("SELECT DISTINCT split_name FROM client_metadata")]


def _name(base: sqlite3.Connection, row: int) -> str:
    return _cell(base, "SELECT client_id FROM client_metadata WHERE rowid = ?", row)


def _rows(base: sqlite3.Connection, split: str, name: str) -> np.ndarray:
    query = "SELECT rowid FROM examples WHERE split_name = ? AND client_id = ? ORDER BY rowid"
    return np.fromiter((row for (row,) in base.execute(query, (split, name))), np.int64)


def _record(base: sqlite3.Connection, row: int) -> bytes:
    return _cell(base, "SELECT serialized_example_proto FROM examples WHERE rowid = ?", row)


def _cell(base: sqlite3.Connection, query: str, row: int) -> Any:
    if (found := base.execute(query, (row,)).fetchone()) is None:
        raise sqlite3.DatabaseError(f"the file has changed, and row {row} is gone")
    return found[0]
