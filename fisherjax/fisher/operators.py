"""Fisher operators: a client's curvature as data, a pytree with matrix-vector products.

An operator acts on params. It is frozen data, so a client can return it, `vmap` can stack it and a
file can hold it. `adds_up` says whether a sum over clients is the sum of the leaves, and
`default_damping` what the server's problem is damped by. Each splits params into *blocks* that it
does not couple, as the leaves of a pytree: leaves for a diagonal, matrices V [a, o] of layers for
Kronecker factors, one vector for a dense matrix. Solvers work on blocks and treat every leaf on its
own.

The sum of several Kronecker operators is not a Kronecker operator: add their products, not factors.
"""

import dataclasses
import math
from collections.abc import Callable
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax import linalg, tree
from fisherjax.fisher.layers import Layer, assemble, matrix
from fisherjax.typing import Array, Params

# Accelerators round float32 factors of a product by default, which solves then magnify.
_PRECISION = "highest"


class Template(NamedTuple):
    """Structure and shapes of params, hashable, so that operators can carry it as static data."""

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: Params) -> "Template":
        """Read the template of params."""
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, tuple(jnp.shape(leaf) for leaf in leaves))

    def names(self) -> tuple[str, ...]:
        """Name the leaves."""
        # Any leaves will do, the names come from the structure.
        return tree.names(jax.tree.unflatten(self.structure, range(len(self.shapes))))

    def by_name(self, params: Params) -> dict[str, Array]:
        """Give the leaves by name."""
        return dict(zip(self.names(), self.structure.flatten_up_to(params), strict=True))

    def restore(self, leaves: dict[str, Array]) -> Params:
        """Rebuild params from leaves by name, of their sizes."""
        named = zip(self.names(), self.shapes, strict=True)
        return jax.tree.unflatten(self.structure, [leaves[n].reshape(shape) for n, shape in named])

    def unravel(self, flat: Array) -> Params:
        """Rebuild params from one vector [d]."""
        ends = list(accumulate(map(math.prod, self.shapes)))
        parts = zip(jnp.split(flat, ends[:-1]), self.shapes, strict=True)
        return jax.tree.unflatten(self.structure, [part.reshape(shape) for part, shape in parts])


def ravel(params: Params) -> Array:
    """Concatenate the leaves into one vector [d], in the order of `jax.tree.leaves`."""
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])


