"""Kronecker factors of layers, the operator of K-FAC."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import tree
from fisherjax._core import linalg
from fisherjax._layers.feeders import Feeders
from fisherjax._layers.layer import Layer, assemble, matrix
from fisherjax.fisher.operators import PRECISION, Blockwise, Template, ravel, stacked
from fisherjax.typing import Array, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Kronecker(Blockwise):
    """Kronecker factors for each layer, F V = A V G, and a diagonal for what no layer covers.

    The block of a layer acts on the row-major flattening of V [a, o] as kron(A, G). A bias is the
    last row of V. For a convolution with T output locations A sums over locations and G averages,
    so that kron(A, G) has the scale of the exact block (Grosse and Martens, A Kronecker-factored
    approximate Fisher matrix for convolution layers, ICML 2016, equations 27 to 30). A scale and a
    shift, the two rows of V, have the exact 2 x 2 block of each column.

    Attributes:
        factors: For each layer, by the name of its kernel, {"input": A [a, a], "output": G [o, o]};
            A is [a] where it is diagonal, as that of an embedding.
        entries: Diagonal entries of the remaining leaves, by name; of a scale the blocks [r, r, o]
            over its r rows.
        layers: Static description of the layers.
        template: Static structure of params.
        feeders: Static: for each layer the names of those whose outputs make its inputs; None where
            that is the one before.
    """

    factors: dict[str, dict[str, Array]]
    entries: dict[str, Array]
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    template: Template = dataclasses.field(metadata={"static": True})
    feeders: Feeders | None = dataclasses.field(default=None, metadata={"static": True})
    # A sum of products of factors is not the product of their sums.
    adds_up: ClassVar[bool] = False
    # In units of a block's mean eigenvalue, best or close to it on MNIST, CIFAR-10 and digits.
    default_damping: ClassVar[float] = 1.0

    def __repr__(self) -> str:
        """Describe the operator in one line: leaves, layers by their form, parameters, dtypes."""
        leaves = jax.tree.leaves((self.factors, self.entries))
        # A factor of the outputs is a matrix, however the inputs' is kept.
        first = [x.get("output") for x in _values(self.factors) if isinstance(x, dict)][:1]
        stack = [said for x in first for said in stacked(x, 2)]
        facts = [*stack, *self.template.facts(_said(self.layers)), *tree.dtypes(leaves)]
        return f"Kronecker({', '.join(facts)})"

    def map_parts(self, on_matrix: Callable, on_entries: Callable) -> "Kronecker":
        """Change every matrix, and what is diagonal."""

        def factor(x: Array) -> Any:
            return on_entries(x) if x.ndim == 1 else on_matrix(x)

        def on_columns(x: Array) -> Any:
            return np.stack([on_matrix(x[..., column]) for column in range(x.shape[-1])], -1)

        entries = {
            # Of a scale one matrix for each column, [r, r, o].
            name: on_columns(x) if name in self.scales else on_entries(x)
            for name, x in self.entries.items()
        }
        factors = jax.tree.map(factor, self.factors)
        return dataclasses.replace(self, factors=factors, entries=entries)

    def blocks(self, params: Params) -> dict[str, Array]:
        """Split params into blocks: the matrix V of each layer, and each remaining leaf."""
        leaves = self.template.by_name(params)
        matrices = {layer.kernel: matrix(layer, leaves) for layer in self.layers}
        return {name: leaves[name] for name in self.entries.keys() - matrices.keys()} | matrices

    def restore(self, blocks: dict[str, Array]) -> Params:
        """Put blocks together to params."""
        rest = {name: blocks[name] for name in self.entries}
        return self.template.restore(rest | assemble(self.layers, blocks))

    def block_mv(self, blocks: dict[str, Array]) -> dict[str, Array]:
        """Multiply blocks by the operator: A V G."""
        products = {name: _sandwich(f, blocks[name]) for name, f in self.factors.items()}
        return products | {name: _times(f, blocks[name]) for name, f in self.entries.items()}

    def block_means(self) -> dict[str, Array]:
        """Average each block's eigenvalues: tr(A) tr(G) / (a o), for the damping."""
        # Eigenvalues of kron(A, G) are products, so that their mean is a product of means.
        means = {
            name: _mean_eigenvalue(factor["input"]) * _mean_eigenvalue(factor["output"])
            for name, factor in self.factors.items()
        }
        return means | {name: jnp.mean(f) for name, f in self._diagonal_entries().items()}

    def strengths(self, means: dict[str, Array], damping: Array) -> dict[str, Array]:
        """Give each block's damping lambda from its mean eigenvalue, in whose units damping is.

        A leaf that fell back to a diagonal has none, as a diagonal Fisher by itself.
        """
        damped = self.factors.keys() | self.scales
        return {name: damping * mean * (name in damped) for name, mean in means.items()}

    def block_exponents(self) -> dict[str, Array]:
        """Read the exponents of blocks off an operator of exponents."""
        return {name: f["input"] + f["output"] for name, f in self.factors.items()} | self.entries

    def inverse(self, shifts: dict[str, Array]) -> "Kronecker":
        """Invert F + shift approximately, each factor with its part of the block's shift.

            (A + pi sqrt(shift) I)^-1, (G + sqrt(shift) / pi I)^-1,   pi^2 = tr(A) o / (tr(G) a).

        Shifts are one number for each block; where it is zero, or the block is indefinite, the
        identity stands in.

        Source: Martens and Grosse, ICML 2015, section 6.3 (factored Tikhonov regularisation).
        """
        factors = {name: inverse_factors(f, shifts[name]) for name, f in self.factors.items()}
        entries = {name: self._inverse_entries(name, shifts[name]) for name in self.entries}
        return dataclasses.replace(self, factors=factors, entries=entries)

    def diagonal(self) -> Params:
        """Give the diagonal of the Kronecker products, in the shape of params."""
        # [a] and [o] -> [a, o], as V.
        outer = {
            name: jnp.outer(diagonal_of(factor["input"]), diagonal_of(factor["output"]))
            for name, factor in self.factors.items()
        }
        return self.restore(outer | self._diagonal_entries())

    @property
    def coverage(self) -> float:
        """Share of the parameters that have factors or exact blocks, not just a diagonal."""
        sizes = dict(zip(self.template.names(), map(math.prod, self.template.shapes), strict=True))
        rest = self.entries.keys() - self.scales
        return 1 - sum(sizes[name] for name in rest) / sum(sizes.values())

    @property
    def scales(self) -> set[str]:
        """Names of the layers that are a scale, and perhaps a shift."""
        return {layer.kernel for layer in self.layers if layer.form == "scale"}

    def identity(self) -> "Kronecker":
        """Give the identity, with factors and entries of the same shapes."""
        factors = jax.tree.map(identity_like, self.factors)
        # Of a scale and a shift one matrix for each column, [r, r, o].
        blocks = {
            name: jnp.zeros_like(self.entries[name])
            + identity_like(self.entries[name][:, :, 0])[..., None]
            for name in self.scales
        }
        ones = jax.tree.map(jnp.ones_like, self.entries)
        return dataclasses.replace(self, factors=factors, entries=ones | blocks)

    def select(self, names: Sequence[str]) -> "Kronecker":
        """Give the blocks of some leaves, on params that are a dict of them by name.

        Raises:
            ValueError: If a layer has leaves among them, and others that are not.
        """
        layers = []
        for layer in self.layers:
            leaves = {layer.leaf, layer.bias} - {None}
            if leaves <= set(names):
                layers.append(layer)
            elif leaves & set(names):
                raise ValueError(
                    f"K-FAC treats {sorted(leaves)} as one layer, of which only "
                    f"{sorted(leaves & set(names))} is asked for; expected all of it or nothing."
                )
        kept = {layer.kernel for layer in layers}
        # Entries are of leaves without a layer, and of scales by the layer's name.
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
        blocks = {name: jnp.diagonal(self.entries[name]).T for name in self.scales}
        return self.entries | blocks

    def _inverse_entries(self, name: str, shift: Array) -> Array:
        entries = self.entries[name]
        if name not in self.scales:
            return 1 / jnp.where(entries + shift > 0, entries + shift, 1)
        # Of r rows, a scale and perhaps a shift: [r, r, o].
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
        """Write the operator as a matrix [d, d] on `ravel(params)`; for small networks."""
        size = sum(map(math.prod, self.template.shapes))
        # Products with unit vectors are columns, which `vmap` stacks as rows.
        columns = jax.vmap(lambda e: ravel(self.mv(self.template.unravel(e))))
        dtype = jnp.result_type(*jax.tree.leaves((self.factors, self.entries)))
        return columns(jnp.eye(size, dtype=dtype)).T


