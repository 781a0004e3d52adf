"""The exact quadratic of the squared error on a few directions and the head: the best way on it.

Martens and Grosse (Optimizing neural networks with Kronecker-factored approximate curvature, ICML
2015, sections 6.4 and 7) read off it how far to go along a direction of K-FAC.
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
from fisherjax._layers.pairs import trace
from fisherjax.algorithms.exchanges._head_sums import check_head
from fisherjax.fisher import _passes
from fisherjax.fisher._factors import second_moment
from fisherjax.fisher.operators import PRECISION, Template
from fisherjax.typing import Array, Examples, Model, Params

# Of the coefficients and of the head, in units of the mean eigenvalue of each one's matrix. The
# sweep is in docs/methods/merging.md.
_RIDGE = 1e-2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Products:
    """The exact quadratic of what K directions and the inputs a of the head do to the outputs.

    Means over examples, of J_k, the derivative of the outputs along direction k, and r = z - y.

    Attributes:
        directions: E[J_j . J_k], [K, K].
        crossed: E[a J_k^T], [K, a, C].
        inputs: E[a a^T], [a, a].
        steepness: E[r . J_k], [K].
        gradient: E[a r^T], [a, C].
        head: Which layer makes the outputs, static. Where the model's mask leaves out a leaf of
            it, nobody solves for it: then this is None, and so is what is of its inputs a.
    """

    directions: Array
    crossed: Array | None
    inputs: Array | None
    steepness: Array
    gradient: Array | None
    head: Layer | None = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        """Describe the sums in one line, with the layer that they are of."""
        return tree.describe(
            "Products", self, f"of {str(getattr(self.head, 'kernel', self.head))[:60]}"
        )


def regression(model: Model, x: Array, z: Array, y: Array) -> Array:
    """Give what outputs z are fitted to, of their shape: themselves where nothing counts."""
    counts = _sequences.counted_targets(model, x, z.shape, y)
    y = likelihoods.regression_targets(model.likelihood, y, z.shape[-1])
    y = y.astype(z.dtype).reshape(z.shape)
    return y if counts is None else jnp.where(counts[..., None], y, z)


@partial(jit, static_argnums=(0, 1))
def exact_products(
    model: Model, batch_size: int, params: Params, directions: Params, examples: Examples
) -> Products:
    """Compute the quadratic of stacked directions [K, ...], by minibatches."""
    apply, own = leaves.bind_untrained(model, params)
    dot = partial(jnp.einsum, precision=PRECISION)

    def batch_sums(x: Array, y: Array, w: Array, key: None) -> Products:
        del key
        seen = trace(apply, own, x)
        solved = not isinstance(seen.last, str)
        head = seen.layers[seen.last] if solved else check_head(model, params, x, frozen=True)
        _, derivative = jax.linearize(lambda own: apply(own, x), own)
        changes = jax.vmap(derivative)(_but(head, directions))
        z = seen.outputs
        residual = z - regression(model, x, z, y)
        counts = _sequences.counted_targets(model, x, z.shape, y)
        if counts is not None:
            changes = jnp.where(counts[..., None], changes, 0)
        # Both sides of a product carry the root of the weight; [B, T, ...].
        root = jnp.sqrt(w)[:, None, None].astype(z.dtype)
        residual = root * residual.reshape(len(z), -1, z.shape[-1])
        changes = root * changes.reshape(-1, *residual.shape)
        crossed = inputs = gradient = None
        if head is not None:
            a = seen.activations[seen.last]
            a = a if counts is None else locations.mask_values(a, counts.reshape(a.shape[:2]))
            a = root.astype(a.dtype) * a
            crossed, inputs = dot("nta,kntc->kac", a, changes), second_moment(a)
            gradient = dot("nta,ntc->ac", a, residual)
        steepness = dot("kntc,ntc->k", changes, residual)
        own_products = dot("jntc,kntc->jk", changes, changes)
        return Products(own_products, crossed, inputs, steepness, gradient, head)

    examples = _sequences.drop_uncounted(model, examples)
    return _passes.weighted_mean(batch_sums, examples, key=None, batch_size=batch_size)


@jit
def best_way(
    directions: Params, params: Params, used: Products, held: Products
) -> tuple[Params, Array]:
    """Find the way on which examples held aside gain most, and what the quadratic promises.

    Two least squares, each with a ridge r in units of the mean eigenvalue of its matrix: the moves
    of the head, A = E[a a^T] of the examples used, and the coefficients, the curvature of the ways
    over the examples held aside. Without one, directions that are nearly parallel get coefficients
    that are large and cancel each other. Of a head that is not solved for there are no moves.
    """
    head, template = used.head, Template.of(params)
    # Too few to hold any aside.
    some = held.directions if head is None else held.inputs
    held = jax.tree.map(partial(jnp.where, jnp.trace(some) > 0), held, used)
    ways, heads = jnp.eye(len(used.steepness)), None
    if head is not None:
        ways, heads = _with_heads(used, matrix(head, template.by_name(params)))
    # Of length one on the other examples: those of small damping are far longer.
    length = jnp.sqrt(jnp.diagonal(_curvature(used, ways, heads)))
    unit = jnp.where(length > 0, 1 / jnp.where(length > 0, length, 1), 0)
    ways = unit[:, None] * ways
    slope = ways @ held.steepness
    if heads is not None:
        heads = unit[:, None, None] * heads
        slope += jnp.einsum("pac,ac->p", heads, held.gradient)
    curvature = _curvature(held, ways, heads)
    shift = jnp.where(unit > 0, _RIDGE * jnp.trace(curvature) / len(unit), 1)
    share = -linalg.cholesky_solve(curvature + jnp.diag(shift), slope)
    predicted = share @ slope + share @ curvature @ share / 2
    step = jax.tree.map(lambda d: jnp.tensordot(share @ ways, d, 1), _but(head, directions))
    leaves = template.by_name(step)
    if heads is not None:
        leaves |= unpack(head, jnp.tensordot(share, heads, 1))
    # Rounding may leave no definite system: then nobody moves.
    sound = jnp.isfinite(predicted)
    return template.restore({k: jnp.where(sound, x, 0) for k, x in leaves.items()}), predicted


def _with_heads(used: Products, value: Array) -> tuple[Array, Array]:
    """Give each way as coefficients [P, K] of directions and a move of the head V, [P, a, C]."""
    # U_k = -(A + r I)^-1 E[a J_k^T], and U_0 = -(A + r I)^-1 (E[a r^T] + r V) for staying there.
    size, one = len(value), jnp.eye(len(used.steepness))
    ridge = _RIDGE * jnp.trace(used.inputs) / size
    pull = (used.gradient + ridge * value)[None]
    sides = jnp.concatenate([used.crossed, pull])
    flat = sides.swapaxes(0, 1).reshape(size, -1)
    heads = -linalg.cholesky_solve(used.inputs + ridge * jnp.eye(size), flat)
    heads = heads.reshape(size, *sides.shape[::2]).swapaxes(0, 1)
    ways = jnp.concatenate([one, one, jnp.zeros_like(one[:1])])
    return ways, jnp.concatenate([jnp.zeros_like(used.crossed), heads])


def _curvature(products: Products, ways: Array, heads: Array | None) -> Array:
    """Compute E[J p . J q] of ways p, q that move along directions and move the head."""
    dot = partial(jnp.einsum, precision=PRECISION)
    along = dot("pj,jk,qk->pq", ways, products.directions, ways)
    if heads is None:
        return along
    crossed = dot("pk,kac,qac->pq", ways, products.crossed, heads)
    own = dot("pac,ab,qbc->pq", heads, products.inputs, heads)
    return along + crossed + crossed.T + own


def _but(head: Layer | None, params: Params) -> Params:
    """Put zeros for the leaves of the head, if it is solved for."""
    if head is None:
        return params
    template = Template.of(params)
    return template.restore(
        {
            name: jnp.zeros_like(leaf) if name in (head.leaf, head.bias) else leaf
            for name, leaf in template.by_name(params).items()
        }
    )
