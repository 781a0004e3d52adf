"""Write and read uploads: files with the update of one client and its description.

Params of any structure become a dict by leaf name, and operators act on that dict, so that a server
can merge uploads without the network and its classes.
"""

import os
from typing import Any

import jax

from fisherjax import algorithms, leaves, tree
from fisherjax._core import checks
from fisherjax._upload_checks import num_clients
from fisherjax.algorithms.base import Update
from fisherjax.files import base
from fisherjax.files._limits import LIMITS, ArrayKind, Limits, check_limits
from fisherjax.files._shown import shown_errors
from fisherjax.files.uploads._description_checks import (
    FIELDS,
    FROZEN,
    STATISTICS,
    check,
    check_described,
)
from fisherjax.files.uploads._records import Record, record_of
from fisherjax.files.uploads.values import check_single, decode, encode, flat

THEN = "; "
"""Text between the kind of an update and the codec's name, in the kind of a compressed update."""


@shown_errors()
def save_update(
    path: str | os.PathLike,
    update: Update,
    *,
    algorithm: str,
    client: str,
    examples: float,
    codec: str | None = None,
    limits: Limits = LIMITS,
) -> None:
    """Write the update of one client to a file, with the description that a merge needs.

    The file is a .safetensors file, which other programs can read too. It has arrays such as
    "params/dense/kernel" and "fisher/factors/dense/kernel/input", and "statistics/norm/mean" for
    running statistics. Of frozen leaves it has the names only. It is written atomically, and holds
    its own SHA-256.

    Args:
        path: Path that ends in .safetensors, in a folder that exists.
        update: Update of one client; `of_client(updates, i)` selects one of stacked updates. A
            compressed update, of `compression.compressed`, takes as many bytes as
            `compression.size` counts, and the header.
        algorithm: Method for which the update was made, a name in `algorithms.METHODS`.
        client: Name of the client, unique among the uploads of a merge.
        examples: Number of the client's examples, which is its weight.
        codec: Name of the codec that packed the arrays (default: the one in the kind of a
            compressed update, else "none").
        limits: Limits for the header and the names, by which the file will be read.

    Raises:
        ValueError: If the algorithm is unknown, a name is empty, the number of examples is
            negative, the update is stacked or has running variances, a leaf's name cannot be
            stored, or the file would exceed the limits.
        TypeError: If a file cannot hold a value of the update.

    Example:
        >>> import tempfile, numpy as np, fisherjax as fj
        >>> update = fj.algorithms.Update({"params": {"w": np.ones((3, 2))}}, "params")
        >>> path = f"{tempfile.mkdtemp()}/ann.safetensors"
        >>> save_update(path, update, algorithm="fedavg", client="ann", examples=60)
        >>> found, record = load_update(path)
        >>> found.values["params"]["w"].shape, record.client, record.examples
        ((3, 2), 'ann', 60)
    """
    checks.instance("update", update, Update, "an algorithms.Update, as of merging.summarize")
    check_limits(limits)
    check_method(algorithm)
    checks.number("examples", examples)
    # The kind of a compressed update names its codec already.
    if codec is None:
        codec = (update.kind.partition(THEN)[2] if "update" in update.values else "") or "none"
    for name, text in (("client", client), ("codec", codec)):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} is {text!r}; expected a name, a string that is not empty")
    # Averaged variances would lack the variance between clients; only moments add up.
    leaves.check_moments(tuple(update.statistics))
    # A server without the network's classes can rebuild dicts, but not their pytrees.
    values = flat(tree.as_arrays(update.values))
    check_single(values)
    arrays: dict[str, Any] = {}
    spec = encode(values, "", arrays)
    encode(dict(update.statistics), STATISTICS, arrays)
    # NumPy's numbers cannot be written as JSON.
    examples = examples if isinstance(examples, int) else float(examples)
    fields = dict(zip(FIELDS, (algorithm, update.kind, client, examples, codec), strict=True))
    about = {"what": "upload"} | fields | {"values": spec} | _untrained(update)
    kinds = {name: ArrayKind.of(array) for name, array in arrays.items()}
    # A receiver checks it too, but only the sender can mend it.
    planned = {"version": base.version()} | about
    check_described(
        base.Sealed(base.checked_path(path, ".safetensors"), planned, kinds, 0, ""), limits
    )
    with base.sealing(path, kinds, about, limits) as put:
        for name, array in arrays.items():
            put(name, array)


