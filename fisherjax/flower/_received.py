"""Check replies, and merge the updates in them: all at once, or as sums while they come."""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Message

from fisherjax import merging
from fisherjax._core.compiler import jit
from fisherjax.algorithms.base import Algorithm, Update
from fisherjax.flower import _uploads, _wire
from fisherjax.flower._grid import Reply
from fisherjax.flower._state import Terms
from fisherjax.merging._running_statistics import add_up
from fisherjax.merging._server_half import decode_and_screen, split_params
from fisherjax.typing import Key, Params


class Request(NamedTuple):
    """What the server asked for.

    Attributes:
        algorithm: Method that merges the replies.
        expected: Shapes of one client's update.
        number: Number of the round.
        places: Client of each node.
        terms: What is accepted.
    """

    algorithm: Algorithm
    expected: Update
    number: int
    places: Mapping[int, int]
    terms: Terms


class Arrived(NamedTuple):
    """A sound upload: the place of its client, the update, its weight, and the loss in training."""

    place: int
    update: Update
    weight: float
    loss: float


class Merged(NamedTuple):
    """Result of a merge: params, state and info of the algorithm, and the uploads without values."""

    params: Params
    state: Any
    info: Any
    arrived: list[Arrived]


def sound(request: Request, replies: Iterable[Reply]) -> Iterator[Arrived]:
    """Yield the uploads that can be merged; warn of the others, by client."""
    for node, message in replies:
        place = request.places[node]
        try:
            yield _arrived(request, place, message)
        except ValueError as error:
            skipped(place, error)


def skipped(place: int | str, reason: Any) -> None:
    """Warn that a client is left out of a round."""
    warnings.warn(f"Client {place} is left out of this round: {reason}", stacklevel=3)


def checked_content(message: Message | None) -> tuple[dict[str, Any], bytes | None]:
    """Return the description and the file of a reply; raise ValueError if it has none."""
    if message is None:
        raise ValueError("it did not reply in time")
    if message.has_error():
        raise ValueError(f"it failed: {str(message.error.reason)[:1000]}")
    return _wire.opened(message.content)


def _arrived(request: Request, place: int, message: Message | None) -> Arrived:
    about, file = checked_content(message)
    for name, expected in (("partition-id", place), ("round", request.number)):
        if (found := _wire.field(about, name, int)) != expected:
            raise ValueError(f"the reply is of {name} {found}; expected {expected}")
    sent = _uploads.Sent(_wire.field(about, "layout", str), file or b"")
    update = _uploads.read(sent, request.expected, request.terms.limits)
    metrics = message.content.get("metrics", {}) if message is not None else {}
    examples = metrics.get("num-examples")
    if not isinstance(examples, (int, float)) or not 0 <= examples < float("inf"):
        raise ValueError(f"it claims {examples!r:.40} examples; expected a finite number")
    most = request.terms.max_weight
    if examples > most:
        warnings.warn(
            f"Client {place} claims {examples} examples, which count as {most} (max_weight).",
            stacklevel=4,
        )
    loss = metrics.get("train-loss", float("nan"))
    stacked = jax.tree.map(lambda x: np.asarray(x)[None], update)
    return Arrived(place, stacked, min(float(examples), most), float(loss))


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
    if len(arrived) < (least := max(1, request.terms.min_replies)):
        raise ValueError(
            f"There are {len(arrived)} sound uploads; expected at least {least} (min_replies)."
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
        left = [each for each in arrived if _is_sound(algorithm, params, each)]
        if len(left) == len(arrived):
            raise
        arrived = left
        _check_number(request, arrived)
        found = merged(arrived)
    return Merged(*found, [each._replace(update=None) for each in arrived])


def _is_sound(algorithm: Algorithm, params: Params, each: Arrived) -> bool:
    try:
        _screened(algorithm, params, each)
    except ValueError as error:
        skipped(each.place, error)
        return False
    return True


def _screened(algorithm: Algorithm, params: Params, each: Arrived) -> Any:
    parts = split_params(params, each.update)
    weight = jnp.array([each.weight], float)
    return decode_and_screen(algorithm, parts, each.update, weight, "raise", first=each.place)


def _merge_sums(
    request: Request, params: Params, uploads: Iterable[Arrived], state: Any, key: Key
) -> Merged:
    algorithm, total, arrived = request.algorithm, None, []
    for each in uploads:
        try:
            found = _screened(algorithm, params, each)
        except ValueError as error:
            skipped(each.place, error)
            continue
        sums = add_up(algorithm.reduce, *found.values, found.weights)
        total = sums if total is None else _add(total, sums)
        arrived.append(each._replace(update=None))
    _check_number(request, arrived)
    cohort = jnp.array([each.place for each in arrived])
    how = {"frozen": request.expected.frozen, "state": state, "key": key}
    return Merged(*merging.merge_sums(algorithm, params, total, cohort, **how), arrived)


@partial(jit, donate_argnums=0)
def _add(total: Any, sums: Any) -> Any:
    return jax.tree.map(jnp.add, total, sums)
