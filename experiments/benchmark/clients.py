"""How time and memory grow with the number of clients, and of uploads, at fixed data."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.benchmark import apart
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, Group, current_bytes
from experiments.benchmark.workloads import federate, train, workload

_PHASES = ("training", "diagonal Fishers")
_MERGES = ("streamed", "all at once")
_UPLOADS_PER_CHUNK = 100
_MOST_HELD = 1_000  # uploads merged all at once, for comparison


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each phase and chunk; every number of clients has its own process."""
    note("LeNet, Dirichlet(0.1) sizes; `before` is the memory in use before the work began.")
    chunks = config.chunks or (1 if jax.default_backend() == "cpu" else 100,)
    for phase, chunk in itertools.product(_PHASES, chunks):
        cases = [
            apart.case(f"fisherjax, M={m}", on_clients, config, phase, m, min(chunk, m))
            for m in config.num_clients
        ]
        title = f"{phase}, {config.num_examples} images, chunks of {chunk}"
        yield Group(title, "steps", None, cases)
    for how in _MERGES:
        cases = [
            apart.case(f"fisherjax, {uploads} uploads", on_uploads, config, how, uploads)
            for uploads in config.uploads
            if how == "streamed" or uploads <= _MOST_HELD
        ]
        if cases:
            yield Group(f"merging diagonal uploads, {how}", "uploads", None, cases)


def on_clients(config: Config, phase: str, num_clients: int, chunk: int) -> tuple[Any, ...]:
    """Train the clients, or compute their diagonal Fishers, of the untrained network.

    The facts are the clients, memory before the work and of its result, and the share of steps that
    clients spend waiting for the largest of their chunk: as measured, in chunks of ten and all side
    by side.
    """
    work = workload(config, "lenet", config.num_examples)
    federation = federate(work, num_clients)
    steps = fj.clients.num_batches(np.asarray(federation.sizes), config.batch_size)
    known = {
        "clients": num_clients,
        "before_bytes": current_bytes(),
        "wasted_steps": fj.parallel.wasted_steps(steps, chunk),
        "wasted_in_tens": fj.parallel.wasted_steps(steps, min(10, num_clients)),
        "wasted_vmapped": fj.parallel.wasted_steps(steps, num_clients),
    }
    if phase == "training":
        units = config.epochs * steps.sum()
        run = partial(train, work, config, federation, clients_per_chunk=chunk)
    else:
        units = steps.sum()
        diagonal = {"fisher": fj.fisher.diagonal, "batch_size": config.batch_size}
        models = jax.tree.map(lambda x: jnp.tile(x, (num_clients,) + (1,) * x.ndim), work.params)
        given = fj.algorithms.fedfisher(work.model, **diagonal), fj.training.Trained(models)
        how = {"key": jax.random.key(2), "clients_per_chunk": chunk}
        run = partial(fj.merging.summarize, *given, federation, **how)

    def facts(result: Any) -> dict[str, float]:
        # Without the start of the training, which was there before.
        made = result._replace(start=None) if phase == "training" else result
        return known | {"result_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(made))}

    return apart.measured(Case(phase, run, float(units), facts=facts), config)


def on_uploads(config: Config, how: str, uploads: int) -> tuple[Any, ...]:
    """Merge uploads a chunk at a time, each made when it is asked for, or the same all at once."""
    work = workload(Config("clients", Path(), data="synthetic"), "lenet", 1)
    algorithm = fj.algorithms.fedfisher(work.model, fisher=fj.fisher.diagonal)
    length = min(_UPLOADS_PER_CHUNK, uploads)

    @jax.jit
    def make(number: Any) -> Any:
        scales = 1 + (number + jnp.arange(length) / length) / uploads
        params = jax.tree.map(lambda x: jnp.multiply.outer(scales, x), work.params)
        values = {"params": params, "fisher": fj.fisher.Diagonal(jax.tree.map(jnp.abs, params))}
        return fj.algorithms.Update(values, algorithm.kind)

    def chunks() -> Iterator[tuple[Any, None]]:
        for start in range(0, uploads, length):
            left, chunk = uploads - start, make(start / length)
            if left < length:
                chunk = jax.tree.map(lambda x, left=left: x[:left], chunk)
            yield chunk, None

    def run() -> Any:
        if how == "streamed":
            return fj.merging.merge_stream(algorithm, work.params, chunks())
        stacked = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(c for c, _ in chunks()))
        return fj.merging.merge(algorithm, work.params, stacked)

    known = {"uploads": uploads, "before_bytes": current_bytes()}
    return apart.measured(Case("merge", run, float(uploads), facts=lambda _: known), config)
