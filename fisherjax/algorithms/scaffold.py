"""SCAFFOLD: correct local steps by the difference of a client's gradients from the mean.

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


class Controls(NamedTuple):
    """The server's state of SCAFFOLD.

    Attributes:
        server: Control c of the server, shaped as params, in units of a step: a gradient times the
            learning rate.
        num_clients: M, the number of all clients.
    """

    server: Params
    num_clients: Array


@cached
def scaffold() -> Algorithm[tuple[()]]:
    r"""Make SCAFFOLD, which averages models and keeps a control variate for each client.

        W   <- sum_i p_i W_i
        c_i <- c_i - c + (W - W_i) / K_i,    c <- c + (1/M) sum_i (change of c_i),

    where client i takes K_i steps from W and subtracts c - c_i after each step. All controls start
    at zero, so that the first round is federated averaging.

    Returns:
        The algorithm. Its `optimizer` applies the corrections c - c_i; c is broadcast, and c_i is
        the local state. Updates are {"params": W_i, "change": change of c_i}, of which the server
        needs only sums.

    Raises:
        ValueError: On summarize, if `training.train` did not train the models by the algorithm's
            optimiser.

    Example:
        >>> optimizer, w = scaffold().optimizer(optax.sgd(1.0)), jnp.array(0.0)
        >>> step, _ = optimizer.update(jnp.array(1.0), optimizer.init(w), w, extras=jnp.array(0.5))
        >>> print(step)
        -1.5

    Source: the paper above; the effect of momentum on the steps is not accounted for in
        (W - W_i) / K_i. As in NIID-Bench's code, controls are multiplied by the learning rate,
        which cancels as long as it is the same in all rounds, and the optimiser does not see the
        correction. Deviation from that code: its controls start at the params of a random network.
    """

    def init(params: Params, num_clients: int) -> Controls:
        return Controls(optax.tree.zeros_like(params), jnp.asarray(num_clients, jnp.int32))

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
                "SCAFFOLD needs the model that each client started from, its steps and its "
                "correction: train with training.train(..., optimizer=algorithm.optimizer(base))."
            )

        def controlled(own: Array, corrected: Array, start: Array, end: Array) -> Array:
            # A client without steps keeps its control.
            taken = jnp.maximum(steps, 1).astype(end.dtype)
            return jnp.where(steps > 0, (start - end) / taken - corrected, own)

        new = jax.tree.map(controlled, local, correction, trained.start, trained.params)
        change = jax.tree.map(jnp.subtract, new, local)
        return {"params": trained.params, "change": change}, new

    def reduce(updates: dict[str, Any], weights: Array) -> dict[str, Any]:
        # Each control counts once, however many examples a client has; one left out has weight
        # zero.
        present = (weights > 0).astype(weights.dtype)
        change = tree.weighted_sum(updates["change"], present)
        return {"params": weighted_sum(updates["params"], weights), "change": change}

    def aggregate(key: Key, sums: dict, params: Params, state: Controls, cohort: Array) -> tuple:
        del key, params, cohort

        def moved(control: Array, change: Array) -> Array:
            # Divided by the number of all clients, although only controls of the cohort changed.
            return (control + change / state.num_clients.astype(change.dtype)).astype(control.dtype)

        server = jax.tree.map(moved, state.server, sums["change"])
        return sums["params"].mean(), state._replace(server=server), ()

    link = Link(init, optax.tree.zeros_like, broadcast, receive)
    kind = "params and changes of controls"
    return Algorithm(summarize, aggregate, reduce, optimizer=_corrected, kind=kind, link=link)


# The same wrapper for the same optimiser, so that `jit` does not compile training again.
@functools.lru_cache(maxsize=64)
def _corrected(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap the user's optimiser to subtract the correction after each step, and to store it."""
    inner_optimizer = _optimizers.with_extra_args(base)

    def init(params: Params) -> KeptState:
        _optimizers.check_plain("SCAFFOLD", base, params)
        return KeptState(optax.tree.zeros_like(params), base.init(params))

    def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        # A single round has no correction: all controls are zero.
        correction = given.get("extras", ())
        correction = correction if jax.tree.leaves(correction) else state.own
        # Before the correction, which momentum must not accumulate.
        given["extras"] = ()
        updates, inner = inner_optimizer.update(updates, state.base, params, **given)
        updates = jax.tree.map(lambda u, c: u - c.astype(u.dtype), updates, correction)
        return updates, KeptState(correction, inner)

    return optax.GradientTransformationExtraArgs(init, update)
