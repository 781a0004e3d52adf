"""Clients: who owns which example, and the minibatches of each.

The data lie in memory once; a client is a row of example indices. Clients are ragged, and only
those integers are padded, never images. `minibatches` is the one place where padding is masked:
training, Fisher passes and metrics all take their examples from there.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fisherjax import tree
from fisherjax._core import checks
from fisherjax.devices import client_mesh, mesh_of, replicate
from fisherjax.parallel import Spread, in_order
from fisherjax.partition.checks import client_rows
from fisherjax.typing import AnyArray, Array, Device, Examples, Key

# Keys are folded by purpose, then by client, so that no two draws share a key.
TRAIN, SUMMARIZE, COHORT, SPLIT, AGGREGATE = range(5)

Minibatch = tuple[Array, Any, Array]  # inputs [B, ...], targets or None, weights [B]


# For every client its rows [n_i].
Partition: TypeAlias = Sequence[Sequence[int] | AnyArray] | AnyArray


class Federation(NamedTuple):
    """The data of all clients.

    Attributes:
        inputs: [N, ...], one copy for everybody; images stay uint8.
        targets: [N, ...].
        indices: [M, n_max] rows of the data, client by client, padded with 0.
        sizes: [M] numbers of examples n_i.
        ids: [M] what each client's keys are folded by; None numbers them from 0.
    """

    inputs: Array
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
        # What is computed with them is computed once, not on every device of a CPU.
        return in_order(Spread(shares(self.sizes)), self.mesh)

    @property
    def mesh(self) -> Mesh | None:
        """The devices that clients are spread over, see `shard`; None for a single one."""
        return mesh_of(self.sizes)


def shares(weights: Any) -> Any:
    """Scale weights [M], numbers of examples or others, to sum one; zeros if all are zero.

    Example:
        >>> print(shares(np.array([0.5e308, 1.5e308])))
        [0.25 0.75]
    """
    numpy = np if isinstance(weights, np.ndarray) else jnp
    if jnp.issubdtype(weights.dtype, jnp.integer):
        return weights / numpy.maximum(weights.sum(), 1)
    # By the largest first: a sum of huge weights overflows, one of tiny weights underflows.
    largest = weights.max()
    scaled = weights / numpy.where(largest > 0, largest, 1)
    total = scaled.sum()
    return scaled / numpy.where(total > 0, total, 1)


def federation(data: Any, partition: Partition) -> Federation:
    """Give every client its examples, on the device.

    Args:
        data: A `datasets.Dataset`, `Examples`, or a pair (inputs [N, ...], targets [N, ...]).
        partition: For every client the rows [n_i] it owns; none is allowed.

    Raises:
        ValueError: If inputs and targets differ in length, a row does not exist, or nobody has any.
        TypeError: If rows are not integers.

    Example:
        >>> print(federation((np.zeros(5), np.zeros(5)), [[3, 1, 0], [4]]).indices)
        [[3 1 0]
         [4 0 0]]
    """
    pair = (data.inputs, data.targets) if hasattr(data, "inputs") else data
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"data is a {type(data).__name__}; expected Dataset or (inputs, targets).")
    checks.instance("partition", partition, Iterable, "the rows of every client")
    inputs, targets = (x if hasattr(x, "ndim") else np.asarray(x) for x in pair)
    inputs, targets = tree.native(inputs, "inputs"), tree.native(targets, "targets")
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise ValueError(
            f"inputs have shape {inputs.shape} and targets {targets.shape}; expected both to have "
            "one row for each example."
        )
    rows = [client_rows(rows, client, len(inputs)) for client, rows in enumerate(partition)]
    sizes = np.array([len(own) for own in rows], np.int32)
    if sizes.sum() == 0:
        raise ValueError(
            f"The partition gives no example to any of its {len(rows)} clients; expected some rows."
        )
    # [M, n_max]. Padding is row 0, a valid index, and `minibatches` never reads it.
    indices = np.stack([np.pad(own, (0, sizes.max() - len(own))) for own in rows])
    return Federation(*map(jnp.asarray, (inputs, targets, indices, sizes)))


def view(federation: Federation, client: int | Array) -> Examples:
    """Select one client's examples, by its place from 0 to M - 1, which may be traced.

    Raises:
        IndexError: If there is no such client.

    Example:
        >>> two = federation((np.zeros(3), np.zeros(3)), [[2], [0, 1]])
        >>> print(view(two, 0).weights)
        [1. 0.]
    """
    check(federation)
    # JAX clamps a place that is out of range: it would show another client's examples.
    if not checks.is_traced(client):
        place, last = np.asarray(client), federation.num_clients - 1
        is_number = place.ndim == 0 and np.issubdtype(place.dtype, np.integer)
        if not is_number or not 0 <= place <= last:
            raise IndexError(f"client is {client!r}; expected 0 to {last}.")
    indices, size = federation.indices[client], federation.sizes[client]
    weights = (jnp.arange(indices.shape[0]) < size).astype(jnp.result_type(float))
    return Examples(federation.inputs, federation.targets, indices, weights)


def select(federation: Federation, clients: Sequence[int] | AnyArray) -> Federation:
    """Keep the clients at these places [K], in this order: a cohort, or those that are held out.

    The data are shared, not copied, and keys are folded as before: a client trains alone exactly as
    it does among the others. `_replace(ids=None)` numbers them anew. The places may be traced.

    Raises:
        ValueError: If there are none, one is named twice, or one does not exist.

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
                f"clients are {places.tolist()}; expected at least one of 0 to {last}, each only "
                "once."
            )
    own = federation.indices, federation.sizes, ids(federation)
    indices, sizes, numbers = jax.tree.map(lambda x: x[places], own)
    return Federation(federation.inputs, federation.targets, indices, sizes, numbers)


