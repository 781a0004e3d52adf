"""Adaptive federated optimisation: the server takes a step of its own along the pseudo-gradient.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, Adaptive federated optimization,
ICLR 2021, algorithm 1 (FedOpt), for any way to merge.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import _optimizers
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, Report, check_algorithm, check_same_shapes
from fisherjax.typing import Array, Key, Params

_NO_LOSS = "The server has no loss, only the difference of two models as a gradient."


class ServerState(NamedTuple):
    """What the wrapped algorithm keeps, and the state of the server's optimiser."""

    algorithm: Any
    optimizer: Any


@cached
def with_server_optimizer(
    algorithm: Algorithm[Report], optimizer: optax.GradientTransformation
) -> Algorithm[Report]:
    """Let the server's optimiser take a step instead of the merged model W', with a `ServerState`.

        g = W - W',   W <- W + update(g).

    Args:
        algorithm: Any.
        optimizer: Any of optax that needs gradients only, on the pseudo-gradient g; descent at rate
            1 replaces W by W'.

    Raises:
        TypeError: If the optimiser is not one of optax.
        ValueError: If the merged model may have other shapes; before the first merge, if the
            optimiser cannot take steps of the params, or wants a loss, which the server has not.

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
        _optimizers.check("server_optimizer", optimizer, params, _NO_LOSS)
        _optimizers.check_plain("The server", optimizer, params)
        return ServerState(algorithm.link.init(params, num_clients), optimizer.init(params))

    def broadcast(params: Params, state: ServerState, place: Array | None) -> Any:
        return algorithm.link.broadcast(params, state.algorithm, place)

    def aggregate(
        key: Key, received: Any, params: Params, state: ServerState, cohort: Array
    ) -> tuple[Params, ServerState, Any]:
        merged, kept, info = algorithm.aggregate(key, received, params, state.algorithm, cohort)
        # Merged leaves are at least float32; the gradient goes back to the dtype of params.
        gradient = jax.tree.map(lambda w, m: jnp.asarray(w) - m.astype(w.dtype), params, merged)
        step, server = _optimizers.with_extra_args(optimizer).update(
            gradient, state.optimizer, params
        )
        moved = optax.apply_updates(params, step)
        return moved, ServerState(kept, server), info

    link = algorithm.link._replace(init=init, broadcast=broadcast)
    return algorithm._replace(aggregate=aggregate, link=link)
