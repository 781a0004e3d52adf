"""Learning rates of the clients that change from round to round.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, Adaptive federated optimization,
ICLR 2021, where clients' rates decay over rounds.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import _optimizers
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Report, check_algorithm
from fisherjax.typing import Array, Params


class RateState(NamedTuple):
    """State of the server.

    Attributes:
        algorithm: State of the wrapped algorithm.
        number: Number of merges so far.
        scale: Number by which every factor is multiplied, 1 at first. It is an array, so that runs
            which differ only in the clients' learning rate share a program.
    """

    algorithm: Any
    number: Array
    scale: Array


class RateMessage(NamedTuple):
    """What is sent to clients, or what their optimisers receive, with the round's factor."""

    own: Any
    factor: Array


@cached
def with_learning_rates(
    algorithm: Algorithm[Report], schedule: Callable[[Array], Any]
) -> Algorithm[Report]:
    """Make an algorithm whose clients' steps are multiplied by a factor of the round.

        W_i <- W_i + schedule(t) update(g),    t = 0, 1, ... the number of the round,

    where `update` is the clients' optimiser: the factor multiplies its learning rate.

    Args:
        algorithm: Any algorithm. SCAFFOLD's controls are in units of the steps of the round before,
            so that they fit approximately where the factor changes slowly.
        schedule: Function from the number of the round to the factor, such as any of optax. A round
            that left the model as it was, as all clients diverged, is not counted.

    Returns:
        The algorithm, whose state is a `RateState`. Clients trained outside of rounds have the
        factor 1.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: When a round begins, if the schedule does not return one real number.

    Example:
        >>> import fisherjax as fj
        >>> decay = optax.exponential_decay(1.0, transition_steps=1, decay_rate=0.5)
        >>> method = with_learning_rates(fj.algorithms.fedavg(), decay)
        >>> state = method.link.init(jnp.zeros(2), 3)
        >>> state = state._replace(number=jnp.array(2))
        >>> print(method.link.broadcast(jnp.zeros(2), state, None).factor)
        0.25
    """
    check_algorithm(algorithm)
    checks.function("schedule", schedule, "optax.cosine_decay_schedule(1.0, decay_steps=100)")

    def init(params: Params, num_clients: int) -> RateState:
        first = algorithm.link.init(params, num_clients)
        return RateState(first, jnp.asarray(0, jnp.int32), jnp.asarray(1, jnp.float32))

    def broadcast(params: Params, state: RateState, place: Array | None) -> RateMessage:
        message = algorithm.link.broadcast(params, state.algorithm, place)
        factor = jnp.asarray(schedule(state.number))
        if factor.shape or jnp.iscomplexobj(factor):
            raise ValueError(
                f"schedule returned {factor.dtype}{list(factor.shape)}; expected one real number, "
                "the factor of all of a round's steps."
            )
        return RateMessage(message, state.scale * factor)

    def receive(message: RateMessage, local: Any) -> tuple[Params, RateMessage]:
        start, extras = algorithm.link.receive(message.own, local)
        return start, message._replace(own=extras)

    def aggregate(key: Any, received: Any, params: Params, state: RateState, cohort: Array):
        merged, own, info = algorithm.aggregate(key, received, params, state.algorithm, cohort)
        return merged, state._replace(algorithm=own, number=state.number + 1), info

    link = algorithm.link._replace(init=init, broadcast=broadcast, receive=receive)
    optimizer = functools.partial(_optimizer, algorithm.optimizer)
    return algorithm._replace(aggregate=aggregate, optimizer=optimizer, link=link)


# The same object for the same optimiser, so that `jit` does not compile training again.
@functools.lru_cache(maxsize=64)
def _optimizer(wrap: Callable, base: optax.GradientTransformation) -> Any:
    """Wrap an optimiser as the algorithm does, with steps of the base that a factor multiplies."""
    inner = _optimizers.with_extra_args(wrap(_multiplied(base)))

    def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        extras = given.get("extras", ())
        if isinstance(extras, RateMessage):
            given |= {"extras": extras.own, "factor": extras.factor}
        return inner.update(updates, state, params, **given)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@functools.lru_cache(maxsize=64)
def _multiplied(base: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    plain = _optimizers.with_extra_args(base)

    def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        factor = given.pop("factor", 1.0)
        steps, state = plain.update(updates, state, params, **given)
        return jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), steps), state

    return optax.GradientTransformationExtraArgs(base.init, update)
