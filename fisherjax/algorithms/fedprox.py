"""FedProx: a proximal term keeps clients near the model that they started from.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated optimization in heterogeneous networks,
MLSys 2020, equation 2.
"""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, averaging
from fisherjax.local_update import penalised
from fisherjax.typing import Array, Params, Scalar


@cached
def fedprox(mu: Scalar = 1e-3) -> Algorithm[tuple[()]]:
    """Make FedProx, federated averaging of clients whose loss has a proximal term.

        loss of client i + mu / 2 ||w - W||^2,   W the model that it started from.

    Args:
        mu: Weight of the proximal term (default 0.001); 0 is federated averaging.

    Returns:
        The algorithm. Its `optimizer` adds mu (w - W) to the gradients before the user's optimiser;
        the loss that training returns does not include the term. Updates are {"params": W_i}, of
        which the server needs only sums.

    Raises:
        ValueError: If mu is negative or not finite.

    Example:
        >>> import optax
        >>> optimizer, w = fedprox(mu=0.5).optimizer(optax.sgd(1.0)), jnp.array(3.0)
        >>> step, _ = optimizer.update(0 * w, optimizer.init(w), w, start=jnp.array(1.0))
        >>> print(step)
        -1.0
    """
    checks.number("mu", mu)

    def penalty(params: Params, *, start: Params, extras: Any) -> Array:
        del extras
        squares = jax.tree.map(lambda w, centre: jnp.square(w - centre).sum(), params, start)
        return jnp.asarray(mu / 2 * sum(jax.tree.leaves(squares)))

    return averaging(optimizer=penalised(penalty))
