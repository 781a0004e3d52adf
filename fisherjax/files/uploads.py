"""An upload is a file: what one client sends, and what there is to know of it.

Params of any structure become a dict by leaf name, and operators act on that: whoever merges needs
neither the network nor its classes.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fisherjax import algorithms, leaves, tree
from fisherjax._core import checks
from fisherjax.algorithms.base import Update
from fisherjax.files import base
from fisherjax.files._claims import FROZEN, SAYS, STATISTICS, check, check_sizes
from fisherjax.files.base import LIMITS, Kind, Limits, Sealed
from fisherjax.files.values import check_single, decode, encode, flat, joined, shape_of

THEN = "; "
"""Between what was sent and the codec's name, in the kind of a compressed update."""


class Record(NamedTuple):
    """What an upload says of itself.

    Attributes:
        path: Of the file.
        client: Whose it is.
        examples: How many the client has, its weight.
        algorithm: The method that it was made for, a name of `algorithms.METHODS`.
        kind: What was sent, in words.
        codec: How arrays were packed, "none" if they were not.
        layers: Shapes of the params by leaf name; None where a codec's nodes do not say it.
        statistics: Shapes of the leaves that training changed without a gradient, by leaf name.
        frozen: Names of the leaves that were not sent.
        arrays: What is in the file: type and shape by name.
        nbytes: Size of the file.
        version: Of the library that wrote it.
        sha256: Of the file, with zeros in place of this.
    """

    path: Path
    client: str
    examples: float
    algorithm: str
    kind: str
    codec: str
    layers: dict[str, tuple[int, ...] | None]
    statistics: dict[str, tuple[int, ...]]
    frozen: tuple[str, ...]
    arrays: dict[str, Kind]
    nbytes: int
    version: str
    sha256: str


def save_update(
    path: str | os.PathLike,
    update: Update,
    *,
    algorithm: str,
    client: str,
    examples: float,
    codec: str | None = None,
) -> None:
    """Write what one client sends to one file, with what a server has to know to merge it.

    The file is a .safetensors file with arrays such as "params/dense/kernel" and
    "fisher/factors/dense/kernel/input"; other programs read it too. Running statistics are arrays
    such as "statistics/norm/mean", and of frozen leaves it has the names only. It appears whole or
    not at all, and holds a SHA-256 of itself.

    Args:
        path: Ends in .safetensors; its folder exists.
        update: One client's, not stacked: `of_client(updates, i)` takes one of many. Compressed
            ones, of `compression.compressed`, take as many bytes beside the header as
            `compression.size` counts.
        algorithm: The method that it was made for, a name of `algorithms.METHODS`.
        client: Whose it is: a merge takes nobody twice.
        examples: How many the client has, its weight.
        codec: How arrays are packed; None is what the kind of a compressed update says, or "none".

    Raises:
        ValueError: For an unknown algorithm, no name, a negative number of examples, an update that
            is stacked, running variances, or leaves that a file cannot name.
        TypeError: If the update holds what a file cannot.

    Example:
        >>> import tempfile, numpy as np, fisherjax as fj
        >>> update = fj.algorithms.Update({"params": {"w": np.ones((3, 2))}}, "params")
        >>> path = f"{tempfile.mkdtemp()}/ann.safetensors"
        >>> save_update(path, update, algorithm="fedavg", client="ann", examples=60)
        >>> found, record = load_update(path)
        >>> found.values["params"]["w"].shape, record.client, record.examples
        ((3, 2), 'ann', 60)
    """
    checks.instance("update", update, Update, "an algorithms.Update, of merging.summarize")
    check_method(algorithm)
    checks.number("examples", examples)
    if codec is None:
        codec = (update.kind.partition(THEN)[2] if "update" in update.values else "") or "none"
    for name, text in (("client", client), ("codec", codec)):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} is {text!r}; expected its name")
    leaves.check_moments(tuple(update.statistics))
    values = flat(tree.as_arrays(update.values))
    check_single(values)
    arrays: dict[str, Any] = {}
    spec = encode(values, "", arrays)
    encode(dict(update.statistics), STATISTICS, arrays)
    examples = examples if isinstance(examples, int) else float(examples)
    said = dict(zip(SAYS, (algorithm, update.kind, client, examples, codec), strict=True))
    about = {"what": "upload"} | said | {"values": spec} | _untrained(update)
    kinds = {name: Kind.of(array) for name, array in arrays.items()}
    with base.sealing(path, kinds, about) as put:
        for name, array in arrays.items():
            put(name, array)


