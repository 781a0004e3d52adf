"""How time and memory grow with the number of clients, and of uploads, at fixed data."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fisherjax as fj
from experiments.benchmark import apart
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, Group, Row
from experiments.benchmark.plot import Panels
from experiments.benchmark.workloads import federate, local_steps, train, workload

_UPLOADS_PER_CHUNK = 100
_MOST_HELD = 1_000  # uploads merged all at once, for comparison


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each phase and chunk; every number of clients has its own process.

    Args:
        config: with the suite's values filled in.
        note: told what is measured with what.

    Yields:
        Groups; the facts are the clients, memory before the work and of its result, and the share
        of steps that clients spend waiting for the largest of their chunk: as measured, in chunks
        of ten and all side by side.
    """
    note("LeNet, Dirichlet(0.1) sizes; `before` is the memory in use before the work began.")
    shared = {"repeats": config.repeats, "budget": config.seconds_per_case}
    split = {
        "num_examples": config.num_examples,
        "batch_size": config.batch_size,
        "epochs": config.epochs,
        "data": config.data,
        "data_dir": config.data_dir and str(config.data_dir.resolve()),
    }
    phases = {"training": training, "diagonal Fishers": fishers}
    for phase, function in phases.items():
        for chunk in config.chunks or (1 if jax.default_backend() == "cpu" else 100,):
            cases = [
                apart.case(
                    f"fisherjax, M={m}",
                    function,
                    {"num_clients": m, "clients_per_chunk": min(chunk, m)} | split | shared,
                )
                for m in config.num_clients
            ]
            title = f"{phase}, {config.num_examples} images, chunks of {chunk}"
            yield Group(title, "steps", None, cases)
    for how, function in {"streamed": streamed, "all at once": held}.items():
        numbers = [n for n in config.uploads if function is streamed or n <= _MOST_HELD]
        cases = [
            apart.case(f"fisherjax, {n} uploads", function, {"uploads": n} | shared)
            for n in numbers
        ]
        if cases:
            yield Group(f"merging diagonal uploads, {how}", "uploads", None, cases)


def panels(rows: Sequence[Row]) -> Panels:
    """Arrange rows for `plot.growth`.

    Args:
        rows: of this suite.

    Returns:
        Curves over clients or uploads: time, time per step or upload, and peak memory.
    """
    cases: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        cases.setdefault((row.workload, row.case), {})[row.metric] = row.value
    labels: dict[str, Callable[[dict[str, float]], float]] = {
        "seconds": lambda case: case["median"],
        "milliseconds a step, or an upload": lambda case: 1e3 / case["rate"],
        "peak memory, MiB": lambda case: case["peak_memory"] / 2**20,
    }
    drawn: Panels = {}
    for (title, _), case in cases.items():
        over = "clients" if "clients" in case else "uploads"
        for label, value in labels.items():
            curves = drawn.setdefault((over, label), {})
            curves.setdefault(title, []).append((case[over], value(case)))
    return drawn


def training(*, repeats: int, budget: float, **options: Any) -> dict[str, Any]:
    """Train the clients."""
    work, federation, facts = _prepared(**options)

    def run() -> Any:
        how = {name: options[name] for name in ("epochs", "batch_size", "clients_per_chunk")}
        return train(work, federation, **how)._replace(start=None)  # which was there before

    steps = options["epochs"] * local_steps(federation, options["batch_size"]).sum()
    return apart.measured(Case("training", run, float(steps), facts=facts), repeats, budget)


def fishers(*, repeats: int, budget: float, **options: Any) -> dict[str, Any]:
    """Compute the clients' diagonal Fishers, of the untrained network."""
    work, federation, facts = _prepared(**options)
    size, num_clients = options["batch_size"], federation.num_clients
    algorithm = _diagonal(work.model, size)
    models = jax.tree.map(lambda x: jnp.tile(x, (num_clients,) + (1,) * x.ndim), work.params)

    def run() -> Any:
        return fj.merging.summarize(
            algorithm,
            fj.training.Trained(models),
            federation,
            key=jax.random.key(2),
            clients_per_chunk=options["clients_per_chunk"],
        )

    steps = float(local_steps(federation, size).sum())
    return apart.measured(Case("fishers", run, steps, facts=facts), repeats, budget)


def streamed(*, uploads: int, repeats: int, budget: float) -> dict[str, Any]:
    """Merge uploads a chunk at a time, each made when it is asked for."""
    work, algorithm, chunks = _arriving(uploads)

    def run() -> Any:
        return fj.merging.merge_stream(algorithm, work.params, chunks())

    return _merging(run, uploads, repeats, budget)


def held(*, uploads: int, repeats: int, budget: float) -> dict[str, Any]:
    """Merge the same uploads all at once."""
    work, algorithm, chunks = _arriving(uploads)

    def run() -> Any:
        leaves = list(zip(*(jax.tree.leaves(chunk) for chunk, _ in chunks()), strict=True))
        structure = jax.tree.structure(next(chunks())[0])
        stacked = jax.tree.unflatten(structure, [jnp.concatenate(parts) for parts in leaves])
        return fj.merging.merge(algorithm, work.params, stacked)

    return _merging(run, uploads, repeats, budget)


def _merging(run: Callable[[], Any], uploads: int, repeats: int, budget: float) -> dict[str, Any]:
    known = {"uploads": uploads, "before_bytes": apart.current_bytes()}
    case = Case("merge", run, float(uploads), facts=lambda _: known)
    return apart.measured(case, repeats, budget)


def _prepared(
    *,
    num_clients: int,
    clients_per_chunk: int,
    num_examples: int,
    batch_size: int,
    epochs: int,
    data: str,
    data_dir: str | None,
) -> tuple[Any, fj.clients.Federation, Callable[[Any], dict[str, float]]]:
    """Return the workload, its clients, and what is known of them."""
    del epochs
    where = Config("clients", Path(), data=data, data_dir=data_dir and Path(data_dir))
    work = workload(where, "lenet", num_examples)
    federation = federate(work, num_clients)
    steps = local_steps(federation, batch_size)
    wasted = fj.parallel.wasted_steps
    known = {
        "clients": num_clients,
        "before_bytes": apart.current_bytes(),
        "wasted_steps": wasted(steps, clients_per_chunk),
        "wasted_in_tens": wasted(steps, min(10, num_clients)),
        "wasted_vmapped": wasted(steps, num_clients),
    }

    def facts(result: Any) -> dict[str, float]:
        return known | {"result_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(result))}

    return work, federation, facts


def _diagonal(model: fj.Model, batch_size: int = 64) -> fj.algorithms.Algorithm:
    return fj.algorithms.fedfisher(model, fisher=fj.fisher.diagonal, batch_size=batch_size)


def _arriving(uploads: int) -> tuple[Any, fj.algorithms.Algorithm, Callable[[], Iterator]]:
    """Return a workload, a method and a function that makes chunks of uploads, one by one."""
    work = workload(Config("clients", Path(), data="synthetic"), "lenet", 1)
    algorithm = _diagonal(work.model)
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

    return work, algorithm, chunks
