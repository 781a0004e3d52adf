"""FedFish: in each coordinate, clients are weighted by their squared gradients.

Dhawan, Mitchell, Charles, Garrett, Dziugaite, Leveraging function space aggregation for federated
learning at scale, TMLR 2024, algorithm 1.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fisherjax import _padding, leaves, local_update, solvers
from fisherjax._core import checks
from fisherjax._core.caching import cached, name_of
from fisherjax.algorithms._fisher_updates import fisher_sums, solve_sums
from fisherjax.algorithms.base import Algorithm, unchanged
from fisherjax.clients import minibatches, num_batches, shuffled, weights_of
from fisherjax.fisher import Diagonal, diagonal, kinds
from fisherjax.fisher.kinds import Kind
from fisherjax.solvers import Info
from fisherjax.training import Trained
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params, Scalar


@cached
def fedfish(
    model: Model,
    *,
    batch_size: int = 64,
    last_epoch: bool = False,
    average: bool = False,
    kind: Kind | None = None,
    damping: Scalar = 0.0,
    floor: Scalar = 1e-12,
) -> Algorithm[Info]:
    r"""Make FedFish, the coordinate-wise mean of the models weighted by squared batch gradients.

        F_i = sum_b (gradient of the mean loss of minibatch b)^2,
        W_j = (sum_i p_i F_ij W_ij + d_j Wbar_j) / (sum_i p_i F_ij + d_j)

    where the denominator exceeds a floor, and the weighted mean Wbar = sum_i p_i W_i elsewhere, for
    parameters that no client used. d_j is the damping times the mean of sum_i p_i F_i over a leaf.

    Args:
        model: The network and the likelihood that clients minimise.
        batch_size: B, minibatch size of training; the last, shorter minibatch counts as one.
        last_epoch: Whether the squares are those of training's last epoch, which the algorithm's
            `optimizer` adds up at no cost, while the weights still move. The default computes them
            at the final weights, in an additional pass over the shuffled data.
        average: Whether to divide by the number of minibatches. The sum grows with the client's
            number of examples, which p_i then counts twice, as in the paper.
        kind: None for the squares of minibatches, as in the paper; or an output-gradient estimator,
            such as `fisher.true`, whose diagonal Fisher of single examples replaces them, summed
            over a client's examples, or averaged. With minibatches of one example
            `fisher.empirical` gives the same as None.
        damping: Pull to the weighted mean, in units of a leaf's mean curvature. Zero, the default,
            is the paper's method; a large number gives federated averaging.
        floor: Floor of the denominator, in units of its mean over a leaf.

    Returns:
        The algorithm. Updates are {"params": W_i, "fisher": Diagonal}, of which the server
        needs only sums.

    Raises:
        ValueError: If a number is out of range, or `last_epoch` is asked for with a kind; on
            summarize with `last_epoch`, if models were not trained by the algorithm's optimiser.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
        >>> data = fj.Examples(jnp.array([[1.0, 0.0], [2.0, 0.0]]), jnp.ones((2, 1)))
        >>> trained = fj.training.Trained(jnp.zeros((2, 1)))
        >>> update, _ = fedfish(model, batch_size=1).summarize(jax.random.key(0), trained, data, ())
        >>> print(update["fisher"].entries.T)
        [[5. 0.]]

    Source: the paper above, which does not say what to do where no client has any Fisher
        information; the squares of the last epoch are its appendix A.5.1. Damping and other kinds
        are this library's.
    """
    checks.model(model)
    checks.count("batch_size", batch_size)
    checks.number("damping", damping)
    if kind is not None:
        checks.function("kind", kind, "fisher.true")
        kinds.check(kind, model.likelihood)
        if last_epoch:
            raise ValueError(
                f"last_epoch is True and kind is {name_of(kind)}; expected one of them: squares of "
                "the last epoch are those of training's own gradients. Pass last_epoch=False."
            )

    aggregate = solve_sums(solvers.closed_form(floor), damping)
    optimizer = _squaring if last_epoch else unchanged
    what = "squared batch gradients" if kind is None else f"{name_of(kind)} diagonal Fisher sums"
    sent = f"params, {what}{' (mean)' if average else ''}"
    summarize = _summary(model, batch_size, last_epoch, average, kind)
    return Algorithm(summarize, aggregate, fisher_sums, optimizer=optimizer, kind=sent, model=model)


@cached
def _summary(
    model: Model, batch_size: int, last_epoch: bool, average: bool, kind: Kind | None
) -> Callable[..., tuple[dict[str, Any], Any]]:
    """Make `summarize`, which methods that differ in the server's options share."""

    def loss(apply: Apply, params: Params, inputs: Array, targets: Array, weights: Array) -> Array:
        outputs = apply(params, inputs)
        likelihood = _padding.likelihood(model, inputs, outputs.shape)
        losses = likelihood.negative_log_likelihood(outputs, targets)
        # Rows of weight zero are copies that fill a short minibatch: they are not counted.
        return jnp.where(weights > 0, losses, 0).sum() / (weights > 0).sum()

    def squares(key: Key, params: Params, examples: Examples) -> Params:
        # Shuffled, because a squared mean gradient depends on which examples share a minibatch.
        examples = _padding.drop_uncounted(model, examples)
        number, batch = minibatches(shuffled(key, examples), batch_size)
        apply, trained = leaves.bind_untrained(model, params)

        def body(step: Array, total: Params) -> Params:
            return _add_squares(total, jax.grad(partial(loss, apply))(trained, *batch(step)))

        return jax.lax.fori_loop(0, number, body, _zeros(trained))

    def summarize(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        if last_epoch and not jax.tree.leaves(trained.extras):
            raise ValueError(
                "FedFish with last_epoch=True needs the squared gradients of the last epoch. "
                "Train with training.train(..., optimizer=algorithm.optimizer(base)), or pass "
                "last_epoch=False to compute them in a pass over the data."
            )
        size = jnp.count_nonzero(weights_of(examples))
        if kind is not None:
            how = {"kind": kind, "key": key, "batch_size": batch_size}
            found = diagonal(model, trained.whole, examples, **how)
            total = found.entries if average else _scaled(found.entries, size)
        else:
            total = trained.extras if last_epoch else squares(key, trained.whole, examples)
            # A client without examples has no minibatch, and its squares are zero.
            steps = jnp.maximum(num_batches(size, batch_size), 1)
            total = _scaled(total, 1 / steps) if average else total
        return {"params": trained.params, "fisher": Diagonal(total)}, local

    return summarize


# The same wrapper for the same optimiser, so that `jit` does not compile training again. The cache
# is bounded, because it keeps optimisers alive.
@functools.lru_cache(maxsize=64)
def _squaring(base: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wrap the user's optimiser to sum the squared gradients that it gets in the last epoch."""

    def update(updates: Params, state: Params, params: Params = None, **given: Any) -> tuple:
        del params
        seen = _add_squares(state, updates)
        # The flag is traced, so that all epochs run the same compiled step.
        last = given["last_epoch"]
        return updates, jax.tree.map(lambda new, old: jnp.where(last, new, old), seen, state)

    return local_update.keep_state(optax.GradientTransformationExtraArgs(_zeros, update), base)


def _add_squares(squares: Params, gradient: Params) -> Params:
    return jax.tree.map(lambda s, g: s + jnp.square(g.astype(s.dtype)), squares, gradient)


def _scaled(values: Params, factor: Array) -> Params:
    return jax.tree.map(lambda x: x * factor.astype(x.dtype), values)


def _zeros(params: Params) -> Params:
    # At least float32: bfloat16 is too coarse for sums of squares.
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, "float32")), params)
