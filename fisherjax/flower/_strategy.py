"""Flower's strategy of an algorithm: the messages of a round, and the merge of the replies."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fisherjax import files
from fisherjax._stacked import shapes_of_one
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.flower import _received, _secure, _secure_server, _wire
from fisherjax.flower._grid import Reply, Streaming, replies
from fisherjax.flower._nodes import Nodes
from fisherjax.flower._secure_client import Group
from fisherjax.flower._state import (
    Report,
    ServerState,
    Setup,
    digest,
    exchanged,
    key_fields,
)
from fisherjax.merging.run_exchanges import message_shapes, start_message
from fisherjax.rounds._cohorts import draw_cohort
from fisherjax.rounds._messages import download
from fisherjax.rounds._one_round import parts_of
from fisherjax.typing import Key, Params


class Strategy(FlowerStrategy):
    """Flower's strategy of an algorithm, as the function `strategy` makes it.

    Run it by its own `run`, or by Flower's `start` in a ServerApp of your own. Both merge replies
    while they come: for an algorithm with a `reduce`, memory holds one upload and the sums.

    Attributes:
        state: State after the last round.
    """

    def __init__(self, setup: Setup, state: ServerState) -> None:
        self._setup = setup
        self.state = state
        self._frozen = digest(parts_of(setup.experiment, state.params, setup.example).frozen)
        self._nodes = Nodes(setup)
        self._asked: dict[int, int] = {}  # the same, of the nodes that were asked in this round
        self._left_out: dict[int | str, str] = {}
        self._merging: Callable[..., _received.Merged] = _received.merge

    def run(
        self,
        grid: Grid,
        rounds: int = 1,
        after: Callable[[ServerState, Report], None] | None = None,
    ) -> None:
        """Run rounds until the state has this number, and then the exchanges.

        Args:
            grid: Flower's grid, or `InProcess`.
            rounds: Number of rounds of the whole run; those that the state has done already count.
            after: Function that is called with the state and the record after each round and each
                exchange, for example to save the state.

        Raises:
            RuntimeError: If no client's upload was ever merged, so that the model is the first one.
            ValueError: If an exchange fails.
        """
        while self.state.number < rounds:
            messages = self._messages(grid)
            report = self._merge(replies(grid, messages, self._setup.terms.timeout))
            if after is not None:
                after(self.state, report)
        if rounds > 0 and np.max(self.state.accepted) < 0:
            raise RuntimeError(
                f"No round of {rounds} succeeded, and the model is still the first one. The "
                f"reasons of the last round: {self._left_out}"
            )
        for which in range(len(self._setup.exchanges)):
            report = self.exchange(grid, which)
            if after is not None:
                after(self.state, report)

    def exchange(self, grid: Grid, which: int = 0) -> Report:
        """Run an exchange without training among all clients that are connected.

        Its key is the run's, folded by the number of the state, and by `which` if that is not 0, so
        that exchanges of one number draw other noise. The model of the state becomes the
        merged one.

        Args:
            grid: Flower's grid, or `InProcess`.
            which: Place of the exchange in `exchanges`.

        Returns:
            The record of the last message, whose `number` is that of the rounds before.

        Raises:
            ValueError: If fewer sound replies than `min_replies` come, or the merged model is not
                finite.
        """
        setup, terms = self._setup, self._setup.terms
        key = jax.random.fold_in(setup.key, self.state.number)
        key = jax.random.fold_in(key, which) if which else key
        sequence, params, kept, report = setup.exchanges[which], self.state.params, None, None
        shapes, self._left_out = message_shapes(sequence, params, setup.example), {}
        for step, algorithm in enumerate(sequence):
            start, kept = start_message(algorithm, params, kept, setup.num_clients)
            parts = parts_of(setup.experiment, params, setup.example)
            sent = exchanged(algorithm, parts, start)
            about = {"exchange": which, "message": step} | self._common(algorithm, key)
            self._asked = self._nodes.connected(grid)
            request = self._request(algorithm, shapes_of_one(shapes[step].sent))
            merge, about = self._begin(grid, request, params, about)
            content = _wire.content(about, _wire.written(partial(files.save_arrays, tree=sent)))
            asked = [Message(content, x, _wire.EXCHANGE, ttl=terms.timeout) for x in self._asked]
            arriving = replies(grid, asked, terms.timeout)
            found = merge(request, params, arriving, kept, key)
            params, kept, report = found.params, found.state, self._report(found)
        assert report is not None  # a sequence has a message
        self.state = self.state._replace(params=params)
        return report

    def start(self, grid: Grid, *args: Any, **kwargs: Any) -> Result:
        """Run Flower's own loop, whose arguments these are.

        The initial arrays, if any, are those that `arrays` returned; the default is the model of
        the state.
        """
        given = args[0] if args else kwargs.pop("initial_arrays", None)
        if given is not None:
            like = partial(files.load_arrays, like=self.state.params)
            params = jax.tree.map(jnp.asarray, _wire.read(_wire.file_of(given), like))
            self.state = self.state._replace(params=params)
        return super().start(Streaming(grid), self.arrays(), *args[1:], **kwargs)

    def arrays(self) -> ArrayRecord:
        """Return the model of the state as Flower's record, a file of arrays by leaf name."""
        params = self.state.params
        return _wire.file_record(_wire.written(partial(files.save_arrays, tree=params)))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of a round; the model is that of the state."""
        del server_round, arrays, config
        return self._messages(grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merge the replies of a round; return the model and the mean training loss."""
        del server_round
        report = self._merge(self._with_missing(replies))
        if not report.clients:
            return None, None
        return self.arrays(), MetricRecord({"train-loss": report.loss})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return no metrics."""
        del server_round, replies

    def summary(self) -> None:
        """Do nothing: Flower's loop logs what it runs."""

    def _common(self, algorithm: Algorithm, key: Key) -> dict[str, Any]:
        """Return what every message of a round says."""
        own = {"kind": algorithm.kind, "round": self.state.number, "frozen": self._frozen}
        # A round and an exchange of one number have one key: if either draws noise, it is secret.
        every = (self._setup.experiment.algorithm, *chain(*self._setup.exchanges))
        return own | key_fields(key, any(each.link.draws for each in every))

    def _request(self, algorithm: Algorithm, expected: Update) -> _received.Request:
        number, terms = self.state.number, self._setup.terms
        return _received.Request(algorithm, expected, number, self._asked, terms, self._left_out)

    def _messages(self, grid: Grid) -> list[Message]:
        """Draw the cohort of a round, and return the messages to its clients."""
        setup, state = self._setup, self.state
        algorithm = setup.experiment.algorithm
        key = jax.random.fold_in(setup.key, state.number)
        nodes = {place: node for node, place in self._nodes.connected(grid).items()}
        cohort = np.asarray(draw_cohort(key, setup.num_clients, setup.cohort)).tolist()
        self._asked = {nodes[place]: place for place in cohort if place in nodes}
        self._left_out = {}
        request = self._request(algorithm, setup.expected)
        for place in cohort:
            if place not in nodes:
                request.leave_out(place, ValueError("it is not connected"))
        parts = parts_of(setup.experiment, state.params, setup.example)
        about = {"num-clients": setup.num_clients} | self._common(algorithm, key)
        try:
            self._merging, about = self._begin(grid, request, state.params, about)
        except ValueError as error:
            # Nobody trains for a sum that cannot be.
            self._merging, self._asked = partial(_raise, error), {}
        messages, file = [], None
        for node, place in self._asked.items():
            if file is None or algorithm.link.personal:
                sent = download(algorithm, parts, state.algorithm, place)
                file = _wire.written(partial(files.save_arrays, tree=sent))
            own = about | {"accepted": int(state.accepted[place])}
            how = {"ttl": setup.terms.timeout}
            messages.append(Message(_wire.content(own, file), node, _wire.TRAIN, **how))
        return messages

    def _begin(
        self, grid: Grid, request: _received.Request, params: Params, about: dict[str, Any]
    ) -> tuple[Callable[..., _received.Merged], dict[str, Any]]:
        """Return what merges the replies of those who are asked, and what these are told.

        Before a secure sum clients exchange keys, and only those are asked who did so.
        """
        setup = self._setup
        if setup.secure is None:
            return _received.merge, about
        nodes = {place: node for node, place in self._asked.items()}

        def ask(given: Mapping[int, dict[str, Any]]) -> Iterable[Reply]:
            how = {"ttl": setup.terms.timeout}
            asked = [
                Message(_wire.content(own), nodes[place], _wire.SECURE, **how)
                for place, own in given.items()
            ]
            return replies(grid, asked, setup.terms.timeout)

        begun = _secure_server.begin(request, setup.secure, params, nodes, ask)
        self._asked = {nodes[place]: place for place in begun.clients}
        partners = {"partners": _secure.written(Group(begun.partners))}
        return partial(_secure_server.merge, begun=begun, ask=ask), about | partners

    def _with_missing(self, arriving: Iterable[Message]) -> Iterable[Reply]:
        """Yield the replies of Flower's loop, and at the end the nodes that did not reply."""
        waiting = dict(self._asked)
        for message in arriving:
            # A reply that Flower lost has no node of ours, which is found among the missing.
            node = message.metadata.src_node_id
            if waiting.pop(node, None) is not None:
                yield Reply(node, message)
        yield from (Reply(node, None) for node in waiting)

    def _merge(self, arriving: Iterable[Reply]) -> Report:
        """Merge the replies of a round into the state; a round that fails only counts."""
        setup, state = self._setup, self.state
        algorithm = setup.experiment.algorithm
        key = jax.random.fold_in(setup.key, state.number)
        request = self._request(algorithm, setup.expected)
        try:
            found = self._merging(request, state.params, arriving, state.algorithm, key)
        except ValueError as error:
            warnings.warn(f"Round {state.number} changes nothing: {error}", stacklevel=3)
            # A round that failed is counted too: the next one must draw another cohort.
            self.state = state._replace(number=state.number + 1)
            self._left_out["round"] = str(error)
            return Report(state.number, (), (), float("nan"), dict(self._left_out), ())
        accepted = np.array(state.accepted)
        accepted[[each.place for each in found.arrived]] = state.number
        # Sums are wider than the state.
        kept = jax.tree.map(_as_before, found.state, state.algorithm)
        self.state = ServerState(state.number + 1, found.params, kept, accepted)
        return self._report(found)._replace(number=state.number)

    def _report(self, found: _received.Merged) -> Report:
        """Return the record of what was merged."""
        places, weights, losses = zip(
            *((each.place, each.weight, each.loss) for each in found.arrived), strict=True
        )
        # A client of weight zero may send any loss, and zero times NaN is NaN.
        loss = np.average(np.where(np.equal(weights, 0), 0, losses), weights=weights)
        left_out = dict(self._left_out)
        return Report(self.state.number, places, weights, float(loss), left_out, found.info)


def _raise(error: ValueError, *_: Any) -> Any:
    raise error


def _as_before(new: Any, old: Any) -> Any:
    return jnp.asarray(new, jnp.result_type(old))
