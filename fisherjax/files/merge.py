"""Merge files of uploads layer by layer, without the network and without data.

Most methods do not couple layers: merging the leaves of one layer of all clients, and then those of
the next, solves the same systems as merging all at once. Methods that match units read all layers.
Whether a client diverged, and its weight, are determined before the first layer. The rest of the
server's work is that of `merging`, called for each part.
"""

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from fisherjax._core import checks
from fisherjax._finite_uploads import diverged
from fisherjax._upload_checks import check_any_left, check_not_all_zero, check_weights
from fisherjax.algorithms.base import Algorithm, averaging
from fisherjax.clients import shares
from fisherjax.files import base
from fisherjax.files._limits import LIMITS, ArrayKind, Limits
from fisherjax.files._shown import shown_errors
from fisherjax.files.checkpoints._merge import (
    about_of,
    check_out,
    merge_plain,
    open_sources,
    place_of,
    warning_of,
)
from fisherjax.files.uploads._description_checks import STATISTICS
from fisherjax.files.uploads._layerwise import Cohort, layer_by_layer
from fisherjax.files.uploads._packed import Opened, check_like, decoded_files, start_by_name
from fisherjax.files.uploads._parts import split
from fisherjax.files.uploads._reads import check_clients, check_untrained, common, method_of
from fisherjax.files.uploads._records import Merge, Record

# The average of statistics, the same for all methods; made once, so that it compiles once.
_MEAN = averaging()


