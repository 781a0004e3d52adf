"""Adaptive federated optimisation: the server's optimiser follows the pseudo-gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, Adaptive federated optimization,
ICLR 2021, algorithm 1 (FedOpt), for any algorithm: FedAdam is `with_server_optimizer(algorithm,
optax.adam(0.01))`. The Adam that solves FedFisher's quadratic is `algorithms.paper_adam`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import _optimizers
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Report, check_algorithm, check_same_shapes
from fisherjax.fisher.operators import widen
from fisherjax.typing import Array, Key, Params

_NO_LOSS = "The server has no loss, only the difference of two models as a gradient."


class ServerState(NamedTuple):
    """States of the wrapped algorithm and of the server's optimiser."""

    algorithm: Any
    optimizer: Any


@cached
def with_server_optimizer(
    algorithm: Algorithm[Report], optimizer: optax.GradientTransformation
) -> Algorithm[Report]:
    """Make an algorithm whose server takes an optimiser's step towards the merged model W'.

        g = W - W',   W <- W + update(g).

    Args:
        algorithm: Any algorithm whose merged leaves have the clients' shapes.
        optimizer: An optax optimiser that needs gradients only; it is applied to the
            pseudo-gradient g. Gradient descent with step size 1 replaces W by W'.

    Returns:
        The algorithm, whose state is a `ServerState`.

    Raises:
        TypeError: If the optimiser is not an optax optimiser.
        ValueError: If merged leaves have other shapes; before the first merge, if the optimiser
            cannot take steps of the params, or needs a loss, which the server does not have.

    Example:
        >>> import fisherjax as fj
        >>> slow = with_server_optimizer(fj.algorithms.fedavg(), optax.sgd(0.25))
        >>> updates = fj.algorithms.Update({"params": jnp.array([[0.0], [4.0]])}, "params")
        >>> print(fj.merging.merge(slow, jnp.zeros(1), updates)[0])
        [0.5]
    """
    check_algorithm(algorithm)
    check_same_shapes(algorithm)
    checks.optimizer("server_optimizer", optimizer)

    def init(params: Params, num_clients: int) -> ServerState:
        wide = _widened(params)
        _optimizers.check("server_optimizer", optimizer, wide, _NO_LOSS)
        _optimizers.check_plain("The server", optimizer, wide)
        return ServerState(algorithm.link.init(params, num_clients), optimizer.init(wide))

    def broadcast(params: Params, state: ServerState, place: Array | None) -> Any:
        return algorithm.link.broadcast(params, state.algorithm, place)

    def aggregate(
        key: Key, received: Any, params: Params, state: ServerState, cohort: Array
    ) -> tuple[Params, ServerState, Any]:
        merged, inner, info = algorithm.aggregate(key, received, params, state.algorithm, cohort)
        wide = _widened(params)
        gradient = jax.tree.map(lambda w, m: w - m.astype(w.dtype), wide, merged)
        step, server = _optimizers.with_extra_args(optimizer).update(
            gradient, state.optimizer, wide
        )
        moved = optax.apply_updates(wide, step)
        return moved, ServerState(inner, server), info

    link = algorithm.link._replace(init=init, broadcast=broadcast)
    return algorithm._replace(aggregate=aggregate, link=link)


def _widened(params: Params) -> Params:
    """Return params in at least float32: squares of small changes are zero in float16."""
    return jax.tree.map(lambda w: widen(jnp.asarray(w)), params)
