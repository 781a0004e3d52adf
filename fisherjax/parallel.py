"""A function over many clients: in turn, side by side, and spread over devices.

Memory is set by how many clients are side by side on a device, never by how many there are.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fisherjax.typing import Array

AXIS = "clients"


class Layout(NamedTuple):
    """Where clients are computed: so many side by side on a device, of one or of a mesh."""

    clients_per_chunk: int
    mesh: Mesh | None = None


class Memory(NamedTuple):
    """Bytes of a program on one device: its arguments and results, and what it needs to run."""

    resident: int
    scratch: int


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
        mesh: Of devices, each of which takes an equal share of the clients; see `client_mesh`.

    Returns:
        The stacked results, in the clients' order, spread over the mesh like the clients.

    Raises:
        ValueError: If the mesh does not divide the clients into equal shares.

    Example:
        >>> map_clients(jnp.sum, jnp.arange(6.0).reshape(3, 2), clients_per_chunk=2)
        Array([1., 5., 9.], dtype=float32)
    """
    if mesh is None:
        return _map_chunks(lambda own: function(own, *common), stacked, sizes, clients_per_chunk)
    num_clients = _length(stacked)
    check_divides(mesh, num_clients)
    share = num_clients // mesh.size

    def one_share(own: Any, sizes: Array | None, common: tuple) -> Any:
        # The chunk was checked against all clients: a device's share may be smaller.
        chunk = min(clients_per_chunk, share)
        return _map_chunks(lambda client: function(client, *common), own, sizes, chunk)

    by_client = PartitionSpec(AXIS)
    return jax.shard_map(
        one_share,
        mesh=mesh,
        in_specs=(by_client, by_client, PartitionSpec()),
        out_specs=by_client,
        check_vma=False,
    )(stacked, sizes, common)


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


def wasted_steps(steps: Sequence[int], clients_per_chunk: int) -> float:
    """Say how much of the work on clients side by side is spent waiting for the largest of a chunk.

    Given the steps of each client: those of finished ones over all that are computed, from 0 to 1.

    Example:
        >>> [wasted_steps([1, 4, 1, 4], chunk) for chunk in (4, 2)]
        [0.375, 0.0]
    """
    steps = np.asarray(steps)
    # [chunks, length], as `map_clients` forms them: each takes as long as its largest client.
    computed = steps[_chunks(np.argsort(steps, kind="stable"), clients_per_chunk)]
    total = computed.shape[1] * computed.max(1).sum()
    return float(1 - steps.sum() / total) if total else 0.0


def client_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay devices of one kind out along the client axis: all, over all processes, if None.

    Raises:
        ValueError: If there are none.

    Example:
        >>> client_mesh(jax.devices()[:1]).size
        1
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError(
            "There are no devices to spread clients over; expected at least one, for instance "
            "jax.devices()."
        )
    return Mesh(np.array(devices), (AXIS,))


def check_divides(mesh: Mesh, num_clients: int) -> None:
    """Refuse a mesh whose devices would get different numbers of clients; name those that fit."""
    if num_clients % mesh.size:
        fitting = [n for n in range(1, mesh.size + 1) if num_clients % n == 0]
        raise ValueError(
            f"{num_clients} clients cannot be spread evenly over {mesh.size} devices. Use "
            f"{' or '.join(map(str, fitting))} of them, as in jax.devices()[:n], or add "
            "clients without examples to the partition."
        )