@shown_errors()
def merge_files(
    out: str | os.PathLike,
    paths: Sequence[Any],
    *,
    algorithm: str | None = None,
    weights: Any = None,
    start: Any = None,
    unequal: str = "raise",
    on_nonfinite: str = "raise",
    progress: Callable[[str, int, int], None] | None = None,
    limits: Limits = LIMITS,
    **options: Any,
) -> Merge:
    """Merge files of uploads, or checkpoints, to one model, without the network and without data.

    The result is that of `merging.merge` or `merging.merge_stream` for the updates that
    `load_update` reads. Memory holds one layer of all clients, or, for methods with sums, one layer
    of one client and the sums; for methods that match units, it holds all updates. Float64 needs
    JAX's x64 mode, except for the mean of checkpoints, which is computed in float64.

    Running statistics are averaged, whatever the method. Frozen leaves, which clients do not send,
    are in the merged file only if `start` is given; they are then copied from it, bit for bit.

    Compressed uploads are decoded first, client by client, to files in a temporary folder beside
    `out`, which the next merge removes if this one is killed. This needs memory for one client's
    decoded update and its codes, and disk space for the decoded updates of all clients. As in
    `merging.merge`, a Fisher that rounding made indefinite is replaced by the nearest positive
    semi-definite one.

    Checkpoints of other programs may be of any size: memory holds pieces of a leaf of all of them,
    if the method merges entries by themselves (`pieces` of its row), and otherwise a layer. The
    merge of a process that was killed goes on at the leaf where it was. Numbers are computed in
    float32 or wider, and have the dtypes of the start, or of the first checkpoint.

    Args:
        out: Path of the merged model, arrays by leaf name, which `load_arrays` reads. It is written
            atomically. PFNM's merged model is wider than those of the clients. If the start or the
            first checkpoint is a folder, `out` may be a new folder, which has the same shards,
            index and other files.
        paths: Paths of uploads that `save_update` wrote, one for each client; or of checkpoints,
            each a .safetensors file, a folder of shards, or a pair of it and its Fisher file, which
            `save_fisher` wrote. Arrays that are not of floats, such as counters, are those of the
            first checkpoint or of `start`.
        algorithm: A name in `algorithms.METHODS` (default: that for which the uploads were made;
            for checkpoints "fedavg", or the first method that reads their Fisher files).
        weights: Non-negative weights [M] (default: the clients' numbers of examples; equal weights
            for checkpoints).
        start: The model that clients started from: a pytree, a file of arrays by leaf name, or a
            folder of shards. It is needed for uploads that hold differences from it, to copy frozen
            leaves, and by methods that merge changes of checkpoints, such as "ties".
        unequal: What becomes of leaves that not all checkpoints have, or have in one shape:
            "raise" (default) an error with their list, "start" or "first" to copy them from the
            start or from the first checkpoint, or "skip" to leave them out.
        on_nonfinite: "raise" (default) or "drop" a client whose upload is not finite. A client that
            is dropped is left out of all layers; a warning, the result and the header of the merged
            file name the client and the leaf.
        progress: Function that is called with (names of leaves, number, count) before each part.
        limits: Limits for the size of the files, which are checked before memory is allocated.
        **options: Options of the method, such as damping; see `algorithms.options(algorithm)`.

    Raises:
        ValueError: If an upload is damaged, was written by a later version or another program,
            exceeds the limits, is not finite, has an indefinite Fisher, or does not fit the others,
            the method or the start; if a client occurs twice, or weights do not fit; if an index
            and its shards differ, or a Fisher file is of another network. The error names the file.
        TypeError: If the method has no such option.
        OSError: If a file cannot be read or written, or the disk has too little space.

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
    # Every check that needs no array comes first: a merge can take hours.
    if isinstance(paths, (str, bytes, os.PathLike)) or not isinstance(paths, Iterable):
        raise TypeError(f"paths is {paths!r:.80}; expected a list of paths, one for each client.")
    paths = list(paths)
    if not paths:
        raise ValueError("There are no uploads to merge; expected the path of at least one file.")
    if empty := [x for x in paths if isinstance(x, tuple | list) and not 0 < len(x) <= 2]:
        raise TypeError(
            f"paths has {empty[0]!r:.80}; expected a path, or a pair with a Fisher file."
        )
    out = place_of(out, paths[0], start)
    found, plain = open_sources(paths, limits)
    how: dict[str, Any] = {"on_nonfinite": on_nonfinite, "progress": progress, "limits": limits}
    if plain.models:
        asked = algorithm, weights, unequal, options
        return merge_plain(out, plain, start, asked, how)
    checks.one_of("unequal", unequal, ("raise",))
    records, specs = [record for record, *_ in found], [spec for _, spec, _ in found]
    check_out(out, [record.path for record in records])
    check_clients(records)
    name, method = method_of(records, algorithm, options)
    weights = check_weights(
        [x.examples for x in records] if weights is None else weights, len(records)
    )
    check_not_all_zero(weights)
    check_untrained(records)
    start = start_by_name(start, limits)
    _check_start(name, method, start, records[0])
    if any(record.codec != "none" for record in records):
        # Decoded uploads are merged like all others, so that there is one way to merge. Decoded
        # files may have longer headers and names than their uploads.
        how["limits"] = limits._replace(header=1 << 62, name=1 << 62)
        with decoded_files(found, start, out.parent, limits) as decoded:
            given = {"algorithm": algorithm, "weights": weights, "start": start} | how
            merged = merge_files(out, decoded, **given, **options)
        return merged._replace(records=tuple(records))
    abstract = common(records, specs, name)
    statistics = {leaf: f"{STATISTICS}/{leaf}" for leaf in records[0].statistics}
    frozen = _frozen(found, start)
    left_out = _left_out(records, jax.tree.leaves((abstract, statistics)), on_nonfinite)
    # A client that is left out has weight zero in all layers, and is not read again.
    weights = np.where([record.client in left_out for record in records], 0, weights)
    check_any_left(weights)
    cohort = Cohort(records, weights, left_out, method.reduce is not None, start)
    parts = [(method, part) for part in split(abstract)]
    parts += [(_MEAN, part) for part in split({"params": statistics})]
    votes: dict[str, np.ndarray] = {}
    ready: Iterable[dict[str, np.ndarray]] = layer_by_layer(cohort, parts, progress, votes)
    if method.gives == "wider model":
        # The header has the shapes of the merged leaves, which are known only after the merge.
        ready = list(ready)
        kinds = {x: ArrayKind.of(array) for merged in ready for x, array in merged.items()}
    else:
        leaves = (abstract["params"] | statistics).items()
        kinds = {x or "array": _merged_kind(records[0].arrays[y]) for x, y in leaves}
        kinds |= {leaf: ArrayKind.of(array) for leaf, array in frozen.items()}
    about = about_of(name, method.kind, options) | {
        "clients": {
            x.client: float(share) for x, share in zip(records, shares(weights), strict=True)
        },
        "left_out": left_out,
    }
    with base.sealing(out, kinds, about, limits) as put:
        # Parts are merged while they are written, so that only one is in memory.
        for merged in itertools.chain(ready, [frozen]):
            for leaf, array in merged.items():
                put(leaf, array)
    # Statistics have no curvature, so that nobody votes on them.
    votes = {leaf: vote for leaf, vote in votes.items() if leaf not in statistics}
    return Merge(name, tuple(records), shares(weights), left_out, votes)


def _frozen(found: Opened, start: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """Return the frozen leaves of the start, if there is one; check that the start fits."""
    if start is None:
        return {}
    first, _, others = found[0]
    for record, _, sizes in found:
        check_like(record, sizes, start, first, others)
    if missing := [leaf for leaf in first.frozen if leaf not in start]:
        raise ValueError(
            f"The start lacks the frozen leaves {missing}, which clients did not send; expected "
            "the model that clients started from."
        )
    return {leaf: start[leaf] for leaf in first.frozen}


def _check_start(
    name: str, method: Algorithm, start: dict[str, np.ndarray] | None, first: Record
) -> None:
    """Check that there is a start if the method reads it."""
    if not method.link.reads_start:
        return
    missing = [leaf for leaf in first.layers if start is not None and leaf not in start]
    if start is None or missing:
        raise ValueError(
            f"{name} with these options reads the model that clients started from, which is not "
            f"given{' for ' + str(missing) if missing else ''}: pass it as `start` (--start), a "
            "pytree or a file of arrays by leaf name."
        )


def _left_out(records: list[Record], names: list[str], on_nonfinite: str) -> dict[str, str]:
    """Find the clients with a leaf that is not finite; raise, or warn once for all of them."""
    left_out = {}
    for record in records:
        # Leaf by leaf, up to the first that is not finite.
        for name, array in zip(names, record.read(names), strict=True):
            if diverged(array[None]):
                left_out[record.client] = name
                break
        if record.client in left_out and on_nonfinite == "raise":
            raise ValueError(
                f"{record.source} is not finite: {left_out[record.client]}. The client diverged: "
                "train it with a smaller learning rate, or leave it out with on_nonfinite='drop' "
                "(--on-nonfinite drop)."
            )
    if left_out:
        warnings.warn(warning_of(left_out), stacklevel=4)
    return left_out


def _merged_kind(kind: ArrayKind) -> ArrayKind:
    """Return the kind of a merged leaf, which has 32 bits where JAX's x64 mode is off."""
    return kind._replace(dtype=jax.dtypes.canonicalize_dtype(kind.dtype).name)
