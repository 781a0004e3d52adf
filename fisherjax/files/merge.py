"""Merge uploads that are files, a layer at a time, without the network and without data.

Most methods here do not couple layers: merging the leaves of one layer of all clients, and then
those of the next, solves the same systems as merging all at once. Those that match units take all.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fisherjax import algorithms, checks, merging
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.clients import shares
from fisherjax.files import base, uploads
from fisherjax.files.base import LIMITS, Kind, Limits
from fisherjax.files.packed import unpacked
from fisherjax.files.parts import Part, split, strengths_of
from fisherjax.files.reads import check_clients, common, method_of
from fisherjax.files.uploads import Record
from fisherjax.fisher import Operator
from fisherjax.updates import check_weights, indefinite


class Merge(NamedTuple):
    """What was merged, of whom, and who had how much of a say.

    Attributes:
        algorithm: Name of the method.
        records: What each upload says of itself.
        shares: The clients' weights [M], with sum one.
        finite: Whether all that was read of each client is finite, [M].
        votes: For each layer the clients' shares of the vote [M]: p_i times the mean eigenvalue of
            F_i there, with sum one; p_i where the method has no curvature.
    """

    algorithm: str
    records: tuple[Record, ...]
    shares: np.ndarray
    finite: np.ndarray
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
        start: The model that clients started from, for uploads of differences to it: a pytree, or a
            file of arrays by leaf name.
        on_nonfinite: "raise" or "drop", what to do about a client that diverged.
        progress: Called with (name, number, how many) before each layer.
        limits: How large uploads may be, and what their codes may decode to: more is refused
            before it is made.
        **options: Of the method, `algorithms.options(algorithm)`, such as damping.

    Raises:
        ValueError: If an upload is damaged, of a later version or another program, beyond the
            limits, or does not fit the others or the method, is not finite or has an indefinite
            Fisher, a client is there twice, or weights do not fit; it says which.
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
    check_clients(records)
    if any(record.codec != "none" for record in records):
        how = {"algorithm": algorithm, "on_nonfinite": on_nonfinite, "progress": progress}
        # Of what was decoded, whose headers are longer.
        how["limits"] = limits._replace(header=1 << 62, name=1 << 62)
        with unpacked(found, start, out.parent, limits) as ready:
            merged = merge_files(out, ready, weights=weights, **how, **options)
        return merged._replace(records=tuple(records))
    abstract = common(records, specs, name)
    arrays = jax.tree.leaves(abstract)
    finite = _finite(records, arrays, on_nonfinite)
    weights = np.where(finite, weights, 0)
    if not weights.sum() > 0:
        raise ValueError("No client has weight: every number of examples, or weight, is zero.")
    parts, votes = split(abstract), {}

    def one_by_one() -> Iterator[dict[str, np.ndarray]]:
        for number, part in enumerate(parts):
            names = ", ".join(part.names[leaf] for leaf in part.values["params"])
            if progress is not None:
                progress(names, number, len(parts))
            try:
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    merged, strengths = _merge_part(method, records, part, weights, on_nonfinite)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{names}: {part.told(error)}") from error
            for warning in said:
                warnings.warn(part.told(warning.message), stacklevel=2)
            votes.update({x: _shares_of(s, weights) for x, s in strengths.items()})
            yield {leaf or "array": np.asarray(array) for leaf, array in merged.items()}

    if algorithms.METHODS[name].gives == "wider model":
        # How wide it is, which the head of the file says, is known when it is there.
        ready = list(one_by_one())
        kinds = {x: Kind.of(array) for merged in ready for x, array in merged.items()}
    else:
        ready = one_by_one()
        own = ((x, records[0].arrays[array]) for x, array in abstract["params"].items())
        kinds = {x or "array": _merged_kind(kind) for x, kind in own}
    about = {
        **{"what": "model", "algorithm": name, "kind": method.kind},
        "options": {key: str(value) for key, value in options.items()},
        "clients": {
            x.client: float(share) for x, share in zip(records, shares(weights), strict=True)
        },
    }
    with base.sealing(out, kinds, about) as put:
        for merged in ready:
            for leaf, array in merged.items():
                put(leaf, array)
    return Merge(name, tuple(records), shares(weights), finite, votes)


def _finite(records: list[Record], names: list[str], on_nonfinite: str) -> np.ndarray:
    """Say whose arrays are all finite, [M]; refuse others by name if asked to."""
    finite = np.ones(len(records), bool)
    for client, record in enumerate(records):
        for name, array in zip(names, base.read(record.path, names), strict=True):
            if not np.isfinite(array).all():
                finite[client] = False
                if on_nonfinite == "raise":
                    raise ValueError(
                        f"{str(record.path)!r} of client {record.client!r} is not finite: {name}. "
                        "It diverged: train it with a smaller learning rate, or leave it out with "
                        "on_nonfinite='drop'."
                    )
                break
    return finite


def _merge_part(
    method: Algorithm, records: list[Record], part: Part, weights: np.ndarray, on_nonfinite: str
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Merge some leaves of all clients; give each client's strength by layer too."""
    arrays, structure = jax.tree.flatten(part.values)
    kinds, strengths = [records[0].arrays[name] for name in arrays], {}
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
        for record, weight in zip(records, weights, strict=True):
            leaves = list(base.read(record.path, arrays))
            look_at(record, leaves, weight)
            stacked = jax.tree.unflatten(structure, [leaf[None] for leaf in leaves])
            yield Update(stacked, method.kind), np.array([weight])

    if method.reduce is not None:
        merged, _, _ = merging.merge_stream(method, start, chunks(), on_nonfinite=on_nonfinite)
    else:
        # Filled in place: a list and its stack would be twice as much.
        stacked = [np.empty((len(records), *kind.shape), kind.dtype) for kind in kinds]
        for client, (record, weight) in enumerate(zip(records, weights, strict=True)):
            for place, leaf in zip(stacked, base.read(record.path, arrays), strict=True):
                place[client] = leaf
            look_at(record, [place[client] for place in stacked], weight)
        update = Update(jax.tree.unflatten(structure, stacked), method.kind)
        merged, _, _ = merging.merge(method, start, update, weights, on_nonfinite=on_nonfinite)
    return {part.names[number]: leaf for number, leaf in merged.items()}, strengths


def _shares_of(strengths: list[float], weights: np.ndarray) -> np.ndarray:
    strengths = np.asarray(strengths)
    # Nobody has curvature: the layer keeps the weighted mean.
    return shares(strengths if strengths.max() > 0 else weights)


def _merged_kind(kind: Kind) -> Kind:
    """Give the kind of a merged leaf: JAX's, where 64 bits are off."""
    return kind._replace(dtype=jax.dtypes.canonicalize_dtype(kind.dtype).name)
