"""Merge uploads that are files, a layer at a time, without the network and without data.

Most methods here do not couple layers: merging the leaves of one layer of all clients, and then
those of the next, solves the same systems as merging all at once. Those that match units take all.
What is decided once for a client, whether it diverged and what it weighs, is decided before; all
else of the server's half is that of `merging`, called for each part.
"""

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fisherjax import merging
from fisherjax._core import checks
from fisherjax._divergence import diverged
from fisherjax._semidefinite import indefinite
from fisherjax._upload_checks import check_any_left, check_not_all_zero, check_weights
from fisherjax.algorithms.base import Algorithm, Update, averaging
from fisherjax.clients import shares
from fisherjax.files import base, uploads
from fisherjax.files._claims import STATISTICS
from fisherjax.files._packed import Opened, check_like, named, unpacked
from fisherjax.files._parts import Part, split, strengths_of
from fisherjax.files._reads import check_clients, check_untrained, common, method_of
from fisherjax.files.base import LIMITS, Kind, Limits
from fisherjax.files.uploads import Record
from fisherjax.fisher import Operator

# What the server's half does with statistics, whatever the method; made once, so compiled once.
_MEAN = averaging()


class Merge(NamedTuple):
    """What was merged, of whom, and who had how much of a say.

    Attributes:
        algorithm: Name of the method.
        records: What each upload says of itself.
        shares: The clients' weights [M], with sum one; zero for those that were left out.
        left_out: The clients that were left out, each with the first of its leaves that is not
            finite.
        votes: For each layer the clients' shares of the vote [M]: p_i times the mean eigenvalue of
            F_i there, with sum one; p_i where the method has no curvature. Running statistics are
            averaged with p_i, and are not among them.
    """

    algorithm: str
    records: tuple[Record, ...]
    shares: np.ndarray
    left_out: dict[str, str]
    votes: dict[str, np.ndarray]


