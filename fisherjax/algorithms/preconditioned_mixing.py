"""Preconditioned mixing: clients end with second-order steps, and the server weighs by curvature.

After Ishii, Niwa, Sawada, Fujino, Harada, Yokota, FedPM: federated learning using second-order
optimization with preconditioned mixing of local parameters, AAAI 2026.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import _padding, leaves
from fisherjax._core import checks
from fisherjax._core.caching import by_value, cached, name_of
from fisherjax._core.compiler import jit
from fisherjax.algorithms._fisher_updates import fisher_summary, kfac_direction, solve_sums
from fisherjax.algorithms.base import FISHER_EXAMPLES, Algorithm
from fisherjax.fisher import Kronecker, _passes, automatic, kfac
from fisherjax.fisher.kinds import Kind
from fisherjax.solvers import Info, Solver
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params, Scalar


@cached
def preconditioned_mixing(
    model: Model,
    *,
    steps: int = 1,
    step_damping: float = 1.0,
    fisher: Callable[..., Kronecker] = kfac,
    kind: Kind = automatic,
    damping: Scalar | None = None,
    solver: Solver | None = None,
    batch_size: int = 64,
    max_examples: int | None = FISHER_EXAMPLES,
) -> Algorithm[Info]:
    """Make preconditioned mixing: each client ends its training with steps of K-FAC.

        W_i <- W_i - s_i (F_i + mu_i)^-1 g_i,      g_i the gradient of the client's mean loss,
        W    = (sum_i p_i P_i)^-1 sum_i p_i P_i W_i,      P_i = F_i + lambda.

    If P_i is also the matrix of a client's step, and this step is its only one, of length s_i = 1,
    then a round is the step of all data, W - (sum_i p_i P_i)^-1 sum_i p_i g_i, however different
    the P_i are. The mean of the W_i is not: it adds up steps that each client's own curvature has
    scaled. With equal P_i the mixing is federated averaging. FedFisher is the same without the
    client's steps.

    The length s_i is the first of 1, 1/4, 1/16, ... after which the client's loss is lower, at a
    pass over its examples each; if there is none, the client stays. Whole steps are too long where
    a model is far from an optimum: the Fisher information of outputs that are certain is zero, also
    where they are wrong.

    Args:
        model: The network and the likelihood of its outputs.
        steps: Number of second-order steps after a client's training by the user's optimiser
            (default 1). `optax.sgd(0.0)` leaves only these.
        step_damping: Damping mu_i of each layer in the steps, in units of its mean eigenvalue.
        fisher: `fisher.kfac`, or a `functools.partial` of it.
        kind: Kind of the Fisher information, as in `fedfisher`.
        damping: Damping lambda of each layer, in units of the mean eigenvalue of sum_i p_i F_i
            (default 1).
        solver: Solver of the server's system (default `solvers.conjugate_gradients()`).
        batch_size: Minibatch size of the passes that compute F_i and g_i.
        max_examples: Largest number of a client's examples for F_i; None uses all, as g_i does.

    Returns:
        The algorithm. Updates are {"params": W_i, "fisher": F_i}, where F_i is that of the last
        step, at the point where it began.

    Raises:
        ValueError: If a number is out of range, or `fisher` is another structure than `kfac`.
        TypeError: If an argument has the wrong type.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
        >>> method = preconditioned_mixing(model, step_damping=1e-8, damping=0.0)
        >>> data = jnp.array([[1.0], [3.0]]), jnp.array([[0.0], [1.0]])
        >>> federation = fj.clients.federation(data, [[0], [1]])
        >>> start = jnp.ones((1, 1))
        >>> sent = fj.merging.summarize(method, [start] * 2, federation, key=jax.random.key(0))
        >>> print(fj.merging.merge(method, start, sent)[0].round(3))  # least squares of all data
        [[0.3]]

    Source: the abstract of the paper above, and its equations for one local step as a review quotes
        them; the paper itself has not been read. K-FAC as the curvature, the damping, the length of
        steps, the epochs of the user's optimiser before, and several steps are this library's.
    """
    checks.count("steps", steps)
    checks.positive("step_damping", step_damping)
    estimate, sent = fisher_summary(model, fisher, kind, batch_size, max_examples)
    if inspect.signature(fisher).return_annotation is not Kronecker:
        raise ValueError(
            f"fisher is {name_of(fisher)}; expected fisher.kfac, whose factors have an inverse. "
            "fedfisher merges by the other structures."
        )
    damping = Kronecker.default_damping if damping is None else damping
    checks.number("damping", damping)
    summarize = by_value(
        partial(_summarize, model, estimate, _Steps(steps, step_damping, batch_size))
    )
    # What clients send depends on their steps. As a float, 1 has the name of 1.0.
    sent = f"{sent}, after {steps} steps of damping {1.0 * step_damping}"
    return Algorithm(summarize, solve_sums(solver, damping), kind=sent, model=model)


_SHORTEST = 4.0**-8  # the last length that is tried before a client stays


class _Steps(NamedTuple):
    number: int
    damping: float
    batch_size: int


def _summarize(
    model: Model,
    estimate: Callable,
    steps: _Steps,
    key: Key,
    trained: Trained,
    examples: Examples,
    local: Any,
) -> tuple[dict[str, Any], Any]:
    def step(number: Array | int, before: dict[str, Any]) -> dict[str, Any]:
        del number
        there = trained._replace(params=before["params"])
        found, _ = estimate(key, there, examples, local)
        given = model, steps.batch_size, there.whole, examples
        loss = _loss(*given)
        move = kfac_direction(found["fisher"], _gradient(*given), steps.damping)

        def moved(length: Array) -> Params:
            return jax.tree.map(lambda w, d: w + (length * d).astype(w.dtype), there.params, move)

        def improves(length: Array) -> Array:
            after = there._replace(params=moved(length)).whole
            return _loss(model, steps.batch_size, after, examples) < loss

        return found | {"params": moved(_first_length(improves))}

    first = step(0, {"params": trained.params})
    last = jax.lax.fori_loop(1, steps.number, step, first) if steps.number > 1 else first
    return last, local


def _first_length(improves: Callable[[Array], Array]) -> Array:
    """Return the first of the lengths 1, 1/4, 1/16, ... that improves; 0 if none of them does."""

    def is_too_long(length: Array) -> Array:
        return (length > 0) & ~improves(length)

    def shorter(length: Array) -> Array:
        return jnp.where(length > _SHORTEST, length / 4, 0)

    return jax.lax.while_loop(is_too_long, shorter, jnp.ones(()))


@partial(jit, static_argnums=(0, 1))
def _gradient(model: Model, batch_size: int, params: Params, examples: Examples) -> Params:
    """Compute the gradient of the mean loss of a client's examples, by its trained leaves."""
    return _mean(model, batch_size, params, examples, jax.grad)


@partial(jit, static_argnums=(0, 1))
def _loss(model: Model, batch_size: int, params: Params, examples: Examples) -> Array:
    """Compute the mean loss of a client's examples."""
    return _mean(model, batch_size, params, examples, lambda loss: loss)


def _mean(
    model: Model,
    batch_size: int,
    params: Params,
    examples: Examples,
    what: Callable[[Callable], Callable],
) -> Any:
    """Compute the mean over a client's examples of what is made of the loss of a batch."""
    apply, own = leaves.bind_untrained(model, params)

    def loss(w: Params, inputs: Array, targets: Array, weights: Array) -> Array:
        outputs = apply(w, inputs)
        likelihood = _padding.likelihood(model, inputs, outputs.shape)
        losses = likelihood.negative_log_likelihood(outputs, targets)
        # Rows of weight zero fill a short minibatch.
        return jnp.where(weights > 0, weights.astype(losses.dtype) * losses, 0).sum()

    def batch_sums(inputs: Array, targets: Array, weights: Array, key: None) -> Any:
        del key
        return what(loss)(own, inputs, targets, weights)

    examples = _padding.drop_uncounted(model, examples)
    return _passes.weighted_mean(batch_sums, examples, key=None, batch_size=batch_size)
