"""FedNova: clients that took more steps count no more for it.

Wang, Liu, Liang, Joshi, Poor, Tackling the objective inconsistency problem in heterogeneous
federated optimization, NeurIPS 2020, equation 3 and section 4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import local_update
from fisherjax.algorithms.base import Algorithm, WeightedSum, weighted_sum
from fisherjax.configuration import cached
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params


class _Length(NamedTuple):
    """A scalar on which the user's optimiser runs besides the params, and its state there."""

    moved: Array
    optimizer: Any


@cached
def fednova() -> Algorithm:
    r"""Make FedNova, which averages the clients' normalised changes of the global model W.

        W + (sum_i p_i a_i) sum_i p_i (W_i - W) / a_i,

    with a_i how far client i's optimiser moves a scalar whose gradient is always one. For gradient
    descent at rate eta with momentum rho that is the paper's

        a_i = eta [tau_i - rho (1 - rho^tau_i) / (1 - rho)] / (1 - rho)

    of tau_i steps. Any other optimiser is measured likewise; equal a_i make it federated averaging.

    Returns:
        The algorithm. Its `optimizer` measures a_i while clients train. Updates are {"change":
        (W_i - W) / a_i, "length": a_i}, and add up.

    Raises:
        ValueError: On summarize, of models that `training.train` did not train by its optimiser.

    Example:
        >>> import fisherjax as fj
        >>> values = {"change": jnp.array([[1.0], [3.0]]), "length": jnp.array([10.0, 30.0])}
        >>> updates = fj.algorithms.Update(values, fednova().kind)
        >>> print(fj.merging.merge(fednova(), jnp.zeros(1), updates)[0])
        [40.]

    Source: the paper above, which gives a_i for gradient descent with momentum only. The server's
        step size, which it leaves out, is 1.
    """

    def summarize(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        del key, examples
        if trained.start is None or not isinstance(trained.extras, _Length):
            raise ValueError(
                "FedNova needs what clients started from and how far their optimiser moves: train "
                "them with training.train(..., optimizer=algorithm.optimizer(base))."
            )
        # Optimisers move the scalar down, against its gradient of one.
        length = jnp.abs(trained.extras.moved)
        safe = jnp.where(length > 0, length, 1)  # a client without steps has not moved
        moved = jax.tree.map(jnp.subtract, trained.params, trained.start)
        change = jax.tree.map(lambda x: x / safe.astype(x.dtype), moved)
        return {"change": change, "length": length}, private

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        mean = sums.mean()

        def move(start: Array, change: Array) -> Array:
            # The mean length stretches the mean change: both are sums over clients, divided once.
            return start + mean["length"].astype(change.dtype) * change

        return jax.tree.map(move, params, mean["change"]), state, ()

    kind = "normalised changes"
    return Algorithm(summarize, aggregate, weighted_sum, optimizer=_measured, kind=kind)


@functools.lru_cache(maxsize=64)
def _measured(base: optax.GradientTransformation) -> optax.GradientTransformation:
    # Its schedule and momentum act on a scalar whose gradient is one as they act on params.
    scalar = optax.with_extra_args_support(base)

    def init(params: Params) -> _Length:
        del params
        zero = jnp.zeros((), jnp.result_type(float))
        return _Length(zero, scalar.init(zero))

    def measure(gradient: Params, state: _Length, params: Params, **given: Any) -> tuple:
        del params
        zero, one = jnp.zeros_like(state.moved), jnp.ones_like(state.moved)
        # The start and extras of params do not have the scalar's shape.
        given |= {"start": zero, "extras": ()}
        step, optimizer = scalar.update(one, state.optimizer, state.moved, **given)
        return gradient, _Length(state.moved + step, optimizer)

    return local_update.keeping(optax.GradientTransformationExtraArgs(init, measure), base)
