"""Make the method that merges uploads, and check that the uploads fit it and each other."""

import os
from collections.abc import Mapping
from typing import Any

import jax

from fisherjax import algorithms, leaves, likelihoods
from fisherjax.algorithms import Algorithm
from fisherjax.compression import Encoded, Slot
from fisherjax.files._places import _some
from fisherjax.files.uploads._description_checks import STATISTICS
from fisherjax.files.uploads._records import Record
from fisherjax.files.uploads.update import check_method
from fisherjax.files.uploads.values import decode
from fisherjax.typing import Model


def method_of(records: list[Record], name: str | None, options: dict) -> tuple[str, Algorithm]:
    """Make the method that merges the uploads."""
    first = records[0]
    for record in records:
        if name is None and record.algorithm != first.algorithm:
            raise ValueError(
                f"{record.source} was made for {record.algorithm}, but {str(first.path)!r} for "
                f"{first.algorithm}; expected one algorithm: pass the `algorithm` that is to merge "
                "them."
            )
    # The method that clients had in mind is the default, but any method with the same values will
    # do.
    name = first.algorithm if name is None else name
    check_method(name)
    _reads_of(name)
    return name, without_network(name, options)._replace(kind=records[0].kind)


def _reads_of(name: str) -> Mapping[str, type]:
    """Return the values, besides params, that a method reads of uploads.

    Raises:
        ValueError: If the method does not merge files.
    """
    reads = {other: row.reads for other, row in algorithms.METHODS.items()}
    if isinstance(values := reads[name], Mapping):
        return values
    known = ", ".join(other for other, own in reads.items() if isinstance(own, Mapping))
    raise ValueError(
        f"{name} {values}, and does not merge files; expected one of {known}. "
        "For this method, read the uploads with files.load_update and merge them with "
        "merging.merge."
    )


def without_network(name: str, options: dict[str, Any]) -> Algorithm:
    """Make a method that merges files; it never runs the network."""
    # Factories require a model, from which a merge of files needs nothing.
    method = algorithms.make(name, Model(_no_network, likelihoods.categorical), **options)
    if options.get("equal_traces"):
        raise ValueError(
            "equal_traces is an option of clients, which divide their Fisher information before it "
            "is sent; expected it where uploads or Fisher files are made, and not where they are "
            "merged."
        )
    # Without a model there is no mask, against which the leaves of uploads would be checked.
    return method._replace(model=None)


def _no_network(*_: Any) -> Any:
    raise RuntimeError("Files are merged without the network; nothing may call it.")


def check_clients(records: list[Record]) -> None:
    """Check that no two uploads are of the same client."""
    owners: dict[str, Record] = {}
    for record in records:
        # A plain checkpoint has no client but its file, which may have several paths.
        own = os.path.realpath(record.path) if record.is_plain else record.client
        first = owners.setdefault(own, record)
        # A client that counts twice would move the merge towards its own data.
        if first is not record:
            raise ValueError(
                f"Client {record.client!r} is in {str(first.path)!r} and in {str(record.path)!r}: "
                "merge only one of them."
            )


def common(records: list[Record], specs: list[dict], name: str) -> dict[str, Any]:
    """Return the values that a method reads, with names of arrays as leaves.

    Raises:
        ValueError: If an upload lacks such values, or its layers differ from the first one's.
    """
    reads, first = _reads_of(name), records[0]
    # Values that the method does not read may differ between clients.
    needed = {"params", *reads}
    for record, spec in zip(records, specs, strict=True):
        values = decode(record.path, spec, lambda name: name)
        _check_not_packed(record, values)
        for key, kind in {"params": dict, **reads}.items():
            if not isinstance(values.get(key), kind):
                raise ValueError(
                    f"{record.source} holds '{record.kind}' and was made for {record.algorithm}; "
                    f"expected an upload for {name}, which merges params"
                    + "".join(f" and {x} ({_type_name(t)})" for x, t in reads.items())
                    + "."
                )
        # Fishers of several kinds cannot be merged; params can, whatever else was sent.
        if len(needed) > 1 and record.kind != first.kind:
            raise ValueError(
                f"{record.source} holds '{record.kind}', but {str(first.path)!r} '{first.kind}'; "
                "expected uploads of one kind."
            )
        own, theirs = (
            {n: k for n, k in x.arrays.items() if n.partition("/")[0] in {*needed, STATISTICS}}
            for x in (record, first)
        )
        # Compared here by name and shape: a merge would only report that structures differ.
        for array in sorted(own.keys() | theirs.keys()):
            if own.get(array) != theirs.get(array):
                raise ValueError(
                    f"{record.source} holds other layers than {str(first.path)!r}: {array} is "
                    f"{own.get(array, 'missing')}, expected {theirs.get(array, 'none')}. All "
                    "clients must have trained the same network."
                )
        # Equal arrays may still belong to other layers, or to another order of the network.
        if any(spec["dict"][key] != specs[0]["dict"][key] for key in needed):
            raise ValueError(
                f"{record.source} describes its layers differently than {str(first.path)!r}. All "
                "clients must have trained the same network."
            )
    # Matched units are permuted, and leaves that stay behind would keep the old order.
    if "wiring" in needed:
        leaves.check_all_trained(name, dict.fromkeys((*first.statistics, *first.frozen), 0))
    values = decode(first.path, specs[0], lambda name: name)
    return {key: values[key] for key in needed}


def check_untrained(records: list[Record]) -> None:
    """Check names: frozen leaves are the same for all clients, and no statistic is a variance."""
    first = records[0]
    names = [*first.layers, *first.statistics, *first.frozen]
    # Only a bare array has no name; it is called "array" in the merged file.
    if "" in names and len(names) > 1:
        raise ValueError(
            f"{first.source} has an array without a name, '', which a merged file cannot have: "
            "rename it."
        )
    for record in records:
        # A leaf that one client trained and another froze has no meaningful mean.
        if differing := sorted({*record.frozen} ^ {*first.frozen}):
            raise ValueError(
                f"{record.source} has other frozen leaves than {str(first.path)!r}: they differ in "
                f"{_some(differing)}. All clients must have trained the same leaves of one network."
            )
        try:
            leaves.check_moments(tuple(record.statistics))
        except ValueError as error:
            raise ValueError(f"{record.source}: {error}") from error


def _check_not_packed(record: Record, values: dict[str, Any]) -> None:
    nodes = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, Encoded | Slot))
    if found := sorted({type(x).__name__ for x in nodes if isinstance(x, Encoded | Slot)}):
        raise ValueError(
            f"{record.source} has codec 'none', but holds encoded values ({', '.join(found)}); "
            "expected an update of compression.encode or compression.compressed, with its codec's "
            "name."
        )


def _type_name(kind: type) -> str:
    return "array" if kind is str else kind.__name__
