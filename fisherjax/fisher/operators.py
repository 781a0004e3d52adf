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
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax.typing import Array, Params, Scalar

# Accelerators round float32 factors of a product by default, which solves then magnify.
PRECISION = "highest"


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

    def facts(self, *more: str) -> list[str]:
        """Say how many leaves there are, and parameters, with what is said between them."""
        size = sum(map(math.prod, self.shapes))
        leaves = tree.count(len(self.shapes), "leaf", "leaves")
        return [leaves, *more, tree.count(size, "parameter")]

    def by_name(self, params: Params) -> dict[str, Array]:
        """Give the leaves by name."""
        return dict(zip(self.names(), self.structure.flatten_up_to(params), strict=True))

    def restore(self, leaves: dict[str, Array]) -> Params:
        """Rebuild params from leaves by name, of their sizes."""
        named = zip(self.names(), self.shapes, strict=True)
        return jax.tree.unflatten(self.structure, [leaves[n].reshape(shape) for n, shape in named])

    def select(self, names: Sequence[str]) -> "Template":
        """Give the template of some leaves as a dict by name."""
        shapes = dict(zip(self.names(), self.shapes, strict=True))
        leaves, structure = jax.tree.flatten({name: name for name in names})
        return Template(structure, tuple(shapes[name] for name in leaves))

    def unravel(self, flat: Array) -> Params:
        """Rebuild params from one vector [d]."""
        ends = list(accumulate(map(math.prod, self.shapes)))
        parts = zip(jnp.split(flat, ends[:-1]), self.shapes, strict=True)
        return jax.tree.unflatten(self.structure, [part.reshape(shape) for part, shape in parts])


def ravel(params: Params) -> Array:
    """Concatenate the leaves into one vector [d], in the order of `jax.tree.leaves`."""
    return jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(params)])


def stacked(leaf: Any, ndim: int) -> list[str]:
    """Say of how many a leaf is a stack, which alone has so many axes; nothing of one alone."""
    axes = getattr(leaf, "shape", ())[:-ndim]
    return [f"{' x '.join(map(str, axes))} stacked"] if axes else []


class Blockwise:
    """What follows from an operator's blocks, and from its diagonal."""

    adds_up: ClassVar[bool] = True
    coverage: ClassVar[float] = 1.0
    default_damping: ClassVar[float] = 0.0

    def blocks(self, params: Params) -> Any:
        """Split params into blocks."""
        raise NotImplementedError

    def restore(self, blocks: Any) -> Params:
        """Put blocks together to params."""
        raise NotImplementedError

    def block_mv(self, blocks: Any) -> Any:
        """Multiply blocks by the operator."""
        raise NotImplementedError

    def block_means(self) -> Any:
        """Average each block's eigenvalues: its scale, for the damping."""
        raise NotImplementedError

    def block_exponents(self) -> Any:
        """Read the exponents of blocks off an operator of exponents."""
        raise NotImplementedError

    def diagonal(self) -> Params:
        """Give the diagonal, in the shape of params."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """Describe the operator in one line, whatever its leaves are."""
        return tree.line(type(self).__name__, self)

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

    def strengths(self, means: Any, damping: Scalar) -> Any:
        """Give each block's damping lambda from its mean eigenvalue, in whose units damping is."""
        return jax.tree.map(lambda mean: damping * mean, means)

    def trace(self) -> Array:
        """Sum the diagonal."""
        return jnp.asarray(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(self.diagonal())))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Diagonal(Blockwise):
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
@dataclasses.dataclass(frozen=True, repr=False)
class Dense(Blockwise):
    """A full Fisher matrix on the flattened params, F v = matrix @ ravel(v).

    Attributes:
        matrix: [d, d], in the order of `ravel`.
        template: Static structure of params.
    """

    matrix: Array
    template: Template = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        """Describe the operator in one line, with the stack that its matrix is one of."""
        facts = [*stacked(self.matrix, 2), *self.template.facts(), *tree.dtypes([self.matrix])]
        return f"Dense({', '.join(facts)})"

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
        return jnp.matmul(self.matrix, blocks, precision=PRECISION)

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

    def select(self, names: Sequence[str]) -> "Dense":
        """Give the block of some leaves, on params that are a dict of them by name."""
        template = self.template.select(names)
        size = sum(map(math.prod, self.template.shapes))
        place = self.template.by_name(self.template.unravel(jnp.arange(size)))
        rows = jnp.concatenate([place[name].ravel() for name in template.names()])
        return Dense(self.matrix[rows[:, None], rows], template)
