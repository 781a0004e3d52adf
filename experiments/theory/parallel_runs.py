"""Independent runs, such as seeds, as one compiled program over all devices."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

import fisherjax as fj


def compute(function: Callable[..., Any], stacked: Any, *common: Any) -> Any:
    """Map a function over runs [R, ...]: in turn on a CPU's devices, side by side on others'.

    What `function` needs besides its run and `common` is fixed by a partial; equal ones compile
    once. The results come back to the host, [R, ...].
    """
    mesh = fj.devices.client_mesh()
    mesh = mesh if mesh.size > 1 else None
    chunk = fj.parallel.chunk_size(None, len(jax.tree.leaves(stacked)[0]))
    stacked, common = fj.devices.replicate((stacked, common), mesh)
    spread = _spread(fj._core.caching.by_value(function), chunk, mesh, stacked, common)
    # Outside of the program: inside it, a device that waits for another would end the process.
    return jax.device_get(fj.parallel.in_order(spread, mesh))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _spread(
    function: Callable[..., Any], chunk: int, mesh: Mesh | None, stacked: Any, common: tuple
) -> fj.parallel.Spread:
    how = {"clients_per_chunk": chunk, "mesh": mesh}
    return fj.parallel.spread_clients(function, stacked, *common, **how)
