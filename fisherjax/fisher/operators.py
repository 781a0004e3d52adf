"""Fisher operators: a client's curvature as a pytree with matrix-vector products.

An operator acts on params. It is frozen data, so a client can return it, `vmap` can stack it and a
file can store it. Each operator splits params into *blocks* that it does not couple, as a pytree
whose leaves are the blocks: leaves of params for a diagonal, matrices V [a, o] of layers for
Kronecker factors, one vector for a dense matrix. Solvers work on blocks, and solve each by itself.

Two attributes of each class: `adds_up` is True if the operator of a sum over clients is the sum of
the leaves, and `default_damping` is the damping of the server's problem if none is given.

The sum of several Kronecker operators is not a Kronecker operator: add their products with vectors,
not their factors.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.typing import Array, Params, Scalar

# By default accelerators round the float32 factors of a product, and solves magnify the error.
PRECISION = "highest"


class Template(NamedTuple):
    """Structure and shapes of params: hashable, so that operators can have it as static data.

    Attributes:
        structure: Tree structure of params.
        shapes: Shapes of the leaves, in the order of `jax.tree.leaves`.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, params: Params) -> "Template":
        """Return the template of params."""
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, tuple(jnp.shape(leaf) for leaf in leaves))

    def names(self) -> tuple[str, ...]:
        """Return the names of the leaves."""
        # The names come from the structure, so the leaves may be anything.
        return tree.names(jax.tree.unflatten(self.structure, range(len(self.shapes))))

    def describe(self, *details: str) -> list[str]:
        """Return the numbers of leaves and of parameters in words, and the details between them."""
        size = sum(map(math.prod, self.shapes))
        leaves = tree.count(len(self.shapes), "leaf", "leaves")
        return [leaves, *details, tree.count(size, "parameter")]

    def by_name(self, params: Params) -> dict[str, Array]:
        """Return the leaves of params by name."""
        return dict(zip(self.names(), self.structure.flatten_up_to(params), strict=True))

    def restore(self, leaves: dict[str, Array]) -> Params:
        """Return params from leaves by name, which are reshaped to their shapes."""
        named = zip(self.names(), self.shapes, strict=True)
        return jax.tree.unflatten(self.structure, [leaves[n].reshape(shape) for n, shape in named])

    def select(self, names: Sequence[str]) -> "Template":
        """Return the template of a dict of the leaves with these names."""
        shapes = dict(zip(self.names(), self.shapes, strict=True))
        leaves, structure = jax.tree.flatten({name: name for name in names})
        return Template(structure, tuple(shapes[name] for name in leaves))

    def unravel(self, flat: Array) -> Params:
        """Return params from one vector [d], the inverse of `ravel`."""
        ends = list(accumulate(map(math.prod, self.shapes)))
        parts = zip(jnp.split(flat, ends[:-1]), self.shapes, strict=True)
        return jax.tree.unflatten(self.structure, [part.reshape(shape) for part, shape in parts])


def widen(x: Array) -> Array:
    """Return an array as at least float32, in which products are summed."""
    # JAX promotes no floats of 8 bits.
    is_narrow = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 16
    return x.astype(jnp.float32 if is_narrow else jnp.promote_types(x.dtype, jnp.float32))


def ravel(params: Params) -> Array:
    """Concatenate the leaves into one vector [d], in the order of `jax.tree.leaves`."""
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])


def describe_stack(leaf: Any, ndim: int) -> list[str]:
    """Return the size of a stack of leaves with `ndim` axes, in words; [] for a single leaf."""
    axes = getattr(leaf, "shape", ())[:-ndim]
    return [f"{' x '.join(map(str, axes))} stacked"] if axes else []


