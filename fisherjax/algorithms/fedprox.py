"""FedProx: clients are pulled back to where they started.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated optimization in heterogeneous networks,
MLSys 2020, equation 2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fisherjax import checks
from fisherjax.algorithms.base import Algorithm, averaging
from fisherjax.configuration import cached
from fisherjax.typing import Array, Params


@cached
def fedprox(mu: float = 1e-3) -> Algorithm:
    """Make FedProx, federated averaging of clients that minimise their loss plus a pull.

        loss of client i + mu / 2 ||w - W||^2,   W what it started from.

    Args:
        mu: How strong the pull is; 0 is federated averaging.

    Returns:
        The algorithm. Its `optimizer` adds mu (w - W) to the gradients, before the user's optimiser
        sees them; the loss that training returns leaves the pull out. Updates are {"params": W_i}.

    Raises:
        ValueError: If mu is negative or not finite.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> optimizer = fj.algorithms.fedprox(mu=0.5).optimizer(optax.sgd(1.0))
        >>> state, w = optimizer.init(jnp.array(3.0)), jnp.array(3.0)
        >>> step, _ = optimizer.update(jnp.array(0.0), state, w, start=jnp.array(1.0))
        >>> print(step)
        -1.0
    """
    checks.number("mu", mu)

    def init(params: Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def pull(gradient: Params, state: Any, params: Params, *, start: Params, **_: Any) -> tuple:
        def leaf(g: Array, w: Array, centre: Array) -> Array:
            # In closed form: the derivative of a norm, then squared, is NaN at the start.
            return g + jnp.asarray(mu, g.dtype) * (w - centre)

        return jax.tree.map(leaf, gradient, params, start), state

    # Equal optimisers give one object, or `jit` would compile training again.
    @functools.cache
    def optimizer(base: optax.GradientTransformation) -> optax.GradientTransformation:
        return optax.chain(optax.GradientTransformationExtraArgs(init, pull), base)

    return averaging(optimizer=optimizer)
