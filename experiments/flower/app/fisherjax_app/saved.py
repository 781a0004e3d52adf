"""Keep the state of a run in a folder, so that a server that was killed goes on."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fisherjax import files
from fisherjax.flower import ServerState

STATE, ROUNDS, MODEL, CONFIG = "state.safetensors", "rounds.jsonl", "model.safetensors", "run.json"
_MAY_DIFFER = (
    *("rounds", "timeout", "connect", "min-replies", "max-weight", "data-dir", "folder"),
    "verifiers",
)


@contextlib.contextmanager
def locked(folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """Hold a folder; refuse one of another process, or of a run with other options."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "a") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # systems without it do not lock
        except OSError as error:
            raise ValueError(
                f"another run writes to {folder}: wait for it, or stop it with `flwr stop`"
            ) from error
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        _check_same(folder, {n: x for n, x in config.items() if n not in _MAY_DIFFER})
        yield


def _check_same(folder: Path, config: dict[str, Any]) -> None:
    path = folder / CONFIG
    # A run of which no round was saved leaves nothing to go on from.
    if not path.exists() or not (folder / STATE).exists():
        _replace(path, json.dumps(config, indent=2))
        return
    before = json.loads(path.read_text())
    if other := [n for n in before.keys() | config.keys() if before.get(n) != config.get(n)]:
        words = "; ".join(f"{n} was {before.get(n)}, is {config.get(n)}" for n in sorted(other))
        raise ValueError(f"{folder} is of another run ({words}): choose another folder")


def load(folder: Path, like: ServerState) -> ServerState | None:
    """Read the state after the last round that was saved; None if there is none."""
    path = folder / STATE
    if not path.exists():
        return None
    found = files.load_arrays(path, like=jax.tree.map(np.asarray, like))
    return found._replace(number=int(found.number))


def save(folder: Path, state: ServerState, rows: list[dict[str, Any]]) -> None:
    """Save the state after a round, and what was measured until then."""
    # First the rows: those of a round that the state lacks are left out when they are read.
    _replace(folder / ROUNDS, "".join(json.dumps(row) + "\n" for row in rows))
    files.save_arrays(folder / STATE, jax.tree.map(np.asarray, state))


def rows(folder: Path, number: int) -> list[dict[str, Any]]:
    """Read what was measured in the first rounds."""
    path = folder / ROUNDS
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["round"] < number]


def _replace(path: Path, text: str) -> None:
    """Replace a file as a whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
