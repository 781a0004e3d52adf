"""Theorems about small networks as programs: merging by curvature, and learning by averaging."""

from fisherjax.theory import bounds, feature_learning, laplace, signal_noise, two_layer

__all__ = ["bounds", "feature_learning", "laplace", "signal_noise", "two_layer"]
