"""The operator of K-FAC: Kronecker factors of layers. Its default damping is set here."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax._core import linalg
from fisherjax._layers.feeders import Feeders
from fisherjax._layers.layer import Layer, assemble, count_layers, matrix
from fisherjax.fisher.operators import PRECISION, Blockwise, Template, describe_stack, ravel
from fisherjax.typing import Array, Params, Scalar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Kronecker(Blockwise):
    """Kronecker factors of each layer, F V = A V G, and a diagonal for all other leaves.

    The block of a layer acts on the row-major flattening of V [a, o] as kron(A, G). A bias is the
    last row of V. For a convolution with T output locations, A is a sum over locations and G is a
    mean, so that kron(A, G) has the scale of the exact block (Grosse and Martens, A
    Kronecker-factored approximate Fisher matrix for convolution layers, ICML 2016, equations 27 to
    30). A scale and a shift are the two rows of V, and have the exact 2 x 2 block for each column.
    A layer with groups, such as a depthwise convolution, has a block for each group: its V, A and G
    have a leading axis of groups.

    Attributes:
        factors: For each layer, by the name of its kernel, {"input": A [a, a], "output": G [o, o]};
            A is [a] if it is diagonal, as for an embedding. With n groups they are [n, a, a] and
            [n, o, o].
        entries: Diagonal entries of the remaining leaves, by name; for a scale the blocks [r, r, o]
            over its r rows.
        layers: Static description of the layers.
        template: Static structure of params.
        feeders: Static; for each layer the names of the layers whose outputs make its inputs, or
            None if each layer is fed by the one before it.
        default_damping: Damping of a merge if none is given, 1.0, in units of a block's mean
            eigenvalue.
    """

    factors: dict[str, dict[str, Array]]
    entries: dict[str, Array]
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    template: Template = dataclasses.field(metadata={"static": True})
    feeders: Feeders | None = dataclasses.field(default=None, metadata={"static": True})
    # A sum of products of factors is not the product of their sums.
    adds_up: ClassVar[bool] = False
    # This value was the best, or close to it, on MNIST, CIFAR-10 and digits.
    default_damping: ClassVar[float] = 1.0

    def __repr__(self) -> str:
        """Return a description in one line: leaves, layers by form, parameters, dtypes."""
        leaves = jax.tree.leaves((self.factors, self.entries))
        # While JAX rebuilds a pytree, any object may take the place of the factors.
        factors = self.factors if isinstance(self.factors, dict) else {}
        # An output factor is always a matrix; an input factor may be a vector.
        grouped = {layer.kernel for layer in self.layers if layer.groups}
        named = [(n, x["output"]) for n, x in factors.items() if isinstance(x, dict)][:1]
        stack = [words for n, x in named for words in describe_stack(x, 2 + (n in grouped))]
        details = self.template.describe(count_layers(self.layers))
        return f"Kronecker({', '.join([*stack, *details, *tree.dtypes(leaves)])})"

    def map_parts(self, on_matrix: Callable, on_entries: Callable) -> "Kronecker":
        """Apply one function to each matrix, and one to each diagonal."""

        def factor(x: Array) -> Any:
            if x.ndim == 3:  # a matrix for each group
                return np.stack([on_matrix(one) for one in x])
            return on_entries(x) if x.ndim == 1 else on_matrix(x)

        def on_columns(x: Array) -> Any:
            return np.stack([on_matrix(x[..., column]) for column in range(x.shape[-1])], -1)

        entries = {
            # A scale has one matrix for each column, [r, r, o].
            name: on_columns(x) if name in self.scales else on_entries(x)
            for name, x in self.entries.items()
        }
        factors = jax.tree.map(factor, self.factors)
        return dataclasses.replace(self, factors=factors, entries=entries)

    def times(self, factor: Scalar) -> "Kronecker":
        """Multiply the operator by a number: the output factors and the diagonals."""
        product, own = super().times(factor), self.factors
        factors = {name: x | {"input": own[name]["input"]} for name, x in product.factors.items()}
        return dataclasses.replace(product, factors=factors)

    def blocks(self, params: Params) -> dict[str, Array]:
        """Return the blocks of params: the matrix V of each layer, and each remaining leaf."""
        leaves = self.template.by_name(params)
        matrices = {layer.kernel: matrix(layer, leaves) for layer in self.layers}
        return {name: leaves[name] for name in self.entries.keys() - matrices.keys()} | matrices

    def restore(self, blocks: dict[str, Array]) -> Params:
        """Return params from their blocks."""
        rest = {name: blocks[name] for name in self.entries}
        return self.template.restore(rest | assemble(self.layers, blocks))

    def block_mv(self, blocks: dict[str, Array]) -> dict[str, Array]:
        """Multiply blocks by the operator: A V G."""
        pairs = self.factors.items()
        products = {n: sandwich(f["input"], blocks[n], f["output"]) for n, f in pairs}
        return products | {name: _times(f, blocks[name]) for name, f in self.entries.items()}

    def block_means(self) -> dict[str, Array]:
        """Return each block's mean eigenvalue, tr(A) tr(G) / (a o), its scale.

        That of a layer with groups is the mean over its groups.
        """
        # The eigenvalues of kron(A, G) are all products, so their mean is the product of the means.
        means = {
            name: jnp.mean(mean_eigenvalue(factor["input"]) * mean_eigenvalue(factor["output"]))
            for name, factor in self.factors.items()
        }
        return means | {name: jnp.mean(f) for name, f in self._diagonal_entries().items()}

    def block_damping(self, means: dict[str, Array], damping: Array) -> dict[str, Array]:
        """Return each block's damping lambda: `damping` times the block's mean eigenvalue.

        Leaves with a diagonal only are not damped, as in a diagonal Fisher.
        """
        damped = self.factors.keys() | self.scales
        return {name: damping * mean * (name in damped) for name, mean in means.items()}

    def block_exponents(self) -> dict[str, Array]:
        """Return the exponent of each block, from an operator whose leaves are exponents."""
        return {name: f["input"] + f["output"] for name, f in self.factors.items()} | self.entries

    def inverse(self, shifts: dict[str, Array]) -> "Kronecker":
        """Return an approximate inverse of F + shift, in which each factor has a part of the shift.

            (A + pi sqrt(shift) I)^-1, (G + sqrt(shift) / pi I)^-1,   pi^2 = tr(A) o / (tr(G) a).

        There is one shift for each block. If it is zero, or if the block is indefinite, then the
        inverse is the identity.

        Source: Martens and Grosse, ICML 2015, section 6.3 (factored Tikhonov regularisation).
        """
        factors = {name: inverse_factors(f, shifts[name]) for name, f in self.factors.items()}
        entries = {name: self._inverse_entries(name, shifts[name]) for name in self.entries}
        return dataclasses.replace(self, factors=factors, entries=entries)

    def diagonal(self) -> Params:
        """Return the diagonal of the Kronecker products, in the shape of params."""
        # [a] and [o] -> [a, o], as V.
        outer = {
            name: diagonal_of(factor["input"])[..., None]
            * diagonal_of(factor["output"])[..., None, :]
            for name, factor in self.factors.items()
        }
        return self.restore(outer | self._diagonal_entries())

    @property
    def coverage(self) -> float:
        """Return the share of the parameters that have factors or exact blocks."""
        sizes = dict(zip(self.template.names(), map(math.prod, self.template.shapes), strict=True))
        rest = self.entries.keys() - self.scales
        return 1 - sum(sizes[name] for name in rest) / sum(sizes.values())

    @property
    def scales(self) -> set[str]:
        """Return the names of the layers that are a scale, with or without a shift."""
        return {layer.kernel for layer in self.layers if layer.form == "scale"}

    def identity(self) -> "Kronecker":
        """Return the identity as an operator of the same shapes."""
        factors = jax.tree.map(identity_like, self.factors)
        # A scale has one matrix for each column, [r, r, o].
        entries = {
            name: identity_like(x.T).T if name in self.scales else jnp.ones_like(x)
            for name, x in self.entries.items()
        }
        return dataclasses.replace(self, factors=factors, entries=entries)

    def select(self, names: Sequence[str]) -> "Kronecker":
        """Return the operator on a dict of the leaves with these names, without the others.

        Raises:
            ValueError: If only some of the leaves of a layer are among them.
        """
        layers = []
        for layer in self.layers:
            leaves = {layer.leaf, layer.bias} - {None}
            if leaves <= set(names):
                layers.append(layer)
            elif leaves & set(names):
                raise ValueError(
                    f"K-FAC treats {sorted(leaves)} as one layer, but names has only "
                    f"{sorted(leaves & set(names))} of them; expected all of them or none."
                )
        kept = {layer.kernel for layer in layers}
        # Entries have the names of leaves without a layer, or of layers that are scales.
        alone = set(names) - {name for x in self.layers for name in (x.leaf, x.bias)}
        return Kronecker(
            {name: x for name, x in self.factors.items() if name in kept},
            {name: x for name, x in self.entries.items() if name in kept | alone},
            tuple(layers),
            self.template.select(names),
            self.feeders and tuple(self.feeders[self.layers.index(x)] for x in layers),
        )

    def _diagonal_entries(self) -> dict[str, Array]:
        # [r, r, o] -> [r, o].
        blocks = {name: jnp.diagonal(self.entries[name]).T for name in sorted(self.scales)}
        return self.entries | blocks

    def _inverse_entries(self, name: str, shift: Array) -> Array:
        entries = self.entries[name]
        if name not in self.scales:
            return 1 / jnp.where(entries + shift > 0, entries + shift, 1)
        # [r, r, o] with r = 2 rows for a scale and a shift, and r = 1 for a scale only.
        rows = len(entries)
        matrices = entries + shift * jnp.eye(rows, dtype=entries.dtype)[..., None]
        if rows == 1:
            inverses = 1 / matrices
        else:
            (a, b), (c, d) = matrices
            inverses = jnp.array([[d, -b], [-c, a]]) / (a * d - b * c)
        sound = (shift > 0) & tree.is_finite(inverses)
        return jnp.where(sound, inverses, self.identity().entries[name])

    def dense(self) -> Array:
        """Return the operator as a matrix [d, d] on `ravel(params)`; for small networks."""
        size = sum(map(math.prod, self.template.shapes))
        # Products with unit vectors are the columns, which `vmap` stacks as rows.
        columns = jax.vmap(lambda e: ravel(self.mv(self.template.unravel(e))))
        dtype = jnp.result_type(*jax.tree.leaves((self.factors, self.entries)))
        return columns(jnp.eye(size, dtype=dtype)).T


def inverse_factors(factor: dict[str, Array], shift: Array) -> dict[str, Array]:
    """Return the inverses of a pair of factors, each with a part of the shift.

    `Kronecker.inverse` has the equation, in which each group of a layer has its own pi.
    """
    if factor["output"].ndim == 3:
        return jax.vmap(inverse_factors, (0, None))(factor, shift)
    means = {side: mean_eigenvalue(x) for side, x in factor.items()}
    # The quotient of the roots does not overflow where the root of the quotient does.
    ratio = jnp.sqrt(means["input"]) / jnp.sqrt(means["output"])
    # A factor of zeros has no scale, so both sides get the same shift.
    ratio = jnp.where(jnp.isfinite(ratio) & (ratio > 0), ratio, 1)
    root = jnp.sqrt(shift)
    return {
        "input": inverse(factor["input"], ratio * root),
        "output": inverse(factor["output"], root / ratio),
    }


def sandwich(left: Array, value: Array, right: Array) -> Array:
    """Return the product of three matrices; the left one may be given as a diagonal."""
    if left.ndim == 1:
        return left[:, None] * jnp.matmul(value, right, precision=PRECISION)
    # One product of three factors takes twice as long when it is mapped over clients, because XLA
    # transposes the larger one first.
    return jnp.matmul(jnp.matmul(left, value, precision=PRECISION), right, precision=PRECISION)


def _times(entries: Array, value: Array) -> Array:
    if entries.shape == value.shape:
        return entries * value
    return jnp.einsum("rso,so->ro", entries, value, precision=PRECISION)


def identity_like(matrix: Array) -> Array:
    """Return the identity of a factor's shape and dtype; a vector of ones if it is diagonal."""
    if matrix.ndim == 1:
        return jnp.ones_like(matrix)
    return jnp.broadcast_to(jnp.eye(matrix.shape[-1], dtype=matrix.dtype), matrix.shape)


def diagonal_of(matrix: Array) -> Array:
    """Return the diagonal of a factor, or of each group's; it may be given as a diagonal itself."""
    return matrix if matrix.ndim == 1 else jnp.diagonal(matrix, axis1=-2, axis2=-1)


def mean_eigenvalue(matrix: Array) -> Array:
    """Return the mean eigenvalue of a factor, or of each group's."""
    return jnp.mean(diagonal_of(matrix), axis=-1)


def inverse(matrix: Array, shift: Array) -> Array:
    """Return the inverse of a semi-definite factor plus shift times the identity.

    Return the identity if the shift is zero, or if the shifted factor is indefinite.
    """
    identity = identity_like(matrix)
    shifted = matrix + shift.astype(matrix.dtype) * identity
    # The shift makes a semi-definite factor definite.
    inverse = 1 / shifted if matrix.ndim == 1 else linalg.cholesky_solve(shifted, identity)
    # The last entry is one over the square of the last pivot. It is not finite if any pivot failed,
    # and a check of this entry compiles faster than one of the whole matrix.
    sound = tree.is_finite(inverse if matrix.ndim == 1 else inverse[-1, -1])
    return jnp.where((shift > 0) & sound, inverse, identity)
