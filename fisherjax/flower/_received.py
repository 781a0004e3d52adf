"""Check replies, and merge the updates in them: all at once, or as sums while they come."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Message

from fisherjax import merging
from fisherjax._core import checks
from fisherjax._finite_uploads import finite_leaves
from fisherjax._upload_checks import check_not_all_zero
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.files._shown import shown
from fisherjax.flower import _uploads, _wire
from fisherjax.flower._grid import Reply
from fisherjax.flower._state import Terms
from fisherjax.merging._running_statistics import add_to, add_up
from fisherjax.merging._server_half import decode_and_screen, split_params
from fisherjax.typing import Key, Params

# Sums of weights stay finite in float32, whatever one client claims.
_MOST_EXAMPLES = 2.0**53


class Request(NamedTuple):
    """What the server asked for.

    Attributes:
        algorithm: Method that merges the replies.
        expected: Shapes of one client's update.
        number: Number of the round.
        places: Number of the client of each node that was asked.
        terms: What is accepted.
        left_out: Reasons for which clients are left out, which this module fills in.
    """

    algorithm: Algorithm
    expected: Update
    number: int
    places: Mapping[int, int]
    terms: Terms
    left_out: dict[int | str, str]

    def leave_out(self, place: int, reason: Exception) -> None:
        """Note that a client is left out, and warn of it."""
        # An error of ours says what is wrong; of others the type tells.
        known = isinstance(reason, ValueError | TypeError)
        self.left_out[place] = shown(reason if known else repr(reason))
        warnings.warn(
            f"Client {place} is left out of round {self.number}: {self.left_out[place]}",
            stacklevel=3,
        )


class Arrived(NamedTuple):
    """A sound upload, stacked [1, ...], its client and its weight, and the loss in training."""

    place: int
    update: Update
    weight: float
    loss: float


class Merged(NamedTuple):
    """Result of a merge: params, state and info of the algorithm, and its uploads."""

    params: Params
    state: Any
    info: Any
    arrived: list[Arrived]


def sound(request: Request, replies: Iterable[Reply]) -> Iterator[Arrived]:
    """Yield the uploads that can be merged; leave the others out."""
    for node, message in replies:
        try:
            arrived = _arrived(request, request.places[node], message)
        # Whatever one client sends, the round goes on for the others.
        except Exception as error:
            request.leave_out(request.places[node], error)
            continue
        yield arrived


def checked_content(message: Message | Exception | None) -> tuple[dict[str, Any], bytes | None]:
    """Return the description and the file of a reply; raise ValueError if it has none."""
    if message is None:
        raise ValueError("it did not reply in time")
    if isinstance(message, Exception):
        raise ValueError(f"its reply is no message of Flower: {message!r:.1000}")
    if message.has_error():
        raise ValueError(f"it failed: {str(message.error.reason)[:1000]}")
    return _wire.opened(message.content)


def _arrived(request: Request, place: int, message: Message | Exception | None) -> Arrived:
    about, file = checked_content(message)
    for name, expected in (("partition-id", place), ("round", request.number)):
        if (found := _wire.field(about, name, int)) != expected:
            raise ValueError(f"the reply is of {name} {found}; expected {expected}")
    # Checked first: what it claims must be finite whatever it sends.
    examples, loss = (_wire.field(about, name, float) for name in ("examples", "loss"))
    checks.number("examples", examples, below=_MOST_EXAMPLES)
    sent = _uploads.Sent(_wire.field(about, "layout", str), file or b"")
    update = _uploads.read(sent, request.expected, request.terms.limits)
    most = request.terms.max_weight
    if examples > most:
        warnings.warn(
            f"Client {place} claims {examples:.0f} examples, which count as {most:.0f} "
            "(max_weight).",
            stacklevel=4,
        )
    stacked = jax.tree.map(lambda x: np.asarray(x)[None], update)
    return Arrived(place, stacked, min(examples, most), loss)


def merge(
    request: Request, params: Params, replies: Iterable[Reply], state: Any, key: Key
) -> Merged:
    """Merge the sound uploads of replies.

    Raises:
        ValueError: If fewer came than the terms demand, or the merged model is not finite.
    """
    one_by_one = request.algorithm.reduce is not None
    function = _merge_sums if one_by_one else _merge_all
    return function(request, params, sound(request, replies), state, key)


def _check_number(request: Request, arrived: list[Arrived]) -> None:
    if len(arrived) < request.terms.min_replies:
        raise ValueError(
            f"there are {len(arrived)} sound uploads; expected at least "
            f"{request.terms.min_replies} (min_replies)"
        )


def _merge_all(
    request: Request, params: Params, uploads: Iterable[Arrived], state: Any, key: Key
) -> Merged:
    algorithm = request.algorithm
    # The order of arrival must not matter.
    arrived = sorted(uploads, key=lambda each: each.place)
    _check_number(request, arrived)

    def merged(some: list[Arrived]) -> tuple[Params, Any, Any]:
        update = jax.tree.map(lambda *x: np.concatenate(x), *(each.update for each in some))
        weights = [each.weight for each in some]
        how = {"state": state, "cohort": jnp.array([each.place for each in some]), "key": key}
        return merging.merge(algorithm, params, update, weights, on_nonfinite="raise", **how)

    try:
        found = merged(arrived)
    except ValueError:
        # Only now are clients screened one by one, which takes time.
        left = [each for each in arrived if _screened(request, params, each) is not None]
        if len(left) == len(arrived):
            raise
        arrived = left
        _check_number(request, arrived)
        found = merged(arrived)
    return Merged(*found, [each._replace(update=None) for each in arrived])


def _screened(request: Request, params: Params, each: Arrived) -> Any:
    """Decode and screen an upload; leave it out and return None if it is not sound."""
    try:
        parts = split_params(params, each.update)
        weight = jnp.array([each.weight], float)
        how: dict[str, Any] = {"on_nonfinite": "raise", "first": each.place}
        return decode_and_screen(request.algorithm, parts, each.update, weight, **how)
    except ValueError as error:
        request.leave_out(each.place, error)
        return None


def _merge_sums(
    request: Request, params: Params, uploads: Iterable[Arrived], state: Any, key: Key
) -> Merged:
    algorithm, total, arrived = request.algorithm, None, []
    assert algorithm.reduce is not None
    for each in uploads:
        if (found := _screened(request, params, each)) is None:
            continue
        values, statistics = found.values
        sums = add_up(algorithm.reduce, values, statistics, found.weights)
        if not finite_leaves(sums).all():
            request.leave_out(each.place, ValueError("its numbers are too large to be summed"))
            continue
        total = sums if total is None else add_to(total, sums)
        arrived.append(each._replace(update=None))
    _check_number(request, arrived)
    check_not_all_zero([each.weight for each in arrived])
    cohort = jnp.array([each.place for each in arrived])
    how = {"frozen": request.expected.frozen, "state": state, "key": key}
    return Merged(*merging.merge_sums(algorithm, params, total, cohort, **how), arrived)
