"""Send messages and receive replies one by one, over Flower or within this process."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from google.protobuf.message import DecodeError

_POLL = 0.5  # least seconds between two looks for replies
_MOST = 10  # questions a second: each is a write in the superlink's database
_LONGEST = 10.0  # seconds between two looks, for any number of nodes


_UNREADABLE = (
    *(ValueError, TypeError, LookupError, AttributeError),
    *(DecodeError, UnexpectedObjectContentError),
)
"""What Flower raises for the bytes of a reply that are no message."""


class Reply(NamedTuple):
    """A reply of a node, the error of one that cannot be read, or None if none came in time."""

    node: int
    message: Message | Exception | None


def replies(grid: Grid, messages: Iterable[Message], timeout: float) -> Iterator[Reply]:
    """Send messages, and yield the replies one by one as they come; only one is in memory.

    Nodes that have not replied when the time is over, or cannot be reached, come last, with None.
    """
    messages = list(messages)
    nodes = [message.metadata.dst_node_id for message in messages]
    # All at once, so that what is common to the messages is sent once.
    sent = list(grid.push_messages(messages)) if messages else []
    del messages
    waiting = dict(zip(sent, nodes, strict=False))
    missing = [waiting.pop(None)] if None in waiting else []
    missing += nodes[len(sent) :]
    end = time.monotonic() + timeout
    while waiting:
        found = False
        for name in list(waiting):
            # One at a time: what has arrived stays with Flower until it is needed.
            for message in _pulled(grid, name):
                found = True
                yield Reply(waiting.pop(name), message)
        if time.monotonic() >= end:
            break
        if waiting and not found:
            pause = min(max(_POLL, len(waiting) / _MOST), _LONGEST)
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
    for node in (*missing, *waiting.values()):
        yield Reply(node, None)


def unless_busy(ask: Callable[..., Iterable[Any]], *given: Any) -> Iterable[Any]:
    """Return what a superlink answers, or nothing if it cannot answer now.

    Its database is locked while many nodes write; Flower then answers with status 500, for which it
    does not ask again itself.
    """
    try:
        return ask(*given)
    except httpx.HTTPStatusError as error:
        if error.response.is_server_error:
            return ()
        raise


def _pulled(grid: Grid, name: str) -> Iterable[Message | Exception]:
    try:
        return unless_busy(grid.pull_messages, [name])
    # One client's garbage is no reason to lose the others' replies.
    except _UNREADABLE as error:
        return [error]


class Streaming(Grid):
    """A grid over another one, whose `send_and_receive` yields replies one by one.

    A subclass that overrides `push_messages` and `pull_messages`, for example to measure or to log
    what passes, sees every message.

    Args:
        grid: Flower's grid, as a ServerApp gets it.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterator[Message]:
        """Send messages, and yield the replies as they come."""
        seconds = float("inf") if timeout is None else timeout
        found = replies(self, messages, seconds)
        # Flower's loop knows messages only: the others are missing in the end.
        return (x.message for x in found if isinstance(x.message, Message))

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self._grid.set_run(run)

    @property
    def run(self) -> Any:
        """Return the run."""
        return self._grid.run

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Make a message."""
        return self._grid.create_message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the nodes."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have come."""
        return self._grid.pull_messages(message_ids)


class InProcess(Grid):
    """Clients within this process, without sockets, for tests and first steps.

    A client answers when its reply is asked for. Its errors become error messages, as Flower's do.

    Args:
        app: The app of all clients.
        configurations: Configuration of each node, such as {"partition-id": 0}; or their number,
            for nodes with the partitions 0, 1, and so on.

    Example: see `strategy`.
    """

    def __init__(self, app: ClientApp, configurations: int | Sequence[Mapping[str, Any]]) -> None:
        if isinstance(configurations, int):
            configurations = [{"partition-id": place} for place in range(configurations)]
        _set_identity()
        self._app = app
        self._contexts = {
            node: Context(1, node, dict(own), RecordDict(), {})
            for node, own in enumerate(configurations, 1)
        }
        self._waiting: dict[str, Message] = {}
        self._sent = 0

    def set_run(self, run: Any) -> None:
        """Ignore the run: there is one."""

    @property
    def run(self) -> Any:
        """Return None: there is one run."""
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Make a message."""
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        """Return the numbers of the nodes, from 1."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Take messages, and return the names by which their replies are pulled."""
        names = []
        for message in messages:
            self._sent += 1
            names.append(str(self._sent))
            self._waiting[names[-1]] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Let clients answer these messages."""
        return [self._answer(self._waiting.pop(name)) for name in message_ids]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Let clients answer messages."""
        del timeout
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        try:
            return self._app(message, self._contexts[message.metadata.dst_node_id])
        except Exception as error:
            return Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)


def _set_identity() -> None:
    """Number the run and the node of this process, without which Flower makes no messages."""
    from flwr.supercore.task_identity import TaskIdentity

    try:
        _ = TaskIdentity.run_id
    except RuntimeError:
        TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