class Blockwise(abc.ABC):
    """Base of Fisher operators: methods that follow from an operator's blocks and diagonal.

    Attributes:
        adds_up: Whether the operator of a sum over clients is the sum of the leaves.
        coverage: Share of the parameters that have more than a diagonal where the structure has
            more; 1.0 if it has no such distinction.
        default_damping: Damping in units of a block's mean eigenvalue, if none is given.
    """

    adds_up: ClassVar[bool] = True
    coverage: ClassVar[float] = 1.0
    default_damping: ClassVar[float] = 0.0

    @abc.abstractmethod
    def blocks(self, params: Params) -> Any:
        """Return the blocks of params."""

    @abc.abstractmethod
    def restore(self, blocks: Any) -> Params:
        """Return params from their blocks."""

    @abc.abstractmethod
    def block_mv(self, blocks: Any) -> Any:
        """Multiply blocks by the operator."""

    @abc.abstractmethod
    def block_means(self) -> Any:
        """Return each block's mean eigenvalue, its scale."""

    @abc.abstractmethod
    def block_exponents(self) -> Any:
        """Return the exponent of each block, from an operator whose leaves are exponents."""

    @abc.abstractmethod
    def diagonal(self) -> Params:
        """Return the diagonal, in the shape of params."""

    def __repr__(self) -> str:
        """Return a description of the operator in one line."""
        return tree.describe(type(self).__name__, self)

    def mv(self, params: Params) -> Params:
        """Multiply a vector of the shape of params by the operator."""
        return self.restore(self.block_mv(self.blocks(params)))

    def at_scale_one(self) -> tuple[Self, Any]:
        """Divide each block by a power of two 2^e near its scale; return the operator, and e."""
        exponents = jax.tree.map(tree.exponent, self)

        def scaled(x: Array, exponent: Array) -> Array:
            # Without this bound zeros would become NaN.
            return tree.times_power(x, jnp.minimum(-exponent, -jnp.finfo(x.dtype).minexp))

        return jax.tree.map(scaled, self, exponents), exponents.block_exponents()

    def block_damping(self, means: Any, damping: Scalar) -> Any:
        """Return each block's damping lambda: `damping` times the block's mean eigenvalue."""
        return jax.tree.map(lambda mean: damping * mean, means)

    def times(self, factor: Scalar) -> Self:
        """Multiply the operator by a number."""
        return jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), self)

    def trace(self) -> Array:
        """Return the trace, the sum of the diagonal."""
        return jnp.asarray(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(self.diagonal())))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Diagonal(Blockwise):
    """A diagonal Fisher, F v = f * v.

    Attributes:
        entries: f, with the structure and shapes of params.

    Example:
        >>> fisher = Diagonal({"w": jnp.array([1.0, 2.0])})
        >>> print(fisher.mv({"w": jnp.array([3.0, 3.0])})["w"], fisher.trace())
        [3. 6.] 3.0
    """

    entries: Params

    def map_parts(self, on_matrix: Callable, on_entries: Callable) -> "Diagonal":
        """Apply one function to matrices, of which there are none here, and one to diagonals."""
        del on_matrix
        return Diagonal(jax.tree.map(on_entries, self.entries))

    def blocks(self, params: Params) -> Params:
        """Return the blocks of params: each leaf is one."""
        return params

    def restore(self, blocks: Params) -> Params:
        """Return params from their blocks."""
        return blocks

    def block_mv(self, blocks: Params) -> Params:
        """Multiply blocks by the operator."""
        return jax.tree.map(jnp.multiply, self.entries, blocks)

    def block_means(self) -> Params:
        """Return each block's mean eigenvalue, its scale."""
        return jax.tree.map(jnp.mean, self.entries)

    def block_exponents(self) -> Params:
        """Return the exponent of each block, from an operator whose leaves are exponents."""
        return self.entries

    def diagonal(self) -> Params:
        """Return the diagonal, in the shape of params."""
        return self.entries

    def dense(self) -> Array:
        """Return the operator as a matrix [d, d] on `ravel(params)`; for small networks."""
        return jnp.diag(ravel(self.entries))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Dense(Blockwise):
    """A full Fisher matrix on the flattened params, F v = matrix @ ravel(v).

    Attributes:
        matrix: Symmetric matrix [d, d], in the order of `ravel`.
        template: Static structure of params.
    """

    matrix: Array
    template: Template = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        """Return a description of the operator in one line."""
        stack, dtypes = describe_stack(self.matrix, 2), tree.dtypes([self.matrix])
        return f"Dense({', '.join([*stack, *self.template.describe(), *dtypes])})"

    def map_parts(self, on_matrix: Callable, on_entries: Callable) -> "Dense":
        """Apply one function to the matrix, and one to diagonals, of which there are none here."""
        del on_entries
        return dataclasses.replace(self, matrix=on_matrix(self.matrix))

    def blocks(self, params: Params) -> Array:
        """Return the only block of params: all of them as one vector."""
        return ravel(params)

    def restore(self, blocks: Array) -> Params:
        """Return params from their block."""
        return self.template.unravel(blocks)

    def block_mv(self, blocks: Array) -> Array:
        """Multiply blocks by the operator."""
        return jnp.matmul(self.matrix, blocks, precision=PRECISION)

    def block_means(self) -> Array:
        """Return the mean eigenvalue, tr(F) / d."""
        return self.trace() / self.matrix.shape[-1]

    def block_exponents(self) -> Array:
        """Return the exponent of the block, from an operator whose matrix is an exponent."""
        return self.matrix

    def diagonal(self) -> Params:
        """Return the diagonal, in the shape of params."""
        return self.template.unravel(jnp.diagonal(self.matrix))

    def trace(self) -> Array:
        """Return the trace, the sum of the diagonal."""
        return jnp.trace(self.matrix)

    def dense(self) -> Array:
        """Return the matrix [d, d]."""
        return self.matrix

    def select(self, names: Sequence[str]) -> "Dense":
        """Return the operator on a dict of the leaves with these names, without the others."""
        template = self.template.select(names)
        size = sum(map(math.prod, self.template.shapes))
        place = self.template.by_name(self.template.unravel(jnp.arange(size)))
        rows = jnp.concatenate([place[name].ravel() for name in template.names()])
        return Dense(self.matrix[rows[:, None], rows], template)
