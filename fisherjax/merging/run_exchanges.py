"""Exchanges: rounds without training, in which clients evaluate a model and return statistics."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple

import jax

from fisherjax import clients, leaves
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape
from fisherjax.algorithms.base import Algorithm, Report, Update, as_sequence
from fisherjax.clients import Federation
from fisherjax.devices import Memory
from fisherjax.merging.merges import merge
from fisherjax.merging.summaries import summarize, summarize_memory
from fisherjax.training import Trained, untrained
from fisherjax.typing import Key, Params


class Message(NamedTuple, Generic[Report]):
    """One message of an exchange: a round trip between the server and all clients.

    Attributes:
        received: What the server sends to each client.
        sent: Updates of all clients, stacked.
        params: Model after the merge.
        state: State of the algorithm after the merge.
        info: What the algorithm reports.
    """

    received: Any
    sent: Update
    params: Params
    state: Any
    info: Report


def exchange(
    algorithm: Algorithm[Report] | Sequence[Algorithm[Report]],
    params: Params,
    federation: Federation,
    *,
    key: Key,
    state: Any = None,
    trained: Trained | None = None,
    clients_per_chunk: int | None = None,
) -> tuple[Params, Any, Report]:
    """Send a model to all clients, summarize it there without training, and merge the updates.

    Methods such as `algorithms.analytic_head` take one message. A sequence of algorithms, such as
    `algorithms.natural_gradient` makes, takes one message each: every algorithm receives the model
    and the state that the one before it returned. With `trained`, the models that clients trained
    before, they summarize these, and the received model is their `start`, as RegMean++ needs. The
    other arguments, the results and the errors are those of `summarize` and `merge`; the weights
    are those of the federation.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> data = np.eye(2, dtype="float32"), np.ones((2, 1), "float32")
        >>> federation = fj.clients.federation(data, [[0], [1]])
        >>> head, start = fj.algorithms.analytic_head(model), {"w": jnp.zeros((2, 1))}
        >>> exchange(head, start, federation, key=jax.random.key(0))[0]["w"].shape
        (2, 1)
    """
    how: dict[str, Any] = {"key": key, "state": state, "clients_per_chunk": clients_per_chunk}
    how["trained"] = trained
    *_, last = messages(algorithm, params, federation, **how)
    return last.params, last.state, last.info


def messages(
    algorithm: Algorithm[Report] | Sequence[Algorithm[Report]],
    params: Params,
    federation: Federation,
    *,
    key: Key,
    state: Any = None,
    trained: Trained | None = None,
    clients_per_chunk: int | None = None,
) -> Iterator[Message[Report]]:
    """Run an `exchange`, with the same arguments, and yield each of its messages.

    Example: see `exchange`.
    """
    clients.check(federation)
    params = checks.arrays(params)
    for following in as_sequence(algorithm):
        start, state = start_message(following, params, state, federation.num_clients)
        how: dict[str, Any] = {"trained": trained, "clients_per_chunk": clients_per_chunk}
        sent = summarize_received(following, params, start, federation, key=key, **how)
        weights = federation.weights
        params, state, info = merge(following, params, sent, weights, state=state, key=key)
        yield Message(start, sent, params, state, info)


def start_message(
    algorithm: Algorithm, params: Params, state: Any, num_clients: int
) -> tuple[Any, Any]:
    """Return what all clients receive in a message of an exchange, and the state of the server.

    The state is that after the message before, or None.

    Raises:
        ValueError: If the method sends each client another message.
    """
    link = algorithm.link
    if link.personal:
        raise ValueError(
            "This method keeps a model for each client, as weighted_fedavg does; expected a "
            "method that sends the same to all clients. Use rounds.federated."
        )
    own = params if algorithm.model is None else leaves.trained(algorithm.model, params)
    state = link.init(own, num_clients) if state is None else state
    start, _ = link.receive(link.broadcast(own, state, None), link.init_client(own))
    return start, state


def summarize_received(
    algorithm: Algorithm,
    params: Params,
    start: Any,
    federation: Federation,
    *,
    key: Key,
    trained: Trained | None = None,
    clients_per_chunk: int | None = None,
) -> Update:
    """Compute the updates of clients that received `start` and hold params, without training.

    Arguments and errors are those of `exchange`.
    """
    # Without training, running statistics stay the same, as frozen leaves do.
    same = (
        untrained(params, federation.num_clients, algorithm.model) if trained is None else trained
    )
    same = same._replace(start=start)
    return summarize(algorithm, same, federation, key=key, clients_per_chunk=clients_per_chunk)


def message_shapes(
    algorithm: Algorithm | Sequence[Algorithm], params: Params, federation: Federation
) -> tuple[Message, ...]:
    """Return the messages of an exchange as shapes and dtypes, without computing them."""

    def shapes(params: Params, federation: Federation) -> list[Message]:
        return [*messages(algorithm, params, federation, key=jax.random.key(0))]

    return tuple(eval_shape(shapes, params, federation))


def exchange_memory(
    algorithm: Algorithm | Sequence[Algorithm],
    params: Params,
    federation: Federation,
    *,
    key: Key,
    clients_per_chunk: int | None = None,
) -> tuple[Memory, ...]:
    """Predict the bytes that clients need on each device for each message of an `exchange`.

    `params` are a model or its shapes; the other arguments are those of `exchange`.

    Example:
        >>> import jax, jax.numpy as jnp, numpy as np, fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> data = np.eye(2, dtype="float32"), np.ones((2, 1), "float32")
        >>> federation = fj.clients.federation(data, [[0], [1]])
        >>> head, start = fj.algorithms.analytic_head(model), {"w": jnp.zeros((2, 1))}
        >>> len(exchange_memory(head, start, federation, key=jax.random.key(0)))
        1
    """
    how = {"key": key, "clients_per_chunk": clients_per_chunk}
    # From shapes alone; afterwards only the clients' half of each message is compiled.
    known = message_shapes(algorithm, params, federation)
    return tuple(
        summarize_memory(following, params, federation, start=message.received, **how)
        for following, message in zip(as_sequence(algorithm), known, strict=True)
    )
