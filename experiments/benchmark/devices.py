"""What spreading clients over all devices gives: training and Fisher passes, beside one device."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax

import fisherjax as fj
from experiments.benchmark.config import Config, num_examples
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import Workload, federate, train, workload
from fisherjax.clients import Federation
from fisherjax.training import Trained

ALONE = "one device"
_STRUCTURES = {"diagonal Fisher": fj.fisher.diagonal, "K-FAC Fisher": fj.fisher.kfac}


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give a group for each network, number of clients and phase.

    Args:
        config: with the suite's values filled in.
        note: told what images are used, and how to get devices where there is only one.

    Yields:
        Groups of two cases.
    """
    count = jax.device_count()
    if count == 1:
        note("one device; on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two")
    for name in config.models:
        examples = num_examples(config, name)
        work = workload(config, name, examples)
        note(f"{name}: {work.source} images")
        for num_clients in config.num_clients:
            alone = federate(work, num_clients)
            where = {ALONE: alone, f"all {count}": fj.clients.shard(alone)}

            training = partial(train, work, epochs=config.epochs, batch_size=config.batch_size)
            trained = Trained(training(alone).params)
            phases = {"training": (training, config.epochs * examples)}
            for phase, fisher in _STRUCTURES.items():
                phases[phase] = _summary(config, work, fisher, trained), examples
            for phase, (run, units) in phases.items():
                cases = [Case(case, partial(run, own), units) for case, own in where.items()]
                title = f"{phase}, {name}, {num_clients} clients, {examples} images"
                yield Group(title, "samples", ALONE, cases)


def _summary(
    config: Config, work: Workload, fisher: Any, trained: Trained
) -> Callable[[Federation], Any]:
    algorithm = fj.algorithms.fedfisher(work.model, fisher=fisher, batch_size=config.batch_size)
    return lambda federation: fj.merging.summarize(
        algorithm, trained, federation, key=jax.random.key(2)
    )