def ids(federation: Federation) -> Array:
    """Give each client's id, which its keys are folded by, [M]."""
    if federation.ids is None:
        return jnp.arange(federation.num_clients, dtype=jnp.int32)
    return federation.ids


def check(federation: Federation) -> None:
    """Refuse what is no `Federation`."""
    checks.instance("federation", federation, Federation, "the result of clients.federation")


def client_key(key: Key, purpose: int, client: Array) -> Key:
    """Fold a key by purpose and by a client's id."""
    return jax.random.fold_in(jax.random.fold_in(key, purpose), client)


def shard(federation: Federation, devices: Sequence[Device] | None = None) -> Federation:
    """Spread the clients over several devices, all of them by default.

    Each device holds the data and works on clients of its own: training and the Fisher pass then
    run on all of them, with the same results to rounding. Clients are divided by their work, any
    number of any sizes; where they lie on the devices of accelerators or of several processes, by
    equal counts if that is possible. `devices.one_per_core` makes every core of a CPU a device.
    Over several hosts (`jax.distributed.initialize`) each process calls it with the same
    federation.

    Raises:
        ValueError: If there are no devices, or one twice.

    Example:
        >>> two = federation((np.zeros(3), np.zeros(3)), [[2], [0, 1]])
        >>> shard(two, jax.devices()[:1]).mesh.size
        1
    """
    # Every device holds everything; `map_clients` hands each its share of the clients.
    return replicate(federation, client_mesh(devices))