def merge_files(
    out: str | os.PathLike,
    paths: Sequence[str | os.PathLike],
    *,
    algorithm: str | None = None,
    weights: Any = None,
    start: Any = None,
    on_nonfinite: str = "raise",
    progress: Callable[[str, int, int], None] | None = None,
    limits: Limits = LIMITS,
    **options: Any,
) -> Merge:
    """Merge uploads to one model, which needs neither the network nor data.

    A layer at a time: one layer of all clients is in memory, or of one client and its sums where
    those suffice; for methods that match units all of all clients. The same as `merging.merge`,
    or `merging.merge_stream`, of what `load_update` reads. Float64 needs JAX's x64.

    Running statistics are averaged, whatever the method. Frozen leaves, which clients do not send,
    are not in the merged file unless `start` is given: then they are copied from it, bit for bit.

    Compressed uploads are decoded first, one client after another, each as a whole, to files in a
    folder beside `out` that is removed in the end: that takes the memory of one client's decoded
    update and of its bits, and a disk for all of them. As in `merging.merge`, what rounding left
    indefinite becomes the nearest that is not.

    Args:
        out: The merged model's file, arrays by leaf name, which `load_arrays` reads. It appears
            whole or not at all. PFNM's is wider than the clients' models.
        paths: Of uploads that `save_update` wrote, one a client.
        algorithm: A name of `algorithms.METHODS`; None is the one that the uploads were made for.
        weights: [M], non-negative; None is the clients' numbers of examples.
        start: The model that clients started from, for uploads of differences to it and for leaves
            that are frozen: a pytree, or a file of arrays by leaf name.
        on_nonfinite: "raise" or "drop", what to do about a client that diverged. Who is left out
            in one layer is so in all; a warning, the result and the merged file's header say who,
            and for which leaf.
        progress: Called with (name, number, how many) before each layer.
        limits: How large uploads may be, and what their codes may decode to: more is refused
            before it is made.
        **options: Of the method, `algorithms.options(algorithm)`, such as damping.

    Raises:
        ValueError: If an upload is damaged, of a later version or another program, beyond the
            limits, or does not fit the others, the method or the start, is not finite or has an
            indefinite Fisher, a client is there twice, or weights do not fit; it says which.
        TypeError: If the method has no such option.
        OSError: If a file cannot be read, or the merged one not written.

    Example:
        >>> import tempfile, fisherjax as fj
        >>> folder = tempfile.mkdtemp()
        >>> how, paths = {"algorithm": "fedavg", "examples": 10}, []
        >>> for client, w in (("ann", 1.0), ("bob", 3.0)):
        ...     update = fj.algorithms.Update({"params": {"w": np.full(2, w, "float32")}}, "params")
        ...     paths.append(f"{folder}/{client}.safetensors")
        ...     fj.files.save_update(paths[-1], update, client=client, **how)
        >>> merged = fj.files.merge_files(f"{folder}/merged.safetensors", paths)
        >>> print(fj.files.load_arrays(f"{folder}/merged.safetensors")["w"], merged.shares)
        [2. 2.] [0.5 0.5]
    """
    checks.one_of("on_nonfinite", on_nonfinite, ("raise", "drop"))
    out, paths = base.checked_path(out, ".safetensors"), list(paths)
    if not paths:
        raise ValueError("There are no uploads to merge; expected at least one file.")
    found = [uploads.opened(path, limits) for path in paths]
    records, specs = [record for record, *_ in found], [spec for _, spec, _ in found]
    if out.exists() and any(out.samefile(record.path) for record in records):
        raise ValueError(f"{str(out)!r} is one of the uploads: write the model to another file.")
    name, method = method_of(records, algorithm, options)
    weights = check_weights(
        [x.examples for x in records] if weights is None else weights, len(records)
    )
    check_not_all_zero(weights)
    check_clients(records)
    check_untrained(records)
    start = named(start)
    if any(record.codec != "none" for record in records):
        how = {"algorithm": algorithm, "on_nonfinite": on_nonfinite, "progress": progress}
        # Of what was decoded, whose headers are longer.
        how["limits"] = limits._replace(header=1 << 62, name=1 << 62)
        with unpacked(found, start, out.parent, limits) as ready:
            merged = merge_files(out, ready, weights=weights, start=start, **how, **options)
        return merged._replace(records=tuple(records))
    abstract = common(records, specs, name)
    statistics = {leaf: f"{STATISTICS}/{leaf}" for leaf in records[0].statistics}
    frozen = _frozen(found, start)
    left_out = _left_out(records, jax.tree.leaves((abstract, statistics)), on_nonfinite)
    # Who is left out is so in all layers, with weight zero, and is not read again.
    weights = np.where([record.client in left_out for record in records], 0, weights)
    check_any_left(weights)
    cohort = _Cohort(records, weights, left_out, method.reduce is not None)
    parts = [(method, part) for part in split(abstract)]
    parts += [(_MEAN, part) for part in split({"params": statistics})]
    votes: dict[str, np.ndarray] = {}
    ready = _layer_by_layer(cohort, parts, progress, votes)
    if method.gives == "wider model":
        # How wide it is, which the head of the file says, is known when it is there.
        ready = list(ready)
        kinds = {x: Kind.of(array) for merged in ready for x, array in merged.items()}
    else:
        own = ((x, records[0].arrays[y]) for x, y in (abstract["params"] | statistics).items())
        kinds = {x or "array": _merged_kind(kind) for x, kind in own}
        kinds |= {leaf: Kind.of(array) for leaf, array in frozen.items()}
    about = {
        **{"what": "model", "algorithm": name, "kind": method.kind},
        "options": {key: str(value) for key, value in options.items()},
        "clients": {
            x.client: float(share) for x, share in zip(records, shares(weights), strict=True)
        },
        "left_out": left_out,
    }
    with base.sealing(out, kinds, about) as put:
        for merged in itertools.chain(ready, [frozen]):
            for leaf, array in merged.items():
                put(leaf, array)
    votes = {leaf: vote for leaf, vote in votes.items() if leaf not in statistics}
    return Merge(name, tuple(records), shares(weights), left_out, votes)


class _Cohort(NamedTuple):
    """Whose uploads are merged: weight zero for who is left out, by the leaf that is not finite.

    `adds` says whether sums over clients suffice, so that one after another is read.
    """

    records: list[Record]
    weights: np.ndarray
    left_out: dict[str, str]
    adds: bool

    def read(self, arrays: Sequence[str]) -> Iterator[tuple[Record, Iterator[np.ndarray], float]]:
        """Read some arrays of each client; zeros, as of `updates.screen`, of who is left out."""
        kinds = [self.records[0].arrays[name] for name in arrays]
        for record, weight in zip(self.records, self.weights, strict=True):
            if record.client in self.left_out:
                yield record, (np.zeros(kind.shape, kind.dtype) for kind in kinds), weight
            else:
                yield record, base.read(record.path, arrays), weight


