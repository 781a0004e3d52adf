"""Map a function over clients: in turn, in vmapped chunks, and spread over devices.

The memory needed depends on the number of clients in a chunk, not on the number of all clients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape, jit
from fisherjax.devices import AXIS, by_client, by_numpy, share_memory
from fisherjax.typing import Array


class Layout(NamedTuple):
    """How clients are computed.

    Attributes:
        clients_per_chunk: Clients that a device computes at once, under `vmap`.
        mesh: Devices over which chunks are spread; None is a single device.
    """

    clients_per_chunk: int
    mesh: Mesh | None = None


class Spread(NamedTuple):
    """Results of clients in the order in which devices computed them.

    Attributes:
        results: Pytree of stacked results.
        places: [M], the row of each client's result; None if results are in the clients' order.
    """

    results: Any
    places: Array | None = None


def map_clients(
    function: Callable[..., Any],
    stacked: Any,
    *common: Any,
    sizes: Array | None = None,
    clients_per_chunk: int = 1,
    mesh: Mesh | None = None,
) -> Any:
    """Map a function over the client axis, one chunk of clients at a time.

    On a CPU one client at a time is fastest, on an accelerator all clients at once. Memory grows
    with the chunk. Results do not depend on the chunk, up to rounding.

    Args:
        function: Function of one client's slice of `stacked` and of `common`.
        stacked: Pytree with leaves [M, ...].
        *common: Arguments that are the same for all clients. With a mesh, every array that the
            function needs must be an argument: the function cannot close over arrays.
        sizes: [M], the work of each client. A chunk takes as long as its largest client, so that
            chunks are made of clients of similar sizes.
        clients_per_chunk: Clients that each device computes at once, from 1 to M (default 1).
        mesh: Devices over which chunks are spread by their work; see `devices.client_mesh`.

    Returns:
        The stacked results in the clients' order, spread over the mesh if its size divides M.

    Example:
        >>> map_clients(jnp.sum, jnp.arange(6.0).reshape(3, 2), clients_per_chunk=2)
        Array([1., 5., 9.], dtype=float32)
    """
    how = {"sizes": sizes, "clients_per_chunk": clients_per_chunk, "mesh": mesh}
    return in_order(spread_clients(function, stacked, *common, **how), mesh)


def spread_clients(
    function: Callable[..., Any],
    stacked: Any,
    *common: Any,
    sizes: Array | None = None,
    clients_per_chunk: int = 1,
    mesh: Mesh | None = None,
) -> Spread:
    """Map like `map_clients`, but return results without moving them between devices.

    In long programs no device then waits for another; `in_order` collects the results afterwards.

    Example:
        >>> spread = spread_clients(jnp.sum, jnp.arange(6.0).reshape(3, 2))
        >>> in_order(spread, mesh=None)
        Array([1., 5., 9.], dtype=float32)
    """
    if mesh is None:
        return Spread(_map_chunks(function, stacked, common, sizes, clients_per_chunk))
    num_clients = _length(stacked)
    most = -(-num_clients // mesh.size)
    chunk = min(clients_per_chunk, most)
    # Clients are not redistributed if each device has one chunk only, or memory of its own.
    if num_clients % mesh.size == 0 and (chunk == most or not share_memory(mesh)):

        def on_share(stacked: Any, sizes: Array | None, *common: Any) -> Any:
            return _map_chunks(function, stacked, common, sizes, chunk)

        return Spread(_on_devices(on_share, mesh, (stacked, sizes), common))
    order = jnp.arange(num_clients) if sizes is None else jnp.argsort(sizes)
    chunks = _chunks(order, chunk)
    costs = jnp.ones(len(chunks)) if sizes is None else sizes[chunks].max(1).astype(float)
    plan = _divide(costs, mesh.size)

    def on_one(table: Array, counts: Array, chunks: Array, stacked: Any, *common: Any) -> Any:
        mine = chunks[table[0]]
        rows = jnp.arange(mine.size).reshape(mine.shape)
        # The number of chunks differs: a device with large clients has fewer of them.
        return _compute(function, stacked, common, mine, rows, counts[0])

    given = (plan.table, plan.counts), (chunks, stacked, *common)
    results = _on_devices(on_one, mesh, *given)
    # A client that fills a chunk is computed more than once, with the same result.
    slots = plan.slots[:, None] * chunks.shape[1] + jnp.arange(chunks.shape[1])
    places = jnp.zeros(num_clients, slots.dtype).at[chunks.ravel()].set(slots.ravel())
    return Spread(results, places)


def in_order(spread: Spread, mesh: Mesh | None) -> Any:
    """Return results in the clients' order, [M, ...].

    Results of devices that share a CPU's memory become arrays of its first device. Others stay
    spread over the mesh if its size divides M.
    """
    if share_memory(mesh) and not checks.is_traced(spread):
        # On the host: JAX ends the process if a device waits for another longer than 40 s.
        places = slice(None) if spread.places is None else np.asarray(spread.places)
        return jax.tree.map(
            lambda x: by_numpy(lambda values: jax.device_put(values[places]), x), spread.results
        )
    if spread.places is None:
        return spread.results
    return _in_order(mesh, spread.results, spread.places)


@partial(jit, static_argnums=0)
def _in_order(mesh: Mesh | None, results: Any, places: Array) -> Any:
    ordered = jax.tree.map(lambda x: x[places], results)
    if mesh is None:
        return ordered
    return jax.lax.with_sharding_constraint(ordered, by_client(mesh, places.shape[0]))


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


@partial(jit, static_argnums=1)
def _divide(costs: Array, num_devices: int) -> _Plan:
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


def _on_devices(function: Callable[..., Any], mesh: Mesh, divided: tuple, common: tuple) -> Any:
    """Run a function on each device with its part of `divided` and with all of `common`."""
    by_device, everywhere = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (by_device,) * len(divided) + (everywhere,) * len(common)
    spread = {"mesh": mesh, "in_specs": in_specs, "out_specs": by_device, "check_vma": False}
    return jax.shard_map(function, **spread)(*divided, *common)


def chunk_size(clients_per_chunk: int | None, num_clients: int) -> int:
    """Return a valid number of clients per chunk; None chooses 1 on a CPU and M elsewhere."""
    if clients_per_chunk is None:
        return 1 if jax.default_backend() == "cpu" else num_clients
    expected = f"an integer from 1 (one client after the other) to {num_clients} (all at once), or "
    expected += "None for the default"
    return checks.count("clients_per_chunk", clients_per_chunk, 1, num_clients, expected)


def idle_share(steps: Sequence[int], clients_per_chunk: int = 1, num_devices: int = 1) -> float:
    """Compute the fraction of the devices' time that is spent waiting, from 0 to 1.

    Clients wait for the largest client of their chunk, and devices for the device with the most
    work. The fraction is one minus the steps of all clients over the steps that could have been
    computed in this time.

    Example:
        >>> [idle_share([1, 4, 1, 4], clients_per_chunk=chunk) for chunk in (4, 2)]
        [0.375, 0.0]
        >>> idle_share([3, 2, 1], num_devices=2)
        0.0
    """
    num_steps = np.asarray(steps)
    most = min(clients_per_chunk, -(-len(num_steps) // num_devices))
    # [chunks, length], as in `map_clients`. A chunk takes as long as its largest client.
    computed = num_steps[_chunks(np.argsort(num_steps, kind="stable"), most)]
    longest = computed.max(1)
    if num_devices > 1:
        longest = np.asarray(_divide(longest.astype(np.float32), num_devices).loads).max()
    total = num_devices * computed.shape[1] * float(longest.sum())
    return max(0.0, float(1 - num_steps.sum() / total)) if total else 0.0


def _map_chunks(
    function: Callable[..., Any],
    stacked: Any,
    common: tuple,
    sizes: Array | None,
    clients_per_chunk: int,
) -> Any:
    num_clients = _length(stacked)
    # One client at a time, or all at once: sorting by size would change nothing.
    if clients_per_chunk == 1:
        return jax.lax.map(lambda client: function(client, *common), stacked)
    if clients_per_chunk >= num_clients:
        return jax.vmap(lambda client: function(client, *common))(stacked)
    order = jnp.arange(num_clients) if sizes is None else jnp.argsort(sizes)
    chunks = _chunks(order, clients_per_chunk)
    # A client that fills a chunk is written more than once, with the same result.
    return _compute(function, stacked, common, chunks, chunks, len(chunks), num_clients)


def _compute(
    function: Callable[..., Any],
    stacked: Any,
    common: tuple,
    chunks: Array,
    rows: Array,
    count: Array | int,
    room: int | None = None,
) -> Any:
    """Compute the first `count` chunks [n, c] in turn; write their results at rows [n, c]."""

    def one_chunk(chunk: Array) -> Any:
        some = jax.tree.map(lambda x: x[chunk], stacked)
        if len(chunk) > 1:
            return jax.vmap(lambda client: function(client, *common))(some)
        alone = function(jax.tree.map(lambda x: x[0], some), *common)
        return jax.tree.map(lambda x: x[None], alone)

    def body(number: Array, results: Any) -> Any:
        new = one_chunk(chunks[number])
        return jax.tree.map(lambda all_, own: all_.at[rows[number]].set(own), results, new)

    # Results are written in place, so that they are never in memory twice.
    shapes = eval_shape(one_chunk, chunks[0])
    room = room or rows.size
    results = jax.tree.map(lambda s: jnp.zeros((room, *s.shape[1:]), s.dtype), shapes)
    return jax.lax.fori_loop(0, count, body, results)


def _length(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def _chunks(order: Any, clients_per_chunk: int) -> Any:
    """Divide clients into chunks of equal length; the first client fills a short chunk."""
    # As few chunks as possible, then as short as possible: 5 clients by 4 are 3 + 3, not 4 + 4.
    count = -(-len(order) // clients_per_chunk)
    length = -(-len(order) // count)
    numpy = jnp if isinstance(order, jax.Array) else np
    # Clients are in order of size: the first one is the smallest, the cheapest to repeat.
    first = numpy.repeat(order[:1], count * length - len(order))
    return numpy.concatenate([first, order]).reshape(count, length)
