"""Checkpoints of a long run: kill it at any moment, and it goes on where it last saved.

Orbax numbers them, keeps the newest, gives one its name when it is whole, and clears away what a
killed process left. Each holds arrays.safetensors, the leaves of the state; record.json, what
leaves these are and the results until then, so that both are of the same moment; and sha256sums, of
these two files: what a disk does to them later shows there.
"""

import dataclasses
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
import orbax.checkpoint as ocp

import fisherjax as fj
from experiments.harness.records import naming, write_text

ARRAYS, RECORD, SUMS = "arrays.safetensors", "record.json", "sha256sums"
_FILES = "default"  # what orbax calls the folder in a checkpoint's folder


class Checkpoint(NamedTuple):
    """A run at one moment.

    Attributes:
        number: Of the moment, for example how many rounds are finished.
        state: What the run needs to go on; a pytree of arrays.
        rows: Its results until then, as JSON holds them: tuples are lists.
    """

    number: int
    state: Any
    rows: list


class _Files(ocp.CheckpointHandler):
    """Write files of ours where orbax says."""

    def save(self, directory: Path, args: Any) -> None:
        folder = Path(directory)
        fj.files.save_arrays(folder / ARRAYS, args.arrays)
        write_text(folder / RECORD, args.record)
        write_text(folder / SUMS, _sums(folder))

    def restore(self, directory: Path, args: Any = None) -> None:
        raise NotImplementedError("`restore` reads the files itself, after their sums")


@ocp.args.register_with_handler(_Files, for_save=True)
@dataclasses.dataclass
class _Contents(ocp.args.CheckpointArgs):
    arrays: dict[str, np.ndarray]
    record: str


def saved(folder: Path) -> list[int]:
    """Return the numbers of the checkpoints in a folder, readable or not, in order."""
    if not folder.exists():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def save(folder: Path, number: int, state: Any, rows: Sequence, *, keep: int = 2) -> None:
    """Add a checkpoint, as a whole or not at all, then delete the oldest.

    Args:
        folder: Of checkpoints and nothing else; made if it does not exist.
        number: From 0 up, and higher than those that are there.
        state: A pytree of JAX or NumPy arrays; typed keys too.
        rows: The results until then; anything that JSON holds.
        keep: How many checkpoints stay, this one included. With two, one spoilt costs a few rounds.

    Raises:
        TypeError: If a leaf of the state would not come back as it is, because it is no array or
            weakly typed; the message names it.
        ValueError: If the state is empty, the number is negative or not above all that are there,
            or no checkpoint is to be kept.
        OSError: If it cannot be written; the message names it, and those before it stay.
    """
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
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, cleanup_tmp_directories=True, enable_async_checkpointing=False
    )
    # A checkpointer of its own for each: nothing stays open between two.
    with (
        naming(folder / str(number)),
        ocp.CheckpointManager(folder.absolute(), options=options, item_handlers=_Files()) as made,
    ):
        made.save(number, args=_Contents(arrays, record))


def restore(folder: Path, like: Any, warn: Callable[[str], None]) -> Checkpoint | None:
    """Read the newest checkpoint that is as it was written.

    Those that are not are renamed to NUMBER.unreadable, so that they neither count as kept nor
    stand in the way of the run that comes to their number again.

    Args:
        folder: Of checkpoints; need not exist.
        like: A state of the same structure, shapes and dtypes, for example the initial one. Leaves
            come back as it has them: as NumPy arrays, or on the same devices.
        warn: Called with one line for every checkpoint that cannot be read.

    Returns:
        The checkpoint, its arrays equal in every bit; None if there is none to go on from.

    Raises:
        TypeError: If a leaf of `like` could not have been saved; the message names it.
        ValueError: If the checkpoint is of another state; the message names the first leaf that
            differs.
    """
    if any(folder.glob(f"*/{SUMS}")):
        aside = _aside(folder, "version-0.1")
        warn(
            f"{folder} holds checkpoints of version 0.1, which are not read any more: moved to "
            f"{aside.name}, starting over"
        )
    numbers = saved(folder)
    while numbers:
        number = numbers.pop()
        damage = _damage(folder / str(number) / _FILES)
        if not damage:
            return Checkpoint(number, *_read(folder / str(number), like))
        aside = _aside(folder / str(number), "unreadable")
        instead = f"going on from checkpoint {numbers[-1]}" if numbers else "starting over"
        warn(f"checkpoint {folder / str(number)} is corrupt ({damage}): moved to {aside.name}, {instead}")
    return None


def _aside(path: Path, why: str) -> Path:
    aside = path.with_name(f"{path.name}.{why}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def _sums(folder: Path) -> str:
    """Sum up a checkpoint's files, as `sha256sum --check` reads it."""
    return "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in (ARRAYS, RECORD)
    )


def _damage(folder: Path) -> str:
    """Say what is not as it was written; nothing if all is."""
    try:
        written = (folder / SUMS).read_text(errors="replace")
        now = _sums(folder)
    except OSError as error:
        return str(error)
    differing = [line for line in now.splitlines() if line not in written.splitlines()]
    if written == now:
        return ""
    file = differing[0].partition("  ")[2] if len(differing) == 1 else SUMS
    return f"{file} is not as it was written"


def _read(checkpoint: Path, like: Any) -> tuple[Any, list]:
    record = json.loads((checkpoint / _FILES / RECORD).read_text())
    for was, now in itertools.zip_longest(
        record["leaves"], _described(like), fillvalue="nothing more"
    ):
        if was != now:
            raise ValueError(
                f"{checkpoint} is of another state: it holds {was} where this run has {now}. "
                "Choose another folder, or delete that one"
            )
    arrays = fj.files.load_arrays(checkpoint / _FILES / ARRAYS)
    restored = [_like(arrays[name], leaf) for name, leaf in _named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), restored), record["rows"]


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