def _frozen(found: Opened, start: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """Take the leaves that nobody sent from the start, if there is one; refuse another network."""
    if start is None:
        return {}
    first, _, others = found[0]
    for record, _, sizes in found:
        check_like(record, sizes, start, first, others)
    if missing := [leaf for leaf in found[0][0].frozen if leaf not in start]:
        raise ValueError(
            f"The start lacks {missing}, which clients did not send as they are frozen; expected "
            "the model that clients started from."
        )
    return {leaf: start[leaf] for leaf in found[0][0].frozen}


def _left_out(records: list[Record], names: list[str], on_nonfinite: str) -> dict[str, str]:
    """Find who diverged, by all of their leaves; refuse them by name, or warn once."""
    left_out = {}
    for record in records:
        # A leaf at a time, and none after the first that is not finite.
        for name, array in zip(names, base.read(record.path, names), strict=True):
            if diverged(array[None]):
                left_out[record.client] = name
                break
        if record.client in left_out and on_nonfinite == "raise":
            raise ValueError(
                f"{str(record.path)!r} of client {record.client!r} is not finite: "
                f"{left_out[record.client]}. It diverged: train it with a smaller learning rate, "
                "or leave it out with on_nonfinite='drop'."
            )
    if left_out:
        said = "; ".join(f"client {client!r} for leaf '{x}'" for client, x in left_out.items())
        warnings.warn(f"Left out, as uploads that are not finite: {said}.", stacklevel=3)
    return left_out


def _layer_by_layer(
    cohort: _Cohort,
    parts: Sequence[tuple[Algorithm, Part]],
    progress: Callable[[str, int, int], None] | None,
    votes: dict[str, np.ndarray],
) -> Iterator[dict[str, np.ndarray]]:
    """Merge each part by its method, and add to the votes; yield merged arrays by leaf name."""
    for number, (method, part) in enumerate(parts):
        names = ", ".join(part.names[leaf] for leaf in part.values["params"])
        if progress is not None:
            progress(names, number, len(parts))
        try:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                merged, strengths = _merge_part(method, cohort, part)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{names}: {part.told(error)}") from error
        for warning in said:
            warnings.warn(part.told(warning.message), stacklevel=2)
        # Nobody has curvature: the layer keeps the weighted mean.
        votes |= {
            x: shares(np.asarray(own if max(own) > 0 else cohort.weights))
            for x, own in strengths.items()
        }
        yield {leaf or "array": np.asarray(array) for leaf, array in merged.items()}


def _merge_part(
    method: Algorithm, cohort: _Cohort, part: Part
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Merge some leaves of all clients; give each client's strength by layer too."""
    arrays, structure = jax.tree.flatten(part.values)
    kinds, strengths = [cohort.records[0].arrays[name] for name in arrays], {}
    start = jax.tree.unflatten(structure, [np.zeros(k.shape, k.dtype) for k in kinds])["params"]

    def look_at(record: Record, leaves: Sequence[np.ndarray], weight: float) -> None:
        values = jax.tree.unflatten(structure, leaves)
        fisher = values.get("fisher")
        if weight > 0 and isinstance(fisher, Operator) and (bad := indefinite(fisher)):
            place = bad[0].partition("/")[2].split("/")
            raise ValueError(
                f"{str(record.path)!r} of client {record.client!r} has a Fisher that is not "
                f"symmetric positive semi-definite: {'/'.join(part.names.get(x, x) for x in place)}"
            )
        for name, strength in strengths_of(values, weight).items():
            strengths.setdefault(part.names.get(name, name), []).append(strength)

    def chunks() -> Iterator[tuple[Update, np.ndarray]]:
        for record, found, weight in cohort.read(arrays):
            leaves = list(found)
            look_at(record, leaves, weight)
            stacked = jax.tree.unflatten(structure, [leaf[None] for leaf in leaves])
            yield Update(stacked, method.kind), np.array([weight])

    if cohort.adds:
        merged, _, _ = merging.merge_stream(method, start, chunks())
    else:
        # Filled in place: a list and its stack would be twice as much.
        stacked = [np.empty((len(cohort.records), *kind.shape), kind.dtype) for kind in kinds]
        for client, (record, found, weight) in enumerate(cohort.read(arrays)):
            for place, leaf in zip(stacked, found, strict=True):
                place[client] = leaf
            look_at(record, [place[client] for place in stacked], weight)
        update = Update(jax.tree.unflatten(structure, stacked), method.kind)
        merged, _, _ = merging.merge(method, start, update, cohort.weights)
    return {part.names[number]: leaf for number, leaf in merged.items()}, strengths


def _merged_kind(kind: Kind) -> Kind:
    """Give the kind of a merged leaf: JAX's, where 64 bits are off."""
    return kind._replace(dtype=jax.dtypes.canonicalize_dtype(kind.dtype).name)
