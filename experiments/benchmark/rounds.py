"""What a federated round costs beside the training of its clients, and what an empty one costs."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import fisherjax as fj
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import OPTIMIZER, federate, workload

ALONE = "local training alone"
_IDLE_ROUNDS = 100


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give a group for each cohort, and one for rounds of clients that do nothing.

    Args:
        config: with the suite's values filled in.
        note: told what images are used.

    Yields:
        Groups.
    """
    work = workload(config, "lenet", config.num_examples)
    note(f"rounds: {work.source} images")
    training = {"epochs": config.epochs, "batch_size": config.batch_size, "optimizer": OPTIMIZER}
    key = jax.random.key(1)

    def played(
        algorithm: fj.algorithms.Algorithm, federation: fj.clients.Federation, rounds: int
    ) -> Callable[[], Any]:
        num_clients = federation.num_clients
        experiment = fj.rounds.federated(work.model, algorithm, cohort=num_clients, **training)
        state = experiment.init(work.params, num_clients)
        options = {"key": key, "rounds": rounds}
        return lambda: list(fj.rounds.run(experiment, state, federation, **options))[-1]

    squares = {"batch_size": config.batch_size}
    algorithms = {
        "fedavg": fj.algorithms.fedavg(),
        "fedfish, last epoch": fj.algorithms.fedfish(work.model, **squares, last_epoch=True),
        "fedfish, a pass of its own": fj.algorithms.fedfish(work.model, **squares),
    }
    for cohort in config.num_clients:
        federation = federate(work, cohort)

        def alone(federation: fj.clients.Federation = federation) -> Any:
            round_key = jax.random.fold_in(key, 0)
            return fj.training.train(
                work.model, work.params, federation, key=round_key, **training
            ).params

        cases = [Case(ALONE, alone)]
        cases += [
            Case(name, played(algorithm, federation, 1)) for name, algorithm in algorithms.items()
        ]
        title = f"a round, {cohort} clients, {config.num_examples} images, LeNet"
        yield Group(title, "rounds", None, cases, beside=ALONE)

        nobody = federation._replace(sizes=jnp.zeros_like(federation.sizes))
        idle = [
            Case(name, played(algorithm, nobody, _IDLE_ROUNDS), _IDLE_ROUNDS)
            for name, algorithm in algorithms.items()
        ]
        title = f"{_IDLE_ROUNDS} rounds, {cohort} clients without data, LeNet"
        yield Group(title, "rounds", None, idle)
