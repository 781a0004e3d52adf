"""FedNova: clients that took more steps count no more for it.

Wang, Liu, Liang, Joshi, Poor, Tackling the objective inconsistency problem in heterogeneous
federated optimization, NeurIPS 2020, equation 3 and section 4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import _optimizers, local_update
from fisherjax._core.caching import cached
from fisherjax.algorithms.base import Algorithm, WeightedSum, weighted_sum
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params

_ONES = "FedNova measures it on gradients of one, of which there is no loss."


class _Length(NamedTuple):
    """Numbers, one a leaf, on which the user's optimiser runs besides the params, and its state."""

    moved: Params
    optimizer: Any


@cached
def fednova() -> Algorithm[tuple[()]]:
    r"""Make FedNova, which averages the clients' normalised changes of the global model W.

        W + (sum_i p_i a_i) sum_i p_i (W_i - W) / a_i,

    leaf by leaf, with a_i how far client i's optimiser moves a number in place of the leaf whose
    gradient is always one. For gradient descent at rate eta with momentum rho that is the paper's

        a_i = eta [tau_i - rho (1 - rho^tau_i) / (1 - rho)] / (1 - rho)

    of tau_i steps. Any other optimiser is measured likewise, one that has a rate for each leaf
    (`optax.multi_transform`) too; equal a_i make it federated averaging.

    Returns:
        The algorithm. Its `optimizer` measures a_i while clients train. Updates are {"change":
        (W_i - W) / a_i, "length": a_i, like params with a number a leaf}, and add up.

    Raises:
        ValueError: On training, of an optimiser whose steps depend on the loss, or whose answer is
            not where it is (`optax.contrib.schedule_free`); on summarize, of models that
            `training.train` did not train by its optimiser.

    Example:
        >>> import fisherjax as fj
        >>> values = {"change": jnp.array([[1.0], [3.0]]), "length": jnp.array([10.0, 30.0])}
        >>> updates = fj.algorithms.Update(values, fednova().kind)
        >>> print(fj.merging.merge(fednova(), jnp.zeros(1), updates)[0])
        [40.]

    Source: the paper above, which gives a_i for gradient descent with momentum only. The server's
        step size, which it leaves out, is 1.
    """

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        del key, examples
        if trained.start is None or not isinstance(trained.extras, _Length):
            raise ValueError(
                "FedNova needs what clients started from and how far their optimiser moves: train "
                "them with training.train(..., optimizer=algorithm.optimizer(base))."
            )
        # Optimisers move the numbers down, against their gradients of one.
        length = jax.tree.map(lambda x: jnp.abs(x).reshape(()), trained.extras.moved)

        def change(end: Array, start: Array, length: Array) -> Array:
            safe = jnp.where(length > 0, length, 1)  # a client without steps has not moved
            return (end - start) / safe.astype(end.dtype)

        moved = jax.tree.map(change, trained.params, trained.start, length)
        return {"change": moved, "length": length}, local

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        mean = sums.mean()

        def move(start: Array, change: Array, length: Array) -> Array:
            # The mean length stretches the mean change: both are sums over clients, divided once.
            return start + length.astype(change.dtype) * change

        return jax.tree.map(move, params, mean["change"], mean["length"]), state, ()

    kind = "normalised changes"
    return Algorithm(summarize, aggregate, weighted_sum, optimizer=_measured, kind=kind)


@functools.lru_cache(maxsize=64)
def _measured(base: optax.GradientTransformation) -> optax.GradientTransformation:
    # Its schedule and momentum act on a number whose gradient is one as they act on params.
    inner = _optimizers.with_extra_args(base)

    def init(params: Params) -> _Length:
        _optimizers.check_plain("FedNova", base, params)

        def small(leaf: Array) -> Array:
            # Of as many axes as the leaf, since optimisers tell matrices from vectors by them.
            return jnp.zeros((1,) * jnp.ndim(leaf), jnp.result_type(float))

        numbers = jax.tree.map(small, params)
        _optimizers.check("The optimizer that FedNova wraps", base, numbers, _ONES)
        return _Length(numbers, base.init(numbers))

    def measure(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        del params
        zeros, ones = (jax.tree.map(f, state.moved) for f in (jnp.zeros_like, jnp.ones_like))
        # The start and extras of params do not have these shapes, nor is the loss of these numbers.
        told = {"start": zeros, "extras": (), "last_epoch": given.get("last_epoch", False)}
        step, optimizer = inner.update(ones, state.optimizer, state.moved, **told)
        return updates, _Length(jax.tree.map(jnp.add, state.moved, step), optimizer)

    return local_update.keep_state(optax.GradientTransformationExtraArgs(init, measure), base)
