"""The solution of diagonal systems."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax.solvers.base import (
    Solution,
    Solver,
    as_partial,
    check_not_negative,
    identity,
    ratio,
    report,
)
from fisherjax.typing import Array

_map = jax.tree.map


def closed_form(floor: float = 1e-6) -> Solver:
    """Solve a diagonal system directly, x_j = b_j / a_j where a_j >= floor, else the start's x_j.

    The diagonal is read off as matvec(ones), so it is exact for elementwise operators and
    meaningless for others.

    Args:
        floor: Below this a coordinate counts as without curvature and keeps its start.

    Returns:
        The solver. `info.residual` is large where the operator was not diagonal.

    Raises:
        ValueError: If the floor is negative.

    Example:
        >>> solve = closed_form()
        >>> diagonal = jnp.array([2.0, 0.0])
        >>> print(
        ...     solve(lambda x: diagonal * x, jnp.array([4.0, 0.0]), jnp.array([1.0, 5.0])).params
        ... )
        [2. 5.]

    Source: Matena and Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022, equation
        5. The floor as in the FedFisher authors' code.
    """
    check_not_negative("floor", floor)

    def solve(
        matvec: Callable,
        rhs: Any,
        init: Any,
        restore: Callable = identity,
        precondition: Callable = identity,
    ) -> Solution:
        del precondition
        x = _closed_form(as_partial(matvec), rhs, init, floor)
        return Solution(restore(x), report(matvec, rhs, x, 1))

    return solve


@jax.jit
def _closed_form(matvec: Callable, rhs: Any, init: Any, floor: Array) -> Any:
    entries = matvec(_map(jnp.ones_like, init))
    counts = _map(lambda a: (a >= floor) & (a > 0), entries)
    return _map(lambda c, b, a, x: jnp.where(c, ratio(c, b, a), x), counts, rhs, entries, init)
