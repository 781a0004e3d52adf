"""Splits for clients that are judged on data like their own."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherjax import partition

SEEDS = st.integers(0, 2**32 - 1)


@given(st.integers(1, 12), st.integers(1, 10), st.integers(1, 10), SEEDS)
@settings(deadline=None)
def test_every_client_has_its_number_of_classes_and_every_class_its_owners(
    num_clients, total, num_classes, seed
):
    num_classes = min(num_classes, total)
    targets = np.arange(200 * total) % total
    parts = partition.pathological(targets, num_clients, num_classes, seed)
    partition.check_partition(parts, len(targets))
    counts = partition.label_counts(targets, parts)
    np.testing.assert_array_equal((counts > 0).sum(1), num_classes)
    owners = (counts > 0).sum(0)
    assert owners.sum() == num_clients * num_classes
    assert owners.max() - owners.min() <= 1
    # Whoever has a class shares all of it, in shares from 2/5 to 3/5 before they are normalised.
    for label in np.flatnonzero(owners):
        held = counts[:, label][counts[:, label] > 0]
        assert held.sum() == 200
        assert held.max() - 1 <= 1.5 * (held.min() + 1)


def test_a_pathological_split_is_a_function_of_its_seed():
    targets = np.arange(300) % 10
    first, again, other = (partition.pathological(targets, 20, 8, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@given(st.data(), st.integers(1, 8), st.integers(1, 6), SEEDS)
@settings(deadline=None)
def test_other_data_are_split_in_the_same_proportions(draw, num_clients, total, seed):
    numbers = st.lists(st.integers(0, 50), min_size=total, max_size=total)
    counts = np.array([draw.draw(numbers) for _ in range(num_clients)])
    targets = np.repeat(np.arange(total), 97)
    parts = partition.in_proportion(targets, counts, seed)
    found = partition.label_counts(targets, parts)
    of_class = counts.sum(0)
    expected = 97 * counts / np.where(of_class, of_class, 1)
    # Cut at floors of cumulated shares.
    assert (np.abs(found - expected) < 1 + 1e-9).all()
    np.testing.assert_array_equal(found.sum(0), np.where(of_class, 97, 0))
    assert not found[counts == 0].any()


def test_its_own_proportions_give_a_split_of_the_same_sizes():
    targets = np.random.default_rng(0).integers(0, 10, 2000)
    parts = partition.niid_bench(targets, 20, 0.8, seed=0)
    counts = partition.label_counts(targets, parts)
    again = partition.in_proportion(targets, counts, seed=1)
    np.testing.assert_array_equal(partition.label_counts(targets, again), counts)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (([0, 1, 1], 2, 3, 0), ValueError, "num_classes is 3; expected 1 to 2"),
        (([0, 1, 1], 2, 0, 0), ValueError, "num_classes"),
        (([0, 1, 1], 4, 1, 0), ValueError, "4"),
        (([0.5, 1], 2, 1, 0), TypeError, "integer"),
        (([0, 1, 1], 2, 1, -1), ValueError, "seed"),
    ],
)
def test_a_pathological_split_refuses(arguments, error, said):
    with pytest.raises(error, match=said):
        partition.pathological(*arguments)


@pytest.mark.parametrize(
    ("targets", "counts", "said"),
    [
        ([0, 2], [[1, 1]], "targets go up to 2, but counts has columns for 2"),
        ([0, 1], [1, 1], r"counts has shape \(2,\)"),
        ([0, 1], [[1, -1]], "numbers from -1 to 1"),
        ([0, 1], [[1, np.nan]], "finite"),
        ([0, 1], np.zeros((0, 2)), "counts has shape"),
    ],
)
def test_proportions_that_are_none_are_refused(targets, counts, said):
    with pytest.raises(ValueError, match=said):
        partition.in_proportion(targets, counts, 0)
