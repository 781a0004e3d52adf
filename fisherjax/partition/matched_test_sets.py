"""Partition training and test data alike, to evaluate each client on its own distribution."""

import numpy as np

from fisherjax.partition import checks


def pathological(targets, num_clients: int, num_classes: int, seed: int) -> list[np.ndarray]:
    """Partition such that each client has k classes, with unequal shares of them.

    Every class has k M / C clients, rounded down or up. Each client in turn gets k different
    classes, those to which most clients are still to be assigned, with ties broken at random. The
    shares of the clients of a class are drawn from U(0.4, 0.6) and normalised. Partition the test
    data with `in_proportion(test.targets, label_counts(targets, partition), seed)`.

    Args:
        targets: Class labels, integers [N]; the number of classes C is the largest plus one.
        num_clients: Number of clients M, from 1 to N.
        num_classes: Classes k of each client, from 1 to C; the paper has 8 for CIFAR-10 and 20 for
            CIFAR-100. If k M is less than C, examples of classes without a client are left out.
        seed: Seed of `numpy.random.RandomState`.

    Raises:
        ValueError: If an argument is not an integer or out of range.
        TypeError: If the labels are not integers.

    Example:
        >>> from fisherjax.partition import label_counts
        >>> counts = label_counts([0, 1, 2] * 20, pathological([0, 1, 2] * 20, 3, 2, seed=0))
        >>> (counts > 0).sum(0).tolist(), (counts > 0).sum(1).tolist()
        ([2, 2, 2], [2, 2, 2])

    Source: Huang, Shi, Cai, Suzuki, ICLR 2024, section 6 ("pathological", without details), as
    in the code of Cai, Shi, Huang, Wang, Fed-CO2, NeurIPS 2023, where a client may get a class
    twice.
    """
    targets = checks.labels(targets)
    checks.num_clients(num_clients, len(targets))
    total = int(targets.max()) + 1
    checks.num_classes(num_classes, total)
    random = checks.random_state(seed)
    lacking = np.full(total, num_clients * num_classes // total)
    more = random.permutation(total)[: num_clients * num_classes % total]
    lacking[more] += 1
    shares = np.zeros((num_clients, total))
    for own in shares:
        # Classes that lack most clients come first, ties in random order.
        taken = np.lexsort((random.random_sample(total), -lacking))[:num_classes]
        lacking[taken] -= 1
        own[taken] = random.uniform(0.4, 0.6, num_classes)
    return in_proportion(targets, shares, int(random.randint(2**31)))


def in_proportion(targets, counts, seed: int) -> list[np.ndarray]:
    """Partition each class in given proportions, such as those of another partition.

        client i ends at floor(N_c sum_{j <= i} counts_jc / sum_j counts_jc) of class c

    With the counts of the training data, each client's test data have the same shares of the
    classes as its training data.

    Args:
        targets: Class labels, integers [N], from 0 to C - 1.
        counts: Numbers of at least 0, [M, C], such as `label_counts` of the other partition. A
            class whose counts are all zero is left out.
        seed: Seed of `numpy.random.RandomState`, which shuffles the ascending rows of each class.

    Raises:
        ValueError: If a label has no column, or counts are negative or not finite.
        TypeError: If the labels are not integers.

    Example:
        >>> parts = in_proportion([0, 1] * 4, [[3, 0], [1, 5]], seed=0)
        >>> [len(rows) for rows in parts]
        [3, 5]

    Source: Huang, Shi, Cai, Suzuki, ICLR 2024, who test each client on its own distribution.
    """
    targets, counts = checks.labels(targets), np.asarray(counts, float)
    if counts.ndim != 2 or not len(counts) or not (np.isfinite(counts) & (counts >= 0)).all():
        raise ValueError(
            f"counts has shape {counts.shape} and numbers from {counts.min(initial=np.inf):g} to "
            f"{counts.max(initial=-np.inf):g}; expected finite numbers [M, C] from 0 up"
        )
    if targets.max() >= counts.shape[1]:
        raise ValueError(
            f"targets go up to {targets.max()}, but counts has columns for {counts.shape[1]} "
            "classes: take the counts of data with all of these classes"
        )
    random = checks.random_state(seed)
    clients: list[list[np.ndarray]] = [[] for _ in counts]
    for label, column in enumerate(counts.T):
        rows = random.permutation(np.flatnonzero(targets == label))
        if column.any():
            # Multiplied before divided: for integers a quotient that is an integer is exact. For
            # other numbers, rounding must not take the last row from the last client with a share.
            sums = np.cumsum(column)
            ends = np.where(sums < sums[-1], np.floor(len(rows) * sums / sums[-1]), len(rows))
            for own, part in zip(clients, np.split(rows, ends[:-1].astype(int)), strict=True):
                own.append(part)
    empty = np.zeros(0, np.int64)
    return [np.concatenate([empty, *parts]) for parts in clients]
