"""What the server sends in a round, and what its clients start with."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import leaves, tree
from fisherjax._stacked import copies
from fisherjax.algorithms.base import Algorithm
from fisherjax.leaves import Leaves
from fisherjax.local_update import ClientInputs
from fisherjax.typing import Array, Params


def download(algorithm: Algorithm, parts: Leaves, state: Any, place: int) -> dict[str, Any]:
    """Return what the server sends to a client: the algorithm's message, and shared statistics."""
    link = algorithm.link
    message = link.broadcast(parts.trained, state, jnp.asarray(place) if link.personal else None)
    kept = link.keeps(parts.statistics)
    shared = tree.by_name(parts.statistics).items()
    return {"message": message, "statistics": {n: x for n, x in shared if n not in kept}}


def broadcast(
    algorithm: Algorithm, state: Any, trained: Params, cohort: Array
) -> tuple[Any, int | None]:
    """Return the server's message, and its client axis: None if it is the same for all clients."""
    send = partial(algorithm.link.broadcast, trained, state)
    return (jax.vmap(send)(cohort), 0) if algorithm.link.personal else (send(None), None)


def client_inputs(
    algorithm: Algorithm,
    message: Any,
    axis: int | None,
    parts: Leaves,
    kept: tuple[Any, dict[str, Array]],
) -> tuple[ClientInputs, ClientInputs]:
    """Return what clients start a round with.

    Args:
        algorithm: Method that sent the message.
        message: The server's message, and `axis` its client axis, as `broadcast` returns them.
        axis: See `message`.
        parts: The server's statistics, and the frozen leaves.
        kept: What each client kept for the algorithm, and its statistics, [K, ...].

    Returns:
        What is common to all clients, and what each client has of its own, [K, ...]. Each field is
        None in one of them.
    """
    local, statistics = kept
    common, own = (
        ClientInputs(None, None, parts.statistics, parts.frozen),
        ClientInputs(None, None, None, None),
    )
    if axis is None and not jax.tree.leaves(local):
        start, extras = algorithm.link.receive(message, local)
        common = common._replace(start=start, extras=extras)
    else:
        start, extras = jax.vmap(algorithm.link.receive, in_axes=(axis, 0))(message, local)
        own = own._replace(start=start, extras=extras)
    if statistics:
        # Clients keep some of the statistics, or all; the others are copies of the server's.
        number = len(next(iter(statistics.values())))
        stacked = leaves.replace(copies(parts.statistics, number), statistics)
        common, own = common._replace(statistics=None), own._replace(statistics=stacked)
    return common, own


def received(given: tuple[ClientInputs, ClientInputs], number: int) -> Params:
    """Return the models that K clients received, leaves [K, ...]: all that a network has."""
    start, _, statistics, frozen = (
        mine if shared is None else copies(shared, number)
        for shared, mine in zip(*given, strict=True)
    )
    return leaves.join(start, statistics, frozen)
