"""The server's side: Flower's strategy and ServerApp of an algorithm."""

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fisherjax import clients, files, leaves, merging, rounds
from fisherjax._core import checks
from fisherjax._core.compiler import eval_shape
from fisherjax._stacked import shapes_of_one
from fisherjax.algorithms.base import Algorithm, Update, as_sequence
from fisherjax.clients import Federation
from fisherjax.flower import _received, _wire
from fisherjax.flower._grid import Reply, Streaming, replies
from fisherjax.flower._state import (
    ServerState,
    Terms,
    digest,
    download,
    key_fields,
    parts_of,
)
from fisherjax.merging._server_half import server_key
from fisherjax.merging.exchanges import message_shapes, start_message
from fisherjax.parallel import Layout
from fisherjax.rounds import Federated
from fisherjax.rounds._one_round import draw_cohort, train_and_summarize
from fisherjax.typing import Key, Model, Params


class Setup(NamedTuple):
    """Arguments of `strategy`, checked.

    Attributes:
        experiment: The algorithm and the model.
        example: Shapes of a client's examples, as a federation of one client.
        expected: Shapes of one client's update.
        num_clients: Number of clients M.
        cohort: Number of clients in a round.
        key: Key of the run.
        exchanges: Messages without training.
        terms: What is accepted of clients.
    """

    experiment: Federated
    example: Federation
    expected: Update
    num_clients: int
    cohort: int
    key: Key
    exchanges: tuple[tuple[Algorithm, ...], ...]
    terms: Terms


def strategy(
    algorithm: Algorithm,
    model: Model,
    params: Params,
    *,
    example: Any,
    num_clients: int,
    key: Key,
    cohort: int | None = None,
    exchanges: Sequence[Any] = (),
    state: ServerState | None = None,
    terms: Terms = Terms(),
) -> "Strategy":
    """Make the strategy of an algorithm, for a ServerApp of your own.

    Example:
        >>> import jax, numpy as np, optax, fisherjax as fj
        >>> from fisherjax import flower
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.categorical)
        >>> params, average = np.zeros((2, 2), np.float32), fj.algorithms.fedavg()
        >>> x, y = np.eye(2, dtype=np.float32), np.array([0, 1])
        >>> def load(context):
        ...     own = context.node_config["partition-id"]
        ...     return x[own :][:1], y[own :][:1]
        >>> client = flower.client_app(average, model, optax.sgd(0.1), load, params=params)
        >>> how = {"example": (x, y), "num_clients": 2, "key": jax.random.key(0)}
        >>> server = flower.strategy(average, model, params, **how)
        >>> server.run(flower.InProcess(client, 2), rounds=2)
        >>> server.state.number, bool(server.state.params[0, 0] > 0)
        (2, True)
    """
    # How clients train is theirs: these numbers only give shapes.
    how: dict[str, Any] = {"optimizer": optax.identity(), "epochs": 1, "batch_size": 1}
    experiment = rounds.federated(model, algorithm, cohort=1, clients_per_chunk=1, **how)
    params = jax.tree.map(jnp.asarray, checks.arrays(params))
    example = clients.federation([example])
    num_clients = checks.count("num_clients", num_clients)
    cohort = checks.count("cohort", num_clients if cohort is None else cohort, most=num_clients)
    first = experiment.init(params, example)
    key = server_key(algorithm, key)
    experiment.check(first, example, key)
    one = eval_shape(partial(_update, experiment), first, example)
    expected = shapes_of_one(one)
    if not jax.tree.leaves(expected.values):
        raise ValueError("This method, as single_set, sends nothing; expected one that does.")
    if algorithm.link.mix is not None and first.statistics:
        raise ValueError(
            "This method mixes the running statistics of each client on the server, which is not "
            "sent over Flower; expected a network without running statistics, or rounds.federated."
        )
    trained = leaves.trained(model, params)
    if state is None:
        kept = algorithm.link.init(trained, num_clients)
        state = ServerState(0, params, kept, np.full(num_clients, -1))
    sequences = tuple(map(as_sequence, exchanges))
    setup = Setup(
        experiment, example, expected, num_clients, cohort, key, sequences, terms
    )
    return Strategy(setup, state)


def _update(experiment: Federated, state: Any, example: Federation) -> Update:
    return train_and_summarize(experiment, Layout(1, None), state, example, jax.random.key(0)).update


