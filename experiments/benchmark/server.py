"""The server's K-FAC solve: conjugate gradients beside the paper's 2000 steps of Adam."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

import fisherjax as fj
from experiments.benchmark.config import Config, num_examples
from experiments.benchmark.measure import Case, Group
from experiments.benchmark.workloads import Workload, split, train, workload

TOLERANCE = 1e-3
PAPER_STEPS = 2000


def groups(config: Config, note: Callable[[str], None]) -> Iterator[Group]:
    """Give one group for each network and number of clients: merging their trained models.

    Args:
        config: with the suite's values filled in.
        note: told what images are used.

    Yields:
        Groups; the facts are the largest relative residual of a layer and its products.
    """
    for name in config.models:
        work = workload(config, name, num_examples(config, name))
        note(f"{name}: clients trained on {work.source} images")
        for num_clients in config.num_clients:
            updates, weights = _uploads(work, config, num_clients)
            cases = _cases(work, config.adam_steps, updates, weights)
            title = f"K-FAC merge, {name}, M={num_clients}"
            yield Group(title, "merges", cases[0].name, cases)


def _cases(work: Workload, adam_steps: int, updates: Any, weights: Any) -> list[Case]:
    """Merge in one compiled program by either solver, and as users call it, checks included."""

    def merge(solver: fj.solvers.Solver) -> Callable[..., Any]:
        algorithm = fj.algorithms.fedfisher(work.model, solver=solver)
        return partial(fj.merging.merge, algorithm, work.params)

    adam = merge(fj.algorithms.paper_adam(epsilon_inside_root=True, steps=adam_steps))
    gradients = merge(fj.solvers.conjugate_gradients(tolerance=TOLERANCE))
    compiled_adam, compiled_gradients = jax.jit(adam), jax.jit(gradients)
    steps = f"{PAPER_STEPS} steps"
    if adam_steps != PAPER_STEPS:
        steps += f" extrapolated from {adam_steps}"
    name = f"conjugate gradients to {TOLERANCE:g}"
    return [
        Case(
            f"the paper's Adam, {steps}",
            lambda: compiled_adam(updates, weights),
            times=PAPER_STEPS / adam_steps,
            facts=_facts,
        ),
        Case(f"fisherjax, {name}", lambda: compiled_gradients(updates, weights), facts=_facts),
        Case(f"fisherjax, {name}, merge", lambda: gradients(updates, weights), facts=_facts),
    ]


def _facts(result: Any) -> dict[str, float]:
    _, _, info = result
    return {
        "relative_residual": max(map(float, jax.tree.leaves(info.residual))),
        "iterations": max(map(int, jax.tree.leaves(info.iterations))),
    }


def _uploads(work: Workload, config: Config, num_clients: int) -> tuple[Any, Any]:
    """Train the clients and compute the factors of each on some of its examples."""
    data, partition = (work.images, work.labels), split(work, num_clients)
    federation = fj.clients.federation(data, partition)
    trained = train(work, federation, epochs=config.epochs, batch_size=config.batch_size)
    random = np.random.default_rng(2)
    some = [random.permutation(own)[: config.fisher_examples] for own in partition]
    algorithm = fj.algorithms.fedfisher(work.model)
    updates = fj.merging.summarize(
        algorithm, trained, fj.clients.federation(data, some), key=jax.random.key(2)
    )
    return jax.block_until_ready(updates), federation.weights
