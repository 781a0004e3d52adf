"""Measure the messages of a round: bytes of their arrays, and seconds on their way."""

import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fisherjax.flower import Streaming

_MOST = 1e9  # seconds; sums and means of larger ones may not be finite


class Exchanged(NamedTuple):
    """A message to a client and its reply.

    Attributes:
        down: Bytes of the arrays that were sent.
        up: Bytes of the arrays that came back.
        seconds: What the client measured, and the rest of the time as "transfer".
        arrived: Time at which the reply was there.
    """

    down: int
    up: int
    seconds: dict[str, float]
    arrived: float


class Metered(Streaming):
    """A grid that measures what another grid sends and receives."""

    def __init__(self, grid: Grid) -> None:
        super().__init__(grid)
        self._sent: dict[str, tuple[float, int]] = {}
        self._exchanged: list[Exchanged] = []

    def taken(self) -> list[Exchanged]:
        """Return what was exchanged since the last call, training only."""
        found, self._exchanged = self._exchanged, []
        return found

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages."""
        messages = list(messages)
        trains = [each.metadata.message_type == "train" for each in messages]
        sizes, began = [size(each) for each in messages], time.time()
        names = list(super().push_messages(messages))
        for name, number, trained in zip(names, sizes, trains, strict=False):
            if trained:
                self._sent[name] = began, number
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies that have come."""
        found = list(super().pull_messages(message_ids))
        for reply in found:
            began, down = self._sent.pop(reply.metadata.reply_to_message_id, (None, 0))
            if began is None or not reply.has_content():
                continue
            arrived, own = time.time(), reply.content.get("seconds")
            seconds = {n: float(x) for n, x in own.items()} if _measured(own) else {}
            seconds["transfer"] = arrived - began - sum(seconds.values())
            self._exchanged.append(Exchanged(down, size(reply), seconds, arrived))
        return found


def size(message: Message) -> int:
    """Return the bytes of a message's arrays."""
    if not message.has_content():
        return 0
    records = message.content.values()
    return sum(record.count_bytes() for record in records if isinstance(record, ArrayRecord))


def _measured(record: Any) -> bool:
    """Return whether a record of a client, who may send anything, holds possible seconds."""
    return isinstance(record, MetricRecord) and all(
        isinstance(x, int | float) and 0 <= x < _MOST for x in record.values()
    )
