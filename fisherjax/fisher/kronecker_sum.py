"""A sum of Kronecker operators as an operator, for sums that no client's factors can be read off.

What the terms are does not matter, only what they add up to: one by one they may be indefinite.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from fisherjax.fisher.kronecker import Kronecker
from fisherjax.fisher.operators import Blockwise
from fisherjax.typing import Array, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class KroneckerSum(Blockwise):
    """A sum of k Kronecker operators, F V = sum_j A_j V G_j.

    Attributes:
        terms: Stacked operators, leaves [k, ...].

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
        >>> one = fj.fisher.kfac(model, jnp.ones((1, 1)), fj.Examples(jnp.ones((1, 1))))
        >>> both = KroneckerSum(jax.tree.map(lambda x: jnp.stack([x, x]), one))
        >>> print(one.mv(jnp.ones((1, 1))), both.mv(jnp.ones((1, 1))))
        [[1.]] [[2.]]
    """

    terms: Kronecker
    adds_up: ClassVar[bool] = False
    default_damping: ClassVar[float] = Kronecker.default_damping

    def __repr__(self) -> str:
        """Describe the operator in one line, by its stacked terms."""
        return f"KroneckerSum({self.terms!r})"

    def blocks(self, params: Params) -> dict[str, Array]:
        """Split params into blocks, those of each term."""
        return self.terms.blocks(params)

    def restore(self, blocks: dict[str, Array]) -> Params:
        """Put blocks together to params."""
        return self.terms.restore(blocks)

    def block_mv(self, blocks: dict[str, Array]) -> dict[str, Array]:
        """Multiply blocks by the operator: sum_j A_j V G_j."""
        return self._added(lambda term: term.block_mv(blocks))

    def block_means(self) -> dict[str, Array]:
        """Average each block's eigenvalues: its scale, for the damping."""
        return self._added(Kronecker.block_means)

    def block_exponents(self) -> dict[str, Array]:
        """Read the exponents of blocks off an operator of exponents."""
        return self.terms.block_exponents()

    def strengths(self, means: dict[str, Array], damping: Array) -> dict[str, Array]:
        """Give each block's damping lambda from its mean eigenvalue, in whose units damping is."""
        return self.terms.strengths(means, damping)

    def diagonal(self) -> Params:
        """Give the diagonal, in the shape of params."""
        return self._added(Kronecker.diagonal)

    def dense(self) -> Array:
        """Write the operator as a matrix [d, d] on `ravel(params)`; for small networks."""
        return self._added(Kronecker.dense)

    def leading(self) -> Kronecker:
        """Give the first term."""
        return jax.tree.map(lambda leaf: leaf[0], self.terms)

    @property
    def coverage(self) -> float:
        """Share of the parameters that have factors or exact blocks, not just a diagonal."""
        return self.terms.coverage

    def _added(self, function: Callable[[Kronecker], Any]) -> Any:
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(function)(self.terms))
