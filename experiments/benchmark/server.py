"""The server's K-FAC solve: conjugate gradients beside the paper's 2000 steps of Adam."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

import fisherjax as fj
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import Workload, federate, split, train, workloads

TOLERANCE = 1e-3
PAPER_STEPS = 2000


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each network and number of clients: merging their trained models.

    The facts are the largest relative residual of a layer and its products.
    """
    for work in workloads(config, note):
        for num_clients in config.num_clients:
            cases = _cases(work, config, num_clients)
            title = f"K-FAC merge, {work.name}, M={num_clients}"
            yield Group(title, "merges", cases[0].name, cases)


def _cases(work: Workload, config: Config, num_clients: int) -> list[Case]:
    """Merge in one compiled program by either solver, and as users call it, checks included."""
    updates, weights = _uploads(work, config, num_clients)

    def merge(solver: fj.solvers.Solver) -> Callable[..., Any]:
        algorithm = fj.algorithms.fedfisher(work.model, solver=solver)
        return partial(fj.merging.merge, algorithm, work.params)

    def case(name: str, run: Callable[..., Any], **how: Any) -> Case:
        return Case(name, partial(run, updates, weights), facts=_facts, **how)

    adam = merge(fj.algorithms.paper_adam(epsilon_inside_root=True, steps=config.adam_steps))
    gradients = merge(fj.solvers.conjugate_gradients(tolerance=TOLERANCE))
    times = PAPER_STEPS / config.adam_steps
    how = "" if times == 1 else f" extrapolated from {config.adam_steps}"
    name = f"fisherjax, conjugate gradients to {TOLERANCE:g}"
    return [
        case(f"the paper's Adam, {PAPER_STEPS} steps{how}", jax.jit(adam), times=times),
        case(name, jax.jit(gradients)),
        case(f"{name}, merge", gradients),
    ]


def _facts(result: Any) -> dict[str, float]:
    _, _, info = result
    return {
        "relative_residual": max(map(float, jax.tree.leaves(info.residual))),
        "iterations": max(map(int, jax.tree.leaves(info.iterations))),
    }


def _uploads(work: Workload, config: Config, num_clients: int) -> tuple[Any, Any]:
    """Train the clients and compute the factors of each on some of its examples."""
    federation = federate(work, num_clients)
    trained = train(work, config, federation)
    permutation = np.random.default_rng(2).permutation
    some = [permutation(own)[: config.fisher_examples] for own in split(work, num_clients)]
    few = fj.clients.federation((work.images, work.labels), some)
    algorithm = fj.algorithms.fedfisher(work.model)
    updates = fj.merging.summarize(algorithm, trained, few, key=jax.random.key(2))
    return jax.block_until_ready(updates), federation.weights