def _untrained(update: Update) -> dict[str, Any]:
    """Describe the leaves that are not trained; return an empty dict if there are none."""
    names = {STATISTICS: list(update.statistics), FROZEN: list(update.frozen)}
    # Without such leaves the file is one of format 1, which older versions read.
    listed = {what: leaves for what, leaves in names.items() if leaves}
    return {"format": base.FORMATS[-1]} | listed if listed else {}


@shown_errors()
def load_update(path: str | os.PathLike, *, limits: Limits = LIMITS) -> tuple[Update, Record]:
    """Read an upload, with params as a dict by leaf name and operators that act on this dict.

    Args:
        path: Path of a file that `save_update` wrote.
        limits: Limits for the size of the file and of its decoded values.

    Returns:
        The update, of NumPy arrays, and the record of the file.

    Raises:
        ValueError: If the file is truncated or changed, was written by another program or a later
            version, or exceeds the limits.
        FileNotFoundError: If there is no such file.

    Example: see `save_update`.
    """
    record, spec, _ = open_upload(path, limits)
    # All at once, as the caller wants the whole update.
    arrays = dict(zip(record.arrays, base.read(record.path, record.arrays), strict=True))
    values = decode(record.path, spec, arrays.__getitem__)
    statistics = {name: arrays[f"{STATISTICS}/{name}"] for name in record.statistics}
    return Update(values, record.kind, statistics, record.frozen), record


def of_client(updates: Update, client: int) -> Update:
    """Select the update of one client, by its place from 0 to M - 1, from stacked updates.

    Raises:
        IndexError: If there is no such client.
        ValueError: If leaves differ in their number of clients, as those of one client's update do.

    Example:
        >>> import numpy as np
        >>> of_client(Update({"params": np.array([[1.0], [2.0]])}, "params"), 1).values
        {'params': array([2.])}
    """
    checks.instance("updates", updates, Update, "the algorithms.Update of merging.summarize")
    # JAX clamps a place that is out of range and would return another client's update.
    checks.place("client", client, num_clients(updates))
    return jax.tree.map(lambda x: x[client], updates)


def check_method(name: str) -> None:
    """Check that a name is that of a method whose uploads can be merged from files.

    Example:
        >>> check_method("fedavg")
    """
    checks.one_of("algorithm", name, algorithms.METHODS, "algorithms.METHODS")
    if algorithms.METHODS[name].reads is None:
        raise ValueError(
            f"algorithm is {name!r}, whose uploads are not merged from files; expected a method "
            "that merges trained models, such as 'fedavg' or 'fedfisher_kfac'."
        )


def open_upload(
    path: str | os.PathLike, limits: Limits = LIMITS
) -> tuple[Record, dict[str, Any], dict[str, ArrayKind]]:
    """Check an upload, and read its record and the description of its values.

    Returns:
        The record, the description of the values, and the kinds that they decode to, by name.

    Raises:
        ValueError: If the file is not an upload, or is refused as in `load_update`.
        FileNotFoundError: If there is no such file.
    """
    return described(base.unseal(path, limits), limits)


def described(
    file: base.Sealed, limits: Limits
) -> tuple[Record, dict[str, Any], dict[str, ArrayKind]]:
    """Do what `open_upload` does for a file that is open."""
    # Merged models are sealed files too, but have no values that could be merged again.
    if file.about["what"] != "upload":
        raise ValueError(
            f"{str(file.path)!r} is a {file.about['what']}; expected an upload of "
            "files.save_update. Read its arrays with files.load_arrays"
        )
    sizes = check(file, limits)
    return record_of(file), file.about["values"], sizes
