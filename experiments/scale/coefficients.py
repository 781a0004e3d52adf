"""Measure on one core what `costs` computes with: uploads, masks and pairs of devices a second."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import fisherjax as fj
from experiments.scale import tree
from experiments.scale.costs import Coefficients, Line

_WIDE = 1_800_000  # numbers of a leaf, so that an upload is limited by its bytes
_REPEATS = 7
_GROUP, _LENGTH = 24, 100_000


def measured() -> Coefficients:
    """Measure all coefficients, in seconds of the processor, the least of several runs."""
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.safetensors"
        leaf = {"w": np.ones(_WIDE, np.float32)}
        values = {"params": leaf, "fisher": fj.fisher.Diagonal(leaf)}
        update = fj.algorithms.Update(values, tree.method()[0].kind)
        fj.files.save_update(wide, update, algorithm=tree.METHOD, client="wide", examples=1)
        found = [_upload(tree.write(Path(folder), 1)[0], tree.CHUNK), _upload(wide, 4)]
    sizes = np.array([(arrays, size) for arrays, size, *_ in found], float)
    seconds = np.array([times for *_, times in found])
    # Not below zero, where the bytes alone explain more than was measured.
    lines = (np.maximum(np.linalg.solve(sizes, own), 0) for own in seconds.T)
    decode, add = (Line(*map(float, line)) for line in lines)
    return Coefficients(decode, add, *_secure())


def _upload(path: Path, chunk: int) -> tuple[int, int, tuple[float, float]]:
    """Return an upload's arrays and bytes, and the seconds to decode and to add it."""
    update, _ = fj.files.load_update(path)
    stacked = jax.tree.map(lambda x: np.stack([x] * chunk), update)
    algorithm, start = tree.method()[0], update.values["params"]
    decode = _least(lambda: [fj.files.load_update(path) for _ in range(chunk)])

    def add(chunks: int) -> None:
        sums, _ = fj.merging.sum_stream(algorithm, start, [(stacked, None)] * chunks)
        jax.block_until_ready(sums)

    # The first chunk differs: there are no sums yet to which it is added.
    more = _least(lambda: add(3)) - _least(lambda: add(1))
    copied = _least(lambda: jax.tree.map(lambda *x: np.stack(x), *[update] * chunk))
    size = fj.compression.size(update)
    return len(jax.tree.leaves(update)), size, (decode / chunk, (more / 2 + copied) / chunk)


def _secure() -> tuple[float, float]:
    """Return numbers masked in a second, and pairs of devices that agree in a second."""
    random = np.random.default_rng(0).bytes  # no secret: nothing is protected here

    def sum_of(length: int) -> float:
        rows = list(np.ones((_GROUP, length)))
        return _least(lambda: fj.secure_aggregation.secure_sum(rows, 1.0, entropy=random), 3)

    short, long = sum_of(1), sum_of(_LENGTH)
    # Each device masks with all others and its own seed, which the server draws again.
    masks = _GROUP * (_GROUP + 1) * _LENGTH / (long - short)
    return masks, _GROUP * (_GROUP - 1) / short


def _least(compute: Callable[[], Any], repeats: int = _REPEATS) -> float:
    compute()
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        compute()
        times.append(time.process_time() - begin)
    return min(times)
