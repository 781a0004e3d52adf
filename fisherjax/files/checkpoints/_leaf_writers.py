"""Merge checkpoints by leaves in pieces, or by layers with curvature, and write the result."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax.algorithms import Algorithm, Row
from fisherjax.clients import shares
from fisherjax.files._limits import ArrayKind, Limits
from fisherjax.files._shards import Checkpoint, Stored
from fisherjax.files.arrays import _cast
from fisherjax.files.checkpoints._compared import Compared
from fisherjax.files.checkpoints._fishers import Fisher, check_hash, hash_of, restricted
from fisherjax.files.checkpoints._pieces import (
    Plan,
    mean_curvatures,
    mean_of,
    merged_pieces,
    smallest_kept,
)
from fisherjax.files.checkpoints._unfinished import Output
from fisherjax.files.uploads import _layerwise
from fisherjax.files.uploads._parts import split
from fisherjax.files.uploads._records import Record


class Task(NamedTuple):
    """How checkpoints are merged.

    Attributes:
        name: Name of the method.
        row: Its row.
        method: The method.
        options: Its options, with their defaults.
        weights: Weights [M].
        unequal: One of `UNEQUAL`.
        on_nonfinite: "raise" or "drop".
        progress: Function that is called before each leaf, or None.
        limits: Limits of files.
        about: Description of the merge, for the headers of the result.
    """

    name: str
    row: Row
    method: Algorithm
    options: dict[str, Any]
    weights: np.ndarray
    unequal: str
    on_nonfinite: str
    progress: Callable[[str, int, int], None] | None
    limits: Limits
    about: dict[str, Any]


def write_pieces(
    plan: Plan,
    task: Task,
    compared: Compared,
    records: list[Record],
    output: Output,
    votes: dict[str, np.ndarray],
) -> None:
    """Merge leaf by leaf, in pieces."""
    if plan.pieces.kept and "smallest" not in output.notes:
        output.note("smallest", smallest_kept(plan, task.progress))
    p = shares(plan.weights)
    # The mean of checkpoints keeps 64 bits, whatever JAX's mode.
    is_mean = task.name == records[0].algorithm
    for number, leaf in enumerate(plan.leaves):
        if task.progress is not None:
            task.progress(leaf, number, len(plan.leaves))
        facts, votes[leaf] = output.notes.get("smallest"), p
        is_averaged = is_mean or bool(plan.fishers and leaf not in plan.covered)
        how = plan._replace(fishers=[]) if is_averaged else plan
        if how.fishers:
            facts = mean_curvatures(how, leaf)
            votes[leaf] = shares(p * facts) if facts.any() else p
        if leaf in output.done:
            continue
        cast = partial(_cast, leaf, dtype=jnp.dtype(kind_of(compared, records, leaf).dtype))
        average = partial(mean_of, cast=cast) if is_averaged else None
        for piece in merged_pieces(how, leaf, facts, average):
            output.put(leaf, cast(piece))
        output.finish(leaf)


def write_layers(
    plan: Plan,
    task: Task,
    compared: Compared,
    records: list[Record],
    output: Output,
    votes: dict[str, np.ndarray],
) -> None:
    """Merge layer by layer, with the curvature of Fisher files."""
    values = {"params": {leaf: f"params/{leaf}" for leaf in plan.covered}}
    parts = split(values | restricted(plan.fishers[0], plan.covered))
    curvature = {name: stored.kind for name, stored in plan.fishers[0].arrays.items()}
    records = [
        record._replace(
            # What is wrong with numbers of a layer, besides those that are not finite, is in it.
            path=fisher.path,
            arrays={f"params/{x}": _wide(model.arrays[x]) for x in plan.covered} | curvature,
            reader=partial(_whole, model, fisher),
        )
        for record, model, fisher in zip(records, plan.models, plan.fishers, strict=True)
    ]
    left_out = {x.client: "" for x, w in zip(records, plan.weights, strict=True) if w == 0}
    adds = task.method.reduce is not None
    cohort = _layerwise.Cohort(records, plan.weights, left_out, adds)
    # Votes of layers that an earlier process merged are in its notes.
    votes |= {x: np.asarray(y) for x, y in output.notes.items()}
    for number, part in enumerate(parts):
        names = [part.names[leaf] for leaf in part.values["params"]]
        if task.progress is not None:
            task.progress(", ".join(names), number, len(parts))
        if output.done.issuperset(names):
            continue
        if plan.start is not None:
            begin = {leaf: plan.start.arrays[leaf] for leaf in names}
            start = {x: y.whole().astype(_wide(y).dtype) for x, y in begin.items()}
            cohort = cohort._replace(start=start)
        found: dict[str, np.ndarray] = {}
        [layer] = _layerwise.layer_by_layer(cohort, [(task.method, part)], None, found)
        for name, vote in found.items():
            output.note(name, vote.tolist())
        votes |= found
        for leaf, array in layer.items():
            dtype = jnp.dtype(kind_of(compared, records, leaf).dtype)
            output.put(leaf, _cast(leaf, array, dtype))
            output.finish(leaf)
    others = [leaf for leaf in plan.leaves if leaf not in plan.covered]
    write_pieces(plan._replace(leaves=others), task, compared, records, output, votes)


def _whole(model: Checkpoint, fisher: Fisher, name: str) -> np.ndarray:
    """Read an array of a checkpoint, or of its Fisher file, and check it."""
    what, _, leaf = name.partition("/")
    is_leaf = what == "params"
    stored, path = (
        (model.arrays[leaf], model.path) if is_leaf else (fisher.arrays[name], fisher.path)
    )
    array = stored.whole()
    if is_leaf:
        check_hash(fisher, path, leaf, hash_of(array))
        array = array.astype(_wide(stored).dtype)
    if not np.isfinite(array).all():
        raise ValueError(f"{str(path)!r} is not finite: {name}")
    return array


def _wide(stored: Stored) -> ArrayKind:
    """Return the kind of an array of at least 32 bits, as JAX computes with it."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.promote_types(stored.kind.dtype, jnp.float32))
    return stored.kind._replace(dtype=dtype.name)


def kind_of(compared: Compared, records: list[Record], leaf: str) -> ArrayKind:
    """Return the kind of a merged leaf: that of the start, or of the first checkpoint."""
    stored = compared.like.arrays.get(leaf)
    return records[0].arrays[f"params/{leaf}"] if stored is None else stored.kind
