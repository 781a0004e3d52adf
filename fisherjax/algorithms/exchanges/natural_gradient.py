"""Natural-gradient exchanges: the whole model moved by sums over all clients, without training.

Clients run the model that they are given, and send the gradient of their squared error and the
Kronecker factors of its curvature, which add up: the server sees those of all data. Steps of K-FAC
(Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature, ICML
2015) are only directions here. How far to go along them, and where the last layer belongs then, is
read off the exact curvature of the few numbers that this leaves, and what comes of it off examples
that were held aside.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import _sequences, fisher, leaves, likelihoods
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.algorithms.base import Algorithm, Link, WeightedSum, weighted_sum
from fisherjax.algorithms.exchanges._head_sums import check_head
from fisherjax.algorithms.exchanges._rescaling import best_way, exact_products, regression
from fisherjax.clients import draw, hold_out
from fisherjax.fisher import Kronecker, _passes
from fisherjax.fisher.kinds import Kind
from fisherjax.training import Trained
from fisherjax.typing import Apply, Array, Examples, Key, Model, Params

_HELD = 10  # one of so many examples is held aside


class Slopes(NamedTuple):
    """What a client knows of the loss near the model; means over its examples.

    Attributes:
        loss: 1/2 |z - y|^2, a number.
        gradient: Of the loss, of the shape of params.
        fisher: Kronecker factors of all layers.
    """

    loss: Array
    gradient: Params
    fisher: Kronecker


class Course(NamedTuple):
    """What the server keeps between the messages of an exchange.

    Attributes:
        loss: Of the model given.
        directions: Stacked [K, ...], those of K-FAC for each damping.
        step: The way to go, of the shape of params; None until it is known.
        predicted: By how much the loss of examples held aside will change.
    """

    loss: Array
    directions: Params
    step: Params = None
    predicted: Any = None


class Step(NamedTuple):
    """How a step went.

    Attributes:
        loss: Of the model given, over all clients.
        predicted: By how much the quadratic says that the loss of examples held aside changes.
        scale: Of the step that was taken; 0 where none was better than to stay.
        held: Losses of the examples held aside at each of `scales`, and last where none is taken.
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
) -> tuple[Algorithm[Step], Algorithm[Step], Algorithm[Step]]:
    """Make the exchange that moves all layers by natural gradients, and solves the last anew.

        D_k = -(A (x) G + lambda_k I)^-1 g   for each hidden layer, lambda_k = damping_k m(A (x) G),
        D   = sum_k c_k (D_k, 0) + d_k (D_k, U_k) + e (0, U_0),
        c, d, e = argmin of 1/2 E|J D|^2 + E[(z - y) . J D]   over examples held aside,
        W  <- W + s D,   s of the least loss on them,

    with g the gradient of 1/2 |z - y|^2 over all clients, y as `analytic_head` fits it, A and G the
    means of their Kronecker factors, J the derivative of the outputs z by the params, and U_k where
    the last layer goes, the head, if the others go by D_k: the least squares of the examples that g
    is of. It follows the analytic head. An exchange has three messages, each of sums: the gradient
    and factors; the products of J D_k and the inputs of the head, twice, of examples held aside and
    of others; the losses, one number for each s. See `merging.exchange`.

    Chosen on the examples that g is of, the step would be that of the least damping, which fits
    those and no others. Both least squares have a ridge of 1e-2: U_k that of the mean eigenvalue of
    E[a a^T], and c, d, e that of the mean eigenvalue of their quadratic, where every direction has
    been scaled to E|J D|^2 = 1 over the examples that g is of. docs/methods/merging.md
    has a sweep of it.

    Where the model's mask leaves out a leaf of the last layer, nothing is solved anew: the ways are
    the D_k alone, of what is trained of that layer too, and clients send no products with its
    inputs. The step is still the one of the least loss on examples held aside.

    Args:
        model: The network, whose outputs are those of a dense layer, and what they mean.
        damping: One for each direction, in units of a block's mean eigenvalue.
        scales: s, from large to small; to stay is tried too.
        kind: Of the factors; `fisher.sampled` takes one backward pass.
        batch_size: Examples of a minibatch.
        max_examples: Of how many of a client's examples the gradient is at most; factors are of a
            quarter of that, products and losses of an eighth. None is all. Of every ten examples
            one is held aside, always the same.

    Returns:
        The three messages, for `merging.exchange`, which plays them in turn. Updates of each add
        up over clients; the last reports a `Step`.

    Raises:
        ValueError: If a number is out of range; on summarize, if the outputs are not those of a
            dense layer as they are (a link, a skip or a de-normalisation follows, or its kernel is
            used elsewhere too), or the likelihood is another than `analytic_head` takes.

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
        Fisher (6.4 and 7). Deviations: several dampings at once in place of one that is adapted,
        the last layer in place of the previous step among what is re-scaled, and examples held
        aside in place of the same ones and of the reduction ratio (6.5).
    """
    checks.model(model)
    for name, values in (("damping", damping), ("scales", scales)):
        checks.instance(name, values, Sequence, "a tuple of numbers such as (1.0, 0.1)")
        if not values:
            raise ValueError(f"{name} is empty; expected at least one number.")
        for value in values:
            checks.positive(name, value)
    checks.function("kind", kind, "fisher.sampled")
    checks.count("batch_size", batch_size)
    if max_examples is not None:
        checks.count("max_examples", max_examples)
    plan = _Plan(model, kind, batch_size, max_examples)
    sizes, steps = tuple(map(float, damping)), (*map(float, scales), 0.0)

    def slopes(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        return {"slopes": _slopes(plan, trained.whole, examples, key)}, local

    def look(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, state, cohort
        mean = sums.mean()
        return params, Course(mean.loss, _directions(mean, sizes)), ()

    def products(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        _, directions = trained.start
        parts = zip(("used", "held"), hold_out(examples, _HELD), strict=True)
        parts = {name: draw(key, part, plan.at_most(8)) for name, part in parts}
        size = plan.batch_size
        own = {
            k: exact_products(model, size, trained.whole, directions, v) for k, v in parts.items()
        }
        return {"products": own}, local

    def turn(key: Key, sums: WeightedSum, params: Params, state: Course, cohort: Array) -> tuple:
        del key, cohort
        step, predicted = best_way(state.directions, params, **sums.mean())
        return params, state._replace(step=step, predicted=predicted), ()

    def losses(key: Key, trained: Trained, examples: Examples, local: Any) -> tuple[dict, Any]:
        _, step = trained.start
        _, held = hold_out(examples, _HELD)
        # Those that the step was chosen on, as the key is the same.
        held = draw(key, held, plan.at_most(8))
        return {"losses": _losses(plan, steps, trained.whole, step, held)}, local

    def go(key: Key, sums: WeightedSum, params: Params, state: Course, cohort: Array) -> tuple:
        del key, cohort
        held = sums.mean()
        # Of equals the first, that is of nothing held aside the largest.
        scale = jnp.array(steps)[jnp.nanargmin(held)]
        moved = jax.tree.map(lambda w, d: w + scale * d, params, state.step)
        return moved, (), Step(state.loss, state.predicted, scale, held)

    def message(name: str, summarize: Any, aggregate: Any, link: Link) -> Algorithm:
        def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
            return weighted_sum(updates[name], weights)

        return Algorithm(summarize, aggregate, reduce, kind=name, model=model, link=link)

    def sent(params: Params, state: Course, *_: Any) -> tuple[Any, Any]:
        known = state.directions if state.step is None else state.step
        return params, known

    informed = Link(broadcast=sent)
    return (
        message("slopes", slopes, look, Link()),
        message("products", products, turn, informed),
        message("losses", losses, go, informed),
    )


class _Plan(NamedTuple):
    model: Model
    kind: Kind
    batch_size: int
    max_examples: int | None

    def at_most(self, part: int) -> int | None:
        """Say of how many examples something is at most that needs a part of them."""
        return None if self.max_examples is None else -(-self.max_examples // part)


@partial(jit, static_argnums=0)
def _slopes(plan: _Plan, params: Params, examples: Examples, key: Key) -> Slopes:
    # Before anything is sent: the next message solves for that layer.
    check_head(plan.model, params, examples.inputs, frozen=True)
    apply, own = leaves.bind_untrained(plan.model, params)
    rows, examples = jax.random.fold_in(key, 0), hold_out(examples, _HELD)[0]
    examples = _sequences.drop_uncounted(plan.model, draw(rows, examples, plan.max_examples))

    def batch_sums(x: Array, y: Array, w: Array, key: None) -> tuple[Array, Params]:
        del key
        return jax.value_and_grad(partial(_squared_error, plan.model, apply, x, y, w))(own)

    how: dict[str, Any] = {"batch_size": plan.batch_size}
    loss, gradient = _passes.weighted_mean(batch_sums, examples, key=None, **how)
    # The curvature of a squared error has no targets. What no layer covers stays as it is.
    how |= {"key": key, "kind": plan.kind, "fallback": fisher.zero}
    if plan.max_examples is not None:
        how["max_examples"] = plan.at_most(4)
    squared = plan.model._replace(likelihood=likelihoods.gaussian)
    factors = fisher.kfac(squared, params, examples._replace(targets=None), **how)
    return Slopes(loss, gradient, factors)


def _squared_error(
    model: Model, apply: Apply, x: Array, y: Array, w: Array, params: Params
) -> Array:
    """Sum w_n 1/2 |z_n - y_n|^2."""
    z = apply(params, x)
    own = likelihoods.gaussian.negative_log_likelihood(z, regression(model, x, z, y))
    return jnp.vdot(w.astype(own.dtype), own)


@partial(jit, static_argnums=1)
def _directions(slopes: Slopes, damping: tuple[float, ...]) -> Params:
    own, means = slopes.fisher, slopes.fisher.block_means()

    def direction(damping: Array) -> Params:
        shifts = {name: damping * mean for name, mean in means.items()}
        found = own.blocks(own.inverse(shifts).mv(slopes.gradient))
        # A block without curvature has the identity for an inverse: it is not moved.
        return own.restore({name: jnp.where(means[name] > 0, -x, 0) for name, x in found.items()})

    return jax.lax.map(direction, jnp.array(damping))


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

    held = _sequences.drop_uncounted(plan.model, held)
    return _passes.weighted_mean(batch_sums, held, key=None, batch_size=plan.batch_size)
