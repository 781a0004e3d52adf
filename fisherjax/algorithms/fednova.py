"""FedNova: clients that took more steps count no more for it.

Wang, Liu, Liang, Joshi, Poor, Tackling the objective inconsistency problem in heterogeneous
federated optimization, NeurIPS 2020, equation 3 and section 4.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fisherjax import training
from fisherjax.algorithms.base import Algorithm, WeightedSum, weighted_sum
from fisherjax.configuration import cached
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Params


class _Length(NamedTuple):
    """A scalar on which the user's optimiser runs besides, and its state there."""

    moved: Array
    optimizer: Any


@cached
def fednova() -> Algorithm:
    r"""Make FedNova, which averages the clients' normalised changes of the global model W.

        W + (sum_i p_i a_i) sum_i p_i (W_i - W) / a_i,

    with a_i how far client i's optimiser moves a scalar whose gradient is always one. For gradient
    descent at rate eta with momentum rho that is the paper's

        a_i = eta [tau_i - rho (1 - rho^tau_i) / (1 - rho)] / (1 - rho)

    of tau_i steps; any other optimiser of optax, with its schedule, is measured likewise. Equal to
    federated averaging where all a_i are equal. The scale of a_i drops out.

    Returns:
        The algorithm. Its `optimizer` measures a_i while clients train. Updates are {"change":
        (W_i - W) / a_i, "length": a_i}, and add up.

    Raises:
        ValueError: On summarize, if models were trained without its optimiser or their start is not
            known.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
        >>> federation = fj.clients.federation((jnp.ones((5, 1)),) * 2, [[0], [1, 2, 3, 4]])
        >>> options = {"key": jax.random.key(0), "epochs": 1, "batch_size": 1}
        >>> options["optimizer"] = fj.algorithms.fednova().optimizer(optax.sgd(0.5))
        >>> fj.training.train(model, jnp.zeros((1, 1)), federation, **options).extras.moved.tolist()
        [-0.5, -2.0]

    Source: the paper above. It leaves out the step size of the server, which is 1 here, and gives
        a_i for gradient descent with momentum only.
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

        def change(end: Array, start: Array) -> Array:
            return (end - start) / safe.astype(end.dtype)

        return {
            "change": jax.tree.map(change, trained.params, trained.start),
            "length": length,
        }, private

    def aggregate(
        key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array
    ) -> tuple[Params, Any, Any]:
        del key, cohort
        mean = sums.mean()

        def move(start: Array, change: Array) -> Array:
            # The mean length stretches the mean change: both are sums over clients, divided once.
            return start + mean["length"].astype(change.dtype) * change

        return jax.tree.map(move, params, mean["change"]), state, ()

    return Algorithm(
        summarize, aggregate, weighted_sum, optimizer=_measured, kind="normalised changes"
    )


@functools.lru_cache(maxsize=64)
def _measured(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run an optimiser on a scalar whose gradient is one, besides the params."""
    # Its schedule and momentum act on the scalar as on params, whatever they are.
    scalar = optax.with_extra_args_support(base)

    def init(params: Params) -> _Length:
        del params
        zero = jnp.zeros((), jnp.result_type(float))
        return _Length(zero, scalar.init(zero))

    def measure(gradient: Params, state: _Length, params: Params, **given: Any) -> tuple:
        del params
        # The start and extras of params do not have the scalar's shape.
        given = given | {"start": jnp.zeros_like(state.moved), "extras": ()}
        step, optimizer = scalar.update(
            jnp.ones_like(state.moved), state.optimizer, state.moved, **given
        )
        return gradient, _Length(state.moved + step, optimizer)

    return training.keeping(optax.GradientTransformationExtraArgs(init, measure), base)