def _values(factors: Any) -> list[Any]:
    # While a pytree is rebuilt, anything may stand for the factors.
    return list(factors.values()) if isinstance(factors, dict) else []


def _said(layers: tuple[Layer, ...]) -> str:
    """Count layers by their form: "2 dense and 1 convolution layers"."""
    # Kernels of attention have three axes, and so have those of one-dimensional convolutions.
    kinds = ("dense", "three-axis", "convolution")
    forms = Counter(
        kinds[min(max(len(layer.shape), 2), 4) - 2] if layer.form == "product" else layer.form
        for layer in layers
    )
    *before, last = [f"{number:,} {form}" for form, number in forms.items()] or ["no"]
    return f"{', '.join(before)} and {last} layers" if before else f"{last} layers"


def inverse_factors(factor: dict[str, Array], shift: Array) -> dict[str, Array]:
    """Invert a pair of factors, each with its part of the shift, as `Kronecker.inverse` says."""
    means = {side: _mean_eigenvalue(x) for side, x in factor.items()}
    # Roots before the quotient: that of the means can overflow where this does not.
    ratio = jnp.sqrt(means["input"]) / jnp.sqrt(means["output"])
    # A factor of zeros has no scale to balance: both sides get the same shift.
    ratio = jnp.where(jnp.isfinite(ratio) & (ratio > 0), ratio, 1)
    root = jnp.sqrt(shift)
    return {
        "input": inverse(factor["input"], ratio * root),
        "output": inverse(factor["output"], root / ratio),
    }


