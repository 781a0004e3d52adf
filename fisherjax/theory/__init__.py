"""What is proven about small networks, to run: why curvature merges, why averaging learns."""

from fisherjax.theory import feature_learning, laplace, signal_noise, two_layer

__all__ = ["feature_learning", "laplace", "signal_noise", "two_layer"]
