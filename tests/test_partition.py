"""Partitions: every row once, the authors' draw, no dependence on anything but the seed."""

import random
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fisherjax import partition

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
        partition.dirichlet_of_client(targets, num_clients, alpha, seed),
        partition.iid(targets, num_clients, seed),
        partition.central(targets) + [np.array([], int)] * (num_clients - 1),
        partition.niid_bench(targets, num_clients, alpha, seed, min_size=0),
    ):
        assert len(parts) == num_clients
        np.testing.assert_array_equal(owners(parts, len(targets)), 1)
        partition.check_partition(parts, len(targets))


def test_one_client_owns_everything_where_numpys_draw_is_infinite():
    """At this beta and seed NumPy divides by a number whose inverse overflows."""
    (rows,) = partition.niid_bench(np.array([0, 0, 6, 6]), 1, 6.103515625e-05, 13, min_size=0)
    assert sorted(rows) == [0, 1, 2, 3]


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
        # Added up in turn: in another order the sum, and then a floor, may round the other way.
        ends = np.floor(np.cumsum(shares / sum(shares.tolist())) * len(rows))
        start = 0
        for client in range(num_clients):
            end = len(rows) if client == num_clients - 1 else int(ends[client])
            expected[client] += list(rows[start:end])
            start = end
    for part, rows in zip(
        partition.dirichlet_of_client(targets, num_clients, alpha, seed), expected, strict=True
    ):
        assert set(part.tolist()) == set(rows)


@pytest.mark.long
def test_fedfisher_is_the_split_of_the_authors_clients(shared):
    import tensorflow_datasets as tfds

    # Labels alone: most of the time of a whole data set is decoding its images.
    skip = {"image": tfds.decode.SkipDecoding()}
    train = tfds.data_source("mnist", split="train", data_dir=shared / "data", decoders=skip)
    records = train.__getitems__(range(len(train)))  # five times as fast as one by one
    targets = np.array([record["label"] for record in records])
    with np.load(shared / "reference" / "mnist_lenet_m5_alpha01.npz") as reference:
        ends = np.cumsum(reference["partition_sizes"])
        expected = np.split(reference["partition_indices"], ends[:-1])
    parts = partition.dirichlet_of_client(targets, num_clients=5, alpha=0.1, seed=3)
    for part, rows in zip(parts, expected, strict=True):
        assert set(part.tolist()) == set(rows.tolist())


def schemes(targets, seed):
    return (
        partition.dirichlet_of_client(targets, 4, 0.3, seed)
        + partition.iid(targets, 4, seed)
        + partition.niid_bench(targets, 4, 0.3, seed)
        + partition.classes_per_client(targets, 4, 3, seed)
    )


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
    targets = np.arange(80) % 3
    before = targets.copy()
    schemes(targets, seed=0)
    np.testing.assert_array_equal(targets, before)


def test_iid_parts_are_equal_to_one_example():
    sizes = [len(part) for part in partition.iid(1003, num_clients=10, seed=0)]
    assert sum(sizes) == 1003
    assert max(sizes) - min(sizes) <= 1


def test_large_alpha_shares_every_class_equally_and_small_alpha_gives_it_to_one_client():
    targets = np.repeat(np.arange(10), 1000)
    even = partition.label_counts(targets, partition.dirichlet_of_client(targets, 5, 1e6, seed=0))
    assert np.abs(even - 200).max() < 10
    uneven = partition.label_counts(
        targets, partition.dirichlet_of_client(targets, 5, 0.01, seed=0)
    )
    assert (uneven.max(axis=0) > 990).mean() > 0.7


