"""Solve diagonal systems in closed form."""

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax._core.compiler import jit
from fisherjax.quadratic import Quadratic
from fisherjax.solvers.base import Solution, Solver, as_data, by_leaf, ratio, solution
from fisherjax.typing import Array, Scalar


@cached
def closed_form(floor: Scalar = 1e-6) -> Solver:
    """Make the solver of diagonal systems, x_j = b_j / a_j.

    Coordinates without curvature keep their start.

    Args:
        floor: Least curvature a_j, in units of the leaf's mean (default 1e-6). A coordinate below
            it counts as without curvature.

    Returns:
        The solver.

    Raises:
        ValueError: If the floor is negative; on solving, if the system is not diagonal.

    Example:
        >>> entries, rhs, init = jnp.array([2.0, 0.0]), jnp.array([4.0, 0.0]), jnp.array([1.0, 5.0])
        >>> problem = Quadratic(lambda x: entries * x, rhs, init, is_diagonal=True)
        >>> print(closed_form()(problem).params)
        [2. 5.]

    Source: Matena and Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022, equation
        5. The FedFisher authors' code has an absolute floor instead, which depends on the scale.
    """
    checks.number("floor", floor)

    @by_leaf
    def solve(problem: Quadratic) -> Solution:
        # A traced problem has no value of this flag.
        if not checks.is_traced(problem.is_diagonal) and not problem.is_diagonal:
            raise ValueError(
                "closed_form solves diagonal systems only, but this system is not diagonal "
                "(is_diagonal is False). Use conjugate_gradients()."
            )
        return _closed_form(as_data(problem), floor)

    return solve


@jit
def _closed_form(problem: Quadratic, floor: Scalar) -> Solution:
    def leaf(a: Array, b: Array, x: Array) -> Array:
        # The floor may be zero. A subnormal number is zero to a division on most processors.
        has_curvature = a >= jnp.maximum(floor * jnp.mean(a), jnp.finfo(a.dtype).tiny)
        # b / infinity would be zero, but a number beyond the range of the dtype has no solution.
        is_finite = jnp.isfinite(a) & jnp.isfinite(b)
        found = jnp.where(has_curvature, ratio(has_curvature, b, a), x)
        return jnp.where(is_finite, found, jnp.nan)

    # The product of a diagonal operator with ones is its diagonal.
    entries = problem.matvec(jax.tree.map(jnp.ones_like, problem.init))
    x = jax.tree.map(leaf, entries, problem.rhs, problem.init)
    return solution(problem, x, 1, checked=True)