def _untrained(update: Update) -> dict[str, Any]:
    """Say which leaves are not trained; nothing of those that have none."""
    names = {STATISTICS: list(update.statistics), FROZEN: list(update.frozen)}
    # Others stay files that versions before read, bit for bit.
    said = {what: own for what, own in names.items() if own}
    return {"format": base.FORMATS[-1]} | said if said else {}


def load_update(path: str | os.PathLike, *, limits: Limits = LIMITS) -> tuple[Update, Record]:
    """Read an upload, with params as a dict by leaf name and operators that act on that.

    Args:
        path: Of a file that `save_update` wrote.
        limits: How large it may be, and what its codes may decode to.

    Returns:
        The update, of NumPy's arrays, and what the file says of itself.

    Raises:
        ValueError: If the file is truncated, changed, of another program or of a later version, or
            beyond the limits.
        FileNotFoundError: If there is none.

    Example: see `save_update`.
    """
    record, spec, _ = opened(path, limits)
    arrays = dict(zip(record.arrays, base.read(record.path, record.arrays), strict=True))
    values = decode(record.path, spec, arrays.__getitem__)
    # Once more, of arrays: how many bits a stream needs is among them.
    check_sizes(record.path, record.client, values, record.nbytes, limits)
    statistics = {name: arrays[f"{STATISTICS}/{name}"] for name in record.statistics}
    return Update(values, record.kind, statistics, record.frozen), record


def of_client(updates: Update, client: int) -> Update:
    """Take one client's of stacked updates.

    Example:
        >>> import numpy as np
        >>> of_client(Update({"params": np.array([[1.0], [2.0]])}, "params"), 1).values
        {'params': array([2.])}
    """
    return jax.tree.map(lambda x: x[client], updates)


def check_method(name: str) -> None:
    """Refuse what is no method, and methods whose uploads are never files.

    Example:
        >>> check_method("fedavg")
    """
    checks.one_of("algorithm", name, algorithms.METHODS, "algorithms.METHODS")
    if algorithms.METHODS[name].reads is None:
        raise ValueError(
            f"algorithm is {name!r}, whose uploads are not merged later, from files; expected a "
            "method that merges trained models, such as 'fedavg' or 'fedfisher_kfac'."
        )


def opened(
    path: str | os.PathLike, limits: Limits = LIMITS
) -> tuple[Record, dict[str, Any], dict[str, Kind]]:
    """Check an upload, and read its record and how its values are made of its arrays.

    Returns:
        The record, the description of the values, and type and shape by name of what they decode
        to.
    """
    file = base.unseal(path, limits)
    if file.about.get("what") != "upload":
        raise ValueError(
            f"{str(file.path)!r} is a {file.about.get('what')}; expected an upload, as "
            "files.save_update writes them. files.load_arrays reads its arrays"
        )
    sizes = check(file, limits)
    return record_of(file), file.about["values"], sizes


def record_of(file: Sealed) -> Record:
    """Read the record of an upload that was checked."""
    about, arrays = file.about, file.arrays
    values, place = about["values"], ""
    # Through what compressed updates are wrapped in, to the params.
    for key in ("update", "values", "params"):
        inner = {**values, **values.get("children", {}), **values.get("dict", {})}
        if key in inner:
            values, place = inner[key], joined(place, key)
    params = values.get("dict", values.get("ordered", {})) if place.endswith("params") else {}
    layers = {x: shape_of(spec, joined(place, x), arrays) for x, spec in params.items()}
    said = {name: about[name] for name in SAYS} | {FROZEN: tuple(about.get(FROZEN, ()))}
    said[STATISTICS] = {x: arrays[f"{STATISTICS}/{x}"].shape for x in about.get(STATISTICS, ())}
    of_file = {"nbytes": file.nbytes, "version": about["version"], "sha256": file.digest}
    return Record(file.path, layers=layers, arrays=arrays, **said, **of_file)
