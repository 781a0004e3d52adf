"""Stream uploads through a tree: processes decode and add shards of them, and one adds the sums.

The uploads are files of a few distinct clients, each of which is read, checked and decoded as often
as it is used, as a server does with uploads of as many devices.
"""

import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import cache, partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.scale import networks
from fisherjax.typing import Params

METHOD = "fedfisher_diag"
CHUNK = 64  # uploads that are added at once
SHARD = 1_000  # uploads of a task of a process


class Added(NamedTuple):
    """Sums of a shard, and what they took.

    Attributes:
        sums: Results of `merging.sum_stream`, as NumPy arrays.
        number: Number of uploads.
        core_seconds: Processor time of the process, all threads together.
        memory: Largest memory of the process until then, in bytes.
    """

    sums: Any
    number: int
    core_seconds: float
    memory: int


class Run(NamedTuple):
    """A tree's merged model, and what it took, of all processes."""

    uploads: int
    seconds: float
    core_seconds: float
    memory: int
    merged: Params


@cache
def method() -> tuple[fj.algorithms.Algorithm, Params]:
    """Return the method that the tree merges by, and the start that it merges to."""
    network = networks.lenet()
    return fj.algorithms.make(METHOD, network.model), fj.tree.by_name(network.params)


def write(folder: Path, number: int, seed: int = 0) -> list[Path]:
    """Write uploads of clients with made up models and diagonals; client i has i + 1 examples."""
    algorithm, params = method()
    random, paths = np.random.default_rng(seed), []
    for client in range(number):
        noise = {n: 0.01 * random.normal(size=x.shape) for n, x in params.items()}
        moved = {n: np.asarray(x + noise[n], x.dtype) for n, x in params.items()}
        fisher = {n: random.exponential(size=x.shape).astype(np.float32) for n, x in params.items()}
        values = {"params": moved, "fisher": fj.fisher.Diagonal(fisher)}
        update = fj.algorithms.Update(values, algorithm.kind)
        paths.append(folder / f"{client}.safetensors")
        about = {"algorithm": METHOD, "client": str(client), "examples": client + 1}
        fj.files.save_update(paths[-1], update, **about)
    return paths


def prepare(everybody: Barrier, paths: Sequence[Path], shard: int) -> None:
    """Compile what a process will run, and wait for the other processes."""
    add_shard(paths, range(shard))
    everybody.wait()


def add_shard(paths: Sequence[Path], places: range) -> Added:
    """Decode and add the uploads of a shard; upload i is the file i modulo their number."""
    algorithm, params = method()
    begin = time.process_time()
    sums, number = fj.merging.sum_stream(algorithm, params, _chunks(paths, places))
    sums = jax.tree.map(np.asarray, sums)
    memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Added(sums, number, time.process_time() - begin, memory)


def _chunks(paths: Sequence[Path], places: range) -> Iterator[tuple[Any, np.ndarray]]:
    for start in range(0, len(places), CHUNK):
        some = [paths[i % len(paths)] for i in places[start : start + CHUNK]]
        updates, records = zip(*map(fj.files.load_update, some), strict=True)
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *updates)
        yield stacked, np.array([record.examples for record in records], float)


def run(pool: Executor, paths: Sequence[Path], uploads: int, shard: int = SHARD) -> Run:
    """Merge uploads by a tree of the processes of a pool and this one."""
    begin = time.perf_counter()
    shards = [range(i, min(i + shard, uploads)) for i in range(0, uploads, shard)]
    totals, number, core_seconds, memory = None, 0, 0.0, 0
    for added in pool.map(partial(add_shard, paths), shards):
        if totals is None:
            # In float64: as many sums as there are shards.
            totals = jax.tree.map(lambda x: np.asarray(x, float), added.sums)
        else:
            totals = jax.tree.map(np.add, totals, added.sums)
        number += added.number
        core_seconds += added.core_seconds
        memory = max(memory, added.memory)
    algorithm, params = method()
    sums = jax.tree.map(jnp.asarray, totals)
    merged, *_ = fj.merging.merge_sums(algorithm, params, sums, jnp.arange(1))
    seconds = time.perf_counter() - begin
    return Run(number, seconds, core_seconds, memory, jax.tree.map(np.asarray, merged))


def exact(paths: Sequence[Path], uploads: int) -> Params:
    """Merge in float64 by each file's number of uses: the mean of models weighted by diagonals."""
    above, below = {}, {}
    for place, path in enumerate(paths):
        update, record = fj.files.load_update(path)
        uses = len(range(place, uploads, len(paths))) * float(record.examples)
        fisher = update.values["fisher"].entries
        for name, model in update.values["params"].items():
            weight = uses * fisher[name].astype(float)
            above[name] = above.get(name, 0.0) + weight * model
            below[name] = below.get(name, 0.0) + weight
    return {name: above[name] / below[name] for name in above}


def difference(found: Params, wanted: Params) -> float:
    """Return the largest difference of an entry."""
    return max(float(np.abs(found[name] - wanted[name]).max()) for name in wanted)
