"""One-shot federated learning with Fisher information: merge models that were trained apart.

Data is partitioned over clients; clients train and summarize; the server aggregates; metrics judge.
"""

from fisherjax import (
    aggregation,
    clients,
    cohort,
    data,
    fisher,
    likelihoods,
    local,
    mapping,
    metrics,
    models,
    nn,
    partition,
    personalization,
    quadratic,
    rounds,
    solvers,
    text,
    training,
    tree,
    typing,
)

__all__ = [
    "aggregation",
    "clients",
    "cohort",
    "data",
    "fisher",
    "likelihoods",
    "local",
    "mapping",
    "metrics",
    "models",
    "nn",
    "partition",
    "personalization",
    "quadratic",
    "rounds",
    "solvers",
    "text",
    "training",
    "tree",
    "typing",
]
__version__ = "0.1.0"
