"""The devices that clients are spread over: which there are, what lies on them, what they need."""

import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fisherjax._core import checks, compiler
from fisherjax._self_check import IDENTITIES, Fault, faults
from fisherjax.typing import Array, Device

AXIS = "clients"
_PASS = "cpu-parallel-task-assigner"
"""What divides elementwise operations among threads in XLA, and the flag that leaves them whole."""
_UNDIVIDED = f"--xla_disable_hlo_passes={_PASS}"


class Memory(NamedTuple):
    """Bytes of a program on one device: its arguments and results, and what it needs to run."""

    resident: int
    scratch: int


def one_per_core() -> None:
    """Make every core that this process may use a device of its own, where JAX runs on a CPU.

    Call it first, before JAX computes anything; `clients.shard` then spreads clients over them.
    Whoever has chosen a number of devices, by JAX_NUM_CPU_DEVICES or XLA_FLAGS, keeps it.

    It also tells XLA not to divide elementwise operations among threads. Programs of as many
    devices as threads keep every thread to themselves, pieces that wait for another fill XLA's
    queue, and once that is full, after hundreds of products of large matrices in one loop, results
    are wrong without a word (seen with jaxlib 0.7.0, 0.9.2 to 0.12.0.1).

    Raises:
        RuntimeError: If JAX has begun already.

    Example:
        import jax, fisherjax as fj
        fj.devices.one_per_core()
        federation = fj.clients.shard(federation)
    """
    # JAX adds its options at run time.
    chosen = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    number = chosen if chosen not in (None, -1) else _forced_devices() or _num_cores()
    if chosen in (None, -1) and not _forced_devices():
        jax.config.update("jax_num_cpu_devices", number)
    flags = os.environ.get("XLA_FLAGS", "")
    if number > 1 and "xla_disable_hlo_passes" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_UNDIVIDED}".strip()


def disable_faulty_fusion() -> None:
    """Disable what jaxlib's CPU compiler miscompiles, for every program of this process.

    jaxlib 0.10.2 to 0.11.2 give wrong numbers, without an error, for some products with a broadcast
    operand and some sums of broadcasts. fisherjax compiles its own programs without such fusions;
    call this before JAX computes anything if you also compile programs yourself (`jax.jit`), with
    or without functions of fisherjax in them. It appends a flag to XLA_FLAGS in `os.environ`. On
    other versions of jaxlib it does nothing, and a value of the flag that you chose stays.

    Raises:
        RuntimeError: If JAX has begun already, on an affected version.

    Example:
        import jax, fisherjax as fj
        fj.devices.disable_faulty_fusion()
    """
    compiler.disable_faulty_fusion()


def self_check() -> tuple[Fault, ...]:
    """Check that this machine, backend and jaxlib compute a handful of identities right.

    Each is compared with NumPy in float64: forms that a released compiler has got wrong, and what
    every merge depends on (products, convolutions, solves, all devices at work at once). It takes
    less than a minute; `python -m fisherjax check` prints the same, with `--one-per-core` for a CPU
    whose every core is a device.

    Returns:
        One `Fault` for each identity that does not hold, with what is affected and what to do:
        nothing, where all is well.

    Example:
        for fault in fj.devices.self_check():
            print(fault)
    """
    return faults(IDENTITIES)


def _forced_devices() -> int:
    found = re.findall(r"host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return int(found[-1]) if found else 0


def _num_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def client_mesh(devices: Sequence[Device] | None = None) -> Mesh:
    """Lay devices of one kind out along the client axis: all, over all processes, if None.

    Raises:
        ValueError: If there are none, or one twice.

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
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices {devices} have one twice; expected each only once.")
    mesh = Mesh(np.array(devices), (AXIS,))
    is_safe = _PASS in os.environ.get("XLA_FLAGS", "") or mesh.size < _num_cores()
    if share_memory(mesh) and mesh.size > 1 and not is_safe:
        warnings.warn(
            f"{mesh.size} CPU devices on {_num_cores()} cores: in long loops of large products "
            "XLA then gives wrong results. Begin with fisherjax.devices.one_per_core(), or set "
            f"XLA_FLAGS={_UNDIVIDED}, before JAX computes anything.",
            stacklevel=2,
        )
    return mesh


def layout_of(tree: Any) -> NamedSharding | None:
    """Find how arrays are spread over a mesh, None for a single device and for tracers."""
    first = jax.tree.leaves(tree)[0]
    if checks.is_traced(first) or not isinstance(first, jax.Array):
        return None
    return first.sharding if isinstance(first.sharding, NamedSharding) else None


def mesh_of(tree: Any) -> Mesh | None:
    """Find the mesh over which arrays are spread, None for a single device and for tracers."""
    layout = layout_of(tree)
    return layout.mesh if layout is not None and isinstance(layout.mesh, Mesh) else None


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Give every device of a mesh the whole of each array; without a mesh leave them alone.

    Over several processes each passes the same values. Shapes become those of such arrays.
    """
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        # Within one process, or where it is spread over processes already, JAX copies it itself.
        is_local = not isinstance(x, jax.Array) or x.is_fully_addressable
        if everywhere.is_fully_addressable or not is_local:
            return jax.device_put(x, everywhere)
        # Another process's devices are reached from host memory only.
        return by_numpy(lambda own: jax.device_put(own, everywhere), x)

    return jax.tree.map(place, tree)


def by_numpy(place: Callable[[np.ndarray], Array], x: Any) -> Array:
    """Bring an array to the host, and place it anew."""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        # NumPy cannot hold a typed key: its bits are placed, and made a key again.
        return jax.random.wrap_key_data(
            place(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x)
        )
    return place(np.asarray(x))


def by_client(mesh: Mesh, num_clients: int) -> NamedSharding:
    """Spread a stack [M, ...] over a mesh; where that does not divide M each device has it all."""
    axes = () if num_clients % mesh.size else (AXIS,)
    return NamedSharding(mesh, PartitionSpec(*axes))


def share_memory(mesh: Mesh | None) -> bool:
    """Say whether the devices of a mesh are this process's own CPU, and results need not stay."""
    if mesh is None:
        return False
    own = jax.process_index()
    return all(d.platform == "cpu" and d.process_index == own for d in mesh.devices.flat)


def stacked_shapes(tree: Any, num_clients: int, mesh: Mesh | None) -> Any:
    """Give the shapes of M copies of each array, [M, ...], as `in_order` would lay them out."""
    sharding = None if mesh is None or share_memory(mesh) else by_client(mesh, num_clients)

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
