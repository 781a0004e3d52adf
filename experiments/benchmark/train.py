"""Local training beside a loop over clients in PyTorch, and the choices inside it."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import fisherjax as fj
from experiments.benchmark import torch_peer
from experiments.benchmark.config import Config, num_examples
from experiments.benchmark.flops import count, matmul_cases, precisions
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import (
    Workload,
    federate,
    gradient,
    in_bfloat16,
    local_steps,
    native_convolutions,
    split,
    train,
    workload,
)
from fisherjax.typing import Apply


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each network and number of clients.

    Args:
        config: with the suite's values filled in.
        note: told what is missing, and what images are used.

    Yields:
        Groups; the facts are the last epoch's mean loss in nats, and the share of steps that
        clients spend waiting for the largest of their chunk.
    """
    missing = torch_peer.missing("torch")
    if missing:
        note(missing)
    for name in config.models:
        work = workload(config, name, num_examples(config, name))
        note(f"{name}: {work.source} images")
        for num_clients in config.num_clients:
            cases = [] if missing else [_torch(work, config, num_clients)]
            cases += [
                *_ours(work, config, num_clients),
                *matmul_cases(config.matmul_size),
            ]
            batches = f"batch {config.batch_size}, {len(work.labels)} images"
            title = f"training, {name}, M={num_clients}, {batches}"
            yield Group(title, "samples", None if missing else torch_peer.NAME, cases)


def chunk_name(chunk: int, num_clients: int) -> str:
    """Say how clients are mapped."""
    default = chunk == fj.parallel.chunk_size(None, num_clients)
    many = {1: "one after another", num_clients: "vmapped"}.get(chunk, f"chunks of {chunk}")
    return f"{many} (default)" if default else many


def chunks(asked: Sequence[int], num_clients: int) -> list[int]:
    """List the chunks to compare, the backend's default first."""
    default = fj.parallel.chunk_size(None, num_clients)
    return list(dict.fromkeys(asked or (default, 1, num_clients)))


def _torch(work: Workload, config: Config, num_clients: int) -> Case:
    train = torch_peer.training(work, split(work, num_clients), config.epochs, config.batch_size)
    units = config.epochs * len(work.labels)
    return Case(torch_peer.NAME, train, units, facts=lambda x: {"loss": x}, peak=torch_peer.peak)


def _ours(work: Workload, config: Config, num_clients: int) -> list[Case]:
    federation = federate(work, num_clients)
    units = config.epochs * len(work.labels)
    one = work.images[: config.batch_size], work.labels[: config.batch_size]
    flops = units / len(one[1]) * count(gradient(work.apply), work.params, *one)

    def case(name: str, apply: Apply, chunk: int, precision: str) -> Case:
        def run() -> Any:
            with jax.default_matmul_precision(precisions().get(precision)):
                return train(
                    work._replace(apply=apply),
                    federation,
                    epochs=config.epochs,
                    batch_size=config.batch_size,
                    clients_per_chunk=chunk,
                )

        def facts(trained: fj.training.Trained) -> dict[str, float]:
            loss = float(federation.weights @ trained.loss[:, -1])
            return {"loss": loss, "wasted_steps": fj.parallel.wasted_steps(steps, chunk)}

        return Case(f"fisherjax, {name}", run, units, flops, precision, facts=facts)

    steps = local_steps(federation, config.batch_size)
    sizes = chunks(config.chunks, num_clients)
    first, wide = sizes[0], max(sizes)
    return [
        *(case(chunk_name(c, num_clients), work.apply, c, "default") for c in sizes),
        *(case(name, work.apply, first, name) for name in precisions() if name != "default"),
        case("bfloat16", in_bfloat16(work.apply), first, "bfloat16"),
        case(
            f"native convolutions, {chunk_name(wide, num_clients)}",
            native_convolutions,
            wide,
            "default",
        ),
    ]
