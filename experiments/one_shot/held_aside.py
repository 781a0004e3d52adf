"""Data sets without their test data, on which constants are chosen: a sixth is held aside.

    python -m experiments.one_shot --import experiments/one_shot/held_aside.py \
        --dataset mnist_held_aside --model lenet --algorithms fedfisher_kfac@damping=0.1

The accuracy is then that on the training examples held aside, which no client has.
"""

from functools import partial
from pathlib import Path

import numpy as np

from experiments.harness import decoded
from fisherjax.datasets import Dataset

SHARE = 6


def held_aside(name: str, folder: Path | None) -> tuple[Dataset, Dataset]:
    """Return five sixths of a data set's training examples, and the sixth that is held aside."""
    train, _ = decoded.load(name, folder)
    order = np.random.default_rng(0).permutation(len(train.targets))
    number = len(order) // SHARE
    parts = order[number:], order[:number]
    kept, aside = (train._replace(inputs=train.inputs[x], targets=train.targets[x]) for x in parts)
    return kept, aside


DATASETS = {f"{name}_held_aside": partial(held_aside, name) for name in ("mnist", "digits")}
