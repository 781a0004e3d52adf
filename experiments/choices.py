"""The names that an experiment may choose from."""

import difflib
from collections.abc import Collection

import fisherjax as fj

MODELS = {
    "mlp": fj.networks.MLP,
    "lenet": fj.networks.LeNet,
    "cnn": fj.networks.CNN,
    "simple_cnn": fj.networks.SimpleCNN,
    "simple_cnn_mnist": fj.networks.SimpleCNNMNIST,
}
PARTITIONS = ("fedfisher", "iid", "niid_bench", "classes_per_client")
CHOICES = {
    "dataset": fj.datasets.NAMES,
    "model": tuple(MODELS),
    "partition": PARTITIONS,
    "algorithms": fj.algorithms.TABLE,  # itself: a row that is added counts
    "augment_border": ("constant", "reflect"),
    "fisher_kind": ("true", "sampled", "empirical"),
    "solver": ("cg", "gd", "adam"),
    "on_nonfinite": ("raise", "drop"),
}
"""By the name of the option."""


def label(name: str) -> str:
    """Say what an algorithm is called in tables and figures; another name stays as it is."""
    return fj.algorithms.TABLE[name].label if name in fj.algorithms.TABLE else name


def check_name(field: str, value: str, known: Collection[str] | None = None) -> None:
    """Refuse a name that an option does not know.

    Args:
        field: the option.
        value: what was given.
        known: the names there are; if None those of `CHOICES`.

    Raises:
        ValueError: if it is unknown; the message holds the nearest one.

    Example:
        >>> check_name("partition", "niid-bench")
        Traceback (most recent call last):
        ValueError: --partition is 'niid-bench', did you mean 'niid_bench'? Known: ...
    """
    known = CHOICES[field] if known is None else known
    if value not in known:
        nearest = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"--{field.replace('_', '-')} is {value!r}, did you mean {nearest!r}? "
            f"Known: {', '.join(known)}"
        )
