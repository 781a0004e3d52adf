"""One client's curvature as data: a structure (diagonal, K-FAC, full) of one of five kinds."""

from fisherjax.fisher.diagonal import diagonal
from fisherjax.fisher.full import full, vector_product
from fisherjax.fisher.kfac import expand, kfac, reduce, zero
from fisherjax.fisher.kinds import automatic, curvature_propagation, empirical, sampled, true
from fisherjax.fisher.kronecker import Kronecker
from fisherjax.fisher.kronecker_sum import KroneckerSum
from fisherjax.fisher.operators import Dense, Diagonal

Operator = Diagonal | Dense | Kronecker
"""Any of the Fisher operators that clients send."""

__all__ = [
    "Dense",
    "Diagonal",
    "Kronecker",
    "KroneckerSum",
    "Operator",
    "automatic",
    "curvature_propagation",
    "diagonal",
    "empirical",
    "expand",
    "full",
    "kfac",
    "reduce",
    "sampled",
    "true",
    "vector_product",
    "zero",
]
