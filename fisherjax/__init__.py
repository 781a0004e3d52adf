"""One-shot federated learning with Fisher information: merge models that were trained separately.

Data is partitioned over clients, the clients train and summarize, the server aggregates their
updates, and metrics evaluate the merged model.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from fisherjax import (
    adapters,
    algorithms,
    clients,
    compression,
    datasets,
    devices,
    files,
    fisher,
    leaves,
    likelihoods,
    local_update,
    merging,
    metrics,
    nn,
    parallel,
    partition,
    personalization,
    privacy,
    quadratic,
    rounds,
    secure_aggregation,
    solvers,
    text,
    theory,
    training,
    tree,
    typing,
)
from fisherjax.typing import Examples, Model

__all__ = [
    "Examples",
    "Model",
    "adapters",
    "algorithms",
    "clients",
    "compression",
    "datasets",
    "devices",
    "files",
    "fisher",
    "leaves",
    "likelihoods",
    "local_update",
    "merging",
    "metrics",
    "networks",
    "nn",
    "parallel",
    "partition",
    "personalization",
    "privacy",
    "quadratic",
    "rounds",
    "secure_aggregation",
    "solvers",
    "text",
    "theory",
    "training",
    "tree",
    "typing",
]
__version__ = "0.3.0.dev0"


# `networks` is imported when it is first used, because no other module needs flax.
if TYPE_CHECKING:
    from fisherjax import networks
else:

    def __getattr__(name: str) -> ModuleType:
        """Import `networks` when it is first used."""
        if name == "networks":
            return importlib.import_module("fisherjax.networks")
        raise AttributeError(f"module 'fisherjax' has no attribute {name!r}")
