"""The two-level split of CIFAR-100: its sizes, its closed forms, its limits."""

import numpy as np
import pytest

from fisherjax import datasets, partition

TARGETS = np.repeat(np.arange(100), 500)
COARSE = np.array(datasets.CIFAR100_COARSE)
# The classes of each superclass, as on the page of the data set; superclasses by their names.
SUPERCLASSES = {
    "aquatic_mammals": "beaver dolphin otter seal whale",
    "fish": "aquarium_fish flatfish ray shark trout",
    "flowers": "orchid poppy rose sunflower tulip",
    "food_containers": "bottle bowl can cup plate",
    "fruit_and_vegetables": "apple mushroom orange pear sweet_pepper",
    "household_electrical_devices": "clock keyboard lamp telephone television",
    "household_furniture": "bed chair couch table wardrobe",
    "insects": "bee beetle butterfly caterpillar cockroach",
    "large_carnivores": "bear leopard lion tiger wolf",
    "large_man-made_outdoor_things": "bridge castle house road skyscraper",
    "large_natural_outdoor_scenes": "cloud forest mountain plain sea",
    "large_omnivores_and_herbivores": "camel cattle chimpanzee elephant kangaroo",
    "medium_mammals": "fox porcupine possum raccoon skunk",
    "non-insect_invertebrates": "crab lobster snail spider worm",
    "people": "baby boy girl man woman",
    "reptiles": "crocodile dinosaur lizard snake turtle",
    "small_mammals": "hamster mouse rabbit shrew squirrel",
    "trees": "maple_tree oak_tree palm_tree pine_tree willow_tree",
    "vehicles_1": "bicycle bus motorcycle pickup_truck train",
    "vehicles_2": "lawn_mower rocket streetcar tank tractor",
}


def test_coarse_classes_are_those_of_the_names():
    names = sorted(" ".join(SUPERCLASSES.values()).split())
    superclass = {x: k for k, own in enumerate(SUPERCLASSES.values()) for x in own.split()}
    assert list(SUPERCLASSES) == sorted(SUPERCLASSES)
    assert tuple(superclass[name] for name in names) == datasets.CIFAR100_COARSE


@pytest.fixture(scope="module")
def whole():
    return partition.pachinko(TARGETS, 500, 100, COARSE, seed=0)


def test_500_clients_of_100_examples_have_every_row_once(whole):
    assert [len(rows) for rows in whole] == [100] * 500
    np.testing.assert_array_equal(np.sort(np.concatenate(whole)), np.arange(50_000))


@pytest.mark.long
def test_a_seed_repeats_its_split(whole):
    again = partition.pachinko(TARGETS, 500, 100, COARSE, seed=0)
    other = partition.pachinko(TARGETS, 500, 100, COARSE, seed=1)
    np.testing.assert_array_equal(whole, again)
    assert (np.array(whole) != np.array(other)).any()


def agreeing_pairs(labels):
    """Return which share of all pairs of a client's examples has equal labels, [M]."""
    size = labels.shape[1]
    return ((labels[:, None] == labels[:, :, None]).sum((1, 2)) - size) / (size * (size - 1))


def drawn(alpha, beta, clients=40, seed=0):
    """Return the classes of few clients, so that no class runs out: [M, 100]."""
    targets = np.repeat(np.arange(100), 3000)
    rows = partition.pachinko(targets, clients, 100, COARSE, seed, alpha=alpha, beta=beta)
    return targets[np.array(rows)]


@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 10), (1, 0.1), (1e9, 1e9), (1e-9, 1e-9)])
def test_examples_of_a_client_agree_as_polya_urns_do(alpha, beta):
    classes = drawn(alpha, beta)
    coarse = (alpha + 1) / (20 * alpha + 1)
    for labels, expected in (
        (COARSE[classes], coarse),
        (classes, coarse * (beta + 1) / (5 * beta + 1)),
    ):
        found = agreeing_pairs(labels)
        error = found.std() / np.sqrt(len(found))
        assert abs(found.mean() - expected) < 4 * error + 1e-6


def test_with_large_parameters_classes_are_those_of_a_uniform_draw():
    """Chi-squared of 100 classes against equal shares, over all clients."""
    counts = np.bincount(drawn(1e9, 1e9).ravel(), minlength=100)
    assert abs(((counts - 40) ** 2 / 40).sum() - 99) < 5 * np.sqrt(2 * 99)


def test_clients_concentrate_as_alpha_falls_until_they_have_one_coarse_class():
    found = [
        agreeing_pairs(COARSE[drawn(alpha, 10)]).mean() for alpha in (1e3, 10, 1, 0.1, 1e-2, 1e-6)
    ]
    assert found == sorted(found)
    assert found[-1] == 1


def test_classes_that_run_out_leave_their_shares_to_the_others():
    targets = [0] * 2 + [1] * 8 + [2] * 10  # class 2 is a coarse class of its own
    parts = partition.pachinko(targets, 4, 5, [0, 0, 1], seed=1, alpha=1e-6, beta=1e-6)
    counts = partition.label_counts(targets, parts)
    np.testing.assert_array_equal(counts.sum(0), [2, 8, 10])
    np.testing.assert_array_equal(counts.sum(1), 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_clients": 501}, "501 clients of 100 examples need 50100"),
        ({"coarse": COARSE[:99]}, "coarse has 99 classes"),
        ({"alpha": 0}, "alpha"),
        ({"beta": -1}, "beta"),
        ({"num_examples": 0}, "num_examples"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    given = {"targets": TARGETS, "coarse": COARSE, "num_clients": 500, "num_examples": 100}
    with pytest.raises(ValueError, match=words):
        partition.pachinko(**given | {"seed": 0} | change)
