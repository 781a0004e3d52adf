"""Write one client's update as the bytes of a file, and read it as the server expects it."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import algorithms, files, tree
from fisherjax._core.compiler import eval_shape
from fisherjax.algorithms.base import Update
from fisherjax.files.uploads.update import THEN
from fisherjax.files.uploads.values import flat
from fisherjax.fisher import Dense
from fisherjax.flower import _wire
from fisherjax.typing import Model

UPLOAD, ARRAYS = "upload", "arrays"
"""Layouts of a file: that of `files.save_update`, or arrays by leaf name of `files.save_arrays`."""


class Sent(NamedTuple):
    """What a client sends.

    Attributes:
        layout: Layout of the file.
        file: Its bytes.
    """

    layout: str
    file: bytes


def method_of(update: Update, model: Model) -> str | None:
    """Find a method in the registry whose uploads are like this update; None if there is none.

    A method of the same kind comes first, then one that reads values of these types.
    """
    kind = update.kind.partition(THEN)[0].removesuffix(", of shared leaves")
    values = update.values.get("update", update.values)
    values = values if isinstance(values, dict) else {}
    alike = None
    for name, row in algorithms.METHODS.items():
        if row.reads is None or algorithms.required(name):
            continue
        if algorithms.make(name, model).kind == kind:
            return name
        if isinstance(row.reads, Mapping) and alike is None:
            others = {key: value for key, value in values.items() if key != "params"}
            same = others.keys() == row.reads.keys() and "params" in values
            if same and all(isinstance(x, row.reads[key]) for key, x in others.items()):
                alike = name
    return alike


def write(update: Update, method: str | None, client: str, examples: int) -> Sent:
    """Write the update of one client; without a method, as arrays by leaf name."""
    update = jax.tree.map(np.asarray, update)
    if method is None:
        named = {"values": update.values, "statistics": dict(update.statistics)}
        return Sent(ARRAYS, _wire.written(partial(files.save_arrays, tree=named)))
    how: dict[str, Any] = {"algorithm": method, "client": client, "examples": examples}
    return Sent(UPLOAD, _wire.written(partial(files.save_update, update=update, **how)))


def read(sent: Sent, expected: Update, limits: files.Limits) -> Update:
    """Read an update, with the structure of the expected one.

    Args:
        sent: What arrived.
        expected: Shapes and dtypes of one client's update.
        limits: Limits for the file.

    Raises:
        ValueError: If the file is damaged, exceeds the limits, or is the update of another method
            or network.
    """
    if sent.layout == ARRAYS:
        like = {"values": expected.values, "statistics": dict(expected.statistics)}
        named = _wire.read(sent.file, partial(files.load_arrays, like=like, limits=limits))
        return dataclasses.replace(expected, **named)
    if sent.layout != UPLOAD:
        raise ValueError(f"the file has layout {sent.layout!r:.40}; expected {UPLOAD} or {ARRAYS}")
    found, _ = _wire.read(sent.file, partial(files.load_update, limits=limits))
    if found.kind != expected.kind:
        raise ValueError(f"the upload holds '{found.kind}'; expected '{expected.kind}'")
    like = dataclasses.replace(expected, values=eval_shape(flat, expected.values))
    _check_same(found, like)
    return dataclasses.replace(
        expected, values=_restored(found.values, expected.values), statistics=found.statistics
    )


def _check_same(found: Update, like: Update) -> None:
    """Check that an update has the leaves that are expected, and the same static description."""
    own, theirs = (
        {name: files.ArrayKind.of(x) for name, x in tree.by_name(update).items()}
        for update in (found, like)
    )
    for name in sorted(own.keys() | theirs.keys()):
        if own.get(name) != theirs.get(name):
            raise ValueError(
                f"the upload is of another network: {name} is {own.get(name, 'missing')}, "
                f"expected {theirs.get(name, 'none')}"
            )
    if jax.tree.structure(found) != jax.tree.structure(like):
        raise ValueError(
            "the upload is of another network: its leaves have the expected shapes, but belong to "
            "other layers, or other leaves are frozen"
        )


def _restored(values: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
    """Return values by leaf name in the structure of those that clients computed."""
    structure = jax.tree.structure(like)
    # By name leaves may have another order.
    order = jax.tree.leaves(flat(jax.tree.unflatten(structure, range(structure.num_leaves))))
    leaves = dict(zip(order, jax.tree.leaves(values), strict=True))
    found = jax.tree.unflatten(structure, [leaves[place] for place in range(len(leaves))])
    return {
        name: _reordered(value, values[name]) if isinstance(value, Dense) else value
        for name, value in found.items()
    }


def _reordered(value: Dense, by_name: Dense) -> Dense:
    """Return a dense operator with the rows in the order of its own leaves."""
    template = by_name.template
    size = by_name.matrix.shape[-1]
    places = template.by_name(template.unravel(jnp.arange(size)))
    rows = np.concatenate([np.ravel(places[name]) for name in value.template.names()])
    return dataclasses.replace(value, matrix=by_name.matrix[rows[:, None], rows])
