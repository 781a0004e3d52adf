"""Compute a client's Fisher information as data: an operator that can be sent, stacked and solved.

A Fisher has a structure and a kind, which are chosen independently. The structures are `diagonal`,
`kfac` and `full`; `vector_product` multiplies by the full matrix without forming it. The kinds are
output-gradient estimators: `true`, `sampled`, `curvature_propagation`, `empirical`, `jacobian`, and
`automatic`, which selects one of the first and the third.

Where to find:

* the default damping of K-FAC and the other operators: `default_damping` in
  fisher/kfac_operator.py and fisher/operators.py;
* how many examples a pass over a data set uses (`max_examples`, `batch_size`, weights):
  fisher/_passes.py;
* the padding mask of sequences (`Model.positions`): fisherjax/_padding.py, and for the locations
  of layers fisherjax/_layers/locations.py.
"""

from fisherjax._layers.feeders import Feeders
from fisherjax._layers.layer import Layer
from fisherjax.fisher._factors import Sharing, expand, reduce
from fisherjax.fisher.diagonal import diagonal
from fisherjax.fisher.full import full, vector_product
from fisherjax.fisher.kfac import Fallback, kfac, zero
from fisherjax.fisher.kfac_operator import Kronecker
from fisherjax.fisher.kfac_sum_operator import KroneckerSum
from fisherjax.fisher.kinds import (
    Kind,
    automatic,
    curvature_propagation,
    empirical,
    jacobian,
    sampled,
    true,
)
from fisherjax.fisher.operators import Blockwise, Dense, Diagonal, Template

Operator = Diagonal | Dense | Kronecker
"""Any of the Fisher operators that clients send."""

__all__ = [
    "Blockwise",
    "Dense",
    "Diagonal",
    "Fallback",
    "Feeders",
    "Kind",
    "Kronecker",
    "KroneckerSum",
    "Layer",
    "Operator",
    "Sharing",
    "Template",
    "automatic",
    "curvature_propagation",
    "diagonal",
    "empirical",
    "expand",
    "full",
    "jacobian",
    "kfac",
    "reduce",
    "sampled",
    "true",
    "vector_product",
    "zero",
]
