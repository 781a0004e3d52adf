"""Choose the devices of clients, place arrays on them, and predict the memory of a program."""

import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from fisherjax._core import checks, compiler
from fisherjax._predicted_memory import Memory, memory
from fisherjax._self_check import IDENTITIES, Fault, faults
from fisherjax.typing import Array, Device

__all__ = [
    "AXIS",
    "Fault",
    "Memory",
    "by_client",
    "by_numpy",
    "client_mesh",
    "disable_faulty_fusion",
    "layout_of",
    "memory",
    "mesh_of",
    "one_per_core",
    "replicate",
    "self_check",
    "share_memory",
    "stacked_shapes",
]

AXIS = "clients"
_PASS = "cpu-parallel-task-assigner"
"""The pass of XLA that divides elementwise operations among threads."""
_UNDIVIDED = f"--xla_disable_hlo_passes={_PASS}"


def one_per_core() -> None:
    """Make each CPU core that this process may use a JAX device.

    Call it before any JAX computation; `clients.shard` then spreads clients over the devices. If
    JAX_NUM_CPU_DEVICES or XLA_FLAGS sets a number of devices, that number is kept.

    The function also disables the pass of XLA that divides elementwise operations among threads.
    With as many devices as threads, programs occupy all threads and parts of divided operations
    that wait fill XLA's queue. Once it is full, after hundreds of products of large matrices in one
    loop, results are wrong without an error (seen with jaxlib 0.7.0, 0.9.2 to 0.12.0.1).

    Raises:
        RuntimeError: If JAX has already started.

    Example:
        import jax, fisherjax as fj
        fj.devices.one_per_core()
        federation = fj.clients.shard(federation)
    """
    # Type checkers do not know this attribute, which JAX sets at run time.
    chosen = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    number = chosen if chosen not in (None, -1) else _forced_devices() or _num_cores()
    if chosen in (None, -1) and not _forced_devices():
        jax.config.update("jax_num_cpu_devices", number)
    flags = os.environ.get("XLA_FLAGS", "")
    if number > 1 and "xla_disable_hlo_passes" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_UNDIVIDED}".strip()


def disable_faulty_fusion() -> None:
    """Disable the fusions that jaxlib's CPU compiler miscompiles, for all programs of the process.

    jaxlib 0.10.2 to 0.11.2 compute wrong numbers, without an error, for some products with a
    broadcast operand and some sums of broadcasts. fisherjax compiles its own programs without such
    fusions. If you also compile programs yourself (`jax.jit`), call this function before any JAX
    computation. It appends a flag to XLA_FLAGS in `os.environ`, unless that has a value of the
    flag. On other versions of jaxlib it does nothing.

    Raises:
        RuntimeError: If JAX has already started, on an affected version.

    Example:
        import jax, fisherjax as fj
        fj.devices.disable_faulty_fusion()
    """
    compiler.disable_faulty_fusion()


