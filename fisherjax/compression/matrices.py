"""Codecs of symmetric matrices: one triangle, or truncated decompositions."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks, linalg
from fisherjax._core.caching import cached
from fisherjax.compression.base import Codec, change_matrices
from fisherjax.compression.encoded import Encoded, Leaves, check_field
from fisherjax.fisher.operators import PRECISION
from fisherjax.typing import Array, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Triangle(Encoded):
    """Upper triangle of a symmetric matrix, folded to a rectangle by `linalg.fold_triangle`."""

    entries: Any

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Return the matrix with both triangles."""
        del leaves
        return linalg.unfold_triangle(inner(self.entries))

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the matrix."""
        found = check_field("entries of a triangle", inner(self.entries), 2)
        rows, columns = found.shape
        size = columns if columns < 2 * rows else columns - 1
        # Rectangles have shape [(n + 1) / 2, n] for odd n, and [n / 2, n + 1] for even n.
        if size < 1 or rows != (size + 1) // 2:
            raise ValueError(f"A triangle has shape {list(found.shape)}, to which no matrix folds")
        return jax.ShapeDtypeStruct((size, size), found.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Truncated(Encoded):
    """Leading singular triplets, A = left diag(values) right: [n, r], [r], [r, n]."""

    left: Any
    values: Any
    right: Any

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Return the product of the three factors."""
        del leaves
        return jnp.matmul(
            inner(self.left) * inner(self.values), inner(self.right), precision=PRECISION
        )

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the matrix."""
        left = check_field("left vectors", inner(self.left), 2)
        values = check_field("singular values", inner(self.values), 1)
        right = check_field("right vectors", inner(self.right), 2)
        if not left.shape[1] == values.shape[0] == right.shape[0]:
            raise ValueError(
                f"Singular triplets have shapes {list(left.shape)}, {list(values.shape)} and "
                f"{list(right.shape)}; expected [n, r], [r] and [r, n]"
            )
        dtype = jnp.result_type(left.dtype, values.dtype, right.dtype)
        return jax.ShapeDtypeStruct((left.shape[0], right.shape[1]), dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Root(Encoded):
    """Eigenvectors times the roots of their eigenvalues, A = B B^T, B [n, r]."""

    columns: Any

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Return B B^T, which is positive semi-definite even if B was quantised."""
        del leaves
        columns = inner(self.columns)
        return jnp.matmul(columns, columns.T, precision=PRECISION)

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Return the shape and dtype of the matrix."""
        found = check_field("columns of a root", inner(self.columns), 2)
        return jax.ShapeDtypeStruct((found.shape[0],) * 2, found.dtype)


@cached
def triangles() -> Codec:
    """Make the lossless codec that sends one triangle of every symmetric matrix.

    Example:
        >>> sent = triangles().encode({"grams": {"w": jnp.eye(3)}}, None)
        >>> sent["grams"]["w"].entries.shape
        (2, 3)
    """

    def triangle(matrix: Array) -> Triangle:
        return Triangle(linalg.fold_triangle(matrix))

    return Codec(lambda values, _: change_matrices(triangle, values), "triangles")


@cached
def truncated(rank: int | None = None, *, bits: int = 8) -> Codec:
    """Make the FedFisher paper's codec of factors, which sends their r leading singular triplets.

        A ~ U[:, :r] diag(s[:r]) V[:, :r]^T,   r = floor(16 d / (bits sum_l (2 a_l + 2 o_l + 2))),

    for d weights, and factors of sizes a_l and o_l. By this rule an update takes as many bytes as
    FedAvg's, if `quantized` encodes weights with 16 bits and triplets with `bits`.

    Args:
        rank: Number of triplets of every factor, r, limited by the size of each; None applies the
            rule (default).
        bits: Number of bits per entry of triplets that the rule assumes (default 8).

    Raises:
        ValueError: If rank or bits are not positive; on encoding, if the update has no symmetric
            matrix.

    Example:
        >>> sent = truncated(1).encode({"grams": {"w": jnp.diag(jnp.array([4.0, 1.0]))}}, None)
        >>> print(sent["grams"]["w"].decode(lambda x: x, {}))
        [[4. 0.]
         [0. 0.]]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, appendix C and the authors' code,
        in which RegMean, with one factor per layer, counts 2 a_l + 1, as here.
    """
    if rank is not None:
        checks.count("rank", rank)
    checks.count("bits", bits)

    def encode(values: dict[str, Any], start: Params | None) -> dict[str, Any]:
        del start
        most = _rank(values, bits) if rank is None else rank

        def triplets(matrix: Array) -> Truncated:
            # Singular values and not eigenvalues, as in the paper, although the matrix is
            # symmetric.
            left, scale, right = linalg.svd(matrix)
            return Truncated(left[:, :most], scale[:most], right[:most])

        return change_matrices(triplets, values)

    return Codec(encode, "singular vectors" if rank is None else f"rank {rank}")


@cached
def roots(rank: int | None = None) -> Codec:
    """Make the codec that sends r columns of a root B = U sqrt(s) of a symmetric matrix A = B B^T.

    Roots have half the numbers of `truncated` at the same rank. The decoded matrix is positive
    semi-definite by construction, also after quantisation.

    Args:
        rank: Number of columns, r, limited by the size of each matrix; None keeps all of them
            (default), which saves no bytes by itself.

    Raises:
        ValueError: If rank is not positive.

    Example:
        >>> sent = roots(1).encode({"grams": {"w": jnp.diag(jnp.array([4.0, 1.0]))}}, None)
        >>> print(jnp.abs(sent["grams"]["w"].columns.T))
        [[2. 0.]]
    """
    if rank is not None:
        checks.count("rank", rank)

    def root(matrix: Array) -> Root:
        values, vectors = linalg.eigh(matrix)
        # Rounding makes the smallest eigenvalues negative, which have no root.
        columns = vectors * jnp.sqrt(jnp.maximum(values, 0))
        # In descending order, as eigh sorts eigenvalues in ascending order.
        return Root(columns[:, ::-1][:, : len(matrix) if rank is None else rank])

    return Codec(lambda values, _: change_matrices(root, values), f"roots of rank {rank or 'all'}")


def _rank(values: dict[str, Any], bits: int) -> int:
    sizes: list[int] = []

    def count(matrix: Array) -> Array:
        sizes.append(len(matrix))
        return matrix

    # The same walk that encodes matrices counts them, so that none is missed.
    change_matrices(count, values)
    if not sizes:
        raise ValueError(
            f"This update holds {sorted(values)}, and no symmetric matrix to truncate; expected "
            "K-FAC factors or Gram matrices. Use quantized for other updates."
        )
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(values.get("params", ())))
    # A triplet has two vectors and a value.
    return max(1, 16 * weights // (bits * sum(2 * n + 1 for n in sizes)))
