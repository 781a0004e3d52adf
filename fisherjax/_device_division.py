"""Divide chunks of clients among devices by their work."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax.devices import share_memory
from fisherjax.typing import Array


class Division(NamedTuple):
    """Which clients each of D devices computes, in chunks of c clients.

    Attributes:
        chunks: [D, room, c], the indices of the clients in each device's chunks.
        counts: [D], numbers of chunks, of which a device has at most `room`.
        places: [M], the row of each client's result among those of all devices.
    """

    chunks: Array
    counts: Array
    places: Array


def divide(sizes: Array | int, clients_per_chunk: int, mesh: Mesh | None) -> Division | None:
    """Divide clients among the devices of a mesh, such that the last to end ends early.

    Outside of compiled programs this is one small program that many others share: each of them
    would otherwise contain it.

    Args:
        sizes: The work of each client [M], for instance `Federation.sizes`; or M for equal clients.
        clients_per_chunk: Clients that each device computes at once.
        mesh: The devices; None is a single device.

    Returns:
        The division, for `spread_clients`; None if clients are not redistributed, because there is
        one device, or each has memory of its own, or one chunk.

    Example:
        >>> divide(5, clients_per_chunk=1, mesh=None) is None
        True
    """
    num_clients = sizes if isinstance(sizes, int) else len(sizes)
    if mesh is None:
        return None
    most = -(-num_clients // mesh.size)
    chunk = min(clients_per_chunk, most)
    if num_clients % mesh.size == 0 and (chunk == most or not share_memory(mesh)):
        return None
    # Wherever sizes are, it is the same program.
    given = np.asarray(sizes) if checks.is_in_host_memory(sizes) else sizes
    found = _divided(given, num_clients, chunk, mesh.size)
    # A device takes its part of a NumPy array without a program.
    return jax.device_get(found) if all(map(checks.is_in_host_memory, found)) else found


def loads(sizes: np.ndarray, clients_per_chunk: int, num_devices: int) -> np.ndarray:
    """Compute the work of each device [D]; a chunk takes as long as its largest client.

    Example:
        >>> print(loads(np.array([3, 2, 1]), clients_per_chunk=1, num_devices=2))
        [3 3]
    """
    divided = _divided(sizes, len(sizes), clients_per_chunk, num_devices)
    chunks, counts, _ = jax.device_get(divided)
    is_computed = np.arange(chunks.shape[1]) < counts[:, None]
    return np.where(is_computed, sizes[chunks].max(2), 0).sum(1)


@partial(jit, static_argnums=(1, 2, 3))
def _divided(sizes: Any, num_clients: int, chunk: int, num_devices: int) -> Division:
    equal = jnp.ndim(sizes) == 0
    order = jnp.arange(num_clients) if equal else jnp.argsort(sizes)
    chunks = chunks_of(order, chunk)
    costs = jnp.ones(len(chunks)) if equal else sizes[chunks].max(1).astype(float)
    plan = _divide_chunks(costs, num_devices)
    # A client that fills a chunk is computed more than once, with the same result.
    slots = plan.slots[:, None] * chunks.shape[1] + jnp.arange(chunks.shape[1])
    places = jnp.zeros(num_clients, slots.dtype).at[chunks.ravel()].set(slots.ravel())
    # Unsigned, so that programs need not count negative indices from the end.
    return Division(chunks[plan.table].astype(jnp.uint32), plan.counts, places)


class _Plan(NamedTuple):
    """Which chunks each of D devices computes.

    Attributes:
        table: [D, room], the chunks of each device, of which the first `counts` are valid.
        counts: [D], numbers of chunks.
        slots: [n], the place of each chunk in the flat table.
        loads: [D], the work of each device.
    """

    table: Array
    counts: Array
    slots: Array
    loads: Array


def _divide_chunks(costs: Array, num_devices: int) -> _Plan:
    """Divide chunks among devices, the largest first, each to the device with the least work.

    The total time is at most 4/3 - 1/(3 D) of the shortest possible one (Graham, Bounds on
    multiprocessing timing anomalies, SIAM Journal on Applied Mathematics 1969, theorem 2), unless a
    device reaches its largest number of chunks, twice an equal share.
    """
    number = len(costs)
    room = min(number, 2 * -(-number // num_devices))
    largest_first = jnp.argsort(-costs)

    def assign(place: Array, plan: _Plan) -> _Plan:
        chunk = largest_first[place].astype(jnp.int32)
        device = jnp.argmin(jnp.where(plan.counts < room, plan.loads, jnp.inf))
        slot = plan.counts[device]
        return _Plan(
            plan.table.at[device, slot].set(chunk),
            plan.counts.at[device].add(1),
            plan.slots.at[chunk].set((device * room + slot).astype(jnp.int32)),
            plan.loads.at[device].add(costs[chunk]),
        )

    table = jnp.zeros((num_devices, room), jnp.int32)
    counts, slots = jnp.zeros(num_devices, jnp.int32), jnp.zeros(number, jnp.int32)
    empty = _Plan(table, counts, slots, jnp.zeros(num_devices, costs.dtype))
    return jax.lax.fori_loop(0, number, assign, empty)


def chunks_of(order: Any, clients_per_chunk: int) -> Any:
    """Divide clients into chunks of equal length; the first client fills a short chunk."""
    # As few chunks as possible, then as short as possible: 5 clients by 4 are 3 + 3, not 4 + 4.
    count = -(-len(order) // clients_per_chunk)
    length = -(-len(order) // count)
    numpy = jnp if isinstance(order, jax.Array) else np
    # Clients are in order of size: the first one is the smallest, the cheapest to repeat.
    first = numpy.repeat(order[:1], count * length - len(order))
    return numpy.concatenate([first, order]).reshape(count, length)
