"""The client's side: Flower's ClientApp of an algorithm."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fisherjax import clients, files, leaves, local_update, rounds
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._user_data import whole
from fisherjax.algorithms.base import Algorithm, as_sequence
from fisherjax.flower import _kept, _secure, _secure_client, _wire
from fisherjax.flower._replies import (
    Client,
    Request,
    check_finite,
    check_same_algorithm,
    key_for,
    member_of,
    place_of,
    reply,
)
from fisherjax.flower._secure import Secure
from fisherjax.flower._state import digest, download_shapes, exchanged
from fisherjax.leaves import Leaves
from fisherjax.local_update import ClientInputs
from fisherjax.merging.run_exchanges import message_shapes, summarize_received
from fisherjax.parallel import Layout
from fisherjax.rounds._messages import client_inputs
from fisherjax.rounds._one_round import client_half, parts_of
from fisherjax.typing import Key, Model, Params


def client_app(
    algorithm: Algorithm,
    model: Model,
    optimizer: optax.GradientTransformation,
    load: Callable[[Context], Any],
    *,
    params: Params,
    epochs: int = 1,
    batch_size: int = 64,
    exchanges: Sequence[Any] = (),
    folder: Any = None,
    key: Key | None = None,
    secure: Secure | Callable[[Context], Secure] | None = None,
) -> ClientApp:
    """Make Flower's app of a client, which trains by an algorithm and sends its updates.

    Updates are sent as the bytes of upload files, which name the first method in
    `algorithms.METHODS` that has such uploads; where there is none, as arrays by leaf name.
    Client i of M is a node whose configuration has `partition-id=i`. In round r it has the key of
    client i in round r of `rounds.run`, so that it trains as it would there.

    Args:
        algorithm: The same algorithm as the server's, wrappers included.
        model: Model that the client trains.
        optimizer: Optimiser of the client; its state starts afresh in every round.
        load: Function from Flower's context to the client's examples: `Examples`, a data set, or a
            pair (inputs [n, ...], targets [n, ...]). `context.node_config` has the configuration
            of the node.
        params: Params of the network, of which the client uses the structure, the frozen leaves,
            and its own leaves until it has trained. The server sends all others.
        epochs: Number of local epochs in a round (default 1).
        batch_size: Number of examples in a minibatch (default 64).
        exchanges: Messages without training that the client answers, such as
            `algorithms.analytic_head(model)`, in the order of the server's.
        folder: Folder for what the client keeps from round to round, such as SCAFFOLD's control or
            FedPer's head, in a file that is written atomically (default: Flower's context, which is
            lost when the node ends).
        key: Secret key of the client, folded by each message, so that other messages draw other
            noise (default: the key that the server sends). Training that draws noise, as of
            `privacy.dp_sgd`, requires one.
        secure: Terms of secure sums, or a function from Flower's context to them, as each client
            has its own signing key. The client then sends its term of a sum under masks only, and
            refuses to send an update by itself. With a `folder`, no stage of a sum is answered
            twice, even by two processes at once; signed sums need one.

    Returns:
        The app, which answers messages of types "train", "query.hello", "query.exchange" and, if
        sums are secure, "query.secure".

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a number is out of range, or the algorithm cannot run in rounds.

    Example: see `strategy`.
    """
    how: dict[str, Any] = {"optimizer": optimizer, "epochs": epochs, "batch_size": batch_size}
    experiment = rounds.federated(model, algorithm, cohort=1, clients_per_chunk=1, **how)
    checks.function("load", load, "load(context) -> (inputs, targets)")
    params = jax.tree.map(jnp.asarray, checks.arrays(params))
    if key is None and local_update.hides_the_loss(model):
        raise ValueError(
            "key is None, but this model trains with noise, as of privacy.dp_sgd, which the server "
            "must not know; expected a secret key of the client, such as privacy.system_key()."
        )
    if secure is not None:
        for each in (algorithm, *chain(*map(as_sequence, exchanges))):
            _secure.check_sums(each)
        if not callable(secure):
            _secure.checked(secure)
    client = Client(
        experiment,
        params,
        load,
        tuple(map(as_sequence, exchanges)),
        None if folder is None else Path(folder),
        key,
        secure,
    )
    app = ClientApp()
    answers = {"hello": _hello, "exchange": _exchange}
    for name, answer in answers.items():
        app.query(name)(partial(_answered, client, answer))
    app.query("secure")(partial(_secure_stage, client))
    app.train()(partial(_answered, client, _train))
    return app


def _answered(
    client: Client,
    answer: Callable[[Client, Request], RecordDict],
    message: Message,
    context: Context,
) -> Message:
    """Answer a message."""
    about, file = _wire.opened(message.content)
    place = place_of(context)
    # Of whatever the client has, the rows in use are copied.
    inputs, targets = whole(client.load(context), "load(context)")
    if not len(targets):
        raise ValueError("load(context) has no examples; expected at least one.")
    data = clients.federation((inputs, targets), [range(len(targets))])
    # Keys are folded by the client's number, as they are among all clients.
    data = data._replace(ids=jnp.array([place], jnp.int32))
    return Message(answer(client, Request(about, file, place, data, context)), reply_to=message)


def _secure_stage(client: Client, message: Message, context: Context) -> Message:
    """Answer a message of a secure sum for which the client does not train."""
    member = member_of(client, context)
    found = _secure_client.answer(member, _wire.opened(message.content)[0])
    return Message(_wire.content(found), reply_to=message)


def _hello(client: Client, request: Request) -> RecordDict:
    """Tell the server which client this is, and what it runs."""
    check_same_algorithm(client.experiment.algorithm, request.about)
    return _wire.content({"partition-id": request.place, "kind": client.experiment.algorithm.kind})


def _parts(client: Client, request: Request) -> Leaves:
    """Split the client's params, after a check that its frozen leaves are the server's."""
    parts = parts_of(client.experiment, client.params, request.federation)
    if digest(parts.frozen) != _wire.field(request.about, "frozen", str):
        raise ValueError(
            "The frozen leaves of this client's params differ from the server's; expected the same "
            "params on both sides, as frozen leaves are not sent."
        )
    return parts


def _train(client: Client, request: Request) -> RecordDict:
    """Train from what the server sent, and send the update."""
    about, data = request.about, request.federation
    experiment, algorithm = client.experiment, client.experiment.algorithm
    check_same_algorithm(algorithm, about)
    parts = _parts(client, request)
    number, accepted = (_wire.field(about, name, int) for name in ("round", "accepted"))
    key = key_for(client, request)
    first = experiment.init(client.params, data)
    experiment.check(first, data, key)
    like = download_shapes(experiment, parts, _wire.field(about, "num-clients", int))
    received = _wire.read(request.file or b"", partial(files.load_arrays, like=like))
    path = None if client.folder is None else client.folder / f"client-{request.place}.safetensors"
    before = _kept.load(request.context, path, (first.local, first.statistics), accepted)
    given = _given(algorithm, received, parts._replace(trained=None, frozen=None), before)
    given = given[0]._replace(frozen=parts.frozen), given[1]
    trained, update, after = client_half(experiment, Layout(1, None), given, before, data, key)
    check_finite(update, after)
    _kept.save(request.context, path, (before, after), (accepted, number))
    # Of a client that hides what it sends, the loss would disclose something.
    is_hidden = algorithm.link.draws or local_update.hides_the_loss(experiment.model)
    loss = float("nan") if is_hidden else trained.loss[0, -1]
    common, own = (each.start for each in given)
    start = jax.tree.map(lambda x: x[0], own) if common is None else common
    params = leaves.join(*parts._replace(trained=start))
    return reply(client, update, request, loss, algorithm, params)


@partial(jit, static_argnums=0)
def _given(
    algorithm: Algorithm, received: dict[str, Any], parts: Leaves, before: Any
) -> tuple[ClientInputs, ClientInputs]:
    parts = parts._replace(statistics=leaves.replace(parts.statistics, received["statistics"]))
    return client_inputs(algorithm, received["message"], None, parts, before)


def _exchange(client: Client, request: Request) -> RecordDict:
    """Evaluate the model that the server sent, without training, and send the update."""
    about, data = request.about, request.federation
    which = _wire.field(about, "exchange", int)
    step = _wire.field(about, "message", int)
    if not 0 <= which < len(client.exchanges) or not 0 <= step < len(client.exchanges[which]):
        raise ValueError(
            f"The server asks for exchange {which}, message {step}, which this client does not "
            "know; expected the same `exchanges` on both sides."
        )
    sequence = client.exchanges[which]
    algorithm, key = sequence[step], key_for(client, request)
    check_same_algorithm(algorithm, about)
    shapes = message_shapes(sequence, client.params, data)[step]
    parts = _parts(client, request)
    like = exchanged(algorithm, parts, shapes.received)
    received = _wire.read(request.file or b"", partial(files.load_arrays, like=like))
    params = leaves.join(received["params"], parts.frozen)
    own = params if algorithm.model is None else leaves.trained(algorithm.model, params)
    start = received.get("start", own)
    update = summarize_received(algorithm, params, start, data, key=key)
    check_finite(update, ())
    return reply(client, update, request, float("nan"), algorithm, params)
