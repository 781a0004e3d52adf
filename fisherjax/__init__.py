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


# These are imported when they are first used: no other module needs flax, and `flower` needs the
# extra of its name, so that it is not in `__all__` either.
if TYPE_CHECKING:
    from fisherjax import flower, networks  # noqa: F401
else:

    def __getattr__(name: str) -> ModuleType:
        """Import `networks` and `flower` when they are first used."""
        if name in ("networks", "flower"):
            return importlib.import_module(f"fisherjax.{name}")
        raise AttributeError(f"module 'fisherjax' has no attribute {name!r}")