def minibatches(
    examples: Examples, batch_size: int
) -> tuple[Array, Callable[[Array | int], Minibatch]]:
    """Cut examples, in their order, into minibatches of B, or of all rows if there are fewer.

    Returns:
        How many minibatches hold an example that counts, and `batch(number) -> (inputs [B, ...],
        targets, weights [B])`. A last, short minibatch is filled up with its own examples at weight
        zero, and so is the place of a row that does not count, which is never read.

    Example:
        >>> number, batch = minibatches(Examples(jnp.arange(5.0)), batch_size=3)
        >>> print(number, *batch(1)[::2])
        2 [3. 4. 3.] [1. 1. 0.]
    """
    rows, weights = rows_of(examples)
    length = min(checks.count("batch_size", batch_size), rows.shape[0])
    # The first row that counts replaces those that do not: weight zero does not silence NaN.
    rows = jnp.where(weights != 0, rows, rows[jnp.argmax(weights != 0)])
    # Nothing after the last example that counts is run.
    used = jnp.max(jnp.where(weights != 0, jnp.arange(1, weights.size + 1), 0))

    def batch(number: Array | int) -> Minibatch:
        place = jnp.arange(length)
        # At least 1, as a remainder by 0 means nothing: an empty client runs minibatches in vain
        # where it waits for others of its chunk.
        full = jnp.clip(used - number * length, 1, length)
        # The places that are left over take the minibatch's own rows again, from its first on.
        chosen = number * length + place % full
        w = jnp.where(place < full, weights[chosen], 0)
        targets = None if examples.targets is None else examples.targets[rows[chosen]]
        return examples.inputs[rows[chosen]], targets, w

    return -(-used // length), batch


def shuffled(key: Key, examples: Examples) -> Examples:
    """Permute a client's examples; the padding stays behind them.

    The draw of a row depends on the key and its place only, not on how much padding there is.
    """
    rows, weights = rows_of(examples)
    # Always 32 bits: the order is the same with and without float64.
    draws = jax.random.bits(key, rows.shape, jnp.uint32)
    # Padding has the largest number; in a stable sort an example that drew it too stays before.
    order = jnp.argsort(jnp.where(weights == 0, ~jnp.uint32(0), draws), stable=True)
    return examples._replace(indices=rows[order], weights=weights[order])


def draw(key: Key, examples: Examples, most: int | None) -> Examples:
    """Draw some of a client's examples without replacement; None, or no fewer than all, is all.

    Example:
        >>> drawn = draw(jax.random.key(0), Examples(jnp.arange(9.0)), most=4)
        >>> len(set(drawn.indices.tolist()))
        4
    """
    if most is None or rows_of(examples)[0].shape[0] <= most:
        return examples
    # What counts comes first.
    rows, weights = rows_of(shuffled(key, examples))
    return examples._replace(indices=rows[:most], weights=weights[:most])


def hold_out(examples: Examples, every: int) -> tuple[Examples, Examples]:
    """Hold one of so many examples aside: give the others, and those.

    Example:
        >>> others, held = hold_out(Examples(jnp.arange(5.0)), every=2)
        >>> print(others.indices, held.indices)
        [0 2 4] [1 3]
    """
    rows, weights = rows_of(examples)
    is_held = np.arange(rows.shape[0]) % checks.count("every", every) == every - 1

    def chosen(which: np.ndarray) -> Examples:
        if not which.any():  # one that does not count stands for nobody
            return examples._replace(indices=rows[:1], weights=0 * weights[:1])
        return examples._replace(indices=rows[which], weights=weights[which])

    return chosen(~is_held), chosen(is_held)


def num_batches(sizes: Array, batch_size: int) -> Array:
    """Count the minibatches of an epoch, ceil(n_i / B)."""
    return -(-sizes // batch_size)


def rows_of(examples: Examples) -> tuple[AnyArray, Array]:
    """Return the rows and weights of examples, with what `Examples` leaves out: all, and ones."""
    rows = examples.indices
    rows = jnp.arange(examples.inputs.shape[0], dtype=jnp.int32) if rows is None else rows
    return rows, jnp.asarray(weights_of(examples), float)


def weights_of(examples: Examples) -> AnyArray:
    """Return the weights of examples, ones where `Examples` leaves them out."""
    if examples.weights is not None:
        return examples.weights
    rows = examples.inputs if examples.indices is None else examples.indices
    return jnp.ones(rows.shape[:1])
