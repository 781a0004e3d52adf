"""FedProx: clients are pulled back to where they started.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, Federated optimization in heterogeneous networks,
MLSys 2020, equation 2.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fisherjax import checks, optimizers
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
        The algorithm. Its `optimizer` adds mu (w - W) to the gradients that the user's optimiser
        sees; the loss that training returns leaves the pull out. Updates are {"params": W_i}.

    Raises:
        ValueError: If mu is negative or not finite.

    Example:
        >>> optimizer, w = fedprox(mu=0.5).optimizer(optax.sgd(1.0)), jnp.array(3.0)
        >>> step, _ = optimizer.update(0 * w, optimizer.init(w), w, start=jnp.array(1.0))
        >>> print(step)
        -1.0
    """
    checks.number("mu", mu)

    def pulled(gradient: Params, params: Params, start: Params) -> Params:
        def leaf(g: Array, w: Array, centre: Array) -> Array:
            # In closed form: the derivative of a norm, then squared, is NaN at the start.
            return g + jnp.asarray(mu, g.dtype) * (w - centre)

        return jax.tree.map(leaf, gradient, params, start)

    def pull(params: Params, start: Params) -> Array:
        squares = jax.tree.map(lambda w, centre: jnp.square(w - centre).sum(), params, start)
        return mu / 2 * sum(jax.tree.leaves(squares))

    # Equal optimisers give one object, or `jit` would compile training again.
    @functools.cache
    def optimizer(base: optax.GradientTransformation) -> optax.GradientTransformation:
        inner = optimizers.supported(base)

        def update(gradient: Params, state: Any, params: Params, **given: Any) -> tuple:
            start = given["start"]
            # The loss that an optimiser may ask for is what clients minimise, with its pull.
            if "value_fn" in given:
                loss, at = given["value_fn"], given["grad_fn"]
                given["value"] = given["value"] + pull(params, start)
                given["grad"] = pulled(given["grad"], params, start)
                given["value_fn"] = lambda w: loss(w) + pull(w, start)
                given["grad_fn"] = lambda w, *step: pulled(at(w, *step), w, start)
            return inner.update(pulled(gradient, params, start), state, params, **given)

        return optax.GradientTransformationExtraArgs(base.init, update)

    return averaging(optimizer=optimizer)
