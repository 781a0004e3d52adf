"""One-shot federated learning with Fisher information: merge models that were trained apart.

Data is partitioned over clients; clients train and summarize; the server aggregates; metrics judge.
"""

from fisherjax import clients, likelihoods, models, nn, tree, typing

__all__ = ["clients", "likelihoods", "models", "nn", "tree", "typing"]
__version__ = "0.1.0"
