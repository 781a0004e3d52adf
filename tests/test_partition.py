"""Partitions: every row once, the authors' draw, no dependence on anything but the seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherjax import data, partition

LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=80).map(np.array)
ALPHAS = st.floats(1e-6, 1e6)
SEEDS = st.integers(0, 2**32 - 1)


def owners(parts, num_examples):
    """Return how many clients hold each row."""
    return np.bincount(np.concatenate(parts).astype(int), minlength=num_examples)


@given(st.data(), LABELS, ALPHAS, SEEDS)
@settings(deadline=None)
def test_every_scheme_gives_every_row_to_exactly_one_client(draw, targets, alpha, seed):
    num_clients = draw.draw(st.integers(1, len(targets)))
    for parts in (
        partition.fedfisher(targets, num_clients, alpha, seed),
        partition.iid(targets, num_clients, seed),
        partition.central(targets) + [np.array([], int)] * (num_clients - 1),
    ):
        assert len(parts) == num_clients
        np.testing.assert_array_equal(owners(parts, len(targets)), 1)
        partition.check_partition(parts, len(targets))


@given(st.data(), LABELS, st.floats(0.05, 10), SEEDS)
@settings(deadline=None)
def test_fedfisher_cuts_each_shuffled_class_at_the_floor_of_the_cumulated_shares(
    draw, targets, alpha, seed
):
    num_clients = draw.draw(st.integers(1, len(targets)))
    num_classes = targets.max() + 1
    # Written a second time, with loops: one draw a client, then one shuffle a class.
    random = np.random.RandomState(seed)
    draws = [random.dirichlet(alpha * np.ones(num_classes)) for _ in range(num_clients)]
    expected = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        rows = [row for row in range(len(targets)) if targets[row] == label]
        random.shuffle(rows := np.array(rows, int))
        shares = np.array([q[label] for q in draws])
        ends = np.floor(np.cumsum(shares / shares.sum()) * len(rows))
        start = 0
        for client in range(num_clients):
            end = len(rows) if client == num_clients - 1 else int(ends[client])
            expected[client] += list(rows[start:end])
            start = end
    for part, rows in zip(
        partition.fedfisher(targets, num_clients, alpha, seed), expected, strict=True
    ):
        assert set(part.tolist()) == set(rows)


def test_fedfisher_is_the_split_of_the_authors_clients(shared):
    train, _ = data.load("mnist", shared / "data")
    with np.load(shared / "reference" / "mnist_lenet_m5_alpha01.npz") as reference:
        ends = np.cumsum(reference["partition_sizes"])
        expected = np.split(reference["partition_indices"], ends[:-1])
    parts = partition.fedfisher(train.targets, num_clients=5, alpha=0.1, seed=3)
    for part, rows in zip(parts, expected, strict=True):
        assert set(part.tolist()) == set(rows.tolist())


def schemes(targets, seed):
    return partition.fedfisher(targets, 4, 0.3, seed) + partition.iid(targets, 4, seed)


def test_a_partition_is_a_function_of_its_seed_alone():
    targets = np.random.RandomState(0).randint(0, 5, 200)
    first = schemes(targets, seed=11)
    other = schemes(targets, seed=12)
    # The global stream of NumPy is neither read nor moved.
    np.random.seed(5)  # noqa: NPY002
    second = schemes(targets, seed=11)
    after = np.random.random()  # noqa: NPY002
    assert after == np.random.RandomState(5).random()
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(set(a.tolist()) != set(b.tolist()) for a, b in zip(first, other, strict=True))


def test_the_targets_are_left_as_they_were():
    targets = np.arange(30) % 3
    before = targets.copy()
    schemes(targets, seed=0)
    np.testing.assert_array_equal(targets, before)


def test_iid_parts_are_equal_to_one_example():
    sizes = [len(part) for part in partition.iid(1003, num_clients=10, seed=0)]
    assert sum(sizes) == 1003
    assert max(sizes) - min(sizes) <= 1


def test_large_alpha_shares_every_class_equally_and_small_alpha_gives_it_to_one_client():
    targets = np.repeat(np.arange(10), 1000)
    even = partition.label_counts(targets, partition.fedfisher(targets, 5, 1e6, seed=0))
    assert np.abs(even - 200).max() < 10
    uneven = partition.label_counts(targets, partition.fedfisher(targets, 5, 0.01, seed=0))
    assert (uneven.max(axis=0) > 990).mean() > 0.7


@pytest.mark.parametrize("alpha", [1e-5, 1e-300, 5e-324])
def test_draws_that_underflow_still_give_each_client_one_class(alpha):
    """The limit: a client draws one class; its drawers share it, everybody an undrawn one."""
    targets = np.repeat(np.arange(6), 840)
    counts = partition.label_counts(targets, partition.fedfisher(targets, 4, alpha, seed=1))
    drawn = ~(counts == 210).all(axis=0)
    assert drawn.any()
    assert ((counts[:, drawn] > 0).sum(axis=1) <= 1).all()
    assert set(counts[:, drawn].ravel().tolist()) <= {0, 280, 420, 840}


def test_label_counts_add_up_to_sizes_and_classes():
    targets = np.random.RandomState(1).randint(0, 7, 300)
    parts = partition.fedfisher(targets, 6, 0.2, seed=4)
    counts = partition.label_counts(targets, parts)
    np.testing.assert_array_equal(counts.sum(axis=1), [len(part) for part in parts])
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(targets))
    for client, part in enumerate(parts):
        for label in range(7):
            assert counts[client, label] == (targets[part] == label).sum()


@pytest.mark.parametrize("alpha", [0, -0.1, np.inf, np.nan, "0.1", None])
def test_alpha_must_be_finite_and_positive(alpha):
    with pytest.raises(ValueError, match=r"alpha is .*finite number above 0"):
        partition.fedfisher([0, 1], 2, alpha, 0)


@pytest.mark.parametrize("num_clients", [0, -1, 4])
def test_there_are_between_one_and_n_clients(num_clients):
    for make in (
        lambda: partition.fedfisher([0, 1, 1], num_clients, 0.1, 0),
        lambda: partition.iid(3, num_clients, 0),
    ):
        with pytest.raises(ValueError, match=f"num_clients is {num_clients}, expected 1 to 3"):
            make()


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (np.eye(3, dtype=int), ValueError, r"shape \(3, 3\).*argmax"),
        (np.array([], int), ValueError, r"shape \(0,\)"),
        (np.array([0.0, 1.0]), TypeError, "dtype float64.*astype"),
        (np.array([True, False]), TypeError, "dtype bool"),
        (np.array([0, -1]), ValueError, "smallest label is -1"),
    ],
)
def test_targets_must_be_class_labels(targets, error, message):
    with pytest.raises(error, match=message):
        partition.fedfisher(targets, 1, 0.1, 0)
    with pytest.raises(error, match=message):
        partition.label_counts(targets, [np.arange(len(targets))])


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**32, ValueError), (None, TypeError), (0.5, TypeError)]
)
def test_a_seed_is_an_integer_of_32_bits(seed, error):
    with pytest.raises(error, match=r"seed is .*from 0 to"):
        partition.iid(4, 2, seed)
    with pytest.raises(error, match=r"seed is .*from 0 to"):
        partition.fedfisher([0, 1], 2, 0.1, seed)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "no client"),
        ([[0, 1], [1, 2]], ValueError, "row 1 belongs to client 0 and to client 1"),
        ([[0], [2, 2]], ValueError, "client 1 holds row 2 2 times"),
        ([[0], [4]], ValueError, "client 1's rows run from 4 to 4.*4 examples, 0 to 3"),
        ([[-1]], ValueError, "client 0's rows run from -1"),
        ([[0], [1.0]], TypeError, "client 1's rows have dtype float64"),
        ([[True, False]], TypeError, "client 0's rows have dtype bool.*flatnonzero"),
        ([[[0, 1]]], ValueError, r"client 0's rows have shape \(1, 2\)"),
    ],
)
def test_check_partition_names_the_client_at_fault(parts, error, message):
    with pytest.raises(error, match=message):
        partition.check_partition(parts, 4)
    with pytest.raises(error, match=message):
        partition.label_counts(np.zeros(4, int), parts)


def test_the_number_of_examples_is_an_integer_or_the_length_of_the_targets():
    for a, b in zip(partition.iid(9, 2, 0), partition.iid(np.zeros((9, 3)), 2, 0), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match=r"9\.0.*number N"):
        partition.central(9.0)
    with pytest.raises(ValueError, match="1 to 0"):
        partition.central(0)
