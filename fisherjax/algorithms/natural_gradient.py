"""Natural-gradient exchanges: the whole model moved by sums over all clients, without training.

Clients run the model that they are given, and send the gradient of their squared error and the
Kronecker factors of its curvature, which add up: the server sees those of all data. Steps of K-FAC
(Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature, ICML
2015) are only directions here. How far to go along them, and where the last layer belongs then, is
read off the exact curvature of the few numbers that this leaves, and what comes of it off examples
that were held aside.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import checks, fisher, likelihoods, linalg
from fisherjax.algorithms.base import Algorithm, WeightedSum, weighted_sum
from fisherjax.clients import draw, hold_out
from fisherjax.configuration import cached
from fisherjax.fisher import Kronecker, passes
from fisherjax.fisher.kfac import second_moment
from fisherjax.fisher.kinds import Kind
from fisherjax.fisher.layers import Layer, matrix, unpack
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.fisher.trace import output_layer, trace
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params

_HELD = 10  # one of so many examples is held aside
_RIDGE = 1e-2  # of the coefficients and of the head, in units of the mean eigenvalue


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Products:
    """The exact quadratic of what K directions and the inputs a of the head do to the outputs.

    Means over examples, of J_k, the derivative of the outputs along direction k, and r = z - y.

    Attributes:
        directions: E[J_j . J_k], [K, K].
        crossed: E[a J_k^T], [K, a, C].
        inputs: E[a a^T], [a, a].
        steepness: E[r . J_k], [K].
        gradient: E[a r^T], [a, C].
        head: Which layer makes the outputs, static.
    """

    directions: Array
    crossed: Array
    inputs: Array
    steepness: Array
    gradient: Array
    head: Layer = dataclasses.field(metadata={"static": True})


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
    step: Params | None = None
    predicted: Array | None = None


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
) -> Algorithm:
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
    those and no others.

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
        The algorithm. Updates of each message add up over clients; it reports a `Step`.

    Raises:
        ValueError: If a number is out of range; on summarize, if the network does not end in a
            dense layer of its own, or its likelihood is another than `analytic_head` takes.

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

    def slopes(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        return {"slopes": _slopes(plan, trained.params, examples, key)}, private

    def look(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, state, cohort
        mean = sums.mean()
        return params, Course(mean.loss, _directions(mean, sizes)), ()

    def products(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        params, directions = trained.start
        parts = zip(("used", "held"), hold_out(examples, _HELD), strict=True)
        parts = {name: draw(key, part, plan.at_most(8)) for name, part in parts}
        own = {name: _products(plan, params, directions, part) for name, part in parts.items()}
        return {"products": own}, private

    def turn(key: Key, sums: WeightedSum, params: Params, state: Course, cohort: Array) -> tuple:
        del key, cohort
        step, predicted = _solved(state.directions, params, **sums.mean())
        return params, state._replace(step=step, predicted=predicted), ()

    def losses(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        params, step = trained.start
        _, held = hold_out(examples, _HELD)
        # Those that the step was chosen on, as the key is the same.
        held = draw(key, held, plan.at_most(8))
        return {"losses": _losses(plan, steps, params, step, held)}, private

    def go(key: Key, sums: WeightedSum, params: Params, state: Course, cohort: Array) -> tuple:
        del key, cohort
        held = sums.mean()
        # Of equals the first, that is of nothing held aside the largest.
        scale = jnp.array(steps)[jnp.nanargmin(held)]
        moved = jax.tree.map(lambda w, d: w + scale * d, params, state.step)
        return moved, (), Step(state.loss, state.predicted, scale, held)

    def message(name: str, summarize: Any, aggregate: Any, **more: Any) -> Algorithm:
        def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
            return weighted_sum(updates[name], weights)

        return Algorithm(summarize, aggregate, reduce, kind=name, model=model, **more)

    def sent(params: Params, state: Course, *_: Any) -> tuple[Any, Any]:
        known = state.directions if state.step is None else state.step
        return params, known

    last = message("losses", losses, go, broadcast=sent)
    middle = message("products", products, turn, broadcast=sent, then=last)
    return message("slopes", slopes, look, then=middle)


class _Plan(NamedTuple):
    model: Model
    kind: Kind
    batch_size: int
    max_examples: int | None

    def at_most(self, part: int) -> int | None:
        """Say of how many examples something is at most that needs a part of them."""
        return None if self.max_examples is None else -(-self.max_examples // part)


@partial(jax.jit, static_argnums=0)
def _slopes(plan: _Plan, params: Params, examples: Examples, key: Key) -> Slopes:
    rows, examples = jax.random.fold_in(key, 0), hold_out(examples, _HELD)[0]
    examples = draw(rows, examples, plan.max_examples)

    def batch_sums(x: Array, y: Array, w: Array, key: None) -> tuple[Array, Params]:
        del key
        return jax.value_and_grad(partial(_squared_error, plan.model, x, y, w))(params)

    how = {"batch_size": plan.batch_size}
    loss, gradient = passes.weighted_mean(batch_sums, examples, key=None, **how)
    # The curvature of a squared error has no targets. What no layer covers stays as it is.
    how |= {"key": key, "kind": plan.kind, "fallback": fisher.zero}
    if plan.max_examples is not None:
        how["max_examples"] = plan.at_most(4)
    squared = plan.model._replace(likelihood=likelihoods.gaussian)
    own = fisher.kfac(squared, params, examples._replace(targets=None), **how)
    return Slopes(loss, gradient, own)


def _squared_error(model: Model, x: Array, y: Array, w: Array, params: Params) -> Array:
    """Sum w_n 1/2 |z_n - y_n|^2."""
    z = model.apply(params, x)
    own = likelihoods.gaussian.negative_log_likelihood(z, _targets(model, z, y))
    return jnp.vdot(w.astype(own.dtype), own)


def _targets(model: Model, z: Array, y: Array) -> Array:
    y = likelihoods.regression_targets(model.likelihood, y, z.shape[-1])
    return y.astype(z.dtype).reshape(z.shape)


@partial(jax.jit, static_argnums=1)
def _directions(slopes: Slopes, damping: tuple[float, ...]) -> Params:
    own, means = slopes.fisher, slopes.fisher.block_means()

    def direction(damping: Array) -> Params:
        shifts = {name: damping * mean for name, mean in means.items()}
        found = own.blocks(own.inverse(shifts).mv(slopes.gradient))
        # A block without curvature has the identity for an inverse: it is not moved.
        return own.restore({name: jnp.where(means[name] > 0, -x, 0) for name, x in found.items()})

    return jax.lax.map(direction, jnp.array(damping))


def _but(head: Layer, params: Params) -> Params:
    """Put zeros for the leaves of the head."""
    template = Template.of(params)
    return template.restore(
        {
            name: jnp.zeros_like(leaf) if name in (head.leaf, head.bias) else leaf
            for name, leaf in template.by_name(params).items()
        }
    )


@partial(jax.jit, static_argnums=0)
def _products(plan: _Plan, params: Params, directions: Params, examples: Examples) -> Products:
    def batch_sums(x: Array, y: Array, w: Array, key: None) -> Products:
        del key
        seen = trace(plan.model.apply, params, x)
        place = output_layer(seen)
        head, a = seen.layers[place], seen.activations[place]
        _, derivative = jax.linearize(lambda params: plan.model.apply(params, x), params)
        changes = jax.vmap(derivative)(_but(head, directions))
        residual = seen.outputs - _targets(plan.model, seen.outputs, y)
        # Both sides of a product carry the root of the weight; [B, T, ...].
        root, places = jnp.sqrt(w)[:, None, None].astype(a.dtype), (*a.shape[:2], -1)
        a, residual = root * a, root * residual.reshape(places)
        changes = root * changes.reshape(-1, *residual.shape)
        dot = partial(jnp.einsum, precision=PRECISION)
        return Products(
            dot("jntc,kntc->jk", changes, changes),
            dot("nta,kntc->kac", a, changes),
            second_moment(a),
            dot("kntc,ntc->k", changes, residual),
            dot("nta,ntc->ac", a, residual),
            head,
        )

    return passes.weighted_mean(batch_sums, examples, key=None, batch_size=plan.batch_size)


@jax.jit
def _solved(
    directions: Params, params: Params, used: Products, held: Products
) -> tuple[Params, Array]:
    """Find the way on which examples held aside gain most, and what the quadratic promises."""
    head, template = used.head, Template.of(params)
    value, number = matrix(head, template.by_name(params)), len(used.steepness)
    # Too few to hold any aside.
    held = jax.tree.map(partial(jnp.where, jnp.trace(held.inputs) > 0), held, used)
    # U_k = -(A + r I)^-1 E[a J_k^T], and U_0 = -(A + r I)^-1 (E[a r^T] + r V) for staying there.
    size = len(value)
    ridge = _RIDGE * jnp.trace(used.inputs) / size
    pull = (used.gradient + ridge * value)[None]
    sides = jnp.concatenate([used.crossed, pull])
    flat = sides.swapaxes(0, 1).reshape(size, -1)
    heads = -linalg.definite(used.inputs + ridge * jnp.eye(size), flat)
    heads = heads.reshape(size, *sides.shape[::2]).swapaxes(0, 1)
    # Each way as coefficients [P, K] of directions and a move of the head [P, a, C].
    one = jnp.eye(number)
    ways = jnp.concatenate([one, one, jnp.zeros((1, number))])
    heads = jnp.concatenate([jnp.zeros_like(used.crossed), heads])
    # Of length one on the other examples: those of small damping are far longer.
    length = jnp.sqrt(jnp.diagonal(_curvature(used, ways, heads)))
    unit = jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)
    ways, heads = unit[:, None] * ways, unit[:, None, None] * heads
    curvature = _curvature(held, ways, heads)
    slope = ways @ held.steepness + jnp.einsum("pac,ac->p", heads, held.gradient)
    shift = jnp.where(unit > 0, _RIDGE * jnp.trace(curvature) / len(unit), 1)
    share = -linalg.definite(curvature + jnp.diag(shift), slope)
    predicted = share @ slope + share @ curvature @ share / 2
    step = jax.tree.map(lambda d: jnp.tensordot(share @ ways, d, 1), _but(head, directions))
    leaves = template.by_name(step) | unpack(head, jnp.tensordot(share, heads, 1))
    # Rounding may leave no definite system: then nobody moves.
    sound = jnp.isfinite(predicted)
    return template.restore({k: jnp.where(sound, x, 0) for k, x in leaves.items()}), predicted


def _curvature(products: Products, ways: Array, heads: Array) -> Array:
    """Give E[J p . J q] of ways p, q that move along directions and move the head."""
    dot = partial(jnp.einsum, precision=PRECISION)
    crossed = dot("pk,kac,qac->pq", ways, products.crossed, heads)
    own = dot("pac,ab,qbc->pq", heads, products.inputs, heads)
    return dot("pj,jk,qk->pq", ways, products.directions, ways) + crossed + crossed.T + own


@partial(jax.jit, static_argnums=(0, 1))
def _losses(
    plan: _Plan, scales: tuple[float, ...], params: Params, step: Params, held: Examples
) -> Array:
    def batch_sums(x: Array, y: Array, w: Array, key: None) -> Array:
        del key

        def loss(scale: Array) -> Array:
            moved = jax.tree.map(lambda p, d: p + scale.astype(p.dtype) * d, params, step)
            return _squared_error(plan.model, x, y, w, moved)

        return jax.lax.map(loss, jnp.array(scales))

    return passes.weighted_mean(batch_sums, held, key=None, batch_size=plan.batch_size)
