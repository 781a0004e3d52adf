"""A function over many clients: in turn, side by side, and spread over devices by their work.

Memory is set by how many clients are side by side on a device, never by how many there are.
"""

import numbers
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
    """Where clients are computed: so many side by side on a device, of one or of a mesh."""

    clients_per_chunk: int
    mesh: Mesh | None = None


class Spread(NamedTuple):
    """Results of clients as devices left them, and the place of each client among them.

    Without places, [M], they are in the clients' order already.
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
    """Map a function over the client axis, a chunk of clients at a time.

    One client at a time is fastest on a CPU, all at once (vmap) on an accelerator; memory grows
    with the chunk. The results do not depend on it beyond rounding.

    Args:
        function: Of one client's slice of `stacked`, and of `common`.
        stacked: A pytree, leaves [M, ...].
        *common: The same for all clients. With a mesh every array that the function needs must be
            here: it cannot close over any.
        sizes: [M]; a chunk takes as long as its largest client, so it is formed of similar ones.
        clients_per_chunk: From 1 to M, on each device.
        mesh: Of devices, over which chunks are spread by their sizes; see `devices.client_mesh`.

    Returns:
        The stacked results, in the clients' order, spread over the mesh where that divides them.

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
    """Map as `map_clients`, but leave results where they are: no device waits for another.

    For long programs, outside of which `in_order` puts the results together.

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
    # Where a device has one chunk only, or memory of its own, clients stay where they lie.
    if num_clients % mesh.size == 0 and (chunk == most or not share_memory(mesh)):

        def on_share(stacked: Any, sizes: Array | None, *common: Any) -> Any:
            return _map_chunks(function, stacked, common, sizes, chunk)

        return Spread(_on_devices(on_share, mesh, (stacked, sizes), common))
    order = jnp.arange(num_clients) if sizes is None else jnp.argsort(sizes)
    chunks = _chunks(order, chunk)
    costs = jnp.ones(len(chunks)) if sizes is None else sizes[chunks].max(1).astype(float)
    plan = _divide(costs, mesh.size)

    def on_one(table: Array, counts: Array, chunks: Array, stacked: Any, *common: Any) -> Any:
        own = chunks[table[0]]
        rows = jnp.arange(own.size).reshape(own.shape)
        # As many as it has: a device with a few large clients has fewer of them.
        return _compute(function, stacked, common, own, rows, counts[0])

    given = (plan.table, plan.counts), (chunks, stacked, *common)
    results = _on_devices(on_one, mesh, *given)
    # Whoever fills up a chunk is there more than once, with the same result.
    slots = plan.slots[:, None] * chunks.shape[1] + jnp.arange(chunks.shape[1])
    places = jnp.zeros(num_clients, slots.dtype).at[chunks.ravel()].set(slots.ravel())
    return Spread(results, places)


def in_order(spread: Spread, mesh: Mesh | None) -> Any:
    """Put results in the clients' order, [M, ...].

    Those of a process's own CPU come back as arrays of its first device, since the devices share
    their memory; others stay spread over the mesh where that divides M.
    """
    if share_memory(mesh) and not checks.is_traced(spread):
        # By the host: a device that waits for another longer than 40 s would end the process.
        places = slice(None) if spread.places is None else np.asarray(spread.places)
        return jax.tree.map(
            lambda x: by_numpy(lambda own: jnp.asarray(own[places]), x), spread.results
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
    """Which chunks each device computes: [D, room], the first counts [D]; the slot of each [n]."""

    table: Array
    counts: Array
    slots: Array
    loads: Array


def _divide(costs: Array, num_devices: int) -> _Plan:
    """Give chunks to devices, the largest first, each to whoever has the least to do.

    The longest then takes at most 4/3 - 1/(3 D) of the shortest possible time (Graham, Bounds on
    multiprocessing timing anomalies, SIAM Journal on Applied Mathematics 1969, theorem 2), but for
    the room of a device, which is twice an equal share.
    """
    number = len(costs)
    room = min(number, 2 * -(-number // num_devices))
    largest_first = jnp.argsort(-costs)

    def give(place: Array, plan: _Plan) -> _Plan:
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
    return jax.lax.fori_loop(0, number, give, empty)


def _on_devices(function: Callable[..., Any], mesh: Mesh, own: tuple, common: tuple) -> Any:
    """Run on every device with its share of `own`, by the first axis, and with all of `common`."""
    by_device, everywhere = PartitionSpec(AXIS), PartitionSpec()
    in_specs = (by_device,) * len(own) + (everywhere,) * len(common)
    spread = {"mesh": mesh, "in_specs": in_specs, "out_specs": by_device, "check_vma": False}
    return jax.shard_map(function, **spread)(*own, *common)


def chunk_size(clients_per_chunk: int | None, num_clients: int) -> int:
    """Check that a chunk has from 1 to M clients; choose where it is None, 1 on a CPU or else M."""
    if clients_per_chunk is None:
        return 1 if jax.default_backend() == "cpu" else num_clients
    is_integer = isinstance(clients_per_chunk, numbers.Integral) and clients_per_chunk is not True
    if not is_integer or not 1 <= clients_per_chunk <= num_clients:
        raise ValueError(
            f"clients_per_chunk is {clients_per_chunk!r}; expected an integer from 1 (one client "
            f"after the other) to {num_clients} (all at once), or None to choose."
        )
    return int(clients_per_chunk)


def idle_share(steps: Sequence[int], clients_per_chunk: int = 1, num_devices: int = 1) -> float:
    """Say how much of the devices' time is spent waiting, from 0 to 1.

    Side by side clients wait for the largest of their chunk, and devices for the one that has the
    most to do: one less the steps of all clients over those that could have been computed.

    Example:
        >>> [idle_share([1, 4, 1, 4], clients_per_chunk=chunk) for chunk in (4, 2)]
        [0.375, 0.0]
        >>> idle_share([3, 2, 1], num_devices=2)
        0.0
    """
    own = np.asarray(steps)
    most = min(clients_per_chunk, -(-len(own) // num_devices))
    # [chunks, length], as `map_clients` forms them: each takes as long as its largest client.
    computed = own[_chunks(np.argsort(own, kind="stable"), most)]
    longest = computed.max(1)
    if num_devices > 1:
        longest = _divide(jnp.asarray(longest, float), num_devices).loads.max()
    total = num_devices * computed.shape[1] * float(longest.sum())
    return max(0.0, float(1 - own.sum() / total)) if total else 0.0


def _map_chunks(
    function: Callable[..., Any],
    stacked: Any,
    common: tuple,
    sizes: Array | None,
    clients_per_chunk: int,
) -> Any:
    num_clients = _length(stacked)
    # In turn nobody waits, and all at once there is one chunk only: no need to sort.
    if clients_per_chunk == 1:
        return jax.lax.map(lambda client: function(client, *common), stacked)
    if clients_per_chunk >= num_clients:
        return jax.vmap(lambda client: function(client, *common))(stacked)
    order = jnp.arange(num_clients) if sizes is None else jnp.argsort(sizes)
    chunks = _chunks(order, clients_per_chunk)
    # Whoever fills up a chunk is written more than once, with the same result.
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
    """Compute the first so many chunks [n, c] in turn, and write their results at rows [n, c]."""

    def one_chunk(chunk: Array) -> Any:
        some = jax.tree.map(lambda x: x[chunk], stacked)
        if len(chunk) > 1:
            return jax.vmap(lambda client: function(client, *common))(some)
        alone = function(jax.tree.map(lambda x: x[0], some), *common)
        return jax.tree.map(lambda x: x[None], alone)

    def body(number: Array, results: Any) -> Any:
        new = one_chunk(chunks[number])
        return jax.tree.map(lambda all_, own: all_.at[rows[number]].set(own), results, new)

    # Written in place, so that the results are never held twice.
    shapes = eval_shape(one_chunk, chunks[0])
    room = room or rows.size
    results = jax.tree.map(lambda s: jnp.zeros((room, *s.shape[1:]), s.dtype), shapes)
    return jax.lax.fori_loop(0, count, body, results)


def _length(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]


def _chunks(order: Any, clients_per_chunk: int) -> Any:
    """Cut clients into chunks of one length; where some are missing, the first is repeated."""
    # As few chunks as possible, then as short as possible: 5 clients by 4 are 3 and 3, not 4 and 4.
    count = -(-len(order) // clients_per_chunk)
    length = -(-len(order) // count)
    numpy = jnp if isinstance(order, jax.Array) else np
    # The first of clients in order of size is the smallest: the cheapest to repeat.
    first = numpy.repeat(order[:1], count * length - len(order))
    return numpy.concatenate([first, order]).reshape(count, length)