@pytest.mark.parametrize("alpha", [1e-5, 1e-300, 5e-324])
def test_draws_that_underflow_still_give_each_client_one_class(alpha):
    """The limit: a client draws one class; its drawers share it, everybody an undrawn one."""
    targets = np.repeat(np.arange(6), 840)
    counts = partition.label_counts(
        targets, partition.dirichlet_of_client(targets, 4, alpha, seed=1)
    )
    drawn = ~(counts == 210).all(axis=0)
    assert drawn.any()
    assert ((counts[:, drawn] > 0).sum(axis=1) <= 1).all()
    assert set(counts[:, drawn].ravel().tolist()) <= {0, 280, 420, 840}


def test_label_counts_add_up_to_sizes_and_classes():
    targets = np.random.RandomState(1).randint(0, 7, 300)
    parts = partition.dirichlet_of_client(targets, 6, 0.2, seed=4)
    counts = partition.label_counts(targets, parts)
    np.testing.assert_array_equal(counts.sum(axis=1), [len(part) for part in parts])
    np.testing.assert_array_equal(counts.sum(axis=0), np.bincount(targets))
    for client, part in enumerate(parts):
        for label in range(7):
            assert counts[client, label] == (targets[part] == label).sum()


MNIST_CLASSES = np.repeat(
    np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
)


def test_niid_bench_draws_the_published_split_of_mnist():
    """Label:count of each client at beta 0.05 and seed 0, as the FedLPA paper prints them."""
    published = """4:2 5:12 6:2847 9:16; 1:20 4:189 5:5349; 0:669 1:476 2:67 6:15 7:6068;
        0:266 1:375 3:3956 7:196 9:5932; 0:4 1:418 2:5862; 1:2 2:25 4:5195 5:24 6:80 8:28;
        1:5034 2:3 4:22 5:6 6:2669; 0:4914; 4:433 5:29 6:307 8:5373;
        0:70 1:417 2:1 3:2175 4:1 5:1 7:1 8:450 9:1"""
    parts = partition.niid_bench(MNIST_CLASSES, num_clients=10, beta=0.05, seed=0)
    counts = partition.label_counts(MNIST_CLASSES, parts)
    for row, line in zip(counts, published.split(";"), strict=True):
        expected = dict(map(int, pair.split(":")) for pair in line.split())
        assert {label: count for label, count in enumerate(row.tolist()) if count} == expected


@given(st.floats(0.02, 10), SEEDS, st.integers(2, 8))
@settings(deadline=None, max_examples=30)
def test_niid_bench_gives_nothing_more_to_a_client_that_has_its_share(beta, seed, num_clients):
    targets = np.random.RandomState(0).randint(0, 7, 400)
    parts = partition.niid_bench(targets, num_clients, beta, seed)
    assert min(map(len, parts)) >= 10
    counts = partition.label_counts(targets, parts)
    held = np.cumsum(counts, axis=1) - counts
    excess = np.where(held >= 400 / num_clients, counts, 0)
    assert (excess[:-1] == 0).all()
    # The cumulated shares end just below one at times: an example then falls to the last client.
    assert excess[-1].max() <= 1


@pytest.mark.parametrize("beta", [1e-3, 1e-300, 5e-324])
def test_a_beta_that_underflows_gives_each_class_to_one_client_with_room(beta):
    """The limit: clients of one class may take a second one here; all are equally likely."""
    targets = np.repeat(np.arange(8), 100)
    takers, largest = np.zeros(5), []
    for seed in range(100):
        parts = partition.niid_bench(targets, 5, beta, seed, min_size=0)
        counts = partition.label_counts(targets, parts)
        assert counts.sum(axis=1).max() < 160 + 100
        largest.append(counts.max(axis=0).mean())
        takers += counts[:, -1] / 100
    assert np.mean(largest) > (99 if beta == 1e-3 else 100 - 1e-9)
    assert ((takers - 20) ** 2 / 20).sum() < 4 + 5 * 8**0.5  # chi-square with 4 degrees


