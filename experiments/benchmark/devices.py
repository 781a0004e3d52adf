"""What spreading clients over all devices gives: training and Fisher passes, beside one device."""

from collections.abc import Callable, Iterator
from functools import partial

import jax

import fisherjax as fj
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import federate, train, workloads

_ALONE = "one device"
_STRUCTURES = {"diagonal Fisher": fj.fisher.diagonal, "K-FAC Fisher": fj.fisher.kfac}


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give a group of two cases for each network, number of clients and phase."""
    count = jax.device_count()
    if count == 1:
        note("one device; on a CPU XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two")
    for work in workloads(config, note):
        examples = len(work.labels)
        for num_clients in config.num_clients:
            alone = federate(work, num_clients)
            where = {_ALONE: alone, f"all {count}": fj.clients.shard(alone)}
            training = partial(train, work, config)
            trained = fj.training.Trained(training(alone).params)
            phases = {"training": (training, config.epochs * examples)}
            for phase, fisher in _STRUCTURES.items():
                how = {"fisher": fisher, "batch_size": config.batch_size}
                algorithm = fj.algorithms.fedfisher(work.model, **how)
                summarize = partial(fj.merging.summarize, algorithm, trained, key=jax.random.key(2))
                phases[phase] = summarize, examples
            for phase, (run, units) in phases.items():
                cases = [Case(case, partial(run, own), units) for case, own in where.items()]
                title = f"{phase}, {work.name}, {num_clients} clients, {examples} images"
                yield Group(title, "samples", _ALONE, cases)
