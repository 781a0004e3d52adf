"""Partition with label skew, so that clients have different shares of the classes.

NIID-Bench is Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental Study",
ICDE 2022, with its code.
"""

import random as standard_random
from collections.abc import Sequence

import numpy as np

from fisherjax._core.checks import count, positive
from fisherjax.partition import checks

_ROUND_BETAS = [digit * 10.0**power for power in range(-3, 3) for digit in (1, 2, 5)]
"""What `niid_bench` tries, each with a twentieth of the draws, where a beta has no partition."""


def dirichlet_of_client(targets, num_clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Partition each class among clients in proportion to the clients' Dirichlet draws.

        q_i ~ Dirichlet(alpha 1_C),    r_ic = q_ic / sum_j q_jc,
        client i ends at floor(N_c sum_{j <= i} r_jc) of class c

    Each client draws shares of the classes, which are then normalised over the clients for each
    class. Therefore all examples are used, sizes vary strongly, and a client may be empty.

    Args:
        targets: Class labels, integers [N]; the number of classes is the largest plus one.
        num_clients: Number of clients M, from 1 to N.
        alpha: Concentration; with 0.05 a client has one or two classes, with 100 nearly equal
            shares of all.
        seed: Seed of `numpy.random.RandomState`, which makes M draws in client order and then one
            shuffle of the ascending rows of each class. The authors use 3 in every run.

    Raises:
        ValueError: If `alpha`, `num_clients`, `seed` or the labels are out of range.
        TypeError: If the labels are not integers.

    Example:
        >>> parts = dirichlet_of_client([0, 1] * 4, num_clients=2, alpha=0.5, seed=3)
        >>> sorted(int(row) for part in parts for row in part)
        [0, 1, 2, 3, 4, 5, 6, 7]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, section 5 and its code. Deviations
    where the code would divide zero by zero: a client whose draw underflows gets one random class
    (the limit of small alpha), and a class that no client drew is divided equally.
    """
    classes = _classes(targets, num_clients)
    positive("alpha", alpha)
    random = checks.random_state(seed)
    shares = _dirichlet_shares(random, num_clients, len(classes), alpha)
    pairs = zip(classes, shares.T, strict=True)
    dealt = [_cut(random.permutation(rows), of_class) for rows, of_class in pairs]
    return [np.concatenate(parts) for parts in zip(*dealt, strict=True)]


def niid_bench(
    targets, num_clients: int, beta: float, seed: int, *, min_size: int = 10, max_draws: int = 10000
) -> list[np.ndarray]:
    """Partition each class by a Dirichlet draw over clients with fewer than N / M examples.

        q_c ~ Dirichlet(beta 1_M),    q_ci <- 0 where client i holds N / M examples or more,
        client i ends at floor(N_c sum_{j <= i} q_cj / sum_j q_cj) of class c

    The classes are drawn one after the other. The whole partition is drawn again until every client
    has `min_size` examples; small beta and many clients need most draws.

    Args:
        targets: Class labels, integers [N]; the number of classes is the largest plus one.
        num_clients: Number of clients M, from 1 to N.
        beta: Concentration; with 0.01 one or two clients have a class, with 100 all have equal
            shares of it.
        seed: Seed of `numpy.random.RandomState`, which for each class shuffles the ascending rows
            and draws the shares, and at last shuffles the rows of each client.
        min_size: Smallest number of examples of a client (default 10).
        max_draws: Largest number of draws of the partition (default 10000).

    Raises:
        ValueError: If no draw gives each client `min_size` examples, with a larger beta that does;
            or if a number is out of range.
        TypeError: If the labels are not integers.

    Example:
        >>> parts = niid_bench([0, 1] * 20, num_clients=2, beta=0.5, seed=0)
        >>> sorted(len(part) for part in parts)
        [15, 25]

    Source: NIID-Bench ("distribution-based label imbalance"), whose splits these are for equal
    seeds. Deviations: its code never stops drawing; and if the draws of all clients with fewer than
    N / M examples underflow, it divides zero by zero. Here they are drawn again from the same
    distribution, in logarithms.
    """
    classes, num_examples = _classes(targets, num_clients), len(targets)
    positive("beta", beta)
    count("min_size", min_size, 0)
    count("max_draws", max_draws)
    if num_clients * min_size > num_examples:
        raise ValueError(
            f"{num_clients} clients cannot have min_size={min_size} of {num_examples} examples "
            f"each: ask for min_size up to {num_examples // num_clients}, or fewer clients"
        )
    random, best = checks.random_state(seed), 0
    for _ in range(max_draws):
        clients, smallest = _balanced_draw(random, classes, num_clients, beta)
        if smallest >= min_size:
            # Only the accepted partition is shuffled, because a shuffle draws from the generator.
            return [random.permutation(rows) for rows in clients]
        best = max(best, smallest)

    def can_be_drawn(larger: float) -> bool:
        again = checks.random_state(seed)
        draws = (
            _balanced_draw(again, classes, num_clients, larger) for _ in range(max_draws // 20)
        )
        return any(smallest >= min_size for _, smallest in draws)

    larger = filter(can_be_drawn, (x for x in _ROUND_BETAS if x > beta))
    nearest = next((f"beta={x:g}" for x in larger), f"a beta above {beta:g}")
    raise ValueError(
        f"none of {max_draws} draws with beta={beta:g} gave each of {num_clients} clients "
        f"min_size={min_size} examples; the best gave every client {best}. Try {nearest}, "
        f"min_size={best}, fewer clients, or more than max_draws={max_draws}"
    )


def classes_per_client(targets, num_clients: int, num_classes: int, seed: int) -> list[np.ndarray]:
    """Partition such that each client has the same number of classes, in equal shares.

    Client i has class i mod C and other classes at random. The clients that have a class divide it
    equally. With fewer clients than classes, the examples of classes without a client are left out.

    Args:
        targets: Class labels, integers [N]; the number of classes is the largest plus one.
        num_clients: Number of clients M, from 1 to N.
        num_classes: Classes of each client, from 1 to C (k of the paper's "#C=k").
        seed: Seed of `random.Random`, which draws the classes of one client after the other, and of
            `numpy.random.RandomState`, which shuffles the ascending rows of each class.

    Raises:
        ValueError: If a class has fewer examples than clients, or an argument is out of range.
        TypeError: If the labels are not integers.

    Example:
        >>> targets = [0, 1, 2] * 6
        >>> parts = classes_per_client(targets, 3, num_classes=2, seed=0)
        >>> label_counts(targets, parts).tolist()
        [[3, 2, 0], [3, 2, 0], [0, 2, 6]]

    Source: NIID-Bench ("quantity-based label imbalance"), whose splits these are for equal seeds.
    """
    classes = _classes(targets, num_clients)
    total = len(classes)
    checks.num_classes(num_classes, total)
    random = checks.random_state(seed)
    owners = _draw_owners(standard_random.Random(int(seed)), num_clients, num_classes, total)
    clients = [[] for _ in range(num_clients)]
    for label, (rows, own) in enumerate(zip(classes, owners, strict=True)):
        if len(rows) < len(own):
            raise ValueError(
                f"class {label} has {len(rows)} examples for the {len(own)} clients that own it: "
                "ask for fewer clients or fewer classes a client"
            )
        shuffled = random.permutation(rows)
        # Examples of a class without a client are left out.
        parts = np.array_split(shuffled, len(own)) if own else []
        for client, part in zip(own, parts, strict=True):
            clients[client].append(part)
    return [np.concatenate(parts) for parts in clients]


def label_counts(targets, partition: Sequence[np.ndarray]) -> np.ndarray:
    """Count the examples of each class that each client has, integers [M, C].

    Raises:
        ValueError: If a label is negative or the partition does not fit the N targets.
        TypeError: If the labels or the row numbers are not integers.

    Example:
        >>> label_counts([0, 1, 1, 2], [[0, 1], [2, 3]])
        array([[1, 1, 0],
               [0, 1, 1]])
    """
    targets = checks.labels(targets)
    checks.check_partition(partition, len(targets))
    num_classes = int(targets.max()) + 1
    rows = [np.asarray(part, np.int64) for part in partition]
    return np.stack([np.bincount(targets[row], minlength=num_classes) for row in rows])


def _classes(targets, num_clients: int) -> list[np.ndarray]:
    """Check targets and the number of clients; return the ascending rows of each class."""
    targets = checks.labels(targets)
    checks.num_clients(num_clients, len(targets))
    return [np.flatnonzero(targets == label) for label in range(int(targets.max()) + 1)]


def _cut(rows: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
    """Divide the rows of a class among the clients by their shares [M]."""
    # The last client gets the rows that are left by rounding.
    return np.split(rows, (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64))


def _balanced_draw(
    random, classes: list[np.ndarray], num_clients: int, beta: float
) -> tuple[list[np.ndarray], int]:
    """Draw one partition of all classes; return the rows of each client, and the fewest."""
    capacity = sum(map(len, classes)) / num_clients
    dealt, sizes = [], np.zeros(num_clients, np.int64)
    for ascending in classes:
        rows = random.permutation(ascending)
        # An empty class fits everywhere; no client may have room at this point.
        has_room = (sizes < capacity) | (len(rows) == 0)
        dealt.append(_cut(rows, _shares_of_class(random, has_room, beta)))
        sizes += list(map(len, dealt[-1]))
    return [np.concatenate(parts) for parts in zip(*dealt, strict=True)], int(sizes.min())


def _shares_of_class(random, has_room: np.ndarray, beta: float) -> np.ndarray:
    """Draw the clients' shares [M] of a class, zero for clients without room."""
    with np.errstate(all="ignore"):
        shares = random.dirichlet(np.full(len(has_room), beta)) * has_room
        # All shares of clients with room underflowed, or all shares, for which NumPy takes 1 / 0.
        if not 0 < shares.sum() < np.inf:
            # Gamma(beta) is Gamma(beta + 1) U^(1/beta). The logarithms are multiplied by beta.
            logs = beta * np.log(random.gamma(beta + 1, size=len(has_room)))
            logs += np.log(random.random_sample(len(has_room)))
            logs = np.where(has_room, logs, -np.inf)
            # Divided by the largest share first, which then cannot underflow.
            shares = np.exp((logs - logs.max()) / beta)
    return shares / shares.sum()


def _draw_owners(random, num_clients: int, num_classes: int, total: int) -> list[list[int]]:
    """Draw the classes of each client; return the clients of each class, in client order."""
    owners = [[] for _ in range(total)]
    for client in range(num_clients):
        own = {client % total}
        # Repeated draws are dropped, not avoided, to have the same draws as the authors.
        while len(own) < num_classes:
            own.add(random.randint(0, total - 1))
        for label in own:
            owners[label].append(client)
    return owners


def _dirichlet_shares(random, num_clients: int, num_classes: int, alpha: float) -> np.ndarray:
    """Draw each client's classes, then normalise each class over the clients: [M, C]."""
    with np.errstate(invalid="ignore", divide="ignore"):
        draws = random.dirichlet(np.full(num_classes, alpha), size=num_clients)
    for client in np.flatnonzero(~np.isfinite(draws).all(axis=1)):
        # All gamma draws underflowed. One class would have had nearly the whole share.
        draws[client] = np.eye(num_classes)[random.randint(num_classes)]
    totals = draws.sum(axis=0, keepdims=True)
    drawn = totals > 0
    # The inner `where` avoids a division by zero, whose result the outer one does not use.
    return np.where(drawn, draws / np.where(drawn, totals, 1.0), 1.0 / num_clients)
