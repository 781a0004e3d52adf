"""Solvers of symmetric positive semi-definite systems, which see a matrix-vector product only.

A solver is a function `solve(problem) -> Solution(params, info)` of a `quadratic.Quadratic`, made
by a factory; only conjugate gradients make use of its preconditioner. Unknowns are pytrees, and
*every leaf is a system of its own*, because `matvec` does not couple leaves: step sizes, residuals
and convergence (at 1e-4 where no tolerance is asked for) belong to a leaf. An operator that couples
several arrays must see them as one leaf (`jax.flatten_util.ravel_pytree`).

What a residual promises is of the quadratic, not of the unknowns. With x* a solution, f the
quadratic that the system is the minimum of, r = b - A x and r_0 that of the start x_0,

    (f(x) - f(x*)) / (f(x_0) - f(x*)) = |r|^2_{A^+} / |r_0|^2_{A^+} <= k |r|^2 / |r_0|^2,

with A^+ the pseudo-inverse and k the largest eigenvalue of A over the smallest that is not zero;
the same holds in the norm of a preconditioner P, |r|^2_P = r^T P r, with the eigenvalues of P A.
With damping delta (in units of the mean eigenvalue) of a block of d unknowns k <= 1 + d / delta.
Without damping nothing bounds k: a solve whose residual is 1e-4 may lack a part of the gain that
the eigenvalues decide, and x may be far from x* along those that are small, where f hardly changes.

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
