"""Merge low-rank adapters (LoRA) by what they do, and train them in simulation.

An `Adapter` changes the matrix of a layer by a product of two thin factors. Averaging the factors
is wrong, because the mean of products is not the product of means, and because the same change has
many factors. `merge` works on the products, weighted by the clients' Kronecker factors if they are
given. `attach` makes a network whose base is frozen and whose adapters are trained, and
`merge_products` runs any algorithm on the changes that adapters make.
"""

from fisherjax.adapters._checks import check
from fisherjax.adapters.base import (
    Adapter,
    Factors,
    distance,
    from_product,
    product,
    truncate,
    weighted_sum,
)
from fisherjax.adapters.merge import mean_factors, merge
from fisherjax.adapters.methods import merge_products
from fisherjax.adapters.network import attach, dense, merged

__all__ = [
    "Adapter",
    "Factors",
    "attach",
    "check",
    "dense",
    "distance",
    "from_product",
    "mean_factors",
    "merge",
    "merge_products",
    "merged",
    "product",
    "truncate",
    "weighted_sum",
]
