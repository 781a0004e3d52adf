"""Federations of clients: which client owns which example, and the minibatches of each.

The data are in memory once, and a client is a row of example indices. Clients have different
numbers of examples; only their indices are padded, never images. `minibatches` masks the padding,
and training, Fisher passes and metrics all read their examples with it.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._minibatches import (
    Minibatch,
    draw,
    hold_out,
    minibatches,
    num_batches,
    rows_of,
    shuffled,
    weights_of,
)
from fisherjax._user_data import client_by_client, from_batches, whole
from fisherjax.devices import client_mesh, mesh_of, replicate
from fisherjax.parallel import Spread, in_order
from fisherjax.partition.checks import client_rows
from fisherjax.typing import AnyArray, Array, Device, Examples, Key

__all__ = [
    "AGGREGATE",
    "COHORT",
    "SPLIT",
    "SUMMARIZE",
    "TRAIN",
    "Federation",
    "Minibatch",
    "Partition",
    "check",
    "client_key",
    "draw",
    "federation",
    "from_batches",
    "hold_out",
    "ids",
    "minibatches",
    "num_batches",
    "rows_of",
    "select",
    "shard",
    "shares",
    "shuffled",
    "view",
    "weights_of",
]

# Keys are folded with a purpose, then with a client's id, so that no two draws share a key.
TRAIN, SUMMARIZE, COHORT, SPLIT, AGGREGATE = range(5)

# The rows [n_i] of each client.
Partition: TypeAlias = Sequence[Sequence[int] | AnyArray] | AnyArray


class Federation(NamedTuple):
    """The data of all clients.

    Attributes:
        inputs: [N, ...], the inputs of all clients, in one copy, or a pytree of such arrays; images
            stay uint8.
        targets: [N, ...], the targets of all clients.
        indices: [M, n_max], the rows of each client, padded with 0.
        sizes: [M], the numbers of examples n_i.
        ids: [M], the integers with which each client's keys are folded; None is 0 to M - 1.
    """

    inputs: Any
    targets: Array
    indices: Array
    sizes: Array
    ids: Array | None = None

    @property
    def num_clients(self) -> int:
        """The number of clients M."""
        return self.sizes.shape[0]

    @property
    def weights(self) -> Array:
        """The clients' shares of the examples, p_i = n_i / sum_j n_j, [M]."""
        if checks.is_in_host_memory(self.sizes):
            known: np.ndarray = shares(np.asarray(self.sizes))
            return jax.device_put(known.astype(jnp.result_type(float)))
        divide = shares if checks.is_traced(self.sizes) else _shares_on_device
        return in_order(Spread(divide(self.sizes)), self.mesh)

    @property
    def mesh(self) -> Mesh | None:
        """The devices over which clients are spread by `shard`; None for a single device."""
        return mesh_of(self.sizes)


def shares(weights: Any) -> Any:
    """Divide weights [M], such as numbers of examples, by their sum; return zeros if all are zero.

    Example:
        >>> print(shares(np.array([0.5e308, 1.5e308])))
        [0.25 0.75]
    """
    numpy = np if isinstance(weights, np.ndarray) else jnp
    if jnp.issubdtype(weights.dtype, jnp.integer):
        return weights / numpy.maximum(weights.sum(), 1)
    # Divided by the largest first: sums of huge weights overflow, those of tiny ones underflow.
    largest = weights.max()
    scaled = weights / numpy.where(largest > 0, largest, 1)
    total = scaled.sum()
    return scaled / numpy.where(total > 0, total, 1)


_shares_on_device = jit(shares)


def federation(data: Any, partition: Partition | None = None) -> Federation:
    """Make a federation of clients, on the device, from data and a partition or client by client.

    Args:
        data: A `datasets.Dataset`, `Examples`, or a pair (inputs [N, ...], targets [N, ...]).
            Inputs may be a dict, a tuple or another pytree of arrays [N, ...]. Arrays may be those
            of any library that NumPy reads, such as PyTorch tensors on a CPU, or lists of rows.
            Without a partition, a sequence of one such data set for each client, whose examples
            are copied into one array.
        partition: The rows [n_i] of each client; a client may have none.

    Raises:
        ValueError: If inputs and targets differ in length, clients differ in shape or dtype, a row
            does not exist, or no client has an example.
        TypeError: If rows are not integers, or data are not numbers.

    Example:
        >>> print(federation((np.zeros(5), np.zeros(5)), [[3, 1, 0], [4]]).indices)
        [[3 1 0]
         [4 0 0]]
        >>> print(federation([(np.zeros(2), np.zeros(2)), (np.ones(1), np.ones(1))]).indices)
        [[0 1]
         [2 0]]
    """
    if partition is None:
        inputs, targets, rows = client_by_client(data)
    else:
        inputs, targets = whole(data)
        checks.instance("partition", partition, Iterable, "the rows of every client")
        rows = [client_rows(own, client, len(targets)) for client, own in enumerate(partition)]
    sizes = np.array([len(part) for part in rows], np.int32)
    if sizes.sum() == 0:
        if partition is None:
            raise ValueError(f"None of the {len(rows)} clients has an example; expected some.")
        raise ValueError(
            f"The partition gives no example to any of its {len(rows)} clients; expected some rows."
        )
    # [M, n_max]. Padding is row 0, a valid index, which `minibatches` never reads.
    indices = np.stack([np.pad(part, (0, sizes.max() - len(part))) for part in rows])
    return Federation(*jax.tree.map(_on_device, (inputs, targets, indices, sizes)))


