"""The names that an experiment may choose from."""

import difflib
from collections.abc import Sequence

import fisherjax as fj

MODELS = {
    "mlp": fj.models.MLP,
    "lenet": fj.models.LeNet,
    "cnn": fj.models.CNN,
    "simple_cnn": fj.models.SimpleCNN,
    "simple_cnn_mnist": fj.models.SimpleCNNMNIST,
}
SHARE_TRAINING = (
    "fedavg",
    "fisher_merge",
    "regmean",
    "fedfisher_diag",
    "fedfisher_kfac",
    "fedfisher_full",
    "fedlpa",
    "fedlpa_ea",
    "fedlpa_gd",
    "fednova",
    "fedfish",
)
"""Algorithms that merge the same clients."""
TRAIN_THEIR_OWN = ("fedprox", "scaffold")
"""Algorithms whose clients are trained in another way."""
ALGORITHMS = SHARE_TRAINING + TRAIN_THEIR_OWN
PARTITIONS = ("fedfisher", "iid", "niid_bench", "classes_per_client")
CHOICES = {
    "dataset": fj.data.NAMES,
    "model": tuple(MODELS),
    "partition": PARTITIONS,
    "algorithms": ALGORITHMS,
    "augment_border": ("constant", "reflect"),
    "fisher_kind": ("true", "sampled", "empirical"),
    "solver": ("cg", "gd", "adam"),
    "on_nonfinite": ("raise", "drop"),
}
"""By the name of the option."""


def check_name(field: str, value: str, known: Sequence[str] | None = None) -> None:
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
