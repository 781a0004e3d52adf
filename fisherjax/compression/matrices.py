"""Symmetric matrices in fewer numbers: triangles, truncated decompositions."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks, linalg
from fisherjax._core.caching import cached
from fisherjax.compression.base import Codec, Encoded, Leaves, change_matrices, check_field
from fisherjax.fisher.operators import PRECISION
from fisherjax.typing import Array, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Triangle(Encoded):
    """The upper triangle of a symmetric matrix, folded to a rectangle by `linalg.fold_triangle`."""

    entries: Any

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Fill both triangles."""
        del leaves
        return linalg.unfold_triangle(inner(self.entries))

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Say how large the matrix is."""
        found = check_field("entries of a triangle", inner(self.entries), 2)
        rows, columns = found.shape
        size = columns if columns < 2 * rows else columns - 1
        # Of n odd [(n + 1) / 2, n], of n even [n / 2, n + 1].
        if size < 1 or rows != (size + 1) // 2:
            raise ValueError(f"A triangle came as {list(found.shape)}, which no matrix folds to")
        return jax.ShapeDtypeStruct((size, size), found.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Truncated(Encoded):
    """Leading singular triplets, A = left diag(values) right: [n, r], [r], [r, n]."""

    left: Any
    values: Any
    right: Any

    def decode(self, inner: Callable[[Any], Any], leaves: Leaves) -> Array:
        """Multiply."""
        del leaves
        return jnp.matmul(
            inner(self.left) * inner(self.values), inner(self.right), precision=PRECISION
        )

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Say how large the matrix is."""
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
        """Multiply: positive semi-definite whatever was done to B."""
        del leaves
        columns = inner(self.columns)
        return jnp.matmul(columns, columns.T, precision=PRECISION)

    def declared(self, inner: Callable[[Any], Any]) -> jax.ShapeDtypeStruct:
        """Say how large the matrix is."""
        found = check_field("columns of a root", inner(self.columns), 2)
        return jax.ShapeDtypeStruct((found.shape[0],) * 2, found.dtype)


@cached
def triangles() -> Codec:
    """Make the codec that sends one triangle of every symmetric matrix, which loses nothing.

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
    """Make the codec of the FedFisher paper for factors: r leading singular triplets of each.

        A ~ U[:, :r] diag(s[:r]) V[:, :r]^T,   r = floor(16 d / (bits sum_l (2 a_l + 2 o_l + 2))),

    so that with weights of 16 bits and triplets of `bits`, by `quantized`, an update takes the
    bytes of FedAvg's: d weights, and factors of sizes a_l and o_l.

    Args:
        rank: r, the same for all factors, at most the size of each; None is the rule.
        bits: Which the rule counts with.

    Raises:
        ValueError: If rank or bits are not positive; on encoding, if nothing in the update is a
            symmetric matrix.

    Example:
        >>> sent = truncated(1).encode({"grams": {"w": jnp.diag(jnp.array([4.0, 1.0]))}}, None)
        >>> print(sent["grams"]["w"].decode(lambda x: x, {}))
        [[4. 0.]
         [0. 0.]]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, appendix C and the authors' code,
        whose RegMean counts 2 a_l + 1: where there is one factor for a layer, as here.
    """
    if rank is not None:
        checks.count("rank", rank)
    checks.count("bits", bits)

    def encode(values: dict[str, Any], start: Params | None) -> dict[str, Any]:
        del start
        most = _rank(values, bits) if rank is None else rank

        def triplets(matrix: Array) -> Truncated:
            left, scale, right = linalg.svd(matrix)
            return Truncated(left[:, :most], scale[:most], right[:most])

        return change_matrices(triplets, values)

    return Codec(encode, "singular vectors" if rank is None else f"rank {rank}")


@cached
def roots(rank: int | None = None) -> Codec:
    """Make the codec that sends a symmetric matrix as B = U sqrt(s), A = B B^T, of r columns.

    Half the numbers of `truncated` at the same rank, and positive semi-definite by construction,
    quantised or not.

    Args:
        rank: r, at most the size of each matrix; None is all of it, which saves nothing by itself.

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
        columns = vectors * jnp.sqrt(jnp.maximum(values, 0))
        # In descending order: the largest eigenvalues are the last.
        return Root(columns[:, ::-1][:, : len(matrix) if rank is None else rank])

    return Codec(lambda values, _: change_matrices(root, values), f"roots of rank {rank or 'all'}")


def _rank(values: dict[str, Any], bits: int) -> int:
    sizes: list[int] = []

    def count(matrix: Array) -> Array:
        sizes.append(len(matrix))
        return matrix

    change_matrices(count, values)
    if not sizes:
        raise ValueError(
            f"This update holds {sorted(values)}, and no symmetric matrix to truncate; expected "
            "K-FAC factors or Gram matrices. Use quantized for others."
        )
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(values.get("params", ())))
    # A left and a right vector and a value each.
    return max(1, 16 * weights // (bits * sum(2 * n + 1 for n in sizes)))