def test_niid_bench_says_what_would_meet_the_minimum():
    targets = np.repeat(np.arange(3), 40)
    with pytest.raises(ValueError, match=r"none of 20 draws.*Try beta=.*, min_size=") as error:
        partition.niid_bench(targets, 6, 0.01, seed=0, max_draws=20)
    ((beta, size),) = re.findall(r"Try beta=(.*?), min_size=(\d+)", str(error.value))
    parts = partition.niid_bench(targets, 6, 0.01, seed=0, max_draws=20, min_size=int(size))
    assert min(map(len, parts)) == int(size) < 10
    parts = partition.niid_bench(targets, 6, float(beta), seed=0, max_draws=20)
    assert min(map(len, parts)) >= 10
    with pytest.raises(ValueError, match=r"min_size=10 of 120 examples each: .* up to 9, or"):
        partition.niid_bench(targets, 13, 1.0, seed=0)


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"min_size": -1}, ValueError, "min_size is -1; expected an integer of at least 0"),
        ({"min_size": 1.5}, ValueError, "min_size is 1.5; expected an integer"),
        ({"max_draws": 0}, ValueError, "max_draws is 0; expected an integer of at least 1"),
    ],
)
def test_niid_bench_refuses_bad_numbers(option, error, message):
    with pytest.raises(error, match=message):
        partition.niid_bench([0, 1], 2, 0.5, 0, **option)


@given(st.data(), SEEDS, st.integers(1, 12), st.integers(1, 6))
@settings(deadline=None)
def test_every_client_has_its_number_of_classes_and_owners_share_equally(
    draw, seed, num_clients, total
):
    num_classes = draw.draw(st.integers(1, total))
    sizes = np.random.RandomState(0).randint(20, 40, total)
    targets = np.random.RandomState(1).permutation(np.repeat(np.arange(total), sizes))
    parts = partition.classes_per_client(targets, num_clients, num_classes, seed)
    partition.check_partition(parts, len(targets))
    counts = partition.label_counts(targets, parts)
    assert ((counts > 0).sum(axis=1) == num_classes).all()
    assert (counts[np.arange(num_clients), np.arange(num_clients) % total] > 0).all()
    for label, size in enumerate(sizes):
        own = counts[counts[:, label] > 0, label]
        assert own.sum() == (size if own.size else 0)
        assert own.size == 0 or own.max() - own.min() <= 1


def test_further_classes_are_the_authors_draw():
    """Of the standard library's generator, in the order of the clients, repetitions thrown away."""
    targets = np.arange(3000) % 10
    counts = partition.label_counts(targets, partition.classes_per_client(targets, 10, 3, seed=7))
    source = random.Random(7)
    for client in range(10):
        own = {client}
        while len(own) < 3:
            own.add(source.randint(0, 9))
        assert set(np.flatnonzero(counts[client])) == own


@pytest.mark.parametrize(
    ("num_classes", "message"),
    [
        (4, "num_classes is 4; expected 1 to 3, the number of classes of the targets"),
        (0, "num_classes is 0; expected 1 to 3"),
        (1.0, "num_classes is 1.0; expected 1 to 3"),
    ],
)
def test_clients_cannot_have_more_classes_than_there_are(num_classes, message):
    with pytest.raises(ValueError, match=message):
        partition.classes_per_client([0, 1, 2, 2], 2, num_classes, 0)


def test_a_class_too_small_for_its_owners_is_named():
    with pytest.raises(ValueError, match="class 1 has 2 examples for the 3 clients that own it"):
        partition.classes_per_client([0, 0, 0, 1, 1], 3, 2, 0)


@pytest.mark.parametrize("alpha", [0, -0.1, np.inf, np.nan, "0.1", None])
def test_alpha_must_be_finite_and_positive(alpha):
    with pytest.raises((ValueError, TypeError), match=r"alpha is .*expected a (finite|positive)"):
        partition.dirichlet_of_client([0, 1], 2, alpha, 0)
    with pytest.raises((ValueError, TypeError), match=r"beta is .*expected a (finite|positive)"):
        partition.niid_bench([0, 1], 2, alpha, 0)


