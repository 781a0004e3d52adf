"""Which client each node of a grid is."""

import time
import warnings

from flwr.app import Message
from flwr.serverapp import Grid

from fisherjax.files._shown import shown
from fisherjax.flower import _received, _wire
from fisherjax.flower._grid import replies, unless_busy
from fisherjax.flower._state import Setup

_POLL = 0.5  # seconds between two looks for clients
_HELLO = 60.0  # least seconds for which a new node may take to say which client it is


class Nodes:
    """The nodes of a run, each of which was asked once which client it is."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._places: dict[int, int] = {}  # of each node that was ever seen

    def connected(self, grid: Grid) -> dict[int, int]:
        """Return the client of each connected node. New nodes are asked which client they are."""
        setup, terms, started = self._setup, self._setup.terms, time.monotonic()
        wanted = terms.min_replies if self._places else setup.num_clients
        while len(nodes := list(unless_busy(grid.get_node_ids))) < wanted:
            if time.monotonic() - started >= terms.connect:
                break
            time.sleep(_POLL)
        about = {"kind": setup.experiment.algorithm.kind}
        new = [node for node in nodes if node not in self._places]
        how = {"ttl": terms.timeout}
        asked = [Message(_wire.content(about), node, _wire.HELLO, **how) for node in new]
        # One that does not say who it is must not hold up the others for as long as training may.
        seconds = min(terms.timeout, max(terms.connect, _HELLO))
        for node, message in replies(grid, asked, seconds):
            try:
                place = _wire.field(_received.checked_content(message)[0], "partition-id", int)
                self._check_place(place, nodes)
                self._places[node] = place
            except ValueError as error:
                warnings.warn(f"Node {node} does not take part: {shown(error)}", stacklevel=2)
        return {node: place for node, place in self._places.items() if node in nodes}

    def _check_place(self, place: int, nodes: list[int]) -> None:
        most = self._setup.num_clients - 1
        if not 0 <= place <= most:
            raise ValueError(f"its partition-id is {place}; expected 0 to {most}")
        twins = [node for node, other in self._places.items() if other == place]
        if any(node in nodes for node in twins):
            raise ValueError(
                f"its partition-id is {place}, as that of node {twins[0]}; expected one of its own"
            )
        # A node that left and came back has another number.
        for node in twins:
            del self._places[node]