def mesh_of(tree: Any) -> Mesh | None:
    """Find the mesh over which arrays are spread, None for a single device and for tracers."""
    first = jax.tree.leaves(tree)[0]
    if isinstance(first, jax.core.Tracer) or not isinstance(first, jax.Array):
        return None
    return first.sharding.mesh if isinstance(first.sharding, NamedSharding) else None


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Give every device of a mesh the whole of each array; without a mesh leave them alone.

    Over several processes each passes the same values.
    """
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Array:
        # Within one process, or where it is spread over processes already, JAX copies it itself.
        is_local = not isinstance(x, jax.Array) or x.is_fully_addressable
        if everywhere.is_fully_addressable or not is_local:
            return jax.device_put(x, everywhere)
        # Another process's devices are reached from host memory only.
        if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
            # NumPy cannot hold a typed key: its bits are placed, and made a key again.
            data = jax.device_put(np.asarray(jax.random.key_data(x)), everywhere)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jax.device_put(np.asarray(x), everywhere)

    return jax.tree.map(place, tree)


def stacked_shapes(tree: Any, num_clients: int, mesh: Mesh | None) -> Any:
    """Give the shapes of M copies of each array, [M, ...], spread over the mesh if there is one."""
    sharding = None if mesh is None else NamedSharding(mesh, PartitionSpec(AXIS))

    def stack(x: Any) -> jax.ShapeDtypeStruct:
        # What the array will have: float64 becomes float32 unless 64 bits are enabled.
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(x))
        return jax.ShapeDtypeStruct((num_clients, *jnp.shape(x)), dtype, sharding=sharding)

    return jax.tree.map(stack, tree)


def memory(compiled_function: Any, *arguments: Any) -> Memory:
    """Ask the compiler what a program will need, without running it.

    Args:
        compiled_function: The result of `jax.jit`.
        *arguments: As it is called; shapes (`jax.ShapeDtypeStruct`) may stand for arrays.

    Returns:
        The bytes. A call with such arguments afterwards need not compile again.

    Example:
        >>> memory(jax.jit(lambda x: x + 1), jax.ShapeDtypeStruct((1000,), "float32")).resident
        8000
    """
    analysis = compiled_function.lower(*arguments).compile().memory_analysis()
    # A donated argument and the result in its place are the same bytes: counted once.
    resident = analysis.argument_size_in_bytes + analysis.output_size_in_bytes
    return Memory(resident - analysis.alias_size_in_bytes, analysis.temp_size_in_bytes)


def _map_chunks(
    function: Callable[[Any], Any], stacked: Any, sizes: Array | None, clients_per_chunk: int
) -> Any:
    num_clients = _length(stacked)
    # In turn nobody waits, and all at once there is one chunk only: no need to sort.
    if clients_per_chunk == 1:
        return jax.lax.map(function, stacked)
    if clients_per_chunk >= num_clients:
        return jax.vmap(function)(stacked)
    order = jnp.arange(num_clients) if sizes is None else jnp.argsort(sizes)
    chunks = _chunks(order, clients_per_chunk)

    def one_chunk(chunk: Array) -> Any:
        return jax.vmap(function)(jax.tree.map(lambda x: x[chunk], stacked))

    def body(number: Array, results: Any) -> Any:
        # Whoever fills up a chunk is written more than once, with the same result.
        chunk = chunks[number]
        return jax.tree.map(lambda all_, own: all_.at[chunk].set(own), results, one_chunk(chunk))

    # Written in place, so that the results are never held twice.
    shapes = jax.eval_shape(one_chunk, chunks[0])
    results = jax.tree.map(lambda s: jnp.zeros((num_clients, *s.shape[1:]), s.dtype), shapes)
    return jax.lax.fori_loop(0, chunks.shape[0], body, results)


def _chunks(order: Any, clients_per_chunk: int) -> Any:
    """Cut clients into chunks of one length; where some are missing, the first is repeated."""
    # As few chunks as possible, then as short as possible: 5 clients by 4 are 3 and 3, not 4 and 4.
    count = -(-len(order) // clients_per_chunk)
    length = -(-len(order) // count)
    numpy = jnp if isinstance(order, jax.Array) else np
    # The first of clients in order of size is the smallest: the cheapest to repeat.
    first = numpy.repeat(order[:1], count * length - len(order))
    return numpy.concatenate([first, order]).reshape(count, length)


def _length(stacked: Any) -> int:
    return jax.tree.leaves(stacked)[0].shape[0]