def self_check() -> tuple[Fault, ...]:
    """Check that this machine, backend and jaxlib compute a set of identities correctly.

    Each identity is compared with NumPy in float64. The set has programs that a released compiler
    has miscompiled, and those that every merge needs: products, convolutions, solves, and all
    devices computing at once. The check takes less than a minute. `python -m fisherjax check`
    prints the result; its option `--one-per-core` makes each CPU core a device first.

    Returns:
        One `Fault` for each identity that does not hold, with the affected programs and the remedy;
        an empty tuple if all hold.

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
    """Make a mesh with the client axis of these devices; None takes those of all processes.

    Raises:
        ValueError: If the list is empty or has a device twice.

    Example:
        >>> client_mesh(jax.devices()[:1]).size
        1
    """
    devices = jax.devices() if devices is None else list(devices)
    if not devices:
        raise ValueError(
            "There are no devices to spread clients over; expected at least one, such as "
            "jax.devices()."
        )
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices {devices} have one twice; expected each only once.")
    mesh = Mesh(np.array(devices), (AXIS,))
    is_safe = _PASS in os.environ.get("XLA_FLAGS", "") or mesh.size < _num_cores()
    if share_memory(mesh) and mesh.size > 1 and not is_safe:
        warnings.warn(
            f"{mesh.size} CPU devices on {_num_cores()} cores: XLA then computes wrong results in "
            "long loops of large products. Call fisherjax.devices.one_per_core(), or set "
            f"XLA_FLAGS={_UNDIVIDED}, before JAX computes anything.",
            stacklevel=2,
        )
    return mesh


def layout_of(tree: Any) -> NamedSharding | None:
    """Return how arrays are spread over a mesh; None for a single device and for tracers."""
    first = jax.tree.leaves(tree)[0]
    if checks.is_traced(first) or not isinstance(first, jax.Array):
        return None
    return first.sharding if isinstance(first.sharding, NamedSharding) else None


def mesh_of(tree: Any) -> Mesh | None:
    """Return the mesh over which arrays are spread; None for a single device and for tracers."""
    layout = layout_of(tree)
    return layout.mesh if layout is not None and isinstance(layout.mesh, Mesh) else None


def replicate(tree: Any, mesh: Mesh | None) -> Any:
    """Copy whole arrays to every device of a mesh; return them unchanged without a mesh.

    With several processes, each passes the same values. A shape (`jax.ShapeDtypeStruct`) becomes
    that of the copied array.
    """
    if mesh is None:
        return tree
    everywhere = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere)
        # JAX itself copies arrays within one process, and arrays that are spread over processes.
        is_local = not isinstance(x, jax.Array) or x.is_fully_addressable
        if everywhere.is_fully_addressable or not is_local:
            return jax.device_put(x, everywhere)
        # Arrays reach the devices of another process only from host memory.
        return by_numpy(lambda values: jax.device_put(values, everywhere), x)

    return jax.tree.map(place, tree)


def by_numpy(place: Callable[[np.ndarray], Array], x: Any) -> Array:
    """Copy an array to the host and place it from there."""
    if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key):
        # NumPy cannot hold a typed key, so that its bits are placed and wrapped again.
        return jax.random.wrap_key_data(
            place(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x)
        )
    return place(np.asarray(x))


def on_each(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Run a function on each device with its part of the arguments, as `jax.shard_map` does.

    Raises:
        NotImplementedError: If JAX cannot run an operation on each of several devices; JAX's own
            error then has no message.
    """
    how = {"mesh": mesh, "in_specs": in_specs, "out_specs": out_specs, "check_vma": False}
    divided = jax.shard_map(function, **how)

    def run(*arguments: Any) -> Any:
        try:
            return divided(*arguments)
        except NotImplementedError as error:
            if error.args:
                raise
            raise NotImplementedError(
                f"JAX {jax.__version__} cannot run an operation of this network on each of "
                f"{mesh.size} devices: on 0.7.1 and 0.7.2 any convolution that is mapped over "
                "examples or clients, on later versions such convolutions in groups. Compute on "
                "one device: without `clients.shard`, and with inputs that are not spread."
            ) from error

    return run


def by_client(mesh: Mesh, num_clients: int) -> NamedSharding:
    """Return the sharding of stacks [M, ...]: by client if the mesh divides M, else replicated."""
    axes = () if num_clients % mesh.size else (AXIS,)
    return NamedSharding(mesh, PartitionSpec(*axes))


def share_memory(mesh: Mesh | None) -> bool:
    """Return whether all devices of a mesh are on this process's CPU and share its memory."""
    if mesh is None:
        return False
    process = jax.process_index()
    return all(d.platform == "cpu" and d.process_index == process for d in mesh.devices.flat)


def stacked_shapes(tree: Any, num_clients: int, mesh: Mesh | None) -> Any:
    """Return the shapes and shardings of M copies of each array, [M, ...], as `in_order` makes."""
    sharding = None if mesh is None or share_memory(mesh) else by_client(mesh, num_clients)

    def stack(x: Any) -> jax.ShapeDtypeStruct:
        # The dtype that JAX will use: float64 becomes float32 unless 64 bits are enabled.
        dtype = jax.dtypes.canonicalize_dtype(jnp.result_type(x))
        return jax.ShapeDtypeStruct((num_clients, *jnp.shape(x)), dtype, sharding=sharding)

    return jax.tree.map(stack, tree)