def _on_device(x: AnyArray) -> Array:
    # `device_put` may share a NumPy array's memory, and its owner may write into it later. NumPy
    # copies it without a program, which `jnp.array` compiles for every shape.
    return jax.device_put(np.array(x) if isinstance(x, np.ndarray) else x)


def view(federation: Federation, client: int | Array) -> Examples:
    """Return the examples of one client, by its place from 0 to M - 1, which may be traced.

    Raises:
        IndexError: If there is no such client.

    Example:
        >>> two = federation((np.zeros(3), np.zeros(3)), [[2], [0, 1]])
        >>> print(view(two, 0).weights)
        [1. 0.]
    """
    check(federation)
    # JAX clamps a place that is out of range and would return another client's examples.
    checks.place("client", client, federation.num_clients)
    indices, size = federation.indices[client], federation.sizes[client]
    weights = (jnp.arange(indices.shape[0]) < size).astype(jnp.result_type(float))
    return Examples(federation.inputs, federation.targets, indices, weights)


def select(federation: Federation, clients: Sequence[int] | AnyArray) -> Federation:
    """Return the federation of the clients at these places [K], such as a cohort, in this order.

    The data are shared, not copied. Clients keep the ids with which their keys are folded: a client
    trains alone exactly as it does among the others. `_replace(ids=None)` numbers them anew. The
    places may be traced.

    Raises:
        ValueError: If there is no place, one is named twice, or a client does not exist.

    Example:
        >>> two = federation((np.zeros(3), np.zeros(3)), [[2], [0, 1]])
        >>> print(select(two, [1]).sizes)
        [2]
    """
    check(federation)
    places: Any = clients
    if not checks.is_traced(clients):
        places, last = np.asarray(clients), federation.num_clients - 1
        known = np.issubdtype(places.dtype, np.integer) & np.isin(places, np.arange(last + 1))
        differ = places.ndim == 1 and places.size == len(np.unique(places)) > 0
        if not differ or not known.all():
            raise ValueError(
                f"clients are {places.tolist()}; expected at least one of 0 to {last}, each "
                "only once."
            )
    own = federation.indices, federation.sizes, ids(federation)
    indices, sizes, numbers = jax.tree.map(lambda x: x[places], own)
    return Federation(federation.inputs, federation.targets, indices, sizes, numbers)


def ids(federation: Federation) -> Array:
    """Return the ids [M] with which the clients' keys are folded."""
    if federation.ids is None:
        return jnp.arange(federation.num_clients, dtype=jnp.int32)
    return federation.ids


def check(federation: Federation) -> None:
    """Check that a value is a `Federation`."""
    checks.instance("federation", federation, Federation, "the result of clients.federation")


def client_key(key: Key, purpose: int, client: Array) -> Key:
    """Fold a purpose and a client's id into a key."""
    return jax.random.fold_in(jax.random.fold_in(key, purpose), client)


def shard(federation: Federation, devices: Sequence[Device] | None = None) -> Federation:
    """Spread the clients over several devices, by default over all.

    Each device holds all data and computes some of the clients, so that training and Fisher passes
    run on all devices, with the same results up to rounding. Any number of clients is divided by
    their numbers of examples; accelerators and several processes get equal numbers of clients if M
    allows that. `devices.one_per_core` makes each core of a CPU a device. On several hosts
    (`jax.distributed.initialize`), each process calls this function with the same federation.

    Raises:
        ValueError: If the list of devices is empty or has a device twice.

    Example:
        >>> two = federation((np.zeros(3), np.zeros(3)), [[2], [0, 1]])
        >>> shard(two, jax.devices()[:1]).mesh.size
        1
    """
    # Every device holds all clients' rows; `map_clients` divides the clients among the devices.
    return replicate(federation, client_mesh(devices))
