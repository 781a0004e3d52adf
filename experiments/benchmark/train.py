"""Time local training beside a loop over clients in PyTorch, its options, and all devices."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

import fisherjax as fj
from experiments.benchmark import measure, peers, workloads
from experiments.benchmark.config import Config
from experiments.benchmark.flops import matmul_cases, precisions, products

_ALONE = "one device"
_STRUCTURES = {"diagonal Fisher": fj.fisher.diagonal, "K-FAC Fisher": fj.fisher.kfac}


def groups(config: Config, note: Callable[[str], None]) -> Iterator[measure.Group]:
    """Yield a group for each network and number of clients.

    The facts are the last epoch's mean loss in nats, and the share of steps that clients spend
    waiting for the largest of their chunk.
    """
    reference = peers.TORCH if peers.are_there(note, "torch") else None
    for work in workloads.workloads(config, note):
        for num_clients in config.num_clients:
            cases = [*_ours(work, config, num_clients), *matmul_cases(config.matmul_size)]
            if reference:
                cases.insert(0, peers.training(work, config, num_clients))
            batches = f"batch {config.batch_size}, {len(work.labels)} images"
            title = f"training, {work.name}, M={num_clients}, {batches}"
            yield measure.Group(title, "samples", reference, cases)


def devices(config: Config, note: Callable[[str], None]) -> Iterator[measure.Group]:
    """Yield a group for each network, number of clients and phase, beside a single device."""
    count = jax.device_count()
    if count == 1:
        note("one device; on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two")
    for work in workloads.workloads(config, note):
        examples = len(work.labels)
        for num_clients in config.num_clients:
            alone = workloads.federate(work, num_clients)
            where = {_ALONE: alone, f"all {count}": fj.clients.shard(alone)}
            training = partial(workloads.train, work, config)
            trained = fj.training.Trained(training(alone).models)
            phases = {"training": (training, config.epochs * examples)}
            for phase, fisher in _STRUCTURES.items():
                how = {"fisher": fisher, "batch_size": config.batch_size}
                algorithm = fj.algorithms.fedfisher(work.model, **how)
                summarize = partial(fj.merging.summarize, algorithm, trained, key=jax.random.key(2))
                phases[phase] = summarize, examples
            for phase, (run, units) in phases.items():
                cases = [measure.Case(n, partial(run, own), units) for n, own in where.items()]
                title = f"{phase}, {work.name}, {num_clients} clients, {examples} images"
                yield measure.Group(title, "samples", _ALONE, cases)


def chunks(asked: Sequence[int], num_clients: int) -> dict[str, int]:
    """Return the chunks of clients to compare by name, the backend's default first."""
    default = fj.parallel.chunk_size(None, num_clients)
    names = {1: "one after another", num_clients: "vmapped"}
    return {
        names.get(chunk, f"chunks of {chunk}") + (" (default)" if chunk == default else ""): chunk
        for chunk in asked or (default, 1, num_clients)
    }


def _ours(work: workloads.Workload, config: Config, num_clients: int) -> list[measure.Case]:
    federation = workloads.federate(work, num_clients)
    units = config.epochs * len(work.labels)
    one = work.images[: config.batch_size], work.labels[: config.batch_size]
    step = products(workloads.gradient(work.model), work.params, *one)
    flops = units / len(one[1]) * step.flops
    steps = fj.clients.num_batches(np.asarray(federation.sizes), config.batch_size)

    def case(name: str, model: fj.Model, chunk: int, precision: str = "default") -> measure.Case:
        def run() -> Any:
            own = work._replace(model=model)
            with jax.default_matmul_precision(precisions().get(precision)):
                return workloads.train(own, config, federation, clients_per_chunk=chunk)

        def facts(trained: fj.training.Trained) -> dict[str, float]:
            loss = float(federation.weights @ trained.loss[:, -1])
            return {"loss": loss, "wasted_steps": fj.parallel.idle_share(steps, chunk)}

        return measure.Case(f"fisherjax, {name}", run, units, flops, precision, facts=facts)

    sizes = chunks(config.chunks, num_clients)
    first, wide = next(iter(sizes.values())), max(sizes, key=sizes.get)
    native = workloads.native_convolutions(work.model)
    return [
        *(case(name, work.model, chunk) for name, chunk in sizes.items()),
        *(case(name, work.model, first, name) for name in precisions() if name != "default"),
        case("bfloat16", workloads.in_bfloat16(work.model), first, "bfloat16"),
        case(f"native convolutions, {wide}", native, sizes[wide]),
    ]
