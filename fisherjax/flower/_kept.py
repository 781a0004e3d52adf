"""What a client keeps from round to round: its own leaves, controls and running statistics.

A client does not know whether the server merged its upload: a reply may be lost or come too late,
or the server may be killed. It therefore keeps its state before and after its last round, and the
server's next message says which of them counts.
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Context

from fisherjax import files
from fisherjax.flower import _wire

_RECORD = "fisherjax"


class Kept(NamedTuple):
    """States of a client.

    Attributes:
        rounds: Numbers of the rounds after which the client had these states; -1 is none.
        before: State before its last round.
        after: State after its last round.
    """

    rounds: Any
    before: Any
    after: Any


def load(context: Context, path: Path | None, initial: Any, accepted: int) -> Any:
    """Return the state after the last round that the server accepted.

    Args:
        context: Flower's context of the client.
        path: File of the client's state; None if the context holds it.
        initial: State of a client before its first round.
        accepted: Number of the last round in which the server merged the client's upload, or -1.
    """
    if accepted < 0 or not jax.tree.leaves(initial):
        return initial
    like = Kept(np.zeros(2, np.int64), initial, initial)
    found = None
    if path is not None and path.exists():
        found = files.load_arrays(path, like=like)
    elif path is None and _RECORD in context.state:
        file = _wire.file_of(context.state[_RECORD])
        found = _wire.read(file, partial(files.load_arrays, like=like))
    for place, state in enumerate(() if found is None else found[1:]):
        if found is not None and found.rounds[place] == accepted:
            return state
    where = "its context, which ends with its process" if path is None else repr(str(path))
    warnings.warn(
        f"This client's state of round {accepted}, which the server merged, is not in {where}; it "
        "starts afresh. Pass a folder to client_app, which outlives the client's process.",
        stacklevel=2,
    )
    return initial


def save(
    context: Context, path: Path | None, states: tuple[Any, Any], rounds: tuple[int, int]
) -> None:
    """Keep the states before and after a round."""
    if not jax.tree.leaves(states):
        return
    kept = jax.tree.map(np.asarray, Kept(np.array(rounds, np.int64), *states))
    if path is not None:
        # A client's own leaves are nobody else's.
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.save_arrays(path, kept)
    else:
        file = _wire.written(partial(files.save_arrays, tree=kept))
        context.state[_RECORD] = _wire.file_record(file)