def _sandwich(factor: dict[str, Array], value: Array) -> Array:
    left, right = factor["input"], factor["output"]
    if left.ndim == 1:
        return left[:, None] * jnp.matmul(value, right, precision=PRECISION)

    # As one product of three factors it takes twice as long where it is mapped over clients: XLA
    # turns the larger one around first.
    return jnp.matmul(jnp.matmul(left, value, precision=PRECISION), right, precision=PRECISION)


def _times(entries: Array, value: Array) -> Array:
    if entries.shape == value.shape:
        return entries * value
    return jnp.einsum("rso,so->ro", entries, value, precision=PRECISION)


def identity_like(matrix: Array) -> Array:
    """Give the identity of a factor's shape and dtype: ones, where that is diagonal."""
    return jnp.ones_like(matrix) if matrix.ndim == 1 else jnp.eye(len(matrix), dtype=matrix.dtype)


def diagonal_of(matrix: Array) -> Array:
    """Give the diagonal of a factor, which may be diagonal itself."""
    return matrix if matrix.ndim == 1 else jnp.diagonal(matrix)


def _mean_eigenvalue(matrix: Array) -> Array:
    return jnp.mean(diagonal_of(matrix))


def inverse(matrix: Array, shift: Array) -> Array:
    """Invert a semi-definite factor plus shift times the identity, which it is without a shift."""
    identity = identity_like(matrix)
    shifted = matrix + shift.astype(matrix.dtype) * identity
    # The shift makes a semi-definite factor definite.
    inverse = 1 / shifted if matrix.ndim == 1 else linalg.cholesky_solve(shifted, identity)
    # The last entry, one over the last pivot squared, is not finite where any pivot was none; a
    # look at all of them would be compiled for every factor.
    sound = tree.is_finite(inverse if matrix.ndim == 1 else inverse[-1, -1])
    return jnp.where((shift > 0) & sound, inverse, identity)
