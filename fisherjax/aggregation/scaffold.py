"""SCAFFOLD: local steps are corrected by how the client's gradients differ from everybody's.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, SCAFFOLD: stochastic controlled averaging for
federated learning, ICML 2020, algorithm 1 with the second option for the controls.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.aggregation.base import Aggregator
from fisherjax.clients import Examples
from fisherjax.local import count_steps
from fisherjax.typing import Array, Key, Params


class Controls(NamedTuple):
    """The state of SCAFFOLD, in units of a step: gradients times the learning rate.

    Attributes:
        server: c, like params.
        clients: c_i, stacked.
    """

    server: Params
    clients: Params

    @property
    def correction(self) -> Params:
        """What each client subtracts from its params after each step, c - c_i, stacked."""
        return jax.tree.map(lambda c, own: c - own, self.server, self.clients)


def scaffold(num_clients: int, *, epochs: int, batch_size: int) -> Aggregator:
    r"""Make SCAFFOLD, which averages models and keeps a control variate of every client.

        W   <- sum_i p_i W_i
        c_i <- c_i - c + (W - W_i) / K_i,    c <- c + (1/M) sum_i (change of c_i),

    where client i took K_i steps from W and subtracted c - c_i after each:
    `training.train(..., correction=state.correction)`. All controls start at zero, so that the
    first round is federated averaging.

    Args:
        num_clients: M, all clients. Those that sit a round out count as zeros and no steps.
        epochs: Of local training, as in `training.train`.
        batch_size: As in `training.train`; client i takes epochs ceil(n_i / batch_size) steps.

    Returns:
        The aggregator, whose state is `Controls`. Updates are {"params": W_i, "steps": K_i}; their
        number is M. The server keeps every client's control, so `reduce` is None.

    Raises:
        ValueError: If a number is below 1; on merging, if updates are not of `num_clients`.

    Example:
        >>> import numpy as np, jax.numpy as jnp, fisherjax as fj
        >>> method = scaffold(2, epochs=1, batch_size=1)
        >>> data = [fj.clients.examples(np.zeros(n), np.zeros(n)) for n in (1, 4)]
        >>> start, ends = {"w": jnp.zeros(1)}, [{"w": jnp.full(1, x)} for x in (1.0, 2.0)]
        >>> updates = [method.summarize(None, w, e, None) for w, e in zip(ends, data)]
        >>> received = fj.tree.stack(updates), jnp.array([0.5, 0.5])
        >>> merged, state, _ = method.finish(received, start, method.init(start))
        >>> print(merged["w"], state.server["w"], state.correction["w"].T)
        [1.5] [-0.75] [[ 0.25 -0.25]]

    Source: the paper above. Controls are kept multiplied by the learning rate, which drops out as
        long as it does not change between rounds. As there, what momentum adds to a step is not
        accounted for in (W - W_i) / K_i. Deviation from NIID-Bench's code: its controls start at a
        random network.
    """
    numbers = {"num_clients": num_clients, "epochs": epochs, "batch_size": batch_size}
    for name, value in numbers.items():
        if not value >= 1:
            raise ValueError(f"{name} is {value}; expected 1 or more.")

    def init(params: Params) -> Controls:
        zeros = jax.tree.map(jnp.zeros_like, params)
        stacked = jax.tree.map(lambda x: jnp.zeros((num_clients, *x.shape), x.dtype), zeros)
        return Controls(zeros, stacked)

    def summarize(key: Key, params: Params, examples: Examples, global_params: Params) -> Any:
        del key, global_params
        num_examples = jnp.count_nonzero(examples.weights)
        return {"params": params, "steps": epochs * count_steps(num_examples, batch_size)}

    def finish(
        received: Any, global_params: Params, state: Controls
    ) -> tuple[Params, Controls, Any]:
        updates, weights = received
        steps = updates["steps"]
        if steps.shape != (num_clients,):
            raise ValueError(
                f"There are {steps.shape[0]} updates; expected one of each of {num_clients} "
                "clients. One that sits out counts as zeros, with no steps and no weight."
            )

        def controlled(own: Array, c: Array, start: Array, end: Array) -> Array:
            taken = steps.reshape(-1, *(1,) * start.ndim).astype(end.dtype)
            return jnp.where(taken > 0, own - c + (start - end) / jnp.maximum(taken, 1), own)

        clients = jax.tree.map(
            controlled, state.clients, state.server, global_params, updates["params"]
        )
        server = jax.tree.map(
            lambda c, new, old: c + (new - old).mean(0), state.server, clients, state.clients
        )
        merged = tree.weighted_sum(updates["params"], weights)
        return merged, Controls(server, clients), ()

    return Aggregator(init, summarize, None, finish, correction=lambda state: state.correction)
