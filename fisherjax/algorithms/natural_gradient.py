"""Natural-gradient exchanges: one layer moved by sums over all clients, without local training.

Clients run the model that they are given and send the gradient of their loss and the Kronecker
factors of one layer, which add up: the server sees those of all data, and takes the step of K-FAC
(Martens and Grosse, Optimizing neural networks with Kronecker-factored approximate curvature,
ICML 2015) that one machine with all data would take.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import checks, fisher, likelihoods, linalg
from fisherjax.algorithms.base import Algorithm, WeightedSum, weighted_sum
from fisherjax.clients import draw
from fisherjax.configuration import cached
from fisherjax.fisher import passes
from fisherjax.fisher.columns import over_columns, weighted
from fisherjax.fisher.kfac import second_moment
from fisherjax.fisher.kinds import Kind
from fisherjax.fisher.layers import Layer, matrix, unpack
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.fisher.trace import Trace, trace
from fisherjax.training import Trained
from fisherjax.typing import Array, Examples, Key, Model, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerSums:
    """What a client knows of one layer; means over its examples.

    Attributes:
        gradient: Of the loss, [a, o].
        inputs: A, [a, a].
        outputs: G, [o, o].
        loss: A number.
        layer: Which layer it is, static.
    """

    gradient: Array
    inputs: Array
    outputs: Array
    loss: Array
    layer: Layer = dataclasses.field(metadata={"static": True})


class Step(NamedTuple):
    """How a step went.

    Attributes:
        loss: Of the model given, over all clients.
        predicted: What the quadratic says the loss will be.
        scale: Of the step, 1 where the cap did not bind.
    """

    loss: Array
    predicted: Array
    scale: Array


@cached
def natural_gradient(
    model: Model,
    *,
    squared: bool = True,
    damping: float = 0.1,
    cap: float = 0.2,
    layer: str | None = None,
    kind: Kind = fisher.sampled,
    batch_size: int = 64,
    max_examples: int | None = None,
) -> Algorithm:
    """Make the exchange that moves one layer V by a natural-gradient step.

        D = -(A (x) G + damping m(A) m(G) I)^-1 g,   V <- V + s D,
        s = min(1, (cap loss / (1/2 D^T (A (x) G) D))^(1/2)),

    with g the gradient of the loss of all clients, A and G the sums of their Kronecker factors and
    m the mean eigenvalue. With `squared` the loss is 1/2 |z - y|^2, y as `analytic_head` fits it:
    the two alternate, each the other's start; otherwise it is the likelihood's. See
    `merging.exchange`.

    Args:
        model: The network and what its outputs mean.
        squared: Whether the loss is the squared error of the outputs.
        damping: In units of the mean eigenvalue of A (x) G.
        cap: What the quadratic may change the loss by at most, as a share of it.
        layer: Name of its kernel; None is the largest dense one but for the last.
        kind: Of Fisher information; `fisher.sampled` takes one backward pass.
        batch_size: Examples of a minibatch.
        max_examples: Of how many of a client's examples its sums are at most; None is all.

    Returns:
        The algorithm. Updates are {"step": LayerSums}, which add up over clients; it reports a
        `Step`.

    Raises:
        ValueError: If a number is out of range; on summarize, if there is no such layer.

    Example:
        >>> import fisherjax as fj
        >>> def apply(params, x):
        ...     return jnp.tanh(x @ params["a"]) @ params["b"]
        >>> model = fj.Model(apply, fj.likelihoods.gaussian)
        >>> start = {"a": jnp.ones((1, 1)) / 2, "b": jnp.ones((1, 1))}
        >>> data = jnp.ones((2, 1)), jnp.full((2, 1), 0.6)
        >>> federation = fj.clients.federation(data, [[0], [1]])
        >>> method = natural_gradient(model, damping=0.0, kind=fj.fisher.true)
        >>> found = fj.merging.exchange(method, start, federation, key=jax.random.key(0))
        >>> bool(found[0]["a"] > start["a"]), found[2].scale < 1
        (True, Array(True, dtype=bool))

    Source: the paper above, sections 3 and 6. Deviations: the eigenvalues themselves are damped,
        not the factors; a cap on what the quadratic predicts stands for its rescaling by the exact
        Fisher. One layer at a time: steps of several at once correct the same error twice.
    """
    checks.model(model)
    checks.number("damping", damping)
    checks.positive("cap", cap)
    checks.function("kind", kind, "fisher.sampled")
    checks.count("batch_size", batch_size)
    if max_examples is not None:
        checks.count("max_examples", max_examples)
    plan = _Plan(model, squared, layer, kind, batch_size)

    def summarize(key: Key, trained: Trained, examples: Examples, private: Any) -> tuple[dict, Any]:
        rows, labels = jax.random.split(key)
        examples = draw(rows, examples, max_examples)
        return {"step": _sums(plan, trained.params, examples, labels)}, private

    def reduce(updates: dict[str, Any], weights: Array) -> WeightedSum:
        return weighted_sum(updates["step"], weights)

    def aggregate(key: Key, sums: WeightedSum, params: Params, state: Any, cohort: Array) -> tuple:
        del key, cohort
        leaves = Template.of(params).by_name(params)
        moved, info = _moved(sums.mean(), matrix(sums.total.layer, leaves), damping, cap)
        leaves |= unpack(sums.total.layer, moved)
        return Template.of(params).restore(leaves), state, info

    return Algorithm(summarize, aggregate, reduce, kind="gradient and factors", model=model)


class _Plan(NamedTuple):
    model: Model
    squared: bool
    layer: str | None
    kind: Kind
    batch_size: int


@partial(jax.jit, static_argnums=0)
def _sums(plan: _Plan, params: Params, examples: Examples, key: Key) -> LayerSums:
    model = plan.model
    likelihood = likelihoods.gaussian if plan.squared else model.likelihood

    def batch_sums(x: Array, y: Array, w: Array, key: Key) -> LayerSums:
        seen = trace(model.apply, params, x)
        z, place = seen.outputs, _place(seen, plan.layer)
        if plan.squared:
            y = likelihoods.regression_targets(model.likelihood, y, z.shape[-1])
            y = y.astype(z.dtype).reshape(z.shape)

        def loss(z: Array) -> Array:
            return jnp.vdot(w.astype(z.dtype), likelihood.negative_log_likelihood(z, y))

        value, score = jax.value_and_grad(loss)(z)
        a = seen.activations[place]
        gradient = jnp.einsum("nta,nto->ao", a, seen.pullback(score)[place], precision=PRECISION)

        def output_factor(one: Array) -> Array:
            g = seen.pullback(one[0])[place]
            # As in `fisher.kfac`: A sums over locations, so that G is a mean over them.
            return second_moment(g) / g.shape[1]

        columns = weighted(plan.kind(likelihood, z, y, key), w)
        outputs = over_columns(output_factor, columns, at_once=1)
        inputs = second_moment(jnp.sqrt(w)[:, None, None].astype(a.dtype) * a)
        return LayerSums(gradient, inputs, outputs, value, seen.layers[place])

    return passes.weighted_mean(batch_sums, examples, key=key, batch_size=plan.batch_size)


def _place(seen: Trace, name: str | None) -> int:
    """Find a layer by name, or the largest dense one before the last."""
    layers = [layer.kernel for layer in seen.layers]
    dense = [place for place, layer in enumerate(seen.layers) if layer.is_dense]
    if name is None and len(dense) > 1:
        return max(dense[:-1], key=lambda place: math.prod(seen.layers[place].shape))
    for place, layer in enumerate(seen.layers):
        # A slice of a stack, or one of two uses of a leaf, cannot move by itself.
        if layer.kernel == name and layer.form == "product" and layer.part_of is None:
            return place
    raise ValueError(
        f"There is no layer {name!r} to move; expected the name of a dense or convolutional one of "
        f"{layers}, or None where a dense one comes before the last."
    )


@jax.jit
def _moved(sums: LayerSums, value: Array, damping: Array, cap: Array) -> tuple[Array, Step]:
    (a, left), (g, right) = linalg.eigh(sums.inputs), linalg.eigh(sums.outputs)
    curvature = jnp.maximum(a, 0)[:, None] * jnp.maximum(g, 0)

    def turned(x: Array, left: Array, right: Array) -> Array:
        return jnp.linalg.multi_dot([left, x, right], precision=PRECISION)

    gradient = turned(sums.gradient, left.T, right)
    damped = curvature + damping * curvature.mean()
    direction = -jnp.where(damped > 0, gradient / jnp.where(damped > 0, damped, 1), 0)
    change = (curvature * direction**2).sum() / 2
    largest = cap * sums.loss
    scale = jnp.where(change > largest, jnp.sqrt(largest / jnp.where(change > 0, change, 1)), 1)
    predicted = sums.loss + scale * jnp.vdot(gradient, direction) + scale**2 * change
    moved = value + scale * turned(direction, left, right.T)
    return moved, Step(sums.loss, predicted, scale)
