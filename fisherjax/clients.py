"""Clients: who owns which example, and what each sends to the server.

The data lie in memory once; a client is a row of example indices. Clients are ragged, and only
those integers are padded, never images.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fisherjax import tree
from fisherjax.mapping import (
    Memory,
    check_divides,
    chunk_size,
    client_mesh,
    map_clients,
    memory,
    mesh_of,
    replicate,
    stacked_shapes,
)
from fisherjax.typing import Array, Key, Params

# Keys are folded by purpose, then by client, so that no two draws share a key.
TRAIN, SUMMARIZE, COHORT, SPLIT = 0, 1, 2, 3


class Federation(NamedTuple):
    """The data of all clients.

    Attributes:
        inputs: [N, ...], one copy for everybody; images stay uint8.
        targets: [N, ...].
        indices: [M, n_max] rows of the data, client by client, padded with 0.
        sizes: [M] numbers of examples n_i.
    """

    inputs: Array
    targets: Array
    indices: Array
    sizes: Array

    @property
    def num_clients(self) -> int:
        """The number of clients M."""
        return self.sizes.shape[0]

    @property
    def weights(self) -> Array:
        """The clients' shares of the examples, p_i = n_i / sum_j n_j, [M]."""
        return self.sizes / self.sizes.sum()

    @property
    def mesh(self) -> Mesh | None:
        """The devices that clients are spread over, see `shard`; None for a single one."""
        return mesh_of(self.sizes)


class Examples(NamedTuple):
    """One client's view of the data; no image is copied.

    Attributes:
        inputs: [N, ...], everybody's.
        targets: [N, ...], everybody's.
        indices: [n_max] rows that are this client's, then padding.
        weights: [n_max], 1 for an example and 0 for padding.
    """

    inputs: Array
    targets: Array
    indices: Array
    weights: Array


class LocalModels(NamedTuple):
    """What local training yields.

    Attributes:
        params: stacked, leaves [M, ...].
        loss: [M, epochs] mean training loss in nats of every epoch, measured while it ran; 0 for a
            client without data.
        steps: [M] optimiser steps taken.
        squared_gradients: stacked like params, the sum over the last epoch's minibatches of the
            squared gradient of their mean loss, at the weights of that step; None unless asked for.
    """

    params: Params
    loss: Array
    steps: Array
    squared_gradients: Params | None = None


def federation(data: Any, partition: Sequence[np.ndarray]) -> Federation:
    """Give every client its examples.

    Args:
        data: a `data.Dataset`, or a pair (inputs [N, ...], targets [N, ...]).
        partition: for every client the rows [n_i] it owns; none is allowed.

    Returns:
        The federation, on the device.

    Raises:
        ValueError: if inputs and targets differ in length, a row is out of range, or there are no
            clients or no examples at all.
        TypeError: if rows are not integers.

    Example:
        >>> import numpy as np
        >>> from fisherjax import clients
        >>> data = np.zeros((5, 8)), np.array([0, 1, 1, 0, 1])
        >>> clients.federation(data, [np.array([3, 1, 0]), np.array([4])]).indices
        Array([[3, 1, 0],
               [4, 0, 0]], dtype=int32)
    """
    inputs, targets = (data.inputs, data.targets) if hasattr(data, "inputs") else data
    inputs, targets = _as_array(inputs), _as_array(targets)
    _check_lengths(inputs, targets)
    rows = [_check_rows(rows, client, len(inputs)) for client, rows in enumerate(partition)]
    sizes = np.array([len(r) for r in rows], np.int32)
    if sizes.sum() == 0:
        raise ValueError(
            f"The partition gives no example to any of its {len(rows)} clients; expected at least "
            "one array of row numbers that is not empty."
        )
    indices = np.zeros((len(rows), sizes.max()), np.int32)
    for client, own in enumerate(rows):
        indices[client, : len(own)] = own
    return Federation(*map(jnp.asarray, (inputs, targets, indices, sizes)))


def examples(inputs: Array, targets: Array) -> Examples:
    """View a whole data set as one client's, for models that were trained elsewhere.

    Args:
        inputs: [N, ...].
        targets: [N, ...].

    Returns:
        The view of all N examples.

    Raises:
        ValueError: if inputs and targets differ in length.

    Example:
        >>> import numpy as np
        >>> from fisherjax import clients
        >>> clients.examples(np.zeros((3, 8)), np.array([0, 1, 1])).weights
        Array([1., 1., 1.], dtype=float32)
    """
    inputs, targets = _as_array(inputs), _as_array(targets)
    _check_lengths(inputs, targets)
    indices = jnp.arange(len(inputs), dtype=jnp.int32)
    weights = jnp.ones(len(inputs), jnp.result_type(float))
    return Examples(jnp.asarray(inputs), jnp.asarray(targets), indices, weights)


