"""Evaluate models: on a test set, as an ensemble, and on the data of the clients."""

from fisherjax.metrics._clients import Barrier, Performance, client_server_barrier, performance
from fisherjax.metrics._test_set import accuracy, ensemble_accuracy, logits

__all__ = [
    "Barrier",
    "Performance",
    "accuracy",
    "client_server_barrier",
    "ensemble_accuracy",
    "logits",
    "performance",
]
