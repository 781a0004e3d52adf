"""Merge leaves of any size piece by piece, from files; memory holds one piece of all models.

Pieces have a few sizes, so that a program is compiled for each size and not for each leaf. They are
read ahead, while the piece before is merged. Numbers are at least float32, whatever the files hold.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import merging
from fisherjax._core.compiler import jit
from fisherjax.algorithms import Algorithm, Pieces, Update
from fisherjax.clients import shares
from fisherjax.files import base
from fisherjax.files._shards import PIECE, Checkpoint, Stored, is_finite, pieces_of
from fisherjax.files.checkpoints._fishers import Fisher, check_hash
from fisherjax.training import Trained
from fisherjax.typing import Array

_ENTRIES = 1 << 22  # of a piece of all models
# Of pieces, which are padded to one of them; the last is PIECE.
_SIZES = [PIECE >> bits for bits in (6, 4, 2, 0)]
_HALF = 1 << 16
_BLOCK = 1 << 14  # entries in float64 take an eighth of a core's cache


class Plan(NamedTuple):
    """What is merged, and how.

    Attributes:
        models: The checkpoints.
        fishers: Their Fisher files, or an empty list.
        start: What they started from, or None.
        weights: Weights [M], zero for those that are left out.
        method: The method.
        pieces: How its row says that pieces are merged.
        share: Share of entries that are kept, or least curvature, as an option says; 0 otherwise.
        leaves: Names of the leaves that are merged.
        covered: Names of those that Fisher files have; the others are averaged.
    """

    models: list[Checkpoint]
    fishers: list[Fisher]
    start: Checkpoint | None
    weights: np.ndarray
    method: Algorithm
    pieces: Pieces
    share: float
    leaves: list[str]
    covered: list[str]


class Read(NamedTuple):
    """A piece of a leaf of all models.

    Attributes:
        models: Entries of each model, in its own dtype; zeros of one without weight.
        start: Entries of the start, or None.
        fishers: Entries of each diagonal Fisher, or an empty list.
    """

    models: list[np.ndarray]
    start: np.ndarray | None
    fishers: list[np.ndarray]


def merged_pieces(
    plan: Plan, leaf: str, facts: Any, average: Callable | None
) -> Iterator[np.ndarray]:
    """Merge a leaf; yield its entries, piece by piece in C order.

    Args:
        plan: What is merged.
        leaf: Name of the leaf.
        facts: For each model the smallest magnitude that is kept, or the mean of its Fisher over
            the leaf; None if the method needs neither.
        average: Function (models, shares) -> entries that merges instead of the method; None for
            the method.

    Raises:
        ValueError: If a number is not finite, or a model is not the one of its Fisher file.
    """
    p = shares(plan.weights)
    digests = [hashlib.sha256() for _ in plan.fishers]
    shape = plan.models[0].arrays[leaf].kind.shape
    for read in _ahead(_read(plan, leaf)):
        for digest, own in zip(digests, read.models, strict=False):
            digest.update(base.little(own.astype(np.float32)))
        if average is not None:
            yield average(read.models, p)
            continue
        size = read.models[0].size
        padded = size if plan.pieces.unit == "leaf" else next(n for n in _SIZES if n >= size)
        models, *others = (_stacked(x, padded) for x in (read.models, read.fishers) if x)
        if plan.fishers:
            mean = np.float32(p @ facts)
            merged = _weighted(models, others[0], p.astype(np.float32), mean, plan.share)
        else:
            start = np.zeros(padded) if read.start is None else read.start
            start = _stacked([start], padded)[0]
            if plan.pieces.unit == "leaf":
                models, start = models.reshape(-1, *shape), start.reshape(shape)
            local = () if facts is None else np.asarray(facts, jax.dtypes.canonicalize_dtype(float))
            values = _sent(plan.method, models, start, local)
            update = Update(values, plan.method.kind)
            merged = merging.merge(plan.method, {"": start}, update, plan.weights)[0][""]
        yield np.asarray(merged).reshape(-1)[:size]
    each = zip(plan.fishers, plan.models, plan.weights, digests, strict=False)
    for fisher, model, weight, digest in each:
        if weight > 0:
            check_hash(fisher, model.path, leaf, digest.hexdigest()[:32])


@partial(jit, static_argnums=0)
def _sent(method: Algorithm, models: Any, start: Any, local: Any) -> dict[str, Any]:
    """Compute what clients send of a piece."""

    def summarize(own: Array, local: Any) -> dict[str, Any]:
        trained = Trained({"": own}, {"": start})
        return method.summarize(None, trained, None, local)[0]  # pyright: ignore

    return jax.vmap(summarize)(models, local)


@jit
def _weighted(models: Any, fishers: Any, p: Any, mean: Any, floor: Any) -> Array:
    """Average entries with the weights p_i F_ij, or p_i where their sum is below the floor."""
    # In units of the leaf's mean, so that products stay in range.
    votes = p[:, None] * (fishers * jnp.where(mean > 0, 1 / mean, 0))
    total = votes.sum(0)
    average = jnp.tensordot(p, models, 1, precision="highest")
    is_curved = (total >= floor) & (total > 0)
    # As a change of the mean, which is exact where all models agree.
    parts = votes / jnp.where(is_curved, total, 1) * (models - average)
    return average + jnp.where(is_curved, parts.sum(0), 0)


def mean_of(
    models: list[np.ndarray], p: np.ndarray, cast: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Average entries in float64, within the range of the models, and cast them.

    NumPy computes it: JAX would make float32 of float64, where its x64 mode is off. It does so by
    blocks that stay in the cache of a core, which is several times faster.
    """
    blocks = (slice(first, first + _BLOCK) for first in range(0, models[0].size, _BLOCK))
    return np.concatenate([cast(_mean([own[x] for own in models], p)) for x in blocks])


