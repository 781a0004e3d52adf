"""Low-rank changes of weight matrices in factored form: products, weighted means, and truncation.

A change is what its factors do together, scale * B A. Any invertible R gives the same change by the
factors (R A, B R^-1), so that a mean of factors depends on an arbitrary R: nothing here adds them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp

from fisherjax._core import linalg
from fisherjax._core.compiler import jit
from fisherjax.fisher.operators import PRECISION, widen
from fisherjax.typing import AnyArray, Array, Scalar

Factors = Mapping[str, Array]
"""Kronecker factors of a layer, {"input": A [inputs, inputs], "output": G [outputs, outputs]}."""


class Adapter(NamedTuple):
    """A low-rank change of a layer's matrix V [inputs, outputs], V + scale * (B A)^T.

    The factors have the layout of peft's files and of Hu et al., LoRA, ICLR 2022.

    Attributes:
        a: A [r, inputs]. For an embedding, the inputs are the entries of its table.
        b: B [outputs, r].
        scale: A number, such as alpha / r; with rsLoRA alpha / sqrt(r).
    """

    a: AnyArray
    b: AnyArray
    scale: Scalar = 1.0


def product(adapter: Adapter) -> Array:
    """Return the change of a layer's matrix V, scale * (B A)^T [inputs, outputs].

    Example:
        >>> print(product(Adapter(jnp.array([[1.0, 2.0]]), jnp.array([[3.0]]), scale=0.5)))
        [[1.5]
         [3. ]]
    """
    a, b = _wide(adapter)
    return jnp.matmul(a.T, b.T, precision=PRECISION)


def from_product(change: Array) -> Adapter:
    """Return an adapter of full rank with a given change [inputs, outputs].

    Example:
        >>> print(product(from_product(jnp.array([[1.5], [3.0]]))).T)
        [[1.5 3. ]]
    """
    change, (inputs, outputs) = widen(change), change.shape
    # The smaller side has the identity, so that the rank is that of the smaller side.
    if inputs < outputs:
        return Adapter(jnp.eye(inputs, dtype=change.dtype), change.T)
    return Adapter(change.T, jnp.eye(outputs, dtype=change.dtype))


def weighted_sum(adapters: Sequence[Adapter], weights: Sequence[Scalar] | Array) -> Adapter:
    """Compute sum_i w_i scale_i B_i A_i exactly, as one adapter of rank sum_i r_i.

    Example:
        >>> one = Adapter(jnp.array([[1.0, 2.0]]), jnp.array([[3.0]]))
        >>> print(product(weighted_sum([one, one], [0.5, 1.5])).T)
        [[ 6. 12.]]
    """
    pairs = [_wide(adapter) for adapter in adapters]
    # A weight is applied to one side only. A client without weight may have any factors.
    columns = [
        jnp.where(w != 0, b, 0) * jnp.asarray(w, b.dtype)
        for (_, b), w in zip(pairs, weights, strict=True)
    ]
    rows = [jnp.where(w != 0, a, 0) for (a, _), w in zip(pairs, weights, strict=True)]
    return Adapter(jnp.concatenate(rows), jnp.concatenate(columns, axis=1))


def truncate(
    adapter: Adapter, rank: int, factors: Mapping[str, Array | None] | None = None
) -> Adapter:
    """Compute the best adapter of a rank, in the metric of a layer's Kronecker factors.

        argmin |G^(1/2) (scale B A - X) A_in^(1/2)|_F   over X of the rank,

    by a singular value decomposition of a small core: the factors are orthogonalised first, so that
    no matrix [outputs, inputs] is computed. Where a singular factor sees nothing, X follows B A.

    Args:
        adapter: An adapter of any rank.
        rank: Rank of the result. An adapter of at most this rank is returned with the same factors.
        factors: {"input": A_in [inputs, inputs], "output": G [outputs, outputs]}; either may be
            diagonal, as a vector, or None or absent, for the identity. None is both.

    Returns:
        The adapter, with scale one, and with factors of equal size.

    Example:
        >>> both = Adapter(jnp.eye(2), jnp.diag(jnp.array([3.0, 2.0])))
        >>> print(jnp.diagonal(product(truncate(both, 1))).round().astype(int))
        [3 0]
        >>> metric = {"input": jnp.array([1.0, 4.0])}
        >>> print(jnp.diagonal(product(truncate(both, 1, metric))).round().astype(int))
        [0 2]

    Source: Eckart and Young, The approximation of one matrix by another of lower rank, 1936.
    """
    a, b = _wide(adapter)
    if len(a) <= rank:
        return Adapter(a, b)
    return Adapter(*_truncate(rank, a, b, dict(factors or {})))


@partial(jit, static_argnums=0)
def _truncate(rank: int, a: Array, b: Array, factors: dict[str, Any]) -> tuple[Array, Array]:
    # G^(1/2) B = Q_b small_b and A_in^(1/2) A^T = Q_a small_a, with orthogonal Q.
    small_b, small_a = _small(b, factors.get("output")), _small(a.T, factors.get("input"))
    u, s, vt = linalg.svd(_times(small_b, small_a.T))
    u, s, vt = u[:, :rank], s[:rank], vt[:rank]
    # As the core times a right singular vector is s times the left one, X needs no inverse root:
    # X = (B small_a^T v) (1 / s) (u^T small_b A). Directions of the size of rounding errors are 0.
    least = s[0] * jnp.finfo(s.dtype).eps * max(a.shape[1], len(b))
    root = jnp.where(s > least, 1 / jnp.sqrt(jnp.where(s > least, s, 1)), 0)
    left = _times(b, _times(small_a.T, vt.T)) * root
    return root[:, None] * _times(_times(u.T, small_b), a), left


def distance(adapter: Adapter, other: Adapter) -> Array:
    """Compute |D - X|_F / |D|_F of two changes in factored form; 0 if both are zero.

    Example:
        >>> one = Adapter(jnp.ones((1, 2)), jnp.ones((2, 1)))
        >>> print(distance(one, one._replace(scale=0.5)))
        0.5
    """
    return _distance(adapter, other)


@jit
def _distance(adapter: Adapter, other: Adapter) -> Array:
    size, error = _norm(adapter), _norm(weighted_sum([adapter, other], [1.0, -1.0]))
    return jnp.where(error > 0, error / jnp.where(size > 0, size, error), 0)


def _norm(adapter: Adapter) -> Array:
    a, b = _wide(adapter)
    # The triangular factors have the norm of the product; traces of Gram matrices would cancel.
    return jnp.linalg.norm(_times(_small(b), _small(a.T).T))


def _wide(adapter: Adapter) -> tuple[Array, Array]:
    """Return A and scale * B in at least float32, in which products are summed."""
    a, b = widen(jnp.asarray(adapter.a)), widen(jnp.asarray(adapter.b))
    return a, b * jnp.asarray(adapter.scale, b.dtype)


def _small(x: Array, factor: Array | None = None) -> Array:
    """Return y [r, r] with x^T F x = y^T y for a semi-definite factor F and x [n, r].

    No root of F is computed: one of Q^T F Q, with the orthonormal basis Q of x, is as accurate and
    far cheaper.
    """
    basis = linalg.orthonormal_basis(x)
    y = _times(basis.T, x)
    if factor is None:
        return y
    of_basis = factor[:, None] * basis if factor.ndim == 1 else _times(factor, basis)
    values, vectors = linalg.eigh(_times(basis.T, of_basis))
    return jnp.sqrt(jnp.maximum(values, 0))[:, None] * _times(vectors.T, y)


def _times(left: Any, right: Any) -> Array:
    return jnp.matmul(left, right, precision=PRECISION)
