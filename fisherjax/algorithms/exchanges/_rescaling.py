"""The exact quadratic of the squared error along a few directions and in the head.

Martens and Grosse (Optimizing neural networks with Kronecker-factored approximate curvature, ICML
2015, sections 6.4 and 7) compute from it the length of a step along a direction of K-FAC.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from fisherjax import _sequences, leaves, likelihoods, tree
from fisherjax._core import linalg
from fisherjax._core.compiler import jit
from fisherjax._layers import locations
from fisherjax._layers.layer import Layer, matrix, unpack
from fisherjax._layers.pairs import output_layer, trace
from fisherjax.fisher import _passes
from fisherjax.fisher.kfac import second_moment
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.typing import Array, Examples, Model, Params

# Ridge of the coefficients and of the head, in units of the mean eigenvalue of the matrix of each.
# docs/merging.md has a sweep of it.
_RIDGE = 1e-2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Products:
    """The exact quadratic of the outputs along K directions and in the head with inputs a.

    Means over examples; J_k is the derivative of the outputs along direction k, and r = z - y.

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

    def __repr__(self) -> str:
        """Describe the sums in one line, with the name of their layer."""
        return tree.line(
            "Products", self, f"of {str(getattr(self.head, 'kernel', self.head))[:60]}"
        )


def regression(model: Model, x: Array, z: Array, y: Array) -> Array:
    """Return the targets of outputs z, in their shape; z itself at positions not counted."""
    counts = _sequences.targets_counted(model, x, z.shape, y)
    y = likelihoods.regression_targets(model.likelihood, y, z.shape[-1])
    y = y.astype(z.dtype).reshape(z.shape)
    return y if counts is None else jnp.where(counts[..., None], y, z)


@partial(jit, static_argnums=(0, 1))
def exact_products(
    model: Model, batch_size: int, params: Params, directions: Params, examples: Examples
) -> Products:
    """Compute the quadratic of stacked directions [K, ...], by minibatches."""
    apply, params = leaves.opened(model, params)

    def batch_sums(x: Array, y: Array, w: Array, key: None) -> Products:
        del key
        seen = trace(apply, params, x)
        place = output_layer(seen)
        head, a = seen.layers[place], seen.activations[place]
        _, derivative = jax.linearize(lambda params: apply(params, x), params)
        changes = jax.vmap(derivative)(_but(head, directions))
        residual = seen.outputs - regression(model, x, seen.outputs, y)
        # Both sides of a product carry the root of the weight; [B, T, ...].
        root, places = jnp.sqrt(w)[:, None, None].astype(a.dtype), (*a.shape[:2], -1)
        counts = _sequences.targets_counted(model, x, seen.outputs.shape, y)
        if counts is not None:
            a = locations.selected(a, counts.reshape(a.shape[:2]))
            changes = jnp.where(counts[..., None], changes, 0)
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

    examples = _sequences.weighed(model, examples)
    return _passes.weighted_mean(batch_sums, examples, key=None, batch_size=batch_size)


@jit
def best_way(
    directions: Params, params: Params, used: Products, held: Products
) -> tuple[Params, Array]:
    """Find the way on which examples held aside gain most, and what the quadratic promises.

    Two least squares, each with a ridge r in units of the mean eigenvalue of its matrix: the moves
    of the head, A = E[a a^T] of the examples used, and the coefficients, the curvature of the ways
    over the examples held aside. Without one, directions that are nearly parallel get coefficients
    that are large and cancel each other.
    """
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


def _but(head: Layer, params: Params) -> Params:
    """Put zeros for the leaves of the head."""
    template = Template.of(params)
    return template.restore(
        {
            name: jnp.zeros_like(leaf) if name in (head.leaf, head.bias) else leaf
            for name, leaf in template.by_name(params).items()
        }
    )