def _mean(models: list[np.ndarray], p: np.ndarray) -> np.ndarray:
    mean, low, high = 0.0, np.inf, -np.inf
    for own, share in zip(models, p, strict=True):
        if share > 0:
            wide = own.astype(np.float64)
            low, high = np.minimum(low, wide), np.maximum(high, wide)
            mean = mean + share * wide
    # A rounded mean may leave the range of the models, and so that of finite numbers.
    return np.clip(mean, low, high)


def smallest_kept(
    plan: Plan, progress: Callable[[str, int, int], None] | None = None
) -> list[float]:
    """Find the smallest magnitude of the share of each model's changes that is kept.

    Magnitudes are ordered as their bits are. The first pass counts their upper 16 bits, and so
    finds those of the number sought; each other counts the next 16 bits of those that share them.
    """
    sources = (*plan.models, *([] if plan.start is None else [plan.start]))
    kinds = [model.arrays[leaf].kind.dtype for model in sources for leaf in plan.leaves]
    # As wide as the merge computes changes.
    wide = jax.dtypes.canonicalize_dtype(jnp.result_type(jnp.float32, *kinds))
    parts, unsigned = wide.itemsize // 2, f"u{wide.itemsize}"
    sizes = [plan.models[0].arrays[leaf].size for leaf in plan.leaves]
    kept = np.full(len(plan.models), max(1, round(plan.share * sum(sizes))))
    upper = np.zeros(len(plan.models), np.int64)
    for part in range(parts):
        shift = 16 * (parts - 1 - part)
        counts = np.zeros((len(plan.models), _HALF), np.int64)
        for number, leaf in enumerate(plan.leaves):
            if progress is not None:
                progress(f"magnitudes of {leaf}", number, len(plan.leaves))
            for read in _ahead(_read(plan, leaf)):
                own_dtype = jnp.result_type(jnp.float32, read.start, *read.models)
                own_dtype = jax.dtypes.canonicalize_dtype(own_dtype)
                start = np.asarray(read.start, own_dtype)
                for client, own in enumerate(read.models):
                    change = np.abs(own.astype(own_dtype) - start).astype(wide, copy=False)
                    bits = change.view(unsigned) >> shift
                    if part:
                        bits = bits[(bits >> 16) == upper[client]] & (_HALF - 1)
                    counts[client] += np.bincount(bits.astype(np.int64), minlength=_HALF)
        from_above = counts[:, ::-1].cumsum(1)
        places = (from_above < kept[:, None]).sum(1)
        # How many of the rest are sought among those with this half.
        before = np.where(places > 0, from_above[np.arange(len(places)), places - 1], 0)
        kept, upper = kept - before, (upper << 16) + (_HALF - 1 - places)
    return [float(x) for x in upper.astype(unsigned).view(wide)]


