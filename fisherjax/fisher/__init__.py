"""Compute a client's Fisher information as data: an operator that can be sent, stacked and solved.

A Fisher has a structure and a kind, which are chosen independently. The structures are `diagonal`,
`kfac` and `full`; `vector_product` multiplies by the full matrix without forming it. The kinds are
output-gradient estimators: `true`, `sampled`, `curvature_propagation`, `empirical`, and
`automatic`, which selects one of the first and the third.

Where to find:

* the default damping of K-FAC and the other operators: `default_damping` in fisher/kronecker.py and
  fisher/operators.py;
* how many examples a pass over a data set uses (`max_examples`, `batch_size`, weights):
  fisher/_passes.py;
* the padding mask of sequences (`Model.positions`): fisherjax/_sequences.py, and for the locations
  of layers fisherjax/_layers/locations.py.
"""

from fisherjax.fisher._factors import expand, reduce
from fisherjax.fisher.diagonal import diagonal
from fisherjax.fisher.full import full, vector_product
from fisherjax.fisher.kfac import kfac, zero
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
