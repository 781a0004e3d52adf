"""Take plain checkpoints as uploads, and make the method that merges them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fisherjax import algorithms, leaves
from fisherjax._core import checks
from fisherjax.algorithms import Algorithm, Row
from fisherjax.files._shards import Checkpoint
from fisherjax.files.checkpoints._fishers import FISHERS, Fisher
from fisherjax.files.uploads._description_checks import FROZEN
from fisherjax.files.uploads._reads import without_network
from fisherjax.files.uploads._records import Record

_MOMENT = re.compile(r"(?<![a-z])(mean|var|variance)(:0)?$")


def plain_record(model: Checkpoint) -> Record:
    """Take a plain checkpoint as an upload of FedAvg with weight one."""
    floats = {name: x for name, x in model.arrays.items() if x.is_float}
    if not floats:
        raise ValueError(f"{str(model.path)!r} has no arrays of floats, which could be merged")
    return Record(
        path=model.path,
        client=str(model.path),
        examples=1,
        algorithm="fedavg",
        kind="params",
        codec="none",
        layers={name: x.kind.shape for name, x in floats.items()},
        statistics={},
        frozen=tuple(sorted(model.arrays.keys() - floats.keys())),
        arrays={
            f"{'params' if name in floats else FROZEN}/{name}": x.kind
            for name, x in model.arrays.items()
        },
        nbytes=model.nbytes,
        version="",
        sha256="",
    )


def checkpoint_method(
    name: str, options: dict[str, Any], fishers: Sequence[Fisher]
) -> tuple[Row, Algorithm]:
    """Make the method that merges checkpoints, and check that it reads their Fisher files.

    Raises:
        ValueError: If the method cannot merge checkpoints, or reads other curvature.
    """
    checks.one_of("algorithm", name, algorithms.METHODS, "algorithms.METHODS")
    row = algorithms.METHODS[name]
    needed = row.reads if isinstance(row.reads, Mapping) else {}
    if not needed.keys() <= FISHERS.keys() or not (row.pieces or needed):
        known = [x for x, y in algorithms.METHODS.items() if y.pieces or is_filed(y)]
        why = row.reads if isinstance(row.reads, str) else "needs what no checkpoint has"
        raise ValueError(
            f"{name} {why}, and does not merge checkpoints; expected one of {', '.join(known)}."
        )
    method = without_network(name, options)
    if bool(needed) != bool(fishers):
        [what] = needed or ["nothing"]
        how = "Compute them by files.save_fisher, or python -m fisherjax fisher, and pass each"
        mend = f"{how} beside its checkpoint (--fisher)." if needed else "Pass none (--fisher)."
        raise ValueError(f"{name} merges params and {what} of Fisher files. {mend}")
    for fisher in fishers:
        [(word, value)], [(what, kind)] = fisher.values.items(), needed.items()
        if word != what or not isinstance(value, kind):
            raise ValueError(
                f"{str(fisher.path)!r} holds {word} ({type(value).__name__}); {name} merges params "
                f"and {what} ({kind.__name__})"
            )
    return row, method


def is_filed(row: Row) -> bool:
    """Return whether a method reads what a Fisher file can hold."""
    return isinstance(row.reads, Mapping) and {*row.reads} <= {*FISHERS} and bool(row.reads)


def check_names(where: str, names: Sequence[str]) -> None:
    """Check that leaves of a plain checkpoint have names, and that none is a running variance."""
    if "" in names:
        raise ValueError(
            f"{where} has an array without a name, '', which a merged file cannot have: rename it."
        )
    try:
        # Only names tell: one ends in the moment, where a layer's goes on.
        leaves.check_moments([name for name in names if _MOMENT.search(name)])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
