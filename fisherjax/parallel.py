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
from fisherjax._core.compiler import jit, trace_once
from fisherjax._device_division import Division, chunks_of, divide, loads
from fisherjax.devices import AXIS, by_client, by_numpy, on_each, share_memory
from fisherjax.typing import Array

__all__ = [
    "Division",
    "Layout",
    "Spread",
    "chunk_size",
    "divide",
    "idle_share",
    "in_order",
    "map_clients",
    "spread_clients",
]


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
    division: Division | None = None,
) -> Spread:
    """Map like `map_clients`, but return results without moving them between devices.

    In long programs no device then waits for another; `in_order` collects the results afterwards.
    A `division` that was computed before, by `divide` of the same sizes, makes programs smaller.

    Example:
        >>> spread = spread_clients(jnp.sum, jnp.arange(6.0).reshape(3, 2))
        >>> in_order(spread, mesh=None)
        Array([1., 5., 9.], dtype=float32)
    """
    if mesh is None:
        return Spread(_map_chunks(function, stacked, common, sizes, clients_per_chunk))
    if division is None:
        own_sizes = _length(stacked) if sizes is None else sizes
        division = divide(own_sizes, clients_per_chunk, mesh)
    if division is None:
        chunk = min(clients_per_chunk, -(-_length(stacked) // mesh.size))

        def on_share(stacked: Any, sizes: Array | None, *common: Any) -> Any:
            return _map_chunks(function, stacked, common, sizes, chunk)

        return Spread(_on_devices(on_share, mesh, (stacked, sizes), common))

    def on_one(chunks: Array, counts: Array, stacked: Any, *common: Any) -> Any:
        rows = jnp.arange(chunks[0].size, dtype=jnp.uint32).reshape(chunks[0].shape)
        # The number of chunks differs: a device with large clients has fewer of them.
        return _compute(function, stacked, common, chunks[0], rows, counts[0])

    own = division.chunks, division.counts
    return Spread(_on_devices(on_one, mesh, own, (stacked, *common)), division.places)


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


def _on_devices(function: Callable[..., Any], mesh: Mesh, divided: tuple, common: tuple) -> Any:
    """Run a function on each device with its part of `divided` and with all of `common`."""
    by_device, everywhere = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (by_device,) * len(divided) + (everywhere,) * len(common)
    return on_each(function, mesh, in_specs, by_device)(*divided, *common)


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
    computed = num_steps[chunks_of(np.argsort(num_steps, kind="stable"), most)]
    longest = computed.max(1).sum()
    if num_devices > 1:
        longest = loads(num_steps, most, num_devices).max()
    total = num_devices * computed.shape[1] * float(longest)
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
    chunks = chunks_of(order, clients_per_chunk)
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
        if len(chunk) == 1:
            alone = function(_row(stacked, chunk[0]), *common)
            return jax.tree.map(lambda x: x[None], alone)
        some = jax.tree.map(lambda x: x[chunk], stacked)
        return jax.vmap(lambda client: function(client, *common))(some)

    traced, shapes = trace_once(one_chunk, chunks[0])

    def body(number: Array, results: Any) -> Any:
        new, places = traced(chunks[number]), rows[number]
        if len(places) == 1:
            return jax.tree.map(partial(_write, place=places[0]), results, new)
        return jax.tree.map(lambda all_, own: all_.at[places].set(own), results, new)

    # Results are written in place, so that they are never in memory twice.
    room = room or rows.size
    results = jax.tree.map(lambda s: jnp.zeros((room, *s.shape[1:]), s.dtype), shapes)
    return jax.lax.fori_loop(0, count, body, results)


def _row(stacked: Any, place: Array) -> Any:
    return jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=place, keepdims=False), stacked)


def _write(results: Array, new: Array, place: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(results, new, place, 0)


def _length(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]
