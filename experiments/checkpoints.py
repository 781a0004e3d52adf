"""Checkpoints of a long run: kill it at any moment, and it goes on where it last saved.

A folder holds one folder for each checkpoint, named by its number: `arrays`, the leaves of the
state as orbax writes them; record.json, what leaves these are and the results until then, so that
both are of the same moment; sha256sums, of all these files. A checkpoint gets its name by one
rename, when it is whole; what a disk does to it later shows in the sums.
"""

import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.records import write_text

RECORD, SUMS = "record.json", "sha256sums"
_PARTIAL = ".partial"
"""Where a checkpoint is written; what a killed process left there goes with the next save."""


class Checkpoint(NamedTuple):
    """A run at one moment.

    Attributes:
        number: of the moment, for example how many rounds are finished.
        state: what the run needs to go on; a pytree of arrays.
        rows: its results until then, as JSON holds them: tuples are lists.
    """

    number: int
    state: Any
    rows: list


def saved(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints in a folder, readable or not, in order."""
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def save(folder: Path, number: int, state: Any, rows: Sequence, *, keep: int = 2) -> None:
    """Add a checkpoint, as a whole or not at all, then delete the oldest.

    Args:
        folder: of checkpoints and nothing else; made if it does not exist.
        number: from 0 up, and higher than those that are there.
        state: a pytree of JAX or NumPy arrays; typed keys too.
        rows: the results until then; anything that JSON holds.
        keep: how many checkpoints stay, this one included. With two, one spoilt costs a few rounds.

    Raises:
        TypeError: if a leaf of the state would not come back as it is, because it is no array or
            weakly typed; the message names it.
        ValueError: if the state is empty, the number is negative or not above all that are there,
            or no checkpoint is to be kept.
    """
    import orbax.checkpoint as ocp

    before = saved(folder)
    if keep < 1:
        raise ValueError(f"keep is {keep}, expected at least 1: the checkpoint that is saved")
    if number < 0:
        raise ValueError(f"number is {number}, expected 0 or more")
    if before and number <= before[-1]:
        raise ValueError(
            f"{folder} already holds checkpoint {before[-1]}, so {number} would not be the newest: "
            "restore it and count on from there, or choose another folder"
        )
    arrays = {name: _stored(leaf) for name, leaf in _named(state)}
    if not any(array.size for array in arrays.values()):
        raise ValueError("the state has no arrays with anything in them: nothing to save")
    record = json.dumps({"leaves": _described(state), "rows": rows})

    partial = folder / _PARTIAL
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    write_text(partial / RECORD, record)
    with ocp.PyTreeCheckpointer() as checkpointer:  # which refuses arrays of nothing
        checkpointer.save(
            (partial / "arrays").absolute(),
            ocp.args.PyTreeSave({name: array for name, array in arrays.items() if array.size}),
        )
    write_text(partial / SUMS, _sums(partial))
    partial.rename(folder / str(number))
    for old in before[: len(before) - keep + 1]:
        shutil.rmtree(folder / str(old))


def restore(folder: Path, like: Any, warn: Callable[[str], None]) -> Checkpoint | None:
    """Read the newest checkpoint that is as it was written.

    Those that are not are renamed to NUMBER.unreadable, so that they neither count as kept nor
    stand in the way of the run that comes to their number again.

    Args:
        folder: of checkpoints; need not exist.
        like: a state of the same structure, shapes and dtypes, for example the initial one. Leaves
            come back as it has them: as NumPy arrays, or on the same devices.
        warn: called with one line for every checkpoint that cannot be read.

    Returns:
        The checkpoint, its arrays equal in every bit; None if there is none to go on from.

    Raises:
        TypeError: if a leaf of `like` could not have been saved; the message names it.
        ValueError: if the checkpoint is of another state; the message names the first leaf that
            differs.
    """
    numbers = saved(folder)
    while numbers:
        number = numbers.pop()
        path = folder / str(number)
        damage = _damage(path)
        if not damage:
            return Checkpoint(number, *_read(path, like))
        aside = path.with_name(f"{number}.unreadable")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        instead = f"going on from checkpoint {numbers[-1]}" if numbers else "starting over"
        warn(f"checkpoint {path} is corrupt ({damage}): moved to {aside.name}, {instead}")
    return None


def _sums(checkpoint: Path) -> str:
    """Sum up all files but the sums, as `sha256sum --check` reads it."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return "".join(
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(checkpoint)}\n"
        for path in files
        if path != checkpoint / SUMS
    )


def _damage(checkpoint: Path) -> str:
    """Say what is not as it was written; nothing if all is."""
    try:
        written = (checkpoint / SUMS).read_text(errors="replace")
        now = _sums(checkpoint)
    except OSError as error:
        return str(error)
    if written == now:
        return ""
    # Both the old and the new line of a file that has changed, one of a file that came or went.
    differing = set(written.splitlines()) ^ set(now.splitlines())
    file = min((line.partition("  ")[2] for line in differing), default="") or SUMS
    return f"{file} is not as it was written"


def _read(checkpoint: Path, like: Any) -> tuple[Any, list]:
    import orbax.checkpoint as ocp

    record = json.loads((checkpoint / RECORD).read_text())
    _check_same(checkpoint, record["leaves"], _described(like))
    leaves = _named(like)
    as_numpy = {
        name: ocp.RestoreArgs(restore_type=np.ndarray) for name, leaf in leaves if leaf.size
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        arrays = checkpointer.restore(
            (checkpoint / "arrays").absolute(), ocp.args.PyTreeRestore(restore_args=as_numpy)
        )
    restored = [_like(arrays[name], leaf) if leaf.size else leaf for name, leaf in leaves]
    return jax.tree.unflatten(jax.tree.structure(like), restored), record["rows"]


def _check_same(checkpoint: Path, there: Sequence[str], here: Sequence[str]) -> None:
    pairs = itertools.zip_longest(there, here, fillvalue="nothing more")
    for was, now in pairs:
        if was != now:
            raise ValueError(
                f"{checkpoint} is of another state: it holds {was} where this run has {now}. "
                "Choose another folder, or delete that one"
            )


def _named(state: Any) -> list[tuple[str, Any]]:
    """List the leaves of a state by name; refuse what would not come back as it was."""
    named = [
        (f"state{jax.tree_util.keystr(path)}", leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    ]
    for name, leaf in named:
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(
                f"{name} is {leaf!r}, expected a JAX or NumPy array: write numbers as "
                "jnp.asarray(number, dtype), and leave out what is no array"
            )
        if getattr(leaf, "weak_type", False):
            raise TypeError(
                f"{name} is weakly typed, which a file does not keep: name its dtype, as in "
                "jnp.asarray(number, dtype)"
            )
        if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
            raise TypeError(f"{name} has the byte order of other machines: use astype before")
    return named


def _described(state: Any) -> list[str]:
    return [f"{name} of {leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(state)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _stored(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _like(array: np.ndarray, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return array
    if _is_key(leaf):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return jax.device_put(array, leaf.sharding) if leaf.committed else jnp.asarray(array)