def view(federation: Federation, client: int | Array) -> Examples:
    """Select one client's examples.

    Args:
        federation: the data of all clients.
        client: which one; may be traced.

    Returns:
        That client's view.

    Example:
        >>> import numpy as np
        >>> from fisherjax import clients
        >>> data = np.zeros((3, 8)), np.array([0, 1, 1])
        >>> clients.view(clients.federation(data, [np.array([2]), np.array([0, 1])]), 0).weights
        Array([1., 0.], dtype=float32)
    """
    indices, size = federation.indices[client], federation.sizes[client]
    weights = (jnp.arange(indices.shape[0]) < size).astype(jnp.result_type(float))
    return Examples(federation.inputs, federation.targets, indices, weights)


def select(federation: Federation, clients: Sequence[int] | Array) -> Federation:
    """Keep some of the clients, for instance those that are held out.

    Args:
        federation: the data of all clients.
        clients: which ones, in the order of the result.

    Returns:
        The federation of these; the data are shared, not copied.

    Raises:
        ValueError: if there are none, one is named twice, or one does not exist.

    Example:
        >>> import numpy as np
        >>> from fisherjax import clients
        >>> data = np.zeros((3, 8)), np.array([0, 1, 1])
        >>> federation = clients.federation(data, [np.array([2]), np.array([0, 1])])
        >>> clients.select(federation, [1]).sizes
        Array([2], dtype=int32)
    """
    clients = np.asarray(clients)
    known = np.isin(clients, np.arange(federation.num_clients))
    if clients.ndim != 1 or not clients.size or not known.all():
        raise ValueError(
            f"clients are {clients.tolist()}; expected at least one of 0 to "
            f"{federation.num_clients - 1}."
        )
    if len(np.unique(clients)) < len(clients):
        raise ValueError(f"clients are {clients.tolist()}; expected each only once.")
    indices, sizes = federation.indices[clients], federation.sizes[clients]
    return federation._replace(indices=indices, sizes=sizes)


def shard(federation: Federation, devices: Sequence[jax.Device] | None = None) -> Federation:
    """Spread the clients over several devices, of this process or of all.

    Every device holds the data and works on M / D clients of its own: training, the Fisher pass
    and the server's sums then run on all of them, with the same results to rounding. Over several
    hosts (`jax.distributed.initialize`) each process calls it with the same federation.

    Args:
        federation: the data of all clients.
        devices: D of them; all if None.

    Returns:
        The federation, on those devices. `training.train` and `summarize` find them there.

    Raises:
        ValueError: if there are no devices, or their number does not divide M.

    Example:
        >>> import jax, numpy as np
        >>> from fisherjax import clients
        >>> data = np.zeros((3, 8)), np.array([0, 1, 1])
        >>> federation = clients.federation(data, [np.array([2]), np.array([0, 1])])
        >>> clients.shard(federation, jax.devices()[:1]).mesh.size
        1
    """
    mesh = client_mesh(devices)
    check_divides(mesh, federation.num_clients)
    return replicate(federation, mesh)


def summarize(
    aggregator: Any,
    models: LocalModels | Sequence[Params] | Params,
    federation: Federation,
    *,
    key: Key,
    global_params: Params | None = None,
    clients_per_chunk: int | None = None,
) -> Any:
    """Compute every client's update: what it sends to the server.

    Compiled once for an aggregator object and shapes; keep the aggregator to use it again.

    Args:
        aggregator: its `summarize(key, params, examples, global_params)` runs for each client;
            where its `squared_gradients` is True, those of training are a fifth argument.
        models: what `training.train` returned, a list of M params, or stacked params.
        federation: the clients' data.
        key: folded by client.
        global_params: what the clients started from, for aggregators that need it.
        clients_per_chunk: side by side on a device; None chooses 1 on a CPU and all elsewhere.

    Returns:
        The stacked updates.

    Raises:
        ValueError: if the models are not as many as the clients, or come without squared gradients
            that the aggregator needs.
        TypeError: if params are not floating.

    Example:
        >>> import types, jax, numpy as np
        >>> from fisherjax import clients
        >>> data = np.zeros((3, 8)), np.array([0, 1, 1])
        >>> federation = clients.federation(data, [np.array([2]), np.array([0, 1])])
        >>> count = types.SimpleNamespace(summarize=lambda key, w, data, start: data.weights.sum())
        >>> models = [{"w": np.zeros(2)}, {"w": np.ones(2)}]
        >>> clients.summarize(count, models, federation, key=jax.random.key(0))
        Array([1., 2.], dtype=float32)
    """
    params = models.params if isinstance(models, LocalModels) else models
    params = tree.stack(params) if isinstance(params, list) else params
    tree.check_floating(params)
    _check_stacked(params, federation.num_clients)
    chunk = chunk_size(clients_per_chunk, federation.num_clients)
    mesh = federation.mesh
    key, global_params = replicate((key, global_params), mesh)
    trained = params, _squares(aggregator, models)
    return _summarize(aggregator.summarize, chunk, mesh, trained, federation, key, global_params)


