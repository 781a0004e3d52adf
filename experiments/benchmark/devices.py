"""What spreading clients over all devices gives: training and Fisher passes, beside one device."""

from collections.abc import Callable, Iterator
from typing import Any

import jax

import fisherjax as fj
from experiments.benchmark.config import Config, num_examples
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import CATEGORICAL, OPTIMIZER, federate, workload
from fisherjax.clients import Federation

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

            def train(federation: Federation, apply: Any = work.apply, start: Any = work.params):
                return fj.training.train(
                    apply,
                    CATEGORICAL,
                    start,
                    federation,
                    key=jax.random.key(1),
                    optimizer=OPTIMIZER,
                    epochs=config.epochs,
                    batch_size=config.batch_size,
                )

            phases = {"training": train}
            models = train(alone).params
            for phase, fisher in _STRUCTURES.items():
                phases[phase] = _summary(config, work.apply, fisher, models)
            for phase, run in phases.items():
                units = examples * (config.epochs if run is train else 1)
                cases = [
                    Case(case, lambda run=run, own=own: run(own), units)
                    for case, own in where.items()
                ]
                title = f"{phase}, {name}, {num_clients} clients, {examples} images"
                yield Group(title, "samples", ALONE, cases)


def _summary(config: Config, apply: Any, fisher: Any, models: Any) -> Callable[[Federation], Any]:
    aggregator = fj.aggregation.fedfisher(
        apply, CATEGORICAL, fisher=fisher, batch_size=config.batch_size
    )
    return lambda federation: fj.clients.summarize(
        aggregator, models, federation, key=jax.random.key(2)
    )
