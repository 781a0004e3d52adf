"""Solve symmetric positive semi-definite systems by matrix-vector products.

A solver is a function `solve(problem) -> Solution(params, info)` of a `quadratic.Quadratic`, made
by a factory. Only conjugate gradients use the problem's preconditioner. Unknowns are pytrees, and
*each leaf is a separate system*, because `matvec` does not couple leaves: step sizes, residuals and
convergence (residual at most 1e-4 if no tolerance is given) belong to a leaf. If an operator
couples several arrays, then they must be one leaf (`jax.flatten_util.ravel_pytree`).

A small residual bounds the error of the quadratic, but not the error of the unknowns. Let f be the
quadratic whose minimum the system is, x* a solution, and r = b - A x the residual, r_0 that of the
start x_0. Then

    (f(x) - f(x*)) / (f(x_0) - f(x*)) = |r|^2_{A^+} / |r_0|^2_{A^+} <= k |r|^2 / |r_0|^2,

with A^+ the pseudo-inverse and k the quotient of the largest and the smallest non-zero eigenvalue
of A. The same holds in the norm of a preconditioner P, |r|^2_P = r^T P r, with the eigenvalues of
P A. For a block of d unknowns with damping delta, in units of the mean eigenvalue,
k <= 1 + d / delta. Without damping k has no bound: at a residual of 1e-4 a part of the decrease of
f may be missing, and x may be far from x* along small eigenvalues, where f hardly changes.

Without a preconditioner, all solvers start from `init` and move in the range of the operator. So in
a singular system the component of `init` in the null space stays (Jhunjhunwala, Wang, Joshi,
FedFisher, AISTATS 2024, Lemma 1).
"""

from fisherjax.solvers.base import Info, Solution, Solver, Status, by_leaf
from fisherjax.solvers.descent import gradient_descent
from fisherjax.solvers.direct import closed_form
from fisherjax.solvers.krylov import conjugate_gradients

__all__ = [
    "Info",
    "Solution",
    "Solver",
    "Status",
    "by_leaf",
    "closed_form",
    "conjugate_gradients",
    "gradient_descent",
]
