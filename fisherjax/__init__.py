"""One-shot federated learning with Fisher information: merge models that were trained apart.

Data is partitioned over clients; clients train and summarize; the server aggregates; metrics judge.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from fisherjax import (
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


# Imported when it is first used, because nothing else here needs flax.
if TYPE_CHECKING:
    from fisherjax import networks
else:

    def __getattr__(name: str) -> ModuleType:
        """Import `networks` when it is first used."""
        if name == "networks":
            return importlib.import_module("fisherjax.networks")
        raise AttributeError(f"module 'fisherjax' has no attribute {name!r}")
