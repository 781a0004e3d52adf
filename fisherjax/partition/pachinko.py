"""Partition with label skew on two levels, for classes that belong to coarse classes."""

from bisect import bisect_right

import numpy as np

from fisherjax._core.checks import count, positive
from fisherjax.partition import checks


def pachinko(
    targets,
    num_clients: int,
    num_examples: int,
    coarse,
    seed: int,
    *,
    alpha: float = 0.1,
    beta: float = 10.0,
) -> list[np.ndarray]:
    """Draw equally many examples for each client, by shares of coarse and of fine classes.

        q_i ~ Dirichlet(alpha 1_K),    r_ik ~ Dirichlet(beta 1_(C_k)),
        each example:    k ~ q_i,    c ~ r_ik,    a row of class c that nobody has, uniformly

    Here K is the number of coarse classes and C_k that of the classes of coarse class k. Classes
    of which no row is left are removed, and the remaining shares are normalised. Two examples of a
    client agree in the coarse class with probability (alpha + 1) / (K alpha + 1) while rows are
    left, and then in the class with probability (beta + 1) / (C_k beta + 1).

    Args:
        targets: Class labels, integers [N]; the number of classes C is the largest plus one.
        num_clients: Number of clients M (500 for the training split of CIFAR-100, 100 for test).
        num_examples: Number of examples of each client (100 for CIFAR-100); M times this number is
            at most N. Rows that nobody draws have no client.
        coarse: The coarse class of each class, integers [C], such as `datasets.CIFAR100_COARSE`.
        seed: Seed of `numpy.random.RandomState`, which shuffles the ascending rows of each class
            and then draws one client after the other.
        alpha: Concentration over coarse classes (default 0.1).
        beta: Concentration over the classes of a coarse class (default 10).

    Raises:
        ValueError: If there are not enough examples, a class has no coarse class, or a number is
            out of range.
        TypeError: If labels are not integers.

    Example:
        >>> targets = [0, 1, 2, 3] * 5  # classes 0 and 1 are coarse class 0
        >>> parts = pachinko(targets, 4, num_examples=5, coarse=[0, 0, 1, 1], seed=0)
        >>> [len(part) for part in parts], len(set(np.concatenate(parts).tolist()))
        ([5, 5, 5, 5], 20)

    Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021, for CIFAR-100, with their
    parameters; Pachinko allocation is of Li and McCallum, ICML 2006. Deviation: shares are drawn as
    logarithms, so that a small alpha cannot underflow.
    """
    targets, coarse = checks.labels(targets), checks.labels(coarse)
    num_classes = int(targets.max()) + 1
    if len(coarse) < num_classes:
        raise ValueError(
            f"coarse has {len(coarse)} classes, but the targets have {num_classes}: pass the "
            "coarse class of every class"
        )
    for name, value in (("num_clients", num_clients), ("num_examples", num_examples)):
        count(name, value)
    positive("alpha", alpha)
    positive("beta", beta)
    if num_clients * num_examples > len(targets):
        raise ValueError(
            f"{num_clients} clients of {num_examples} examples need {num_clients * num_examples} "
            f"of them, but there are {len(targets)}: ask for fewer clients or fewer examples"
        )
    random = checks.random_state(seed)
    # A uniformly random row that is left is the last one of a shuffled list.
    rows = [random.permutation(np.flatnonzero(targets == c)).tolist() for c in range(num_classes)]
    groups = [np.flatnonzero(coarse[:num_classes] == k) for k in range(int(coarse.max()) + 1)]
    return [
        _draw_client(random, rows, groups, num_examples, alpha, beta) for _ in range(num_clients)
    ]


def _draw_client(
    random, rows: list[list], groups: list[np.ndarray], number: int, alpha: float, beta: float
) -> np.ndarray:
    """Draw the rows of one client, and remove them from the rows that are left."""
    above = _log_shares(random, len(groups), alpha)
    below = [_log_shares(random, len(classes), beta) for classes in groups]
    drawn, is_new = [], True
    for first, second in random.random_sample((number, 2)):
        if is_new:  # shares change only when a class runs out
            left = [np.array([len(rows[c]) > 0 for c in classes], bool) for classes in groups]
            coarse = _cumulative(above, np.array([own.any() for own in left]))
            fine = [_cumulative(*own) for own in zip(below, left, strict=True)]
        k = bisect_right(coarse, first)
        own = rows[groups[k][bisect_right(fine[k], second)]]
        drawn.append(own.pop())
        is_new = not own
    return np.array(drawn)


def _log_shares(random, number: int, alpha: float) -> np.ndarray:
    """Draw logarithms of Dirichlet shares, up to a constant."""
    # Gamma(alpha) is Gamma(alpha + 1) U^(1 / alpha), with U above 0.
    uniform = 1 - random.random_sample(number)
    return np.log(random.gamma(alpha + 1, size=number)) + np.log(uniform) / alpha


def _cumulative(logs: np.ndarray, left: np.ndarray) -> list[float]:
    """Return the cumulative shares of what is left; the last is exactly 1."""
    if not left.any():
        return []
    shares = np.where(left, np.exp(np.minimum(logs - logs[left].max(), 0)), 0)
    total = np.cumsum(shares)
    return (total / total[-1]).tolist()
