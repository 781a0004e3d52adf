"""FedAdam and FedYogi: the server takes adaptive steps along the mean change of the clients.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, Adaptive federated optimization,
ICLR 2021, algorithm 2.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, averaging
from fisherjax.algorithms.wrappers.server_optimizer import with_server_optimizer
from fisherjax.typing import Array, Params, Scalar


class Moments(NamedTuple):
    """The server's state, shaped as params.

    Attributes:
        first: m, the decaying mean of the changes.
        second: v, what the method keeps of their squares.
    """

    first: Params
    second: Params


def _adam(v: Array, square: Array, b2: Scalar) -> Array:
    return b2 * v + (1 - b2) * square


def _yogi(v: Array, square: Array, b2: Scalar) -> Array:
    return v - (1 - b2) * square * jnp.sign(v - square)


def fedadam(
    *, learning_rate: float = 0.03, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3
) -> Algorithm[tuple[()]]:
    r"""Make FedAdam, federated averaging with steps of Adam on the server.

        D = sum_i p_i W_i - W,    m <- b1 m + (1 - b1) D,    v <- b2 v + (1 - b2) D^2,
        W <- W + learning_rate m / (sqrt(v) + tau),

    from m = 0 and v = tau^2, without bias correction. A merge is one such step, and small: FedAdam
    is made for many rounds. `with_server_optimizer` gives any method any optimiser of optax, whose
    Adam corrects the bias.

    Args:
        learning_rate: Step size of the server.
        b1: Decay of the first moment, below 1.
        b2: Decay of the second moment, below 1.
        tau: Degree of adaptivity, above zero; a large one gives steps along m itself.

    Returns:
        The algorithm. Updates are {"params": W_i}, of which the server needs only sums.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import fisherjax as fj
        >>> method = fedadam(learning_rate=0.1, b1=0.0, b2=0.0, tau=1.0)
        >>> updates = fj.algorithms.Update({"params": jnp.array([[2.0], [4.0]])}, method.kind)
        >>> print(fj.merging.merge(method, jnp.zeros(1), updates)[0])
        [0.075]

    Source: the paper above, whose weights p_i are equal or by examples; here those of the merge.
    """
    return _adaptive(_adam, learning_rate, b1, b2, tau)


def fedyogi(
    *, learning_rate: float = 0.03, b1: float = 0.9, b2: float = 0.99, tau: float = 1e-3
) -> Algorithm[tuple[()]]:
    r"""Make FedYogi, federated averaging with steps of Yogi on the server.

        D = sum_i p_i W_i - W,    m <- b1 m + (1 - b1) D,
        v <- v - (1 - b2) D^2 sign(v - D^2),    W <- W + learning_rate m / (sqrt(v) + tau),

    from m = 0 and v = tau^2. The second moment falls at most by the last square, where that of
    FedAdam decays.

    Args:
        learning_rate: Step size of the server.
        b1: Decay of the first moment, below 1.
        b2: One minus the weight of a square in the second moment, below 1.
        tau: Degree of adaptivity, above zero; a large one gives steps along m itself.

    Returns:
        The algorithm. Updates are {"params": W_i}, of which the server needs only sums.

    Raises:
        ValueError: If a number is out of range.

    Example:
        >>> import fisherjax as fj
        >>> method = fedyogi(learning_rate=0.1, b1=0.0, b2=0.0, tau=1.0)
        >>> updates = fj.algorithms.Update({"params": jnp.array([[2.0], [4.0]])}, method.kind)
        >>> print(fj.merging.merge(method, jnp.zeros(1), updates)[0].round(4))
        [0.0721]

    Source: the paper above, whose weights p_i are equal or by examples; here those of the merge.
    """
    return _adaptive(_yogi, learning_rate, b1, b2, tau)


@cached
def _adaptive(
    second: Callable[..., Array], learning_rate: float, b1: float, b2: float, tau: float
) -> Algorithm[tuple[()]]:
    for name, decay in (("b1", b1), ("b2", b2)):
        checks.number(name, decay)
        if decay >= 1:
            raise ValueError(f"{name} is {decay}; expected zero or more, and below 1.")
    checks.positive("learning_rate", learning_rate)
    checks.positive("tau", tau)

    def init(params: Params) -> Moments:
        return Moments(
            optax.tree.zeros_like(params), jax.tree.map(lambda x: jnp.full_like(x, tau**2), params)
        )

    def update(updates: Params, state: Any, params: Any = None) -> tuple[Params, Moments]:
        del params
        # The pseudo-gradient is -D, and so the first moment has the other sign.
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, updates)
        squared = partial(second, b2=b2)
        last = jax.tree.map(lambda v, g: squared(v, jnp.square(g)), state.second, updates)
        step = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + tau), first, last)
        return step, Moments(first, last)

    return with_server_optimizer(averaging(), optax.GradientTransformation(init, update))
