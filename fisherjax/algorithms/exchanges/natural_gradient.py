"""Natural-gradient exchanges: move all layers by sums over all clients, without training.

Clients evaluate the model that they receive, and send the gradient of its squared error and the
Kronecker factors of its curvature, whose sums are those of all data. Steps of K-FAC (Martens and
Grosse, Optimizing neural networks with Kronecker-factored approximate curvature, ICML 2015) serve
only as directions here. The exact curvature of the few remaining numbers determines the lengths
along them and the last layer; held-out examples determine how much of this step is taken.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import _padding, fisher, leaves, likelihoods
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.algorithms._fisher_updates import kfac_direction
from fisherjax.algorithms.base import Algorithm, Link, WeightedSum, check_pass, weighted_sum
from fisherjax.algorithms.exchanges._head_sums import check_head
from fisherjax.algorithms.exchanges._rescaling import best_way, exact_products, regression
from fisherjax.clients import draw, hold_out
from fisherjax.fisher import Kronecker, _passes
from fisherjax.fisher.kinds import Kind
from fisherjax.training import Trained
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params

_HELD = 10  # one of ten examples is held out


class Slopes(NamedTuple):
    """Means over a client's examples that describe the loss near the model.

    Attributes:
        loss: 1/2 |z - y|^2, a number.
        gradient: Gradient of the loss, shaped as params.
        fisher: Kronecker factors of all layers.
    """

    loss: Array
    gradient: Params
    fisher: Kronecker


class Course(NamedTuple):
    """State of the server between the messages of an exchange.

    Attributes:
        loss: Loss of the received model.
        directions: Stacked directions [K, ...] of K-FAC, one for each damping.
        step: The step, shaped as params; None until it is computed.
        predicted: Predicted change of the loss of held-out examples.
    """

    loss: Array
    directions: Params
    step: Params = None
    predicted: Any = None


class NaturalGradientReport(NamedTuple):
    """Report of a step.

    Attributes:
        loss: Loss of the received model over all clients.
        predicted: Change of the loss of held-out examples that the quadratic predicts.
        scale: Scale of the step that was taken; 0 if no step lowers the loss.
        held: Losses of the held-out examples at each of `scales`, and last at scale 0.
    """

    loss: Array
    predicted: Array
    scale: Array
    held: Array


@cached
def natural_gradient(
    model: Model,
    *,
    damping: tuple[float, ...] = (1.0, 0.1, 0.01, 0.001),
    scales: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125),
    kind: Kind = fisher.sampled,
    batch_size: int = 128,
    max_examples: int | None = 4000,
) -> tuple[
    Algorithm[NaturalGradientReport],
    Algorithm[NaturalGradientReport],
    Algorithm[NaturalGradientReport],
]:
    """Make the exchange that moves all layers by natural gradients, and solves the last layer.

        D_k = -(A (x) G + lambda_k I)^-1 g   for each hidden layer, lambda_k = damping_k m(A (x) G),
        D   = sum_k c_k (D_k, 0) + d_k (D_k, U_k) + e (0, U_0),
        c, d, e = argmin of 1/2 E|J D|^2 + E[(z - y) . J D]   over held-out examples,
        W  <- W + s D,   s of the smallest loss on them,

    where g is the gradient of 1/2 |z - y|^2 over all clients, with y as in `analytic_head`, A and G
    are the means of their Kronecker factors, J is the derivative of the outputs z by the params,
    and U_k is the move of the last layer, the head, if the other layers move by D_k: a
    least-squares solution on the examples of g. The exchange usually follows the analytic head. It
    has three messages, each of sums: the gradient and factors; the products of J D_k and the inputs
    of the head, for held-out examples and for others; the losses, one for each s. See
    `merging.exchange`.

    If the examples of g selected the step, it would be that of the smallest damping, which fits
    only these examples. Both least squares have a ridge of 1e-2, for U_k of the mean eigenvalue of
    E[a a^T], and c, d, e that of the mean eigenvalue of their quadratic, where every direction has
    been scaled to E|J D|^2 = 1 over the examples of g (a sweep of it: docs/methods/exchanges.md).

    If the model's mask freezes a leaf of the last layer, this layer is not solved for: D is a
    combination of the D_k alone, which include the trained leaves of that layer, and clients send
    no products with its inputs. The coefficients still minimise the loss of held-out examples.

    Args:
        model: The network, whose outputs are those of a dense layer, and their likelihood.
        damping: Dampings, one for each direction, in units of a block's mean eigenvalue.
        scales: Values of s, in descending order; 0 is tried too.
        kind: Kind of the factors (default `fisher.sampled`, which needs one backward pass).
        batch_size: Minibatch size.
        max_examples: Largest number of a client's examples in the gradient; factors use a quarter
            of it, products and losses an eighth. None uses all. One of ten examples is held out,
            always the same ones.

    Returns:
        The three messages, for `merging.exchange`. The server needs only sums of the updates of
        each; the last one reports `NaturalGradientReport`.

    Raises:
        ValueError: If a number is out of range, or the likelihood is another than `analytic_head`
            takes; on summarize, if the outputs are not those of a dense layer as they are (a link,
            a skip or a de-normalisation follows, or its kernel is used elsewhere too).

    Example:
        >>> import fisherjax as fj
        >>> def apply(params, x):
        ...     return jnp.tanh(x @ params["a"]) @ params["b"]
        >>> model = fj.Model(apply, fj.likelihoods.gaussian)
        >>> start = {"a": jnp.ones((1, 1)) / 2, "b": jnp.ones((1, 1))}
        >>> x = jnp.linspace(-2.0, 2.0, 40)[:, None]
        >>> federation = fj.clients.federation((x, jnp.tanh(x)), [range(20), range(20, 40)])
        >>> method, key = natural_gradient(model), jax.random.key(0)
        >>> found, _, info = fj.merging.exchange(method, start, federation, key=key)
        >>> bool(info.held.min() < info.held[-1])
        True

    Source: the paper above: its damping by factors (section 6.3), and its re-scaling by the exact
        Fisher (6.4 and 7). Deviations: several dampings at once instead of one that is adapted; the
        last layer instead of the previous step in what is re-scaled; held-out examples instead of
        the same ones and of the reduction ratio (6.5).
    """
    checks.model(model)
    likelihoods.check_regression(model.likelihood)
    for name, values in (("damping", damping), ("scales", scales)):
        checks.instance(name, values, Sequence, "a tuple of numbers such as (1.0, 0.1)")
        if not values:
            raise ValueError(f"{name} is empty; expected at least one number.")
        for value in values:
            checks.positive(name, value)
    checks.function("kind", kind, "fisher.sampled")
    check_pass(batch_size, max_examples)
    plan = _Plan(model, kind, batch_size, max_examples)
    sizes, steps = tuple(map(float, damping)), (*map(float, scales), 0.0)

    def slopes(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        return {"slopes": _slopes(plan, trained.whole, examples, key)}, local

    def direct(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, state, cohort
        return params, _course(sums, sizes), ()

    def products(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        _, directions = trained.start
        parts = zip(("used", "held"), hold_out(examples, _HELD), strict=True)
        parts = {name: draw(key, part, plan.at_most(8)) for name, part in parts}
        size = plan.batch_size
        own = {
            k: exact_products(model, size, trained.whole, directions, v) for k, v in parts.items()
        }
        return {"products": own}, local

    def combine(key: Key, sums: WeightedSum, params: Params, state: Course, cohort: Array) -> tuple:
        del key, cohort
        step, predicted = best_way(state.directions, params, sums)
        return params, state._replace(step=step, predicted=predicted), ()

    def losses(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        _, step = trained.start
        _, held = hold_out(examples, _HELD)
        # The same examples as those that determined the step, because the key is the same.
        held = draw(key, held, plan.at_most(8))
        return {"losses": _losses(plan, steps, trained.whole, step, held)}, local

    def move(key: Key, sums: WeightedSum, params: Params, state: Course, cohort: Array) -> tuple:
        del key, cohort
        moved, scale, held = _move(steps, sums, params, state.step)
        return moved, (), NaturalGradientReport(state.loss, state.predicted, scale, held)

    def message(name: str, summarize: Any, aggregate: Any, link: Link) -> Algorithm:
        def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
            return weighted_sum(updates[name], weights)

        return Algorithm(summarize, aggregate, reduce, kind=name, model=model, link=link)

    def broadcast(params: Params, state: Course, *_: Any) -> tuple[Any, Any]:
        known = state.directions if state.step is None else state.step
        return params, known

    informed = Link(broadcast=broadcast)
    return (
        message("slopes", slopes, direct, Link()),
        message("products", products, combine, informed),
        message("losses", losses, move, informed),
    )


@partial(jit, static_argnums=0)
def _move(steps: tuple[float, ...], sums: WeightedSum, params: Params, step: Params) -> tuple:
    held = sums.mean()
    # The first of equal losses: the largest scale if there are no held-out examples.
    scale = jnp.array(steps)[jnp.nanargmin(held)]
    return jax.tree.map(lambda w, d: w + scale * d, params, step), scale, held


class _Plan(NamedTuple):
    model: Model
    kind: Kind
    batch_size: int
    max_examples: int | None

    def at_most(self, part: int) -> int | None:
        """Return the largest number of examples of a pass that uses one `part`-th of them."""
        return None if self.max_examples is None else -(-self.max_examples // part)


@partial(jit, static_argnums=0)
def _slopes(plan: _Plan, params: Params, examples: Examples, key: Key) -> Slopes:
    # Before anything is sent: the next message solves for that layer, unless it is frozen.
    check_head(plan.model, params, examples.inputs, frozen=True)
    apply, own = leaves.bind_untrained(plan.model, params)
    rows, examples = jax.random.fold_in(key, 0), hold_out(examples, _HELD)[0]
    examples = _padding.drop_uncounted(plan.model, draw(rows, examples, plan.max_examples))

    def batch_sums(x: Array, y: Array, w: Array, key: None) -> tuple[Array, Params]:
        del key
        return jax.value_and_grad(partial(_squared_error, plan.model, apply, x, y, w))(own)

    how: dict[str, Any] = {"batch_size": plan.batch_size}
    loss, gradient = _passes.weighted_mean(batch_sums, examples, key=None, **how)
    # The curvature of a squared error needs no targets. Leaves of no layer are not moved.
    how |= {"key": key, "kind": plan.kind, "fallback": fisher.zero}
    if plan.max_examples is not None:
        how["max_examples"] = plan.at_most(4)
    squared = plan.model._replace(likelihood=likelihoods.gaussian)
    factors = fisher.kfac(squared, params, examples._replace(targets=None), **how)
    return Slopes(loss, gradient, factors)


def _squared_error(
    model: Model, apply: Apply, x: Array, y: Array, w: Array, params: Params
) -> Array:
    """Compute sum_n w_n 1/2 |z_n - y_n|^2."""
    z = apply(params, x)
    own = likelihoods.gaussian.negative_log_likelihood(z, regression(model, x, z, y))
    return jnp.vdot(w.astype(own.dtype), own)


@partial(jit, static_argnums=1)
def _course(sums: WeightedSum, damping: tuple[float, ...]) -> Course:
    slopes: Slopes = sums.mean()
    direction = partial(kfac_direction, slopes.fisher, slopes.gradient)
    return Course(slopes.loss, jax.lax.map(direction, jnp.array(damping)))


@partial(jit, static_argnums=(0, 1))
def _losses(
    plan: _Plan, scales: tuple[float, ...], params: Params, step: Params, held: Examples
) -> Array:
    apply, own = leaves.bind_untrained(plan.model, params)

    def batch_sums(x: Array, y: Array, w: Array, key: None) -> Array:
        del key

        def loss(scale: Array) -> Array:
            moved = jax.tree.map(lambda p, d: p + scale.astype(p.dtype) * d, own, step)
            return _squared_error(plan.model, apply, x, y, w, moved)

        return jax.lax.map(loss, jnp.array(scales))

    held = _padding.drop_uncounted(plan.model, held)
    return _passes.weighted_mean(batch_sums, held, key=None, batch_size=plan.batch_size)
