"""Likelihoods of targets given a network's outputs: loss, sampling and the Fisher's output factor.

A likelihood reads the outputs z of a batch, [B, C], or [B, L, C] if an example is a sequence of L
positions, whose log-likelihoods then add up. Losses are negative log-likelihoods in nats. The true
Fisher information needs the output factor S(z),

    S S^T = E_{y ~ p(y|z)} [g g^T],   g = d(-log p(y|z)) / dz,

as K cotangents of the shape of z, so that F = mean_n sum_k (J_n^T s_nk)(J_n^T s_nk)^T. For
sequences only the factor of each position is computed, a `ByPosition`.
"""

from fisherjax.likelihoods._custom import custom, unknown
from fisherjax.likelihoods._distributions import (
    bernoulli,
    categorical,
    check_regression,
    gaussian,
    is_categorical,
    regression_targets,
    smoothed,
)

__all__ = [
    "bernoulli",
    "categorical",
    "check_regression",
    "custom",
    "gaussian",
    "is_categorical",
    "regression_targets",
    "smoothed",
    "unknown",
]
