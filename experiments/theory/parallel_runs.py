"""Run independent runs, such as seeds, in one compiled program over all devices."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

import fisherjax as fj
from fisherjax.typing import Array, Key


def compute(function: Callable[..., Any], stacked: Any, *common: Any) -> Any:
    """Map a function over runs [R, ...]: one by one on each device of a CPU, else side by side.

    Other arguments of `function` than its run and `common` are fixed by a partial; equal partials
    compile once. The results [R, ...] are on the host.
    """
    mesh = fj.devices.client_mesh()
    mesh = mesh if mesh.size > 1 else None
    chunk = fj.parallel.chunk_size(None, len(jax.tree.leaves(stacked)[0]))
    stacked, common = fj.devices.replicate((stacked, common), mesh)
    spread = _spread(fj._core.caching.by_value(function), chunk, mesh, stacked, common)
    # Results are put in order outside of the program, because a device that waits for another
    # inside of it may end the process.
    return jax.device_get(fj.parallel.in_order(spread, mesh))


Each = Callable[[Sequence[Any]], Iterable[Any]]
"""Yield the parts of a figure one by one, each with its own programs, and show the progress."""


def draw(
    setting: Any, owners: tuple[int, ...], key: Key, norm: Array, scale: Array | float
) -> tuple[Array, fj.theory.signal_noise.Data, fj.theory.signal_noise.Data]:
    """Draw initial weights, training data and test data of an experiment on signal and noise."""
    for_data, for_test, for_start = jax.random.split(key, 3)
    how = {"num_examples": setting.num_examples, "dim": setting.dim, "norm": norm}
    data = fj.theory.signal_noise.draw(for_data, owners, **how)
    test = fj.theory.signal_noise.draw_test(for_test, data, setting.num_test)
    return fj.theory.signal_noise.initial(for_start, setting.width, setting.dim, scale), data, test


def merge(name: str, model: Any, start: Any, models: Any, federation: Any) -> Any:
    """Merge clients' models [M, ...] by a method of the registry."""
    method, trained = fj.algorithms.make(name, model), fj.training.Trained(models)
    updates = fj.merging.summarize(method, trained, federation, key=jax.random.key(0))
    return fj.merging.merge(method, start, updates)[0]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _spread(
    function: Callable[..., Any], chunk: int, mesh: Mesh | None, stacked: Any, common: tuple
) -> fj.parallel.Spread:
    how = {"clients_per_chunk": chunk, "mesh": mesh}
    return fj.parallel.spread_clients(function, stacked, *common, **how)
