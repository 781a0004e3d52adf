"""The exact quadratic of the squared error along a few directions and in the head.

Martens and Grosse (Optimizing neural networks with Kronecker-factored approximate curvature, ICML
2015, sections 6.4 and 7) compute from it the length of a step along a direction of K-FAC.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import _padding, leaves, likelihoods, tree
from fisherjax._core import linalg
from fisherjax._core.compiler import jit
from fisherjax._layers import locations
from fisherjax._layers.layer import Layer, matrix, unpack
from fisherjax._layers.pairs import trace
from fisherjax.algorithms.base import WeightedSum
from fisherjax.algorithms.exchanges._head_sums import check_head
from fisherjax.fisher import _passes
from fisherjax.fisher._factors import second_moment
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.typing import Array, Examples, Model, Params

# Ridge of the coefficients and of the head, in units of the mean eigenvalue of the matrix of each.
# docs/methods/exchanges.md has a sweep of it.
_RIDGE = 1e-2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class HeadProducts:
    """The part of `Products` that contains the inputs a of the head, the layer of the outputs.

    Attributes:
        crossed: E[a J_k^T], [K, a, C].
        inputs: E[a a^T], [a, a].
        gradient: E[a r^T], [a, C].
        layer: The head, static.
    """

    crossed: Array
    inputs: Array
    gradient: Array
    layer: Layer = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        """Describe the sums in one line, with the name of their layer."""
        return tree.describe(
            "HeadProducts", self, f"of {str(getattr(self.layer, 'kernel', self.layer))[:60]}"
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Products:
    """The exact quadratic of the outputs along K directions and in the head with inputs a.

    Means over examples; J_k is the derivative of the outputs along direction k, and r = z - y.

    Attributes:
        directions: E[J_j . J_k], [K, K].
        steepness: E[r . J_k], [K].
        head: Products with the inputs of the head. None if the model's mask freezes a leaf of the
            head, because the head is then not solved for.
    """

    directions: Array
    steepness: Array
    head: HeadProducts | None

    def __repr__(self) -> str:
        """Describe the sums in one line."""
        return tree.describe("Products", self)


def regression(model: Model, x: Array, z: Array, y: Array) -> Array:
    """Return the targets of outputs z, in their shape; z itself at positions not counted."""
    counts = _padding.counted_targets(model, x, z.shape, y)
    y = likelihoods.regression_targets(model.likelihood, y, z.shape[-1])
    y = y.astype(z.dtype).reshape(z.shape)
    return y if counts is None else jnp.where(counts[..., None], y, z)


@partial(jit, static_argnums=(0, 1))
def exact_products(
    model: Model, batch_size: int, params: Params, directions: Params, examples: Examples
) -> Products:
    """Compute the quadratic of stacked directions [K, ...], by minibatches."""
    apply, trained = leaves.bind_untrained(model, params)
    dot = partial(jnp.einsum, precision=PRECISION)

    def batch_sums(x: Array, y: Array, w: Array, key: None) -> Products:
        del key
        seen = trace(apply, trained, x)
        last = seen.last
        if isinstance(last, str):
            # Raises unless the mask freezes a leaf of the head.
            check_head(model, params, x, frozen=True)
        _, derivative = jax.linearize(lambda trained: apply(trained, x), trained)
        layer = None if isinstance(last, str) else seen.layers[last]
        changes = jax.vmap(derivative)(_without_head(layer, directions))
        z = seen.outputs
        residual = z - regression(model, x, z, y)
        counts = _padding.counted_targets(model, x, z.shape, y)
        if counts is not None:
            changes = jnp.where(counts[..., None], changes, 0)
        # Each side of a product is multiplied by the root of the weight; [B, T, ...].
        root = jnp.sqrt(w)[:, None, None].astype(z.dtype)
        residual = root * residual.reshape(len(z), -1, z.shape[-1])
        changes = root * changes.reshape(-1, *residual.shape)
        head = None
        if not isinstance(last, str):
            a = seen.activations[last]
            a = a if counts is None else locations.mask_values(a, counts.reshape(a.shape[:2]))
            a = root.astype(a.dtype) * a
            crossed, gradient = dot("nta,kntc->kac", a, changes), dot("nta,ntc->ac", a, residual)
            head = HeadProducts(crossed, second_moment(a), gradient, seen.layers[last])
        steepness = dot("kntc,ntc->k", changes, residual)
        return Products(dot("jntc,kntc->jk", changes, changes), steepness, head)

    examples = _padding.drop_uncounted(model, examples)
    return _passes.weighted_mean(batch_sums, examples, key=None, batch_size=batch_size)


@jit
def best_way(directions: Params, params: Params, sums: WeightedSum) -> tuple[Params, Array]:
    """Find the step that lowers the loss of held-out examples most, and its predicted change.

    The step is a combination of ways: directions, with or without moves of the head. It solves two
    least-squares problems, each with a ridge in units of the mean eigenvalue of its matrix. The
    first one determines the moves of the head; its matrix is E[a a^T] over the examples of the
    gradient. The second one determines the coefficients of the ways; its matrix is their curvature
    over held-out examples. Without a ridge, nearly parallel directions would get large coefficients
    that cancel each other. If the head is frozen, it has no moves.
    """
    products: dict[str, Products] = sums.mean()
    (used, held), template = (products["used"], products["held"]), Template.of(params)
    # Too few examples to hold any out leave these sums zero.
    own = held.directions if held.head is None else held.head.inputs
    held = jax.tree.map(partial(jnp.where, jnp.trace(own) > 0), held, used)
    ways, heads = jnp.eye(len(used.steepness)), None
    if used.head is not None:
        ways, heads = _with_heads(used.head, matrix(used.head.layer, template.by_name(params)))
    # Scaled to length one on the other examples, because small dampings make far longer ways.
    length = jnp.sqrt(jnp.diagonal(_curvature(used, ways, heads)))
    unit = jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)
    ways, heads = jax.tree.map(partial(jax.vmap(jnp.multiply), unit), (ways, heads))
    slope = ways @ held.steepness
    if held.head is not None:
        slope += jnp.einsum("pac,ac->p", heads, held.head.gradient)
    curvature = _curvature(held, ways, heads)
    shift = jnp.where(unit > 0, _RIDGE * jnp.trace(curvature) / len(unit), 1)
    share = -linalg.cholesky_solve(curvature + jnp.diag(shift), slope)
    predicted = share @ slope + share @ curvature @ share / 2
    layer = None if used.head is None else used.head.layer
    moved = _without_head(layer, directions)
    step = template.by_name(jax.tree.map(lambda d: jnp.tensordot(share @ ways, d, 1), moved))
    if layer is not None:
        step |= unpack(layer, jnp.tensordot(share, heads, 1))
    # If rounding makes the system indefinite, nothing is moved.
    sound = jnp.isfinite(predicted)
    return template.restore({k: jnp.where(sound, x, 0) for k, x in step.items()}), predicted


def _with_heads(used: HeadProducts, value: Array) -> tuple[Array, Array]:
    """Return the ways as coefficients [P, K] of directions and moves [P, a, C] of the head V."""
    # U_k = -(A + r I)^-1 E[a J_k^T], and without a direction U_0 = -(A + r I)^-1 (E[a r^T] + r V).
    size, one = len(value), jnp.eye(len(used.crossed))
    ridge = _RIDGE * jnp.trace(used.inputs) / size
    pull = (used.gradient + ridge * value)[None]
    sides = jnp.concatenate([used.crossed, pull])
    flat = sides.swapaxes(0, 1).reshape(size, -1)
    heads = -linalg.cholesky_solve(used.inputs + ridge * jnp.eye(size), flat)
    heads = heads.reshape(size, *sides.shape[::2]).swapaxes(0, 1)
    ways = jnp.concatenate([one, one, jnp.zeros_like(one[:1])])
    return ways, jnp.concatenate([jnp.zeros_like(used.crossed), heads])


def _curvature(products: Products, ways: Array, heads: Any) -> Array:
    """Compute E[J p . J q] of ways p, q, with moves [P, a, C] of the head unless it is frozen."""
    dot = partial(jnp.einsum, precision=PRECISION)
    along = dot("pj,jk,qk->pq", ways, products.directions, ways)
    if products.head is None:
        return along
    crossed = dot("pk,kac,qac->pq", ways, products.head.crossed, heads)
    inside = dot("pac,ab,qbc->pq", heads, products.head.inputs, heads)
    return along + crossed + crossed.T + inside


def _without_head(layer: Layer | None, params: Params) -> Params:
    """Replace the leaves of the head by zeros; None if the head is frozen and not solved for."""
    if layer is None:
        return params
    template = Template.of(params)
    return template.restore(
        {
            name: jnp.zeros_like(leaf) if name in (layer.leaf, layer.bias) else leaf
            for name, leaf in template.by_name(params).items()
        }
    )
