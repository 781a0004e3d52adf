"""Measure how time and memory grow with the number of clients and of uploads, at fixed data."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fisherjax as fj
from experiments.benchmark import measure, workloads
from experiments.benchmark.config import Config

_UPLOADS_PER_CHUNK = 100
_MOST_HELD = 1_000  # largest number of uploads that are merged at once, for comparison


def groups(config: Config, note: Callable[[str], None]) -> Iterator[measure.Group]:
    """Yield a group for each phase and chunk; every number of clients has its own process."""

    def apart(name: str, *work: Any) -> measure.Apart:
        return measure.Apart(f"fisherjax, {name}", partial(measure.in_own_process, *work))

    note("LeNet, Dirichlet(0.1) sizes; `before` is the memory in use before the work began.")
    chunks = config.chunks or (1 if jax.default_backend() == "cpu" else 100,)
    for phase, chunk in itertools.product(("training", "diagonal Fishers"), chunks):
        cases = [apart(f"M={m}", _on_clients, config, phase, m, chunk) for m in config.num_clients]
        title = f"{phase}, {config.num_examples} images, chunks of {chunk}"
        yield measure.Group(title, "steps", None, cases)
    for how, most in {"streamed": max(config.uploads), "all at once": _MOST_HELD}.items():
        numbers = [n for n in config.uploads if n <= most]
        cases = [apart(f"{n} uploads", _on_uploads, config, how, n) for n in numbers]
        if cases:
            yield measure.Group(f"merging diagonal uploads, {how}", "uploads", None, cases)


def _on_clients(config: Config, phase: str, num_clients: int, chunk: int) -> measure.Measurement:
    """Train the clients, or compute the diagonal Fishers of untrained ones.

    The facts contain the share of steps that clients wait for the largest of their chunk: as
    measured, in chunks of ten, and all side by side.
    """
    work = workloads.workload(config, "lenet", config.num_examples)
    federation = workloads.federate(work, num_clients)
    steps = fj.clients.num_batches(np.asarray(federation.sizes), config.batch_size)
    chunk = min(chunk, num_clients)
    known = {
        "clients": num_clients,
        "before_bytes": measure.current_bytes(),
        "wasted_steps": fj.parallel.idle_share(steps, chunk),
        "wasted_in_tens": fj.parallel.idle_share(steps, min(10, num_clients)),
        "wasted_vmapped": fj.parallel.idle_share(steps, num_clients),
    }
    if phase == "training":
        units = config.epochs * steps.sum()
        run = partial(workloads.train, work, config, federation, clients_per_chunk=chunk)
    else:
        units = steps.sum()
        diagonal = {"fisher": fj.fisher.diagonal, "batch_size": config.batch_size}
        models = jax.tree.map(lambda x: jnp.tile(x, (num_clients,) + (1,) * x.ndim), work.params)
        given = fj.algorithms.fedfisher(work.model, **diagonal), fj.training.Trained(models)
        how = {"key": jax.random.key(2), "clients_per_chunk": chunk}
        run = partial(fj.merging.summarize, *given, federation, **how)

    def facts(result: Any) -> dict[str, float]:
        # The start of the training existed before and does not count.
        made = result._replace(start=None) if phase == "training" else result
        return known | {"result_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(made))}

    case = measure.Case(phase, run, float(units), facts=facts)
    return measure.alone(case, config.repeats, config.seconds_per_case)


def _on_uploads(config: Config, how: str, uploads: int) -> measure.Measurement:
    """Merge uploads in chunks, each made when it is needed, or all of them at once."""
    work = workloads.workload(Config("clients", Path(), data="synthetic"), "lenet", 1)
    algorithm = fj.algorithms.fedfisher(work.model, fisher=fj.fisher.diagonal)

    @jax.jit
    def make(numbers: Any) -> Any:
        scales = 1 + numbers / uploads
        params = jax.tree.map(lambda x: jnp.multiply.outer(scales, x), work.params)
        values = {"params": params, "fisher": fj.fisher.Diagonal(jax.tree.map(jnp.abs, params))}
        return fj.algorithms.Update(values, algorithm.kind)

    def chunks() -> Iterator[tuple[Any, None]]:
        for start in range(0, uploads, _UPLOADS_PER_CHUNK):
            yield make(jnp.arange(start, min(start + _UPLOADS_PER_CHUNK, uploads))), None

    def run() -> Any:
        if how == "streamed":
            return fj.merging.merge_stream(algorithm, work.params, chunks())
        stacked = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(c for c, _ in chunks()))
        return fj.merging.merge(algorithm, work.params, stacked)

    known = {"uploads": uploads, "before_bytes": measure.current_bytes()}
    case = measure.Case(how, run, float(uploads), facts=lambda _: known)
    return measure.alone(case, config.repeats, config.seconds_per_case)
