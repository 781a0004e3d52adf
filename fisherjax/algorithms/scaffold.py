"""SCAFFOLD: local steps are corrected by how the client's gradients differ from everybody's.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: stochastic controlled averaging for
federated learning, ICML 2020, algorithm 1 with the second option for the controls.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import _optimizers, tree
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Link, weighted_sum
from fisherjax.local_update import KeptState
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params

_zeros = functools.partial(jax.tree.map, jnp.zeros_like)


class Controls(NamedTuple):
    """The server's state of SCAFFOLD.

    Attributes:
        server: c, like params, in units of a step: gradients times the learning rate.
        num_clients: M, all of them.
    """

    server: Params
    num_clients: Array


@cached
def scaffold() -> Algorithm[tuple[()]]:
    r"""Make SCAFFOLD, which averages models and keeps a control variate of every client.

        W   <- sum_i p_i W_i
        c_i <- c_i - c + (W - W_i) / K_i,    c <- c + (1/M) sum_i (change of c_i),

    where client i took K_i steps from W and subtracted c - c_i after each. All controls start at
    zero, so that the first round is federated averaging.

    Returns:
        The algorithm. Its `optimizer` makes the corrections c - c_i; c is sent, c_i local.
        Updates are {"params": W_i, "change": of c_i}, and add up.

    Raises:
        ValueError: On summarize, of models that `training.train` did not train by its optimiser.

    Example:
        >>> optimizer, w = scaffold().optimizer(optax.sgd(1.0)), jnp.array(0.0)
        >>> step, _ = optimizer.update(jnp.array(1.0), optimizer.init(w), w, extras=jnp.array(0.5))
        >>> print(step)
        -1.5

    Source: the paper above; what momentum adds to a step is not accounted for in (W - W_i) / K_i.
        As in NIID-Bench's code, controls are kept multiplied by the learning rate, which drops out
        as long as it does not change between rounds, and the optimiser does not see the correction.
        Deviation from that code: its controls start at a random network.
    """

    def init(params: Params, num_clients: int) -> Controls:
        return Controls(_zeros(params), jnp.asarray(num_clients, jnp.int32))

    def broadcast(params: Params, state: Controls, place: None) -> tuple[Params, Params]:
        del place
        return params, state.server

    def receive(message: tuple[Params, Params], local: Params) -> tuple[Params, Params]:
        start, server = message
        return start, jax.tree.map(jnp.subtract, server, local)

    def summarize(key: Key, trained: Trained, examples: Examples, local: Params) -> tuple:
        del key, examples
        steps, correction = trained.steps, trained.extras
        if trained.start is None or steps is None or not jax.tree.leaves(correction):
            raise ValueError(
                "SCAFFOLD needs what clients started from, their steps and their corrections: "
                "train them with training.train(..., optimizer=algorithm.optimizer(base))."
            )

        def controlled(own: Array, corrected: Array, start: Array, end: Array) -> Array:
            # A client without steps keeps its control.
            taken = jnp.maximum(steps, 1).astype(end.dtype)
            return jnp.where(steps > 0, (start - end) / taken - corrected, own)

        new = jax.tree.map(controlled, local, correction, trained.start, trained.params)
        change = jax.tree.map(jnp.subtract, new, local)
        return {"params": trained.params, "change": change}, new

    def reduce(updates: dict[str, Any], weights: Array) -> dict[str, Any]:
        # Each control counts once, however large the client; one that was left out has weight zero.
        present = (weights > 0).astype(weights.dtype)
        change = tree.weighted_sum(updates["change"], present)
        return {"params": weighted_sum(updates["params"], weights), "change": change}

    def aggregate(key: Key, sums: dict, params: Params, state: Controls, cohort: Array) -> tuple:
        del key, params, cohort

        def moved(control: Array, change: Array) -> Array:
            # Divided by the number of all clients, although only the cohort's controls changed.
            return (control + change / state.num_clients.astype(change.dtype)).astype(control.dtype)

        server = jax.tree.map(moved, state.server, sums["change"])
        return sums["params"].mean(), state._replace(server=server), ()

    return Algorithm(
        summarize,
        aggregate,
        reduce,
        optimizer=_corrected,
        kind="params and changes of controls",
        link=Link(init=init, init_client=_zeros, broadcast=broadcast, receive=receive),
    )


# One wrapper for one optimiser, or `jit` would compile training again.
@functools.lru_cache(maxsize=64)
def _corrected(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """Subtract the correction after each step of the user's optimiser, and keep it."""
    inner_optimizer = _optimizers.with_extra_args(base)

    def init(params: Params) -> KeptState:
        _optimizers.check_plain("SCAFFOLD", base, params)
        return KeptState(_zeros(params), base.init(params))

    def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        # Without a correction, as in a single round, all controls are zero.
        correction = given.get("extras", ())
        correction = correction if jax.tree.leaves(correction) else state.own
        # Before the correction, so that momentum does not accumulate it.
        given["extras"] = ()
        updates, inner = inner_optimizer.update(updates, state.base, params, **given)
        updates = jax.tree.map(lambda u, c: u - c.astype(u.dtype), updates, correction)
        return updates, KeptState(correction, inner)

    return optax.GradientTransformationExtraArgs(init, update)
