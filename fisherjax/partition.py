"""Which example belongs to which client.

Every scheme is a NumPy function on the host, of the targets and an integer seed, and returns a
*partition*: a list with one integer array of row numbers per client. Together the arrays name
every example exactly once, unless a scheme says otherwise; a client's array may be empty. The seed
of the partition has nothing to do with the keys of training, so that one split can be trained many
times.

Letters: M clients, N examples, C classes.
"""

import math
import numbers
import random as standard_random
from collections.abc import Sequence

import numpy as np


def fedfisher(targets, num_clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    r"""Split every class over the clients in the proportion of their Dirichlet draws.

    .. math:: q_i \sim \mathrm{Dir}(\alpha 1_C), \qquad r_{ic} = q_{ic} / \sum_j q_{jc}, \qquad
              \text{client } i \text{ ends at } \lfloor N_c \sum_{j \le i} r_{jc} \rfloor
              \text{ of class } c.

    Clients draw shares of the classes and each class is then normalised over the clients, so that
    all data is used, sizes vary strongly, and a client may end up empty.

    Args:
      targets: class labels, integers ``[N]``; the number of classes is the largest plus one.
      num_clients: M, between 1 and N.
      alpha: concentration; 0.05 gives a client one or two classes, 100 nearly equal shares.
      seed: of ``numpy.random.RandomState``: M draws in client order, then one shuffle of the
        ascending rows of each class, class by class. The authors use 3 in every run.

    Returns:
      M arrays of row numbers, classes in ascending order.

    Raises:
      ValueError: if ``alpha``, ``num_clients``, ``seed`` or the labels are out of range.
      TypeError: if the labels are not integers.

    Example:
      >>> parts = fedfisher([0, 1, 0, 1, 0, 1, 0, 1], num_clients=2, alpha=0.5, seed=3)
      >>> sorted(int(row) for part in parts for row in part)
      [0, 1, 2, 3, 4, 5, 6, 7]

    Source: Jhunjhunwala, Wang, Joshi, "FedFisher: Leveraging Fisher Information for One-Shot
    Federated Learning", AISTATS 2024, section 5 and its code. Where the code would divide zero by
    zero: a client whose draw underflows gets one random class (the limit of small alpha), a class
    that nobody drew is shared equally.
    """
    targets = _check_targets(targets)
    _check_num_clients(num_clients, len(targets))
    _check_concentration("alpha", alpha)
    random = _random_state(seed)
    num_classes = int(targets.max()) + 1
    shares = _dirichlet_shares(random, num_clients, num_classes, alpha)
    clients = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        rows = np.flatnonzero(targets == label)
        random.shuffle(rows)
        cuts = np.floor(np.cumsum(shares[:, label])[:-1] * len(rows)).astype(np.int64)
        for client, part in zip(clients, np.split(rows, cuts), strict=True):
            client.append(part)
    return [np.concatenate(parts) for parts in clients]


def niid_bench(
    targets,
    num_clients: int,
    beta: float,
    seed: int,
    *,
    min_size: int = 10,
    max_draws: int = 10_000,
) -> list[np.ndarray]:
    r"""Split every class over the clients by a Dirichlet draw, sparing those that have enough.

    .. math:: q_c \sim \mathrm{Dir}(\beta 1_M), \qquad q_{ci} \leftarrow 0 \text{ where client } i
              \text{ holds } N / M \text{ examples or more}, \qquad
              \text{client } i \text{ ends at }
              \lfloor N_c \sum_{j \le i} q_{cj} / \sum_j q_{cj} \rfloor \text{ of class } c,

    class by class, all over again until every client holds ``min_size`` examples.

    Args:
      targets: class labels, integers ``[N]``; the number of classes is the largest plus one.
      num_clients: M, between 1 and N.
      beta: concentration; at 0.01 a class goes to one client or two, at 100 to all equally.
      seed: of ``numpy.random.RandomState``. For each class it shuffles the ascending rows, then
        draws the shares; at last it shuffles the rows of each client.
      min_size: the fewest examples of a client.
      max_draws: how often to draw before giving up. Small beta and many clients need most.

    Returns:
      M arrays of row numbers.

    Raises:
      ValueError: if no draw gave every client ``min_size`` examples, or if a number or the labels
        are out of range.
      TypeError: if the labels or a count are not integers.

    Example:
      >>> parts = niid_bench(np.arange(40) % 2, num_clients=2, beta=0.5, seed=0)
      >>> sorted(len(part) for part in parts)
      [15, 25]

    Source: Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental Study",
    ICDE 2022 ("distribution-based label imbalance") and its code, whose splits these are, seed by
    seed. Deviations: the code draws for ever; and where the draws of all clients that may still
    receive underflow, it divides zero by zero. They are then drawn again in logarithms, by the same
    law.
    """
    targets = _check_targets(targets)
    num_examples = len(targets)
    _check_num_clients(num_clients, num_examples)
    _check_concentration("beta", beta)
    _check_count("min_size", min_size, 0)
    _check_count("max_draws", max_draws, 1)
    if num_clients * min_size > num_examples:
        raise ValueError(
            f"{num_clients} clients cannot hold min_size={min_size} of {num_examples} examples "
            f"each: ask for min_size up to {num_examples // num_clients}, or fewer clients"
        )
    random = _random_state(seed)
    classes = [np.flatnonzero(targets == label) for label in range(int(targets.max()) + 1)]
    best = 0
    for _ in range(max_draws):
        clients = _balanced_draw(random, classes, num_clients, beta)
        smallest = min(map(len, clients))
        if smallest >= min_size:
            for rows in clients:
                random.shuffle(rows)
            return clients
        best = max(best, smallest)
    raise ValueError(
        f"none of {max_draws} draws gave each of {num_clients} clients min_size={min_size} "
        f"examples; the best gave every client {best}. What would do: min_size={best}, a beta "
        f"above {beta:g}, fewer clients, or more than max_draws={max_draws}"
    )


def classes_per_client(targets, num_clients: int, num_classes: int, seed: int) -> list[np.ndarray]:
    """Give every client the same number of classes; the owners of a class share it equally.

    Client i owns class i mod C and further classes chosen at random. Where there are fewer clients
    than classes, the examples of a class that nobody owns are left out.

    Args:
      targets: class labels, integers ``[N]``; C is the largest plus one.
      num_clients: M, between 1 and N.
      num_classes: k, how many classes a client owns, between 1 and C ("#C=k").
      seed: of ``random.Random``, which chooses the classes, client by client, and of
        ``numpy.random.RandomState``, which shuffles the ascending rows of each class.

    Returns:
      M arrays of row numbers, classes in ascending order.

    Raises:
      ValueError: if ``num_classes`` is not between 1 and C, a class has fewer examples than
        owners, or another argument is out of range.
      TypeError: if the labels or a count are not integers.

    Example:
      >>> targets = np.arange(18) % 3
      >>> label_counts(targets, classes_per_client(targets, 3, num_classes=2, seed=0))
      array([[3, 2, 0],
             [3, 2, 0],
             [0, 2, 6]])

    Source: Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental Study",
    ICDE 2022 ("quantity-based label imbalance") and its code, whose splits these are, seed by seed.
    """
    targets = _check_targets(targets)
    _check_num_clients(num_clients, len(targets))
    total = int(targets.max()) + 1
    _check_count("num_classes", num_classes, 1)
    if num_classes > total:
        raise ValueError(
            f"num_classes is {num_classes}, but the targets have {total} classes: ask for 1 to "
            f"{total} classes a client"
        )
    random = _random_state(seed)
    owners = _draw_owners(standard_random.Random(int(seed)), num_clients, num_classes, total)
    clients = [[] for _ in range(num_clients)]
    for label, own in enumerate(owners):
        rows = np.flatnonzero(targets == label)
        if len(rows) < len(own):
            raise ValueError(
                f"class {label} has {len(rows)} examples for the {len(own)} clients that own it: "
                "ask for fewer clients or fewer classes a client"
            )
        random.shuffle(rows)
        # Without an owner the examples are left out.
        parts = np.array_split(rows, len(own)) if own else []
        for client, part in zip(own, parts, strict=True):
            clients[client].append(part)
    return [np.concatenate(parts) for parts in clients]


def iid(targets_or_num_examples, num_clients: int, seed: int) -> list[np.ndarray]:
    """Deal all examples out at random into equal parts, sizes differing by at most one.

    Args:
      targets_or_num_examples: the targets ``[N, ...]``, whose values are ignored, or N itself.
      num_clients: M, between 1 and N.
      seed: of ``numpy.random.RandomState``, which draws one permutation of the N rows.

    Returns:
      M arrays of row numbers; the first N mod M clients have the extra example.

    Raises:
      ValueError: if ``num_clients`` or ``seed`` is out of range.

    Example:
      >>> [len(part) for part in iid(10, num_clients=3, seed=0)]
      [4, 3, 3]

    Source: "homogeneous" of Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022.
    """
    num_examples = _num_examples(targets_or_num_examples)
    _check_num_clients(num_clients, num_examples)
    return np.array_split(_random_state(seed).permutation(num_examples), num_clients)


def central(targets_or_num_examples) -> list[np.ndarray]:
    """Give everything to one client, the ceiling that merging is compared with.

    Args:
      targets_or_num_examples: the targets ``[N, ...]``, whose values are ignored, or N itself.

    Returns:
      One array with the rows 0 to N - 1.

    Raises:
      ValueError: if there is no example.

    Example:
      >>> central(4)
      [array([0, 1, 2, 3])]
    """
    num_examples = _num_examples(targets_or_num_examples)
    _check_num_clients(1, num_examples)
    return [np.arange(num_examples)]


def natural(groups) -> list[np.ndarray]:
    """Give every group of examples to a client of its own: a writer, a speaker, a hospital.

    Args:
      groups: who each example comes from, ``[N]`` numbers or strings.

    Returns:
      One array of ascending row numbers for each distinct group, groups in sorted order, that of
      ``numpy.unique(groups)``.

    Raises:
      ValueError: if ``groups`` is not one label for each of at least one example.

    Example:
      >>> natural(["Romeo", "Juliet", "Romeo"])
      [array([1]), array([0, 2])]

    Source: Caldas, Duddu, Wu, Li, Konečný, McMahan, Smith, Talwalkar, "LEAF: A Benchmark for
    Federated Settings", 2018.
    """
    groups = np.asarray(groups)
    if groups.ndim != 1 or groups.size == 0:
        raise ValueError(
            f"groups have shape {groups.shape}, expected one label for each example, [N], and at "
            "least one example"
        )
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    return np.split(np.argsort(number, kind="stable"), np.cumsum(sizes)[:-1])


def hold_out(num_clients: int, num_held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Choose clients at random that take no part in training, to judge a model on new clients.

    Args:
      num_clients: M.
      num_held_out: how many are held out, between 1 and M - 1.
      seed: of ``numpy.random.RandomState``, which draws one permutation of the M clients.

    Returns:
      The numbers of the clients that are kept ``[M - num_held_out]`` and of those held out
      ``[num_held_out]``, each ascending.

    Raises:
      ValueError: if no client would be kept or none held out, or the seed is out of range.
      TypeError: if a count or the seed is not an integer.

    Example:
      >>> hold_out(5, 2, seed=0)
      (array([1, 3, 4]), array([0, 2]))

    Source: Yuan, Morningstar, Ning, Singhal, "What Do We Mean by Generalization in Federated
    Learning?", ICLR 2022 (participation gap).
    """
    _check_count("num_clients", num_clients, 2)
    _check_count("num_held_out", num_held_out, 1)
    if num_held_out >= num_clients:
        raise ValueError(
            f"num_held_out is {num_held_out} of {num_clients} clients, which leaves none to train: "
            f"hold out 1 to {num_clients - 1}"
        )
    held_out, kept = np.split(_random_state(seed).permutation(num_clients), [num_held_out])
    return np.sort(kept), np.sort(held_out)


def label_counts(targets, partition: Sequence[np.ndarray]) -> np.ndarray:
    """Count how many examples of each class each client holds.

    Args:
      targets: class labels, integers ``[N]``; the number of classes is the largest plus one.
      partition: M arrays of row numbers.

    Returns:
      Integers ``[M, C]``; row sums are client sizes, column sums class sizes.

    Raises:
      ValueError: if the labels are negative or the partition is not one of these N examples.
      TypeError: if the labels or the row numbers are not integers.

    Example:
      >>> label_counts([0, 1, 1, 2], [[0, 1], [2, 3]])
      array([[1, 1, 0],
             [0, 1, 1]])
    """
    targets = _check_targets(targets)
    check_partition(partition, len(targets))
    num_classes = int(targets.max()) + 1
    rows = [np.asarray(part, np.int64) for part in partition]
    return np.stack([np.bincount(targets[row], minlength=num_classes) for row in rows])


def check_partition(partition: Sequence[np.ndarray], num_examples: int) -> None:
    """Refuse a partition that names a row twice, or one that does not exist.

    Rows that belong to nobody are allowed, and so are clients without any.

    Args:
      partition: M arrays of row numbers.
      num_examples: N; rows run from 0 to N - 1.

    Raises:
      ValueError: if there is no client, or a row is out of range or named twice; the message names
        the client.
      TypeError: if row numbers are not integers.

    Example:
      >>> check_partition([[0, 2], [1], []], num_examples=3)
    """
    if len(partition) == 0:
        raise ValueError("the partition has no client: pass one array of row numbers per client")
    owner = np.full(num_examples, -1)
    for client, part in enumerate(partition):
        rows = np.asarray(part)
        if rows.ndim != 1:
            raise ValueError(
                f"client {client}'s rows have shape {rows.shape}, expected one dimension [n_i]"
            )
        if rows.size == 0:
            continue
        if not np.issubdtype(rows.dtype, np.integer):
            raise TypeError(
                f"client {client}'s rows have dtype {rows.dtype}, expected integers: turn a mask "
                "into rows with numpy.flatnonzero"
            )
        if rows.min() < 0 or rows.max() >= num_examples:
            raise ValueError(
                f"client {client}'s rows run from {rows.min()} to {rows.max()}, but there are "
                f"{num_examples} examples, 0 to {num_examples - 1}"
            )
        values, counts = np.unique(rows, return_counts=True)
        if counts.max() > 1:
            raise ValueError(
                f"client {client} holds row {values[counts.argmax()]} {counts.max()} times: "
                "every row may appear once"
            )
        taken = rows[owner[rows] >= 0]
        if taken.size:
            raise ValueError(
                f"row {taken[0]} belongs to client {owner[taken[0]]} and to client {client}: "
                "clients must not share examples"
            )
        owner[rows] = client


def _balanced_draw(
    random, classes: list[np.ndarray], num_clients: int, beta: float
) -> list[np.ndarray]:
    """Split the rows of all classes once; the rows of each client."""
    capacity = sum(map(len, classes)) / num_clients
    clients = [[] for _ in range(num_clients)]
    sizes = np.zeros(num_clients, np.int64)
    for ascending in classes:
        rows = ascending.copy()
        random.shuffle(rows)
        # An empty class needs no room; by then there may be none.
        has_room = (sizes < capacity) | (len(rows) == 0)
        shares = _shares_of_class(random, has_room, beta)
        cuts = (np.cumsum(shares)[:-1] * len(rows)).astype(np.int64)
        for client, part in zip(clients, np.split(rows, cuts), strict=True):
            client.append(part)
        sizes = np.array([sum(map(len, parts)) for parts in clients])
    return [np.concatenate(parts) for parts in clients]


def _shares_of_class(random, has_room: np.ndarray, beta: float) -> np.ndarray:
    """Draw shares [M] of a class, zero for clients without room."""
    with np.errstate(all="ignore"):
        shares = random.dirichlet(np.full(len(has_room), beta)) * has_room
        if not shares.sum() > 0:  # all that may receive underflowed, or NumPy's whole draw
            # Gamma(beta) is Gamma(beta + 1) U^(1/beta), here with logarithms multiplied by beta.
            logs = beta * np.log(random.gamma(beta + 1, size=len(has_room)))
            logs += np.log(random.random_sample(len(has_room)))
            logs = np.where(has_room, logs, -np.inf)
            shares = np.exp((logs - logs.max()) / beta)
    return shares / shares.sum()


def _draw_owners(
    random: standard_random.Random, num_clients: int, num_classes: int, total: int
) -> list[list[int]]:
    """Let every client choose its classes; the owners of each class, in client order."""
    owners = [[] for _ in range(total)]
    for client in range(num_clients):
        own = [client % total]
        while len(own) < num_classes:
            label = random.randint(0, total - 1)
            if label not in own:
                own.append(label)
        for label in own:
            owners[label].append(client)
    return owners


def _dirichlet_shares(random, num_clients: int, num_classes: int, alpha: float) -> np.ndarray:
    """Draw each client's classes, then normalise each class over the clients: ``[M, C]``."""
    with np.errstate(invalid="ignore", divide="ignore"):
        draws = random.dirichlet(np.full(num_classes, alpha), size=num_clients)
    for client in np.flatnonzero(~np.isfinite(draws).all(axis=1)):
        # All gamma draws underflowed. The largest would have outweighed the others by far.
        draws[client] = np.eye(num_classes)[random.randint(num_classes)]
    totals = draws.sum(axis=0, keepdims=True)
    drawn = totals > 0
    return np.where(drawn, draws / np.where(drawn, totals, 1.0), 1.0 / num_clients)


def _check_targets(targets) -> np.ndarray:
    targets = np.asarray(targets)
    if targets.ndim != 1 or targets.size == 0:
        raise ValueError(
            f"targets have shape {targets.shape}, expected class labels [N] of at least one "
            "example: turn one-hot rows into labels with argmax(-1)"
        )
    if not np.issubdtype(targets.dtype, np.integer):
        raise TypeError(
            f"targets have dtype {targets.dtype}, expected integer class labels: cast them with "
            "astype(int), or split other targets with partition.iid"
        )
    if targets.min() < 0:
        raise ValueError(
            f"the smallest label is {targets.min()}, expected labels from 0 up: drop or renumber "
            "the unlabelled examples"
        )
    return targets


def _num_examples(targets_or_num_examples) -> int:
    if isinstance(targets_or_num_examples, numbers.Integral):
        return int(targets_or_num_examples)
    shape = np.shape(targets_or_num_examples)
    if not shape:
        raise TypeError(
            f"got {targets_or_num_examples!r}, expected the targets [N, ...] or their number N"
        )
    return shape[0]


def _check_num_clients(num_clients: int, num_examples: int) -> None:
    if not isinstance(num_clients, numbers.Integral) or isinstance(num_clients, bool):
        raise TypeError(f"num_clients is {num_clients!r}, expected an integer")
    if not 1 <= num_clients <= num_examples:
        raise ValueError(
            f"num_clients is {num_clients}, expected 1 to {num_examples}, the number of examples: "
            "ask for fewer clients or bring more data"
        )


def _check_concentration(name: str, value: float) -> None:
    if not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0:
        raise ValueError(
            f"{name} is {value!r}, but a Dirichlet concentration is a finite number above 0: "
            "try 0.1 for very different clients, 100 for similar ones"
        )


def _check_count(name: str, value: int, smallest: int) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected an integer")
    if value < smallest:
        raise ValueError(f"{name} is {value}, expected {smallest} or more")


def _random_state(seed: int) -> np.random.RandomState:
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool):
        raise TypeError(f"seed is {seed!r}, expected an integer from 0 to 2**32 - 1")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}, expected an integer from 0 to 2**32 - 1")
    return np.random.RandomState(int(seed))
