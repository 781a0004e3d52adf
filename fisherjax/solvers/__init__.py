"""Solvers of symmetric positive semi-definite systems, which see a matrix-vector product only.

A solver is a function `solve(problem) -> Solution(params, info)` of a `quadratic.Quadratic`, made
by a factory; only conjugate gradients make use of its preconditioner. Unknowns are pytrees, and
*every leaf is a system of its own*, because `matvec` does not couple leaves: step sizes, residuals
and convergence (at 1e-4 where no tolerance is asked for) belong to a leaf. An operator that couples
several arrays must see them as one leaf (`jax.flatten_util.ravel_pytree`).

Without a preconditioner all start from `init` and move only in the range of the operator, so in a
singular system the component of `init` in the null space stays (Jhunjhunwala, Wang, Joshi,
FedFisher, AISTATS 2024, Lemma 1).
"""

from fisherjax.solvers.base import Info, Solution, Solver, Status
from fisherjax.solvers.descent import gradient_descent
from fisherjax.solvers.direct import closed_form
from fisherjax.solvers.krylov import conjugate_gradients

__all__ = [
    "Info",
    "Solution",
    "Solver",
    "Status",
    "closed_form",
    "conjugate_gradients",
    "gradient_descent",
]
