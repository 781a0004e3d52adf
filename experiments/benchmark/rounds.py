"""What a federated round costs beside the training of its clients, and what an empty one costs."""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp

import fisherjax as fj
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import OPTIMIZER, federate, train, workload

_ALONE = "local training alone"
_IDLE_ROUNDS = 100


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give a group for each cohort, and one for rounds of clients that do nothing."""
    work = workload(config, "lenet", config.num_examples, note)
    training = {"epochs": config.epochs, "batch_size": config.batch_size, "optimizer": OPTIMIZER}
    key = jax.random.key(1)
    fedfish = partial(fj.algorithms.fedfish, work.model, batch_size=config.batch_size)
    algorithms = {
        "fedavg": fj.algorithms.fedavg(),
        "fedfish, last epoch": fedfish(last_epoch=True),
        "fedfish, a pass of its own": fedfish(),
    }

    def played(federation: fj.clients.Federation, rounds: int) -> Iterator[Case]:
        cohort = federation.num_clients
        for name, algorithm in algorithms.items():
            experiment = fj.rounds.federated(work.model, algorithm, cohort=cohort, **training)
            state = experiment.init(work.params, cohort)
            run = partial(fj.rounds.run, experiment, state, federation, key=key, rounds=rounds)
            yield Case(name, lambda run=run: list(run())[-1], rounds)

    for cohort in config.num_clients:
        federation = federate(work, cohort)
        title = f"a round, {cohort} clients, {config.num_examples} images, LeNet"
        alone = partial(train, work, config, federation, key=jax.random.fold_in(key, 0))
        cases = [Case(_ALONE, alone), *played(federation, 1)]
        yield Group(title, "rounds", None, cases, beside=_ALONE)
        nobody = federation._replace(sizes=jnp.zeros_like(federation.sizes))
        title = f"{_IDLE_ROUNDS} rounds, {cohort} clients without data, LeNet"
        yield Group(title, "rounds", None, [*played(nobody, _IDLE_ROUNDS)])
