"""Merge uploads layer by layer, reading only the arrays of one layer at a time."""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fisherjax import merging
from fisherjax._semidefinite_uploads import indefinite
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.clients import shares
from fisherjax.files._shown import shown
from fisherjax.files.uploads._parts import Part, strengths_of
from fisherjax.files.uploads._records import Record
from fisherjax.fisher import Operator


class Cohort(NamedTuple):
    """The clients whose uploads are merged.

    Attributes:
        records: Records of all uploads.
        weights: [M], zero for clients that are left out.
        left_out: Leaf that is not finite, by client that is left out.
        adds: Whether sums over clients suffice, so that clients are read one by one.
        start: The model that clients started from, by leaf name, if it is known.
    """

    records: list[Record]
    weights: np.ndarray
    left_out: dict[str, str]
    adds: bool
    start: dict[str, np.ndarray] | None = None

    def with_sources(self, message: str) -> str:
        """Return a message with files and names of clients in place of their numbers."""

        def source(found: re.Match[str]) -> str:
            number = int(found[1])
            return self.records[number].source if number < len(self.records) else found[0]

        return re.sub(r"\bclient (\d+)\b", source, message)

    def read(self, arrays: Sequence[str]) -> Iterator[tuple[Record, Iterator[np.ndarray], float]]:
        """Yield some arrays of each client; zeros, as in `screen`, for one that is left out."""
        # The arrays of all clients have the same kinds: `_reads.common` has compared them.
        kinds = [self.records[0].arrays[name] for name in arrays]
        for record, weight in zip(self.records, self.weights, strict=True):
            if record.client in self.left_out:
                yield record, (np.zeros(kind.shape, kind.dtype) for kind in kinds), weight
            else:
                yield record, record.read(arrays), weight


def layer_by_layer(
    cohort: Cohort,
    parts: Sequence[tuple[Algorithm, Part]],
    progress: Callable[[str, int, int], None] | None,
    votes: dict[str, np.ndarray],
) -> Iterator[dict[str, np.ndarray]]:
    """Merge each part by its method; yield merged arrays by leaf name, and fill in the votes."""
    for number, (method, part) in enumerate(parts):
        names = ", ".join(part.names[leaf] for leaf in part.values["params"])
        if progress is not None:
            progress(names, number, len(parts))
        try:
            # Warnings of a part name its leaves by numbers, which mean nothing to the user.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                merged, strengths = _merge_part(method, cohort, part)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{names}: {cohort.with_sources(part.with_names(error))}") from error
        for warning in caught:
            text = cohort.with_sources(part.with_names(warning.message))
            warnings.warn(shown(text), stacklevel=2)
        # Where no client has curvature, the merged layer is the weighted mean.
        votes |= {
            x: shares(np.asarray(strength if max(strength) > 0 else cohort.weights))
            for x, strength in strengths.items()
        }
        yield {leaf or "array": np.asarray(array) for leaf, array in merged.items()}


def _merge_part(
    method: Algorithm, cohort: Cohort, part: Part
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Merge some leaves of all clients; return each client's strength by layer too."""
    arrays, structure = jax.tree.flatten(part.values)
    kinds, strengths = [cohort.records[0].arrays[name] for name in arrays], {}
    # All methods expect params of the start's structure; few read it.
    start = jax.tree.unflatten(structure, [np.zeros(k.shape, k.dtype) for k in kinds])["params"]
    if method.link.reads_start and cohort.start is not None:
        start = {number: cohort.start[part.names[number]] for number in start}

    def check_and_weigh(record: Record, leaves: Sequence[np.ndarray], weight: float) -> None:
        values = jax.tree.unflatten(structure, leaves)
        fisher = values.get("fisher")
        # Checked while the layer is in memory, as reading it again would double the time.
        if weight > 0 and isinstance(fisher, Operator) and (bad := indefinite(fisher)):
            place = bad[0].partition("/")[2].split("/")
            raise ValueError(
                f"{record.source} has a Fisher that is not symmetric positive semi-definite: "
                f"{'/'.join(part.names.get(x, x) for x in place)}"
            )
        # The strengths are kept, not the values, of which memory holds one layer at a time.
        for name, strength in strengths_of(values, weight).items():
            strengths.setdefault(part.names.get(name, name), []).append(strength)

    def chunks() -> Iterator[tuple[Update, np.ndarray]]:
        for record, found, weight in cohort.read(arrays):
            leaves = list(found)
            check_and_weigh(record, leaves, weight)
            stacked = jax.tree.unflatten(structure, [leaf[None] for leaf in leaves])
            yield Update(stacked, method.kind), np.array([weight])

    if cohort.adds:
        # Sums of one client after another need memory for one client only.
        merged, _, _ = merging.merge_stream(method, start, chunks())
    else:
        # Filled in place: a list and its stack would need twice the memory.
        stacked = [np.empty((len(cohort.records), *kind.shape), kind.dtype) for kind in kinds]
        for client, (record, found, weight) in enumerate(cohort.read(arrays)):
            for place, leaf in zip(stacked, found, strict=True):
                place[client] = leaf
            check_and_weigh(record, [place[client] for place in stacked], weight)
        update = Update(jax.tree.unflatten(structure, stacked), method.kind)
        merged, _, _ = merging.merge(method, start, update, cohort.weights)
    return {part.names[number]: leaf for number, leaf in merged.items()}, strengths