class _Operator:
    """What follows from an operator's blocks, and from its diagonal."""

    adds_up: ClassVar[bool] = True
    default_damping: ClassVar[float] = 0.0

    def mv(self, params: Params) -> Params:
        """Multiply a vector of the shape of params by the operator."""
        return self.restore(self.block_mv(self.blocks(params)))

    def at_scale_one(self) -> tuple[Self, Any]:
        """Divide every block by a power of two 2^e near its own scale, and give e by block too."""
        exponents = jax.tree.map(tree.exponent, self)

        def scaled(x: Array, exponent: Array) -> Array:
            # Zeros would become NaN.
            return tree.times_power(x, jnp.minimum(-exponent, -jnp.finfo(x.dtype).minexp))

        return jax.tree.map(scaled, self, exponents), exponents.block_exponents()

    def strengths(self, means: Any, damping: Array) -> Any:
        """Give each block's damping lambda from its mean eigenvalue, in whose units damping is."""
        return jax.tree.map(lambda mean: damping * mean, means)

    def trace(self) -> Array:
        """Sum the diagonal."""
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(self.diagonal()))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Diagonal(_Operator):
    """A diagonal Fisher, F v = f * v.

    Attributes:
        entries: f, the structure and shapes of params.

    Example:
        >>> fisher = Diagonal({"w": jnp.array([1.0, 2.0])})
        >>> print(fisher.mv({"w": jnp.array([3.0, 3.0])})["w"], fisher.trace())
        [3. 6.] 3.0
    """

    entries: Params

    def map_parts(self, on_matrix: Callable, on_entries: Callable) -> "Diagonal":
        """Change every matrix, and what is diagonal."""
        del on_matrix  # there is none
        return Diagonal(jax.tree.map(on_entries, self.entries))

    def blocks(self, params: Params) -> Params:
        """Split params into blocks: each leaf is one."""
        return params

    def restore(self, blocks: Params) -> Params:
        """Put blocks together to params."""
        return blocks

    def block_mv(self, blocks: Params) -> Params:
        """Multiply blocks by the operator."""
        return jax.tree.map(jnp.multiply, self.entries, blocks)

    def block_means(self) -> Params:
        """Average each block's eigenvalues: its scale, for the damping."""
        return jax.tree.map(jnp.mean, self.entries)

    def block_exponents(self) -> Params:
        """Read the exponents of blocks off an operator of exponents."""
        return self.entries

    def diagonal(self) -> Params:
        """Give the diagonal, in the shape of params."""
        return self.entries

    def dense(self) -> Array:
        """Write the operator as a matrix [d, d] on `ravel(params)`; for small networks."""
        return jnp.diag(ravel(self.entries))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(_Operator):
    """A full Fisher matrix on the flattened params, F v = matrix @ ravel(v).

    Attributes:
        matrix: [d, d], in the order of `ravel`.
        template: Static structure of params.
    """

    matrix: Array
    template: Template = dataclasses.field(metadata={"static": True})

    def map_parts(self, on_matrix: Callable, on_entries: Callable) -> "Dense":
        """Change every matrix, and what is diagonal."""
        del on_entries
        return dataclasses.replace(self, matrix=on_matrix(self.matrix))

    def blocks(self, params: Params) -> Array:
        """Split params into blocks: all of it is one."""
        return ravel(params)

    def restore(self, blocks: Array) -> Params:
        """Put blocks together to params."""
        return self.template.unravel(blocks)

    def block_mv(self, blocks: Array) -> Array:
        """Multiply blocks by the operator."""
        return jnp.matmul(self.matrix, blocks, precision=_PRECISION)

    def block_means(self) -> Array:
        """Average the eigenvalues: tr(F) / d, for the damping."""
        return self.trace() / self.matrix.shape[-1]

    def block_exponents(self) -> Array:
        """Read the exponents of blocks off an operator of exponents."""
        return self.matrix

    def diagonal(self) -> Params:
        """Give the diagonal, in the shape of params."""
        return self.template.unravel(jnp.diagonal(self.matrix))

    def trace(self) -> Array:
        """Sum the diagonal."""
        return jnp.trace(self.matrix)

    def dense(self) -> Array:
        """Give the matrix [d, d]."""
        return self.matrix


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kronecker(_Operator):
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
    """

    factors: dict[str, dict[str, Array]]
    entries: dict[str, Array]
    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    template: Template = dataclasses.field(metadata={"static": True})
    # A sum of products of factors is not the product of their sums.
    adds_up: ClassVar[bool] = False
    # In units of a block's mean eigenvalue, best or close to it on MNIST, CIFAR-10 and digits.
    default_damping: ClassVar[float] = 1.0

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
        factors = {}
        for name, factor in self.factors.items():
            means = {side: _mean_eigenvalue(x) for side, x in factor.items()}
            # Roots before the quotient: that of the means can overflow where this does not.
            ratio = jnp.sqrt(means["input"]) / jnp.sqrt(means["output"])
            # A factor of zeros has no scale to balance: both sides get the same shift.
            ratio = jnp.where(jnp.isfinite(ratio) & (ratio > 0), ratio, 1)
            root = jnp.sqrt(shifts[name])
            factors[name] = {
                "input": _inverse(factor["input"], ratio * root),
                "output": _inverse(factor["output"], root / ratio),
            }
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
        sound = (shift > 0) & jnp.isfinite(inverses).all()
        return jnp.where(sound, inverses, self.identity().entries[name])

    def dense(self) -> Array:
        """Write the operator as a matrix [d, d] on `ravel(params)`; for small networks."""
        size = sum(map(math.prod, self.template.shapes))
        # Products with unit vectors are columns, which `vmap` stacks as rows.
        columns = jax.vmap(lambda e: ravel(self.mv(self.template.unravel(e))))
        dtype = jnp.result_type(*jax.tree.leaves((self.factors, self.entries)))
        return columns(jnp.eye(size, dtype=dtype)).T


def _sandwich(factor: dict[str, Array], value: Array) -> Array:
    left, right = factor["input"], factor["output"]
    if left.ndim == 1:
        return left[:, None] * jnp.matmul(value, right, precision=_PRECISION)
    # The cheaper of (A V) G and A (V G) is chosen by shape.
    return jnp.linalg.multi_dot([left, value, right], precision=_PRECISION)


def _times(entries: Array, value: Array) -> Array:
    if entries.shape == value.shape:
        return entries * value
    return jnp.einsum("rso,so->ro", entries, value, precision=_PRECISION)


def identity_like(matrix: Array) -> Array:
    """Give the identity of a factor's shape and dtype: ones, where that is diagonal."""
    return jnp.ones_like(matrix) if matrix.ndim == 1 else jnp.eye(len(matrix), dtype=matrix.dtype)


def diagonal_of(matrix: Array) -> Array:
    """Give the diagonal of a factor, which may be diagonal itself."""
    return matrix if matrix.ndim == 1 else jnp.diagonal(matrix)


def _mean_eigenvalue(matrix: Array) -> Array:
    return jnp.mean(diagonal_of(matrix))


def _inverse(matrix: Array, shift: Array) -> Array:
    identity = identity_like(matrix)
    shifted = matrix + shift.astype(matrix.dtype) * identity
    # The shift makes a semi-definite factor definite.
    inverse = 1 / shifted if matrix.ndim == 1 else linalg.definite(shifted, identity)
    return jnp.where((shift > 0) & jnp.isfinite(inverse).all(), inverse, identity)


Operator = Diagonal | Dense | Kronecker
"""Any of the Fisher operators."""