def find_nonfinite(plan: Plan) -> dict[str, str]:
    """Return the first array that is not finite, by the path of the checkpoint that has it."""
    found: dict[str, str] = {}
    for number, model in enumerate(plan.models):
        named = [(f"params/{leaf}", model.arrays[leaf]) for leaf in plan.leaves]
        for fisher in plan.fishers[number : number + 1]:
            named += list(fisher.arrays.items())
        for name, stored in named:
            if not all(map(is_finite, _ahead(pieces_of(stored)))):
                found[str(model.path)] = name
                break
    return found


def _read(plan: Plan, leaf: str) -> Iterator[Read]:
    """Read a leaf piece by piece; raise if a number is not finite."""
    size = plan.models[0].arrays[leaf].size
    step = min(_SIZES[-1], _ENTRIES // len(plan.models))
    step = max((n for n in _SIZES if n <= step), default=_SIZES[0])
    step = size if plan.pieces.unit == "leaf" else step
    begin = None if plan.start is None else plan.start.arrays[leaf]
    for first in range(0, size, max(step, 1)):
        where = first, min(step, size - first)
        each = zip(plan.models, plan.weights, strict=True)
        models = [_piece(x.arrays[leaf], where, x.path, f"params/{leaf}", w) for x, w in each]
        each = zip(plan.fishers, plan.weights, strict=False)
        fishers = [_piece(_entries(x, leaf), where, x.path, f"fisher/{leaf}", w) for x, w in each]
        start = None
        if begin is not None and plan.start is not None:
            start = _piece(begin, where, plan.start.path, leaf, 1.0)
        yield Read(models, start, fishers)


def _piece(
    stored: Stored, where: tuple[int, int], path: Path, name: str, weight: float
) -> np.ndarray:
    if weight == 0:
        return np.zeros(where[1], stored.kind.dtype)
    found = stored.read(*where)
    check_finite(found, path, name)
    return found


def check_finite(piece: np.ndarray, path: Path, name: str) -> None:
    """Check that entries of an array are finite; a start in memory has no path."""
    if not is_finite(piece):
        where = repr(str(path)) if path != Path() else "The start"
        raise ValueError(
            f"{where} is not finite: {name}. The client diverged: train it with a smaller "
            "learning rate, or leave it out with on_nonfinite='drop' (--on-nonfinite drop)."
        )


def mean_curvatures(plan: Plan, leaf: str) -> np.ndarray:
    """Compute the mean over a leaf of each Fisher, zero for a model without weight."""
    means = np.zeros(len(plan.fishers))
    for place, (fisher, weight) in enumerate(zip(plan.fishers, plan.weights, strict=True)):
        stored, name = _entries(fisher, leaf), f"fisher/{leaf}"
        for piece in _ahead(pieces_of(stored)) if weight > 0 else ():
            check_finite(piece, fisher.path, name)
            if (piece < 0).any():
                raise ValueError(
                    f"{str(fisher.path)!r} has a Fisher that is not symmetric positive "
                    f"semi-definite: {leaf}"
                )
            means[place] += piece.astype(np.float32).sum(dtype=np.float64) / stored.size
    return means


def _entries(fisher: Fisher, leaf: str) -> Stored:
    """Return where the diagonal of a leaf lies."""
    return fisher.arrays[fisher.values["fisher"].entries[leaf]]


def _stacked(arrays: list[np.ndarray], size: int) -> np.ndarray:
    """Stack vectors as numbers of at least 32 bits, with zeros behind them."""
    dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(jnp.float32, *arrays))
    stacked = np.zeros((len(arrays), size), dtype)
    for place, array in zip(stacked, arrays, strict=True):
        place[: array.size] = array
    return stacked


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """Yield items, each of which is made in a thread while the one before is used."""
    end = object()
    with ThreadPoolExecutor(1) as pool:
        ready = pool.submit(next, items, end)
        while (item := ready.result()) is not end:
            ready = pool.submit(next, items, end)
            yield item
