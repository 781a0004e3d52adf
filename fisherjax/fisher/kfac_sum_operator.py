"""A sum of Kronecker operators as an operator, for sums that do not reveal a client's factors.

Only the sum of the terms has a meaning: a single term may be indefinite, and is no client's Fisher.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from fisherjax.fisher.kfac_operator import Kronecker
from fisherjax.fisher.operators import Blockwise
from fisherjax.typing import Array, Params, Scalar


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class KroneckerSum(Blockwise):
    """A sum of k Kronecker operators, F V = sum_j A_j V G_j.

    Attributes:
        terms: Stacked operators, with leaves [k, ...].

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
        """Return a description of the operator in one line."""
        return f"KroneckerSum({self.terms!r})"

    def blocks(self, params: Params) -> dict[str, Array]:
        """Return the blocks of params, which are those of each term."""
        return self.terms.blocks(params)

    def restore(self, blocks: dict[str, Array]) -> Params:
        """Return params from their blocks."""
        return self.terms.restore(blocks)

    def block_mv(self, blocks: dict[str, Array]) -> dict[str, Array]:
        """Multiply blocks by the operator: sum_j A_j V G_j."""
        return self._sum_terms(lambda term: term.block_mv(blocks))

    def block_means(self) -> dict[str, Array]:
        """Return each block's mean eigenvalue, its scale."""
        return self._sum_terms(Kronecker.block_means)

    def block_exponents(self) -> dict[str, Array]:
        """Return the exponent of each block, from an operator whose leaves are exponents."""
        return self.terms.block_exponents()

    def block_damping(self, means: dict[str, Array], damping: Array) -> dict[str, Array]:
        """Return each block's damping lambda: `damping` times the block's mean eigenvalue."""
        return self.terms.block_damping(means, damping)

    def times(self, factor: Scalar) -> "KroneckerSum":
        """Multiply the operator by a number."""
        return KroneckerSum(self.terms.times(factor))

    def diagonal(self) -> Params:
        """Return the diagonal, in the shape of params."""
        return self._sum_terms(Kronecker.diagonal)

    def dense(self) -> Array:
        """Return the operator as a matrix [d, d] on `ravel(params)`; for small networks."""
        return self._sum_terms(Kronecker.dense)

    def leading(self) -> Kronecker:
        """Return the first term."""
        return jax.tree.map(lambda leaf: leaf[0], self.terms)

    @property
    def coverage(self) -> float:
        """Return the share of the parameters that have factors or exact blocks."""
        return self.terms.coverage

    def _sum_terms(self, function: Callable[[Kronecker], Any]) -> Any:
        return jax.tree.map(lambda x: x.sum(0), jax.vmap(function)(self.terms))
