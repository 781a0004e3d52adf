"""Solvers of symmetric positive semi-definite systems, which see a matrix-vector product only.

A solver is a function

    solve(matvec, rhs, init, restore=identity, precondition=identity) -> Solution(params, info)

made by a factory; only conjugate gradients make use of `precondition`, roughly the inverse of
`matvec`. Unknowns are pytrees, and *every leaf is a system of its own*, because `matvec`
does not couple leaves: step sizes, residuals and convergence belong to a leaf. An operator that
couples several arrays must see them as one leaf (`jax.flatten_util.ravel_pytree`).

Without a preconditioner all start from `init` and move only in the range of the operator, so in a
singular system the component of `init` in the null space stays (Jhunjhunwala, Wang, Joshi,
FedFisher, AISTATS 2024, Lemma 1).
"""

from fisherjax.solvers.base import Info, Solution, Solver
from fisherjax.solvers.descent import gradient_descent, paper_adam
from fisherjax.solvers.direct import closed_form
from fisherjax.solvers.krylov import conjugate_gradients
from fisherjax.solvers.preconditioned import expectation_approximation, residual_descent

__all__ = [
    "Info",
    "Solution",
    "Solver",
    "closed_form",
    "conjugate_gradients",
    "expectation_approximation",
    "gradient_descent",
    "paper_adam",
    "residual_descent",
]
