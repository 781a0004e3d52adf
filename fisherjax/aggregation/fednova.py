"""FedNova: clients that took more steps count no more for it.

Wang, Liu, Liang, Joshi, Poor, Tackling the objective inconsistency problem in heterogeneous
federated optimization, NeurIPS 2020, equation 3 and section 4.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.aggregation.base import Aggregator, no_state
from fisherjax.clients import Examples
from fisherjax.local import count_steps
from fisherjax.typing import Array, Key, Params


def fednova(*, epochs: int, batch_size: int, momentum: float = 0.0) -> Aggregator:
    r"""Make FedNova, which averages the clients' normalised changes of the global model W.

        W + (sum_i p_i a_i) sum_i p_i (W_i - W) / a_i,
        a_i = [tau_i - rho (1 - rho^tau_i) / (1 - rho)] / (1 - rho),

    with tau_i the steps that client i took. Equal to federated averaging where all tau_i are equal;
    without momentum a_i = tau_i.

    Args:
        epochs: Of local training, as in `training.train`.
        batch_size: As in `training.train`; client i takes epochs ceil(n_i / batch_size) steps.
        momentum: rho of the local optimiser, from 0 to below 1, as in `optax.sgd`.

    Returns:
        The aggregator. Updates are {"change": (W_i - W) / a_i, "steps": a_i}, and add up.

    Raises:
        ValueError: If a number is out of range; on summarize, if there are no `global_params`.

    Example:
        >>> import numpy as np, jax.numpy as jnp, fisherjax as fj
        >>> method = fednova(epochs=1, batch_size=1)
        >>> data = [fj.clients.examples(np.zeros(n), np.zeros(n)) for n in (1, 4)]
        >>> start, ends = {"w": jnp.zeros(1)}, [{"w": jnp.full(1, x)} for x in (1.0, 4.0)]
        >>> updates = [method.summarize(None, w, e, start) for w, e in zip(ends, data)]
        >>> print(fj.aggregation.merge(method, start, updates, [1, 4])[0]["w"])
        [3.4]

    Source: the paper above. It leaves out the step size of the server, which is 1 here.
    """
    for name, value in (("epochs", epochs), ("batch_size", batch_size)):
        if not value >= 1:
            raise ValueError(f"{name} is {value}; expected 1 or more.")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum}; expected 0 <= momentum < 1.")

    def summarize(key: Key, params: Params, examples: Examples, global_params: Params) -> Any:
        del key
        if global_params is None:
            raise ValueError(
                "FedNova needs what the clients started from: pass global_params to summarize."
            )
        num_examples = jnp.count_nonzero(examples.weights)
        length = _length(epochs * count_steps(num_examples, batch_size), momentum)
        change = jax.tree.map(lambda w, start: _divide(w - start, length), params, global_params)
        return {"change": change, "steps": length}

    def reduce(updates: Any, weights: Array) -> Any:
        return tree.weighted_sum(updates, weights)

    def finish(sums: Any, global_params: Params, state: Any) -> tuple[Params, Any, Any]:
        def move(start: Array, change: Array) -> Array:
            return start + sums["steps"].astype(change.dtype) * change

        return jax.tree.map(move, global_params, sums["change"]), state, ()

    return Aggregator(no_state, summarize, reduce, finish)


def _length(steps: Array, momentum: float) -> Array:
    """Add up what momentum makes of `steps` gradients of one size."""
    steps = steps.astype(jnp.result_type(float))
    lost = momentum * (1 - jnp.power(momentum, steps)) / (1 - momentum)
    return (steps - lost) / (1 - momentum)


def _divide(change: Array, length: Array) -> Array:
    """Divide; a client without steps has not moved."""
    return change / jnp.where(length > 0, length, 1).astype(change.dtype)
