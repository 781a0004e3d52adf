"""Schemes that give clients different shares of the classes, and the table that shows them.

NIID-Bench is Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental Study",
ICDE 2022, with its code.
"""

import random as standard_random
from collections.abc import Sequence

import numpy as np

from fisherjax.partition import checks


def dirichlet_of_client(targets, num_clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Split every class over the clients in the proportion of their Dirichlet draws.

        q_i ~ Dirichlet(alpha 1_C),    r_ic = q_ic / sum_j q_jc,
        client i ends at floor(N_c sum_{j <= i} r_jc) of class c

    Clients draw shares of the classes and each class is then normalised over the clients, so that
    all data is used, sizes vary strongly, and a client may end up empty.

    Args:
        targets: Class labels, integers [N]; the number of classes is the largest plus one.
        num_clients: M, between 1 and N.
        alpha: Concentration; 0.05 gives a client one or two classes, 100 nearly equal shares.
        seed: Of `numpy.random.RandomState`: M draws in client order, then one shuffle of the
            ascending rows of each class, class by class. The authors use 3 in every run.

    Raises:
        ValueError: If `alpha`, `num_clients`, `seed` or the labels are out of range.
        TypeError: If the labels are not integers.

    Example:
        >>> parts = dirichlet_of_client([0, 1] * 4, num_clients=2, alpha=0.5, seed=3)
        >>> sorted(int(row) for part in parts for row in part)
        [0, 1, 2, 3, 4, 5, 6, 7]

    Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024, section 5 and its code. Where the
    code would divide zero by zero: a client whose draw underflows gets one random class (the limit
    of small alpha), a class that nobody drew is shared equally.
    """
    classes = _classes(targets, num_clients)
    checks.concentration("alpha", alpha)
    random = checks.random_state(seed)
    shares = _dirichlet_shares(random, num_clients, len(classes), alpha)
    pairs = zip(classes, shares.T, strict=True)
    dealt = [_cut(random.permutation(rows), of_class) for rows, of_class in pairs]
    return [np.concatenate(parts) for parts in zip(*dealt, strict=True)]


def niid_bench(
    targets, num_clients: int, beta: float, seed: int, *, min_size: int = 10, max_draws: int = 10000
) -> list[np.ndarray]:
    """Split every class over the clients by a Dirichlet draw, sparing those that have enough.

        q_c ~ Dirichlet(beta 1_M),    q_ci <- 0 where client i holds N / M examples or more,
        client i ends at floor(N_c sum_{j <= i} q_cj / sum_j q_cj) of class c

    class by class, all over again until every client holds `min_size` examples, at most `max_draws`
    times; small beta and many clients need most. At beta 0.01 a class goes to one client or two, at
    100 to all equally.

    Targets and num_clients are those of `dirichlet_of_client`. For each class the generator of the
    seed shuffles the ascending rows, then draws the shares; at last it shuffles the rows of each
    client.

    Raises:
        ValueError: If no draw gives each client `min_size` examples, or a number is out of range.
        TypeError: If the labels or a count are not integers.

    Example:
        >>> parts = niid_bench([0, 1] * 20, num_clients=2, beta=0.5, seed=0)
        >>> sorted(len(part) for part in parts)
        [15, 25]

    Source: NIID-Bench ("distribution-based label imbalance"), whose splits these are, seed by seed.
    Deviations: its code draws for ever; and where the draws of all clients that may still receive
    underflow, it divides zero by zero. They are drawn again by the same law, in logarithms.
    """
    classes, num_examples = _classes(targets, num_clients), len(targets)
    checks.concentration("beta", beta)
    checks.count("min_size", min_size, 0)
    checks.count("max_draws", max_draws, 1)
    if num_clients * min_size > num_examples:
        raise ValueError(
            f"{num_clients} clients cannot hold min_size={min_size} of {num_examples} examples "
            f"each: ask for min_size up to {num_examples // num_clients}, or fewer clients"
        )
    random, best = checks.random_state(seed), 0
    for _ in range(max_draws):
        clients = _balanced_draw(random, classes, num_clients, beta)
        smallest = min(map(len, clients))
        if smallest >= min_size:
            # Only what is kept is shuffled, as a shuffle draws too.
            return [random.permutation(rows) for rows in clients]
        best = max(best, smallest)
    raise ValueError(
        f"none of {max_draws} draws gave each of {num_clients} clients min_size={min_size} "
        f"examples; the best gave every client {best}. What would do: min_size={best}, a beta "
        f"above {beta:g}, fewer clients, or more than max_draws={max_draws}"
    )


def classes_per_client(targets, num_clients: int, num_classes: int, seed: int) -> list[np.ndarray]:
    """Give every client the same number of classes; the owners of a class share it equally.

    Client i owns class i mod C and further classes chosen at random, `num_classes` in all (k of the
    paper's "#C=k"). Where there are fewer clients than classes, the examples of a class that nobody
    owns are left out.

    Targets and num_clients are those of `dirichlet_of_client`. The seed is that of `random.Random`,
    which chooses the classes, client by client, and of `numpy.random.RandomState`, which shuffles
    the ascending rows of each class.

    Raises:
        ValueError: If a class has fewer examples than owners, or an argument is out of range.
        TypeError: If the labels or a count are not integers.

    Example:
        >>> targets = [0, 1, 2] * 6
        >>> parts = classes_per_client(targets, 3, num_classes=2, seed=0)
        >>> label_counts(targets, parts).tolist()
        [[3, 2, 0], [3, 2, 0], [0, 2, 6]]

    Source: NIID-Bench ("quantity-based label imbalance"), whose splits these are, seed by seed.
    """
    classes = _classes(targets, num_clients)
    total = len(classes)
    checks.count("num_classes", num_classes, 1)
    if num_classes > total:
        raise ValueError(
            f"num_classes is {num_classes}, but the targets have {total} classes: ask for 1 to "
            f"{total} classes a client"
        )
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
        # Without an owner the examples are left out.
        parts = np.array_split(shuffled, len(own)) if own else []
        for client, part in zip(own, parts, strict=True):
            clients[client].append(part)
    return [np.concatenate(parts) for parts in clients]


def label_counts(targets, partition: Sequence[np.ndarray]) -> np.ndarray:
    """Count how many examples of each class, by targets [N], each client holds: integers [M, C].

    Raises:
        ValueError: If the labels are negative or the partition is not one of these N examples.
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
    """Give the ascending rows of each class, where targets and clients pass their checks."""
    targets = checks.labels(targets)
    checks.num_clients(num_clients, len(targets))
    return [np.flatnonzero(targets == label) for label in range(int(targets.max()) + 1)]


def _cut(rows: np.ndarray, shares: np.ndarray) -> list[np.ndarray]:
    """Cut the rows of a class into the clients' shares [M] of it."""
    # The last client takes what rounding leaves: its end is not computed.
    return np.split(rows, (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64))


def _balanced_draw(
    random, classes: list[np.ndarray], num_clients: int, beta: float
) -> list[np.ndarray]:
    """Split the rows of all classes once; the rows of each client."""
    capacity = sum(map(len, classes)) / num_clients
    dealt, sizes = [], np.zeros(num_clients, np.int64)
    for ascending in classes:
        rows = random.permutation(ascending)
        # An empty class needs no room; by then there may be none.
        has_room = (sizes < capacity) | (len(rows) == 0)
        dealt.append(_cut(rows, _shares_of_class(random, has_room, beta)))
        sizes += list(map(len, dealt[-1]))
    return [np.concatenate(parts) for parts in zip(*dealt, strict=True)]


def _shares_of_class(random, has_room: np.ndarray, beta: float) -> np.ndarray:
    """Draw shares [M] of a class, zero for clients without room."""
    with np.errstate(all="ignore"):
        shares = random.dirichlet(np.full(len(has_room), beta)) * has_room
        # All that may receive underflowed, or NumPy's whole draw, of which it then takes 1 / 0.
        if not 0 < shares.sum() < np.inf:
            # Gamma(beta) is Gamma(beta + 1) U^(1/beta), here with logarithms multiplied by beta.
            logs = beta * np.log(random.gamma(beta + 1, size=len(has_room)))
            logs += np.log(random.random_sample(len(has_room)))
            logs = np.where(has_room, logs, -np.inf)
            # Divided by the largest first: it alone is certain not to underflow.
            shares = np.exp((logs - logs.max()) / beta)
    return shares / shares.sum()


def _draw_owners(random, num_clients: int, num_classes: int, total: int) -> list[list[int]]:
    """Let every client choose its classes; the owners of each class, in client order."""
    owners = [[] for _ in range(total)]
    for client in range(num_clients):
        own = {client % total}
        # Repetitions are thrown away, not avoided: the authors' draws are the same.
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
        # All gamma draws underflowed. The largest would have outweighed the others by far.
        draws[client] = np.eye(num_classes)[random.randint(num_classes)]
    totals = draws.sum(axis=0, keepdims=True)
    drawn = totals > 0
    # The inner where keeps NumPy from dividing by zero, the outer one takes no notice of it.
    return np.where(drawn, draws / np.where(drawn, totals, 1.0), 1.0 / num_clients)
