"""Time the server's K-FAC solve: conjugate gradients beside the paper's 2000 steps of Adam."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

import fisherjax as fj
from experiments.benchmark.config import Config
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import Workload, federate, split, train, workloads

_TOLERANCE = 1e-3
_PAPER_STEPS = 2000


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Yield a group for each network and number of clients: merges of their trained models.

    Both solvers run in one compiled program; the last case is the call of users, with its checks.
    The facts are the largest relative residual of a layer and its products.
    """
    adam = fj.algorithms.paper_adam(epsilon_inside_root=True, steps=config.adam_steps)
    gradients = fj.solvers.conjugate_gradients(tolerance=_TOLERANCE)
    times = _PAPER_STEPS / config.adam_steps
    theirs = f"the paper's Adam, {_PAPER_STEPS} steps"
    theirs += "" if times == 1 else f" extrapolated from {config.adam_steps}"
    ours = f"fisherjax, conjugate gradients to {_TOLERANCE:g}"
    for work in workloads(config, note):
        by_adam, by_gradients = (
            partial(fj.merging.merge, fj.algorithms.fedfisher(work.model, solver=s), work.params)
            for s in (adam, gradients)
        )
        for num_clients in config.num_clients:
            sent = _uploads(work, config, num_clients)
            cases = [
                Case(theirs, partial(jax.jit(by_adam), *sent), times=times, facts=_facts),
                Case(ours, partial(jax.jit(by_gradients), *sent), facts=_facts),
                Case(f"{ours}, merge", partial(by_gradients, *sent), facts=_facts),
            ]
            yield Group(f"K-FAC merge, {work.name}, M={num_clients}", "merges", theirs, cases)


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
