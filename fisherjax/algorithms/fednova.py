"""FedNova: clients' changes are normalised by their numbers of steps.

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

_ONES = "FedNova measures step sizes with gradients equal to one, for which there is no loss."


class _Length(NamedTuple):
    """State of the measurement of a_i.

    Attributes:
        moved: How far the user's optimiser moved one number per leaf, arrays of size one.
        optimizer: State of the user's optimiser on these numbers.
    """

    moved: Params
    optimizer: Any


@cached
def fednova() -> Algorithm[tuple[()]]:
    r"""Make FedNova, which averages the clients' normalised changes of the global model W.

        W + (sum_i p_i a_i) sum_i p_i (W_i - W) / a_i,

    leaf by leaf, where a_i is how far client i's optimiser moves a number, in place of the leaf,
    whose gradient is always one. For gradient descent at rate eta with momentum rho that is the
    paper's

        a_i = eta [tau_i - rho (1 - rho^tau_i) / (1 - rho)] / (1 - rho)

    for tau_i steps. For any other optimiser, a_i is measured in the same way, also if rates differ
    between leaves (`optax.multi_transform`). If all a_i are equal, it is federated averaging.

    Returns:
        The algorithm. Its `optimizer` measures a_i while clients train. Updates are {"change":
        (W_i - W) / a_i, "length": a_i, one number per leaf}, of which the server needs only sums.

    Raises:
        ValueError: On training, if steps of the optimiser depend on the loss, or its result is not
            its last iterate (`optax.contrib.schedule_free`); on summarize, if `training.train` did
            not train the models by the algorithm's optimiser.

    Example:
        >>> import fisherjax as fj
        >>> values = {"change": jnp.array([[1.0], [3.0]]), "length": jnp.array([10.0, 30.0])}
        >>> updates = fj.algorithms.Update(values, fednova().kind)
        >>> print(fj.merging.merge(fednova(), jnp.zeros(1), updates)[0])
        [40.]

    Source: the paper above, which derives a_i for gradient descent with momentum only. The server's
        step size, which the paper also has, is 1.
    """

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        del key, examples
        if trained.start is None or not isinstance(trained.extras, _Length):
            raise ValueError(
                "FedNova needs the model that each client started from and the length of its "
                "steps: train them with training.train(..., optimizer=algorithm.optimizer(base))."
            )
        # The numbers decrease, because their gradients are one.
        length = jax.tree.map(lambda x: jnp.abs(x).reshape(()), trained.extras.moved)

        def change(end: Array, start: Array, length: Array) -> Array:
            safe = jnp.where(length > 0, length, 1)  # zero for a client without steps
            return (end - start) / safe.astype(end.dtype)

        moved = jax.tree.map(change, trained.params, trained.start, length)
        return {"change": moved, "length": length}, local

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        mean = sums.mean()

        def move(start: Array, change: Array, length: Array) -> Array:
            # The mean change times the mean length: sums over clients, each divided once by the
            # weight.
            return start + length.astype(change.dtype) * change

        return jax.tree.map(move, params, mean["change"], mean["length"]), state, ()

    kind = "normalised changes"
    return Algorithm(summarize, aggregate, weighted_sum, optimizer=_measured, kind=kind)


@functools.lru_cache(maxsize=64)
def _measured(base: optax.GradientTransformation) -> optax.GradientTransformation:
    # Schedule and momentum act on a number whose gradient is one as they act on params.
    inner = _optimizers.with_extra_args(base)

    def init(params: Params) -> _Length:
        _optimizers.check_plain("FedNova", base, params)

        def small(leaf: Array) -> Array:
            # As many axes as the leaf, because optimisers distinguish matrices from vectors by
            # them.
            return jnp.zeros((1,) * jnp.ndim(leaf), jnp.result_type(float))

        numbers = jax.tree.map(small, params)
        _optimizers.check("The optimizer that FedNova wraps", base, numbers, _ONES)
        return _Length(numbers, base.init(numbers))

    def measure(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        del params
        zeros, ones = (jax.tree.map(f, state.moved) for f in (jnp.zeros_like, jnp.ones_like))
        # The start and extras of params have other shapes, and the loss belongs to params.
        arguments = {"start": zeros, "extras": (), "last_epoch": given.get("last_epoch", False)}
        step, optimizer = inner.update(ones, state.optimizer, state.moved, **arguments)
        return updates, _Length(jax.tree.map(jnp.add, state.moved, step), optimizer)

    return local_update.keep_state(optax.GradientTransformationExtraArgs(init, measure), base)
