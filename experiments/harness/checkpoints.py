"""Save checkpoints of a long run, so that a killed run continues from the last one.

Orbax numbers checkpoints, keeps two, names one when it is complete, and removes the remains of a
killed process. Each holds arrays.safetensors with the leaves of the state; record.json with the
descriptions of the leaves and the results until then, so that both belong to the same moment; and
sha256sums of these two files, which reveals later damage.
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
from experiments.harness import hosts
from experiments.harness.records import naming, write_text

ARRAYS, RECORD, SUMS = "arrays.safetensors", "record.json", "sha256sums"
_FILES = "default"  # orbax puts the files of a checkpoint into this folder
# Two are kept, as one may be damaged; a checkpoint is on disk when `save` returns.
_OPTIONS = ocp.CheckpointManagerOptions(
    max_to_keep=2,
    cleanup_tmp_directories=True,
    enable_async_checkpointing=False,
    # Of several processes, the first saves without waiting for the others.
    create=False,
    multiprocessing_options=ocp.options.MultiprocessingOptions(0, {0}),
)


class Checkpoint(NamedTuple):
    """The state of a run at one moment."""

    number: int  # for example of finished rounds
    state: Any  # a pytree of arrays
    rows: list  # results until then, as JSON values


class _Files(ocp.AsyncCheckpointHandler):
    """Write our files into orbax's folders, and read them again."""

    def save(self, directory: Path, args: Any) -> None:
        folder = Path(directory)
        fj.files.save_arrays(folder / ARRAYS, args.arrays)
        write_text(folder / RECORD, args.record)
        write_text(folder / SUMS, _sums(folder))

    async def async_save(self, directory: Path, args: Any) -> None:
        # Synchronous all the same: from its own thread orbax would log errors with tracebacks.
        self.save(directory, args)

    def restore(self, directory: Path, args: Any = None) -> "_Contents":
        del args
        arrays = fj.files.load_arrays(Path(directory) / ARRAYS)
        return _Contents(arrays, (Path(directory) / RECORD).read_text())


@ocp.args.register_with_handler(_Files, for_save=True, for_restore=True)
@dataclasses.dataclass(repr=False)  # orbax prints it in messages, where a model is too long
class _Contents(ocp.args.CheckpointArgs):
    arrays: dict[str, np.ndarray]
    record: str