@pytest.mark.parametrize("num_clients", [0, -1, 4])
def test_there_are_between_one_and_n_clients(num_clients):
    for make in (
        lambda: partition.dirichlet_of_client([0, 1, 1], num_clients, 0.1, 0),
        lambda: partition.iid(3, num_clients, 0),
        lambda: partition.niid_bench([0, 1, 1], num_clients, 0.1, 0),
        lambda: partition.classes_per_client([0, 1, 1], num_clients, 1, 0),
    ):
        with pytest.raises(ValueError, match=f"num_clients is {num_clients}; expected 1 to 3"):
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
        partition.dirichlet_of_client(targets, 1, 0.1, 0)
    with pytest.raises(error, match=message):
        partition.label_counts(targets, [np.arange(len(targets))])


@pytest.mark.parametrize("seed", [-1, 2**32, None, 0.5])
def test_a_seed_is_an_integer_of_32_bits(seed):
    with pytest.raises(ValueError, match=r"seed is .*from 0 to"):
        partition.iid(4, 2, seed)
    with pytest.raises(ValueError, match=r"seed is .*from 0 to"):
        partition.dirichlet_of_client([0, 1], 2, 0.1, seed)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], ValueError, "no client"),
        ([[0, 1], [1, 2]], ValueError, "row 1 belongs to client 0 and to client 1"),
        ([[0], [2, 2]], ValueError, "client 1 holds row 2 2 times"),
        ([[0], [4]], ValueError, "rows of client 1 run from 4 to 4; expected 0 to 3"),
        ([[-1]], ValueError, "rows of client 0 run from -1"),
        ([[0], [1.0]], TypeError, "rows of client 1 have dtype float64"),
        ([[True, False]], TypeError, "rows of client 0 have dtype bool.*flatnonzero"),
        ([[[0, 1]]], ValueError, r"rows of client 0 have shape \(1, 2\)"),
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


@given(st.lists(st.sampled_from(["Romeo", "Juliet", "Nurse", "Paris"]), min_size=1, max_size=40))
def test_natural_clients_hold_their_own_group_and_all_of_it(groups):
    parts = partition.natural(groups)
    np.testing.assert_array_equal(owners(parts, len(groups)), 1)
    assert len(parts) == len(set(groups))
    for name, rows in zip(sorted(set(groups)), parts, strict=True):
        assert {groups[row] for row in rows} == {name}
        assert (np.diff(rows) > 0).all()


@pytest.mark.parametrize("groups", [[], [[0, 1]], "Romeo"])
def test_groups_are_one_label_for_each_example(groups):
    with pytest.raises(ValueError, match=r"groups have shape.*one label for each example"):
        partition.natural(groups)


@given(st.integers(2, 50), st.data(), SEEDS)
def test_clients_are_either_kept_or_held_out(num_clients, draw, seed):
    num_held_out = draw.draw(st.integers(1, num_clients - 1))
    kept, held_out = partition.hold_out(num_clients, num_held_out, seed)
    assert len(held_out) == num_held_out
    assert sorted([*kept, *held_out]) == list(range(num_clients))
    assert (np.diff(kept) > 0).all()
    assert (np.diff(held_out) > 0).all()


def test_every_client_is_held_out_equally_often():
    counts = sum(np.bincount(partition.hold_out(6, 2, seed)[1], minlength=6) for seed in range(900))
    np.testing.assert_allclose(counts, 300, atol=5 * (300 * 2 / 3) ** 0.5)


@pytest.mark.parametrize(("num_clients", "num_held_out"), [(1, 1), (5, 0), (5, 5), (5, -1)])
def test_both_sides_of_a_hold_out_have_a_client(num_clients, num_held_out):
    with pytest.raises(ValueError, match=r"num_(clients|held_out) is"):
        partition.hold_out(num_clients, num_held_out, 0)
