"""Merged models are compared by differences within cells."""

from typing import NamedTuple

import numpy as np
import pytest

from experiments.pretrained import paired


class _One(NamedTuple):
    algorithm: str
    cell: int
    accuracy: float


def _compared(**rows):
    found = [_One(name, i, x) for name, own in rows.items() for i, x in enumerate(own)]
    return paired.compared(found, lambda one: one.algorithm, lambda one: one.cell)


def test_nineteen_of_twenty_intervals_hold_the_mean():
    draws = np.random.default_rng(0).normal(0.7, 3.0, (2000, 5))
    held = [low <= 0.7 <= high for low, high in map(paired.interval, draws.tolist())]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)


def test_what_all_rows_of_a_cell_share_does_not_count():
    random = np.random.default_rng(1)
    ties, ours = random.uniform(0.4, 0.5, (2, 8))
    shared = random.uniform(0, 0.4, 8)
    first = _compared(ties=ties, fedfisher_kfac=ours)
    assert _compared(ties=ties + shared, fedfisher_kfac=ours + shared) == first


def test_the_words_follow_the_interval():
    noise = np.array([-0.01, 0.0, 0.01, 0.0])
    for by, word in ((0.1, "highest"), (0.001, "tied"), (-0.1, "below")):
        found = _compared(ties=[0.5] * 4, fedavg=[0.4] * 4, fedfisher_kfac=0.5 + by + noise)
        assert found["ties"] == "reference"
        assert found["fedfisher_kfac"].endswith(word)
        assert found["fedavg"] == "-10.0 [-10.0, -10.0] below"


def test_the_reference_is_of_others_and_one_cell_has_no_interval():
    best = {"fedfisher_kfac": [0.9], "regmean@centre='prior_once'": [0.8], "ties+ccvr": [0.7]}
    found = _compared(**best, fedavg=[0.5], ties=[0.4])
    assert found["fedavg"] == "reference"
    assert found["fedfisher_kfac"] == "+40.0"
    assert found["ties"] == "-10.0"
    assert set(_compared(**best).values()) == {"-"}
