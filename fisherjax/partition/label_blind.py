"""Partition without reading labels: equal parts, one part, or existing groups."""

import numbers

import numpy as np

from fisherjax._core.checks import count
from fisherjax.partition import checks


def iid(targets_or_num_examples, num_clients: int, seed: int) -> list[np.ndarray]:
    """Partition examples at random into equal parts; the first N mod M parts have one more.

    Args:
        targets_or_num_examples: The targets [N, ...], whose values are not read, or their number N.
        num_clients: Number of clients M, from 1 to N.
        seed: Seed of `numpy.random.RandomState`, which draws one permutation of the N rows.

    Raises:
        ValueError: If `num_clients` is not from 1 to N, or the seed is out of range.
        TypeError: If the number of examples is not an integer.

    Example:
        >>> [len(part) for part in iid(10, num_clients=3, seed=0)]
        [4, 3, 3]

    Source: "homogeneous" of Li et al., Federated Learning on Non-IID Data Silos, ICDE 2022.
    """
    num_examples = _num_examples(targets_or_num_examples)
    checks.num_clients(num_clients, num_examples)
    return np.array_split(checks.random_state(seed).permutation(num_examples), num_clients)


def central(targets_or_num_examples) -> list[np.ndarray]:
    """Return all examples as one client, for the central training that merging is compared with.

    The argument is that of `iid`.

    Raises:
        ValueError: If there is no example.

    Example:
        >>> central(4)
        [array([0, 1, 2, 3])]
    """
    num_examples = _num_examples(targets_or_num_examples)
    checks.num_clients(1, num_examples)
    return [np.arange(num_examples)]


def natural(groups) -> list[np.ndarray]:
    """Partition examples by their groups, such as writers, speakers or hospitals.

    Args:
        groups: The group of each example, numbers or strings [N].

    Returns:
        One client for each group, in the order of `numpy.unique(groups)`, with ascending rows.

    Raises:
        ValueError: If `groups` is not one label for each of at least one example.

    Example:
        >>> natural(["Romeo", "Juliet", "Romeo"])
        [array([1]), array([0, 2])]

    Source: Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar, LEAF: A Benchmark for
    Federated Settings, 2018.
    """
    groups = np.asarray(groups)
    if groups.ndim != 1 or groups.size == 0:
        raise ValueError(
            f"groups have shape {groups.shape}, expected one label for each example, [N], and at "
            "least one example"
        )
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    # One stable sort for all groups, so that the rows of each group are ascending.
    return np.split(np.argsort(number, kind="stable"), np.cumsum(sizes)[:-1])


def hold_out(num_clients: int, num_held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw held-out clients, which do not train, to evaluate a model on new clients.

    Args:
        num_clients: Number of clients M.
        num_held_out: Number of clients to hold out, from 1 to M - 1.
        seed: Seed of `numpy.random.RandomState`, which draws one permutation of the M clients.

    Returns:
        The numbers of the clients that train, and those of the held-out clients, each ascending.

    Raises:
        ValueError: If no client would train or none is held out, or an argument is not an integer
            or out of range.

    Example:
        >>> hold_out(5, 2, seed=0)
        (array([1, 3, 4]), array([0, 2]))

    Source: Yuan, Morningstar, Ning, Singhal, What Do We Mean by Generalization in Federated
    Learning?, ICLR 2022 (participation gap).
    """
    count("num_clients", num_clients, 2)
    expected = f"1 to {num_clients - 1} of {num_clients} clients, so that some are left to train"
    count("num_held_out", num_held_out, 1, num_clients - 1, expected)
    held_out, kept = np.split(checks.random_state(seed).permutation(num_clients), [num_held_out])
    return np.sort(kept), np.sort(held_out)


def _num_examples(targets_or_num_examples) -> int:
    if isinstance(targets_or_num_examples, numbers.Integral):
        return int(targets_or_num_examples)
    shape = np.shape(targets_or_num_examples)
    if not shape:
        raise TypeError(
            f"got {targets_or_num_examples!r}, expected the targets [N, ...] or their number N"
        )
    return shape[0]