class Strategy(FlowerStrategy):
    """Flower's strategy of an algorithm, as `strategy` makes it.

    Attributes:
        state: State after the last round.
    """

    def __init__(self, setup: Setup, state: ServerState) -> None:
        self._setup = setup
        self.state = state
        self._places: dict[int, int] = {}
        self._frozen = digest(parts_of(setup.experiment, state.params, setup.example).frozen)

    def run(
        self, grid: Grid, rounds: int = 1, after: Callable[[ServerState, Any], None] | None = None
    ) -> None:
        """Run rounds up to this number of all, and then the exchanges."""
        while self.state.number < rounds:
            messages = self._messages(grid)
            found = self._merged(replies(grid, messages, self._setup.terms.timeout))
            if after is not None:
                after(self.state, found)
        for which in range(len(self._setup.exchanges)):
            self.exchange(grid, which)

    # Flower's interface.

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run Flower's loop, in which replies are merged as they come."""
        if not args and "initial_arrays" not in kwargs:
            kwargs["initial_arrays"] = self.arrays()
        return super().start(Streaming(grid), *args, **kwargs)

    def arrays(self) -> ArrayRecord:
        """Return the model of the state as Flower's record, a file of arrays by leaf name."""
        params = self.state.params
        return _wire.file_record(_wire.written(partial(files.save_arrays, tree=params)))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round; `arrays` are the model of the state."""
        del server_round, arrays, config
        return self._messages(grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the replies of a round."""
        del server_round
        found = self._merged(Reply(each.metadata.src_node_id, each) for each in replies)
        return None if found is None else (self.arrays(), None)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return no metrics."""

    def summary(self) -> None:
        """Print nothing."""

    def _known_places(self, grid: Grid) -> dict[int, int]:
        """Return the client of each connected node; new nodes are asked."""
        setup = self._setup
        connected = list(grid.get_node_ids())
        new = [node for node in connected if node not in self._places]
        about = {"kind": setup.experiment.algorithm.kind}
        asked = [Message(_wire.content(about), node, _wire.HELLO) for node in new]
        for node, message in replies(grid, asked, setup.terms.timeout):
            try:
                place = _wire.field(_received.checked_content(message)[0], "partition-id", int)
                if not 0 <= place < setup.num_clients or place in self._places.values():
                    raise ValueError(
                        f"it has partition-id {place}; expected 0 to {setup.num_clients - 1}, each "
                        "of one node"
                    )
                self._places[node] = place
            except ValueError as error:
                _received.skipped(f"of node {node}", error)
        return {node: place for node, place in self._places.items() if node in connected}

    def _messages(self, grid: Grid) -> list[Message]:
        setup, state = self._setup, self.state
        algorithm = setup.experiment.algorithm
        key = jax.random.fold_in(setup.key, state.number)
        nodes = {place: node for node, place in self._known_places(grid).items()}
        drawn = np.asarray(draw_cohort(key, setup.num_clients, setup.cohort))
        parts = parts_of(setup.experiment, state.params, setup.example)
        about: dict[str, Any] = {
            "kind": algorithm.kind,
            "round": state.number,
            "num-clients": setup.num_clients,
            "frozen": self._frozen,
            **key_fields(key),
        }
        messages, common = [], None
        for place in map(int, drawn):
            if place not in nodes:
                _received.skipped(place, "it is not connected")
                continue
            if common is None or algorithm.link.personal:
                sent = download(setup.experiment, parts, state.algorithm, place)
                common = _wire.written(partial(files.save_arrays, tree=sent))
            own = about | {"accepted": int(state.accepted[place])}
            content = _wire.content(own, common)
            messages.append(Message(content, nodes[place], _wire.TRAIN))
        return messages

    def _merged(self, arriving: Iterable[Reply]) -> _received.Merged | None:
        setup, state = self._setup, self.state
        algorithm = setup.experiment.algorithm
        key = jax.random.fold_in(setup.key, state.number)
        request = _received.Request(
            algorithm, setup.expected, state.number, self._places, setup.terms
        )
        try:
            found = _received.merge(request, state.params, arriving, state.algorithm, key)
        except ValueError as error:
            warnings.warn(f"Round {state.number} changes nothing: {error}", stacklevel=3)
            self.state = state._replace(number=state.number + 1)
            return None
        accepted = np.array(state.accepted)
        accepted[[each.place for each in found.arrived]] = state.number
        kept = jax.tree.map(_as_before, found.state, state.algorithm)
        self.state = ServerState(state.number + 1, found.params, kept, accepted)
        return found

    def exchange(self, grid: Grid, which: int = 0) -> Any:
        """Run an exchange without training, see `merging.exchange`; return its report."""
        setup = self._setup
        key = jax.random.fold_in(setup.key, self.state.number)
        sequence, params, kept, info = setup.exchanges[which], self.state.params, None, ()
        shapes = message_shapes(sequence, params, setup.example)
        for step, algorithm in enumerate(sequence):
            start, kept = start_message(algorithm, params, kept, setup.num_clients)
            parts = parts_of(setup.experiment, params, setup.example)
            sent = {"params": leaves.join(parts.trained, parts.statistics), "start": start}
            about = {
                "kind": algorithm.kind,
                "round": self.state.number,
                "exchange": which,
                "message": step,
                "frozen": self._frozen,
                **key_fields(key),
            }
            content = _wire.content(about, _wire.written(partial(files.save_arrays, tree=sent)))
            nodes = self._known_places(grid)
            asked = [Message(content, node, _wire.EXCHANGE) for node in nodes]
            expected = shapes_of_one(shapes[step].sent)
            request = _received.Request(
                algorithm, expected, self.state.number, self._places, setup.terms
            )
            arriving = replies(grid, asked, setup.terms.timeout)
            found = _received.merge(request, params, arriving, kept, key)
            params, kept, info = found.params, found.state, found.info
        self.state = self.state._replace(params=params)
        return info


def _as_before(new: Any, old: Any) -> Any:
    return jnp.asarray(new, jnp.result_type(old))


def server_app(
    algorithm: Algorithm,
    model: Model,
    params: Params,
    *,
    rounds: int = 1,
    after: Callable[[ServerState, Any], None] | None = None,
    **options: Any,
) -> ServerApp:
    """Make Flower's app of the server, which runs rounds and then the exchanges."""
    made = strategy(algorithm, model, params, **options)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        made.run(grid, rounds, after)

    return app
