"""Name an experiment by its options, and entitle it."""

import hashlib
import json

from experiments.harness import commands, figures, folders
from experiments.harness.config import OWNERS, Data, OneShot

_LATER = (
    *("beta", "min_size", "classes_per_client", "weight_decay", "augment_border", "normalize"),
    *("label_smoothing", "distillation", "choose", "aside", "compress"),
    *("then_rounds", "then_epochs", "central", "calibrate", "exchanges", "imports"),
)
"""Options that the first runs did not have; the defaults give what those runs computed."""


def name(config: OneShot) -> str:
    """Return the name of an experiment, with a digest of all options that change its result."""
    first, data = commands.contents(OneShot()), config.data
    # Runs from before these options existed, when damping was one, keep their names.
    changed = {"damping": "default"} | {
        option: value
        for option, value in commands.contents(config).items()
        if option not in folders.WHERE_AND_HOW and (option not in _LATER or value != first[option])
    }
    # Those runs took all examples.
    if not changed["max_examples"]:
        del changed["max_examples"]
    # Folders keep version 0.2's name of this partition, so that its runs continue.
    word = {"dirichlet_of_client": "fedfisher"}.get(data.partition, data.partition)
    changed["partition"] = word
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:6]
    split = f"{word}{_number(data)[1]}"
    return f"{data.dataset}-{data.model}-m{data.num_clients}-{split}-{digest}"


def title(data: Data) -> str:
    """Return a title with the data set, the network and the clients."""
    both = f"{figures.label(data.dataset)}, {figures.label(data.model)}"
    if data.dataset in OWNERS:
        return f"{both}, a client for each {OWNERS[data.dataset]}"
    return f"{both}, {data.num_clients} clients ({''.join(_number(data))})"


def _number(data: Data) -> tuple[str, str]:
    """Return the words for the partition in a title, and its parameter, which follows them."""
    return {
        "iid": ("iid", ""),
        "dirichlet_of_client": ("Dirichlet of each client, alpha ", f"{data.alpha:g}"),
        "pachinko": ("pachinko, alpha ", f"{data.alpha:g}"),
        "niid_bench": ("Dirichlet of each class, beta ", f"{data.beta:g}"),
        "classes_per_client": ("classes of each: ", str(data.classes_per_client)),
    }[data.partition]