def saved(folder: Path) -> list[int]:
    """Return the numbers of all checkpoints in a folder in order, readable or not."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def save(folder: Path, number: int, state: Any, rows: Sequence) -> None:
    """Add a checkpoint as a whole or not at all, then delete all but the newest two.

    The state is a pytree of JAX or NumPy arrays, including typed keys; rows are JSON values. A
    TypeError names a leaf that could not be restored exactly. An OSError names the path that cannot
    be written; earlier checkpoints then stay. Of several processes, each calls it and the first
    saves.
    """
    if number < 0:
        raise ValueError(f"number is {number}, expected 0 or more")
    if number <= (newest := max(saved(folder), default=-1)):
        raise ValueError(
            f"{folder} already holds checkpoint {newest}, so {number} would not be the newest: "
            "restore it and count on from there, or choose another folder"
        )
    state = hosts.gathered(state)
    if not hosts.is_first():
        return
    arrays = {
        name: np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        for name, leaf in _named(state)
    }
    if not any(array.size for array in arrays.values()):
        raise ValueError("the state has no arrays with anything in them: nothing to save")
    contents = _Contents(arrays, json.dumps({"leaves": _described(state), "rows": rows}))
    made = {"options": _OPTIONS, "item_handlers": _Files()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (
            naming(folder / str(number)),
            ocp.CheckpointManager(folder.absolute(), **made) as manager,
        ):
            manager.save(number, args=contents)
    except BaseException:  # also of a process that is terminated
        for part in folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(part, ignore_errors=True)
        raise


def restore(folder: Path, like: Any, warn: Callable[[str], None]) -> Checkpoint | None:
    """Read the newest undamaged checkpoint; return None if there is none.

    Damaged checkpoints are renamed to NUMBER.unreadable, so that they neither count as kept nor
    block the number when the run reaches it again; `warn` is called with a message for each.

    Leaves are restored bit for bit, as NumPy arrays or on the same devices as those of `like`, for
    example the initial state. A ValueError names the first leaf that differs in name, dtype or
    shape.
    """
    if any(folder.glob(f"*/{SUMS}")):
        old = f"{folder} holds checkpoints of version 0.1, which are not read any more"
        warn(f"{old}: moved to {_aside(folder, 'version-0.1')}, starting over")
    numbers = saved(folder)
    while numbers:
        number = numbers.pop()
        checkpoint = folder / str(number)
        damage = _damage(checkpoint / _FILES)
        if not damage:
            return Checkpoint(number, *_read(checkpoint, like))
        moved = f"moved to {_aside(checkpoint, 'unreadable')}"
        instead = f"going on from checkpoint {numbers[-1]}" if numbers else "starting over"
        warn(f"checkpoint {checkpoint} is corrupt ({damage}): {moved}, {instead}")
    return None


def _aside(path: Path, why: str) -> str:
    aside = path.with_name(f"{path.name}.{why}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside).name


def _sums(folder: Path) -> str:
    """Return the checksums of a checkpoint's files in the format of `sha256sum --check`."""
    sums = {name: hashlib.sha256((folder / name).read_bytes()) for name in (ARRAYS, RECORD)}
    return "".join(f"{one.hexdigest()}  {name}\n" for name, one in sums.items())


def _damage(folder: Path) -> str:
    """Describe the damage of a checkpoint; return an empty string if there is none."""
    try:
        written, now = (folder / SUMS).read_text(errors="replace"), _sums(folder)
    except OSError as error:
        return str(error)
    differing = {line.partition("  ")[2] for line in set(now.splitlines()) - {*written.split("\n")}}
    return "" if written == now else f"{min(differing, default=SUMS)} is not as it was written"


def _read(checkpoint: Path, like: Any) -> tuple[Any, list]:
    # The checksums were verified before, as orbax does not do it.
    contents = _Files().restore(checkpoint / _FILES)
    record = json.loads(contents.record)
    # Until 0.2, `rounds.State` named the leaves that clients keep `private`.
    leaves = [name.replace("state.private", "state.local", 1) for name in record["leaves"]]
    arrays = {n.replace("state.private", "state.local", 1): x for n, x in contents.arrays.items()}
    pairs = itertools.zip_longest(leaves, _described(like), fillvalue="nothing more")
    for was, now in pairs:
        if was != now:
            raise ValueError(
                f"{checkpoint} is of another run or version: it holds {was} where this run has "
                f"{now}. Choose another folder, or delete that one"
            )
    restored = [_like(arrays[name], leaf) for name, leaf in _named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), restored), record["rows"]


def _named(state: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a state by name; refuse leaves that could not be restored exactly."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = [(f"state{jax.tree_util.keystr(path)}", leaf) for path, leaf in leaves]
    array = "jnp.asarray(number, dtype)"
    for name, leaf in named:
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise TypeError(f"{name} is {leaf!r}, expected a JAX or NumPy array: use {array}")
        if getattr(leaf, "weak_type", False):
            raise TypeError(f"{name} is weakly typed, which no file keeps: use {array}")
        if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
            raise TypeError(f"{name} has the byte order of other machines: use astype before")
    return named


def _described(state: Any) -> list[str]:
    return [f"{name} of {leaf.dtype}{list(leaf.shape)}" for name, leaf in _named(state)]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _like(array: np.ndarray, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return array
    if _is_key(leaf):
        array = jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf))
    return jax.device_put(array, leaf.sharding) if leaf.committed else jnp.asarray(array)
