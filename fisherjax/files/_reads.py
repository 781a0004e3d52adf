"""What a method reads of uploads, and whether they fit it and each other."""

from collections.abc import Mapping
from typing import Any

import jax

from fisherjax import algorithms, leaves, likelihoods
from fisherjax.algorithms.base import Algorithm
from fisherjax.compression import Encoded, Slot
from fisherjax.files._claims import STATISTICS
from fisherjax.files.uploads import Record, check_method
from fisherjax.files.values import decode
from fisherjax.typing import Model


def method_of(records: list[Record], name: str | None, options: dict) -> tuple[str, Algorithm]:
    """Make the method, which never runs the network."""
    made_for = sorted({record.algorithm for record in records})
    if name is None and len(made_for) > 1:
        raise ValueError(f"The uploads were made for {made_for}: say which algorithm merges them.")
    name = made_for[0] if name is None else name
    check_method(name)
    _reads_of(name)
    algorithms.check_options(name, options)
    method = algorithms.make(name, Model(_no_network, likelihoods.categorical), **options)
    # Without its model nobody asks which leaves the network leaves alone.
    return name, method._replace(kind=records[0].kind, model=None)


def _reads_of(name: str) -> Mapping[str, type]:
    """Return what a method reads of uploads besides params; refuse one that merges no files."""
    reads = {other: row.reads for other, row in algorithms.METHODS.items()}
    if isinstance(found := reads[name], Mapping):
        return found
    known = ", ".join(other for other, own in reads.items() if isinstance(own, Mapping))
    raise ValueError(
        f"{name} {found}, and does not merge files; expected one of {known}. "
        "Read the uploads by files.load_update and merge them by merging.merge."
    )


def _no_network(*_: Any) -> Any:
    raise RuntimeError("Files are merged without the network.")


def check_clients(records: list[Record]) -> None:
    """Refuse a client that is there twice."""
    owners: dict[str, Record] = {}
    for record in records:
        first = owners.setdefault(record.client, record)
        if first is not record:
            raise ValueError(
                f"Client {record.client!r} is in {str(first.path)!r} and in {str(record.path)!r}: "
                "merge one of them."
            )


def common(records: list[Record], specs: list[dict], name: str) -> dict[str, Any]:
    """Give the values that a method reads, with names of arrays for leaves; refuse others."""
    reads, first = _reads_of(name), records[0]
    needed = {"params", *reads}
    for record, spec in zip(records, specs, strict=True):
        where = f"{str(record.path)!r} of client {record.client!r}"
        values = decode(record.path, spec, lambda name: name)
        _check_not_packed(where, values)
        for key, kind in {"params": dict, **reads}.items():
            if not isinstance(values.get(key), kind):
                raise ValueError(
                    f"{where} holds '{record.kind}'; {name} merges params"
                    + "".join(f" and {x}: {_called(t)}" for x, t in reads.items())
                    + f". It was made for {record.algorithm}."
                )
        # Fishers of several kinds do not mix; params do, whatever else was sent.
        if len(needed) > 1 and record.kind != first.kind:
            raise ValueError(f"{where} holds '{record.kind}', but {first.path} '{first.kind}'.")
        own, theirs = (
            {n: k for n, k in x.arrays.items() if n.partition("/")[0] in {*needed, STATISTICS}}
            for x in (record, first)
        )
        for array in sorted(own.keys() | theirs.keys()):
            if own.get(array) != theirs.get(array):
                raise ValueError(
                    f"{where} holds other layers than {str(first.path)!r}: {array} is "
                    f"{own.get(array, 'missing')}, expected {theirs.get(array, 'none')}. All "
                    "clients must have trained the same network."
                )
        if any(spec["dict"][key] != specs[0]["dict"][key] for key in needed):
            raise ValueError(f"{where} describes its layers otherwise than {str(first.path)!r}.")
    if "wiring" in needed:
        leaves.check_all_trained(name, dict.fromkeys((*first.statistics, *first.frozen), 0))
    values = decode(first.path, specs[0], lambda name: name)
    return {key: values[key] for key in needed}


def check_untrained(records: list[Record]) -> None:
    """Refuse other frozen leaves than the first client's, and running variances."""
    first = records[0]
    for record in records:
        where = f"{str(record.path)!r} of client {record.client!r}"
        if differing := sorted({*record.frozen} ^ {*first.frozen}):
            raise ValueError(
                f"{where} has the frozen leaves {list(record.frozen)}, but {str(first.path)!r} "
                f"{list(first.frozen)}: they differ in {differing}. All clients must have trained "
                "the same leaves of one network."
            )
        try:
            leaves.check_moments(tuple(record.statistics))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error


def _check_not_packed(where: str, values: dict[str, Any]) -> None:
    nodes = jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, Encoded | Slot))
    if found := sorted({type(x).__name__ for x in nodes if isinstance(x, Encoded | Slot)}):
        raise ValueError(
            f"{where} says that nothing in it is packed, and holds {', '.join(found)}; expected "
            "what compression.encode or compression.compressed makes, with its codec's name."
        )


def _called(kind: type) -> str:
    return "array" if kind is str else kind.__name__