def summarize_client(
    function: Callable[..., Any],
    federation: Federation,
    client: Array,
    key: Key,
    trained: tuple[Params, Params | None],
    global_params: Params | None,
) -> Any:
    """Compute one client's update.

    Args:
        function: an aggregator's `summarize`.
        federation: the clients' data.
        client: which one; may be traced.
        key: folded by purpose and client.
        trained: its params, and its squared gradients where the aggregator needs them, else None.
        global_params: what it started from.

    Returns:
        The update.
    """
    params, squares = trained
    key = jax.random.fold_in(jax.random.fold_in(key, SUMMARIZE), client)
    rest = () if squares is None else (squares,)
    return function(key, params, view(federation, client), global_params, *rest)


def summarize_memory(
    aggregator: Any,
    params: Params,
    federation: Federation,
    *,
    key: Key,
    global_params: Params | None = None,
    clients_per_chunk: int | None = None,
) -> Memory:
    """Predict the memory of `summarize`, with the models and updates of all clients.

    Args:
        aggregator: as for `summarize`.
        params: one model, or its shapes.
        federation: the clients' data.
        key: as for `summarize`.
        global_params: as for `summarize`.
        clients_per_chunk: as for `summarize`.

    Returns:
        Bytes on each device.

    Raises:
        ValueError: if clients_per_chunk is not a number of clients.

    Example:
        >>> import types, jax, numpy as np
        >>> from fisherjax import clients
        >>> data = np.zeros((3, 8), np.float32), np.array([0, 1, 1])
        >>> federation = clients.federation(data, [np.array([2]), np.array([0, 1])])
        >>> send = types.SimpleNamespace(summarize=lambda key, w, data, start: w)
        >>> options = {"key": jax.random.key(0)}
        >>> small = clients.summarize_memory(send, {"w": np.zeros(1)}, federation, **options)
        >>> large = clients.summarize_memory(send, {"w": np.zeros(1001)}, federation, **options)
        >>> large.resident - small.resident  # two models in, two models out
        16000
    """
    chunk = chunk_size(clients_per_chunk, federation.num_clients)
    mesh = federation.mesh
    key, global_params = replicate((key, global_params), mesh)
    trained = params, params if needs_squares(aggregator) else None
    stacked = stacked_shapes(trained, federation.num_clients, mesh)
    arguments = (aggregator.summarize, chunk, mesh, stacked, federation, key, global_params)
    return memory(_summarize, *arguments)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _summarize(
    function: Callable[..., Any],
    clients_per_chunk: int,
    mesh: Mesh | None,
    trained: tuple[Params, Params | None],
    federation: Federation,
    key: Key,
    global_params: Params | None,
) -> Any:
    def one(
        own: tuple[Array, tuple[Params, Params | None]],
        federation: Federation,
        key: Key,
        global_params: Params | None,
    ) -> Any:
        client, trained = own
        return summarize_client(function, federation, client, key, trained, global_params)

    return map_clients(
        one,
        (jnp.arange(federation.num_clients), trained),
        federation,
        key,
        global_params,
        sizes=federation.sizes,
        clients_per_chunk=clients_per_chunk,
        mesh=mesh,
    )


def needs_squares(aggregator: Any) -> bool:
    """Say whether an aggregator summarizes the squared gradients of training."""
    return getattr(aggregator, "squared_gradients", False)


def _squares(aggregator: Any, models: Any) -> Params | None:
    if not needs_squares(aggregator):
        return None
    squares = models.squared_gradients if isinstance(models, LocalModels) else None
    if squares is None:
        raise ValueError(
            "This aggregator needs the squared gradients of the last epoch. Train with "
            "training.train(..., squared_gradients=True) and pass what it returns, or let the "
            "aggregator compute them in a pass of its own."
        )
    return squares


def _as_array(x: Any) -> Any:
    return x if isinstance(x, (np.ndarray, jax.Array)) else np.asarray(x)


def _check_lengths(inputs: Any, targets: Any) -> None:
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise ValueError(
            f"inputs have shape {inputs.shape} and targets {targets.shape}; expected both to have "
            "one row for each example."
        )


def _check_rows(rows: Any, client: int, num_examples: int) -> np.ndarray:
    rows = np.asarray(rows)
    if rows.ndim != 1:
        raise ValueError(
            f"The rows of client {client} have shape {rows.shape}; expected one dimension, the "
            "numbers of the examples it owns."
        )
    if rows.size and not np.issubdtype(rows.dtype, np.integer):
        raise TypeError(
            f"The rows of client {client} have dtype {rows.dtype}; expected integers. Turn a mask "
            "into rows with numpy.flatnonzero."
        )
    if rows.size and (rows.min() < 0 or rows.max() >= num_examples):
        raise ValueError(
            f"The rows of client {client} run from {rows.min()} to {rows.max()}; expected 0 to "
            f"{num_examples - 1}. The partition must come from the targets of this data set."
        )
    return rows.astype(np.int32)


def _check_stacked(params: Params, num_clients: int) -> None:
    for name, leaf in zip(tree.names(params), jax.tree.leaves(params), strict=True):
        if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] != num_clients:
            raise ValueError(
                f"Leaf '{name}' of the stacked params has shape {jnp.shape(leaf)}; expected a "
                f"leading axis of the federation's {num_clients} clients. Pass a list to give one "
                "params pytree for each client."
            )
