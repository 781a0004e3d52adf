"""The solution of diagonal systems."""

from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.quadratic import Quadratic
from fisherjax.solvers.base import Solution, Solver, as_data, ratio, solution
from fisherjax.typing import Array, Scalar


@cached
def closed_form(floor: Scalar = 1e-6) -> Solver:
    """Solve a diagonal system directly, x_j = b_j / a_j where a_j counts, else the start's x_j.

    Args:
        floor: In units of a leaf's mean a: below it a coordinate counts as without curvature and
            keeps its start.

    Raises:
        ValueError: If the floor is negative; on solving, if the system is not diagonal.

    Example:
        >>> entries, rhs, init = jnp.array([2.0, 0.0]), jnp.array([4.0, 0.0]), jnp.array([1.0, 5.0])
        >>> problem = Quadratic(lambda x: entries * x, rhs, init, is_diagonal=True)
        >>> print(closed_form()(problem).params)
        [2. 5.]

    Source: Matena and Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022, equation
        5. The FedFisher authors' code has an absolute floor, which would depend on the scale.
    """
    checks.number("floor", floor)

    def solve(problem: Quadratic) -> Solution:
        # The flag of a traced problem has no value yet.
        if not checks.is_traced(problem.is_diagonal) and not problem.is_diagonal:
            raise ValueError(
                "closed_form solves diagonal systems only, and this one is not (is_diagonal is "
                "False): use conjugate_gradients()."
            )
        return solution(problem, _closed_form(as_data(problem), floor), 1, checked=True)

    return solve


@jit
def _closed_form(problem: Quadratic, floor: Scalar) -> Any:
    def leaf(a: Array, b: Array, x: Array) -> Array:
        # Above zero besides, since the floor itself may be zero.
        counts = (a >= floor * jnp.mean(a)) & (a > 0)
        # What float32 cannot hold has no answer: b / infinity would be zero.
        held = jnp.isfinite(a) & jnp.isfinite(b)
        return jnp.where(held, jnp.where(counts, ratio(counts, b, a), x), jnp.nan)

    # A diagonal is what the product makes of ones.
    entries = problem.matvec(jax.tree.map(jnp.ones_like, problem.init))
    return jax.tree.map(leaf, entries, problem.rhs, problem.init)
