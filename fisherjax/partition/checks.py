"""Check partitions and the arguments of the schemes that make them."""

from collections.abc import Sequence

import numpy as np

from fisherjax._core.checks import count


def check_partition(partition: Sequence[np.ndarray], num_examples: int) -> None:
    """Check that a partition has no row twice, and no row outside of 0 to N - 1.

    Rows without a client are allowed, and so are clients without rows.

    Raises:
        ValueError: If there is no client, or a row is out of range or occurs twice; the message
            names the client.
        TypeError: If row numbers are not integers.

    Example:
        >>> check_partition([[0, 2], [1], []], num_examples=3)
    """
    if len(partition) == 0:
        raise ValueError("the partition has no client: pass one array of row numbers per client")
    owner = np.full(num_examples, -1)
    for client, part in enumerate(partition):
        rows = client_rows(part, client, num_examples)
        values, counts = np.unique(rows, return_counts=True)
        if counts.max(initial=0) > 1:
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


def client_rows(rows, client: int, num_examples: int) -> np.ndarray:
    """Check the rows of a client, and return them as an array [n_i]."""
    rows = np.asarray(rows)
    if rows.ndim != 1:
        raise ValueError(
            f"The rows of client {client} have shape {rows.shape}; expected one dimension, [n_i]."
        )
    # NumPy makes an empty list an array of floats, so that only existing rows are checked.
    if rows.size and not np.issubdtype(rows.dtype, np.integer):
        raise TypeError(
            f"The rows of client {client} have dtype {rows.dtype}; expected integers. Turn a mask "
            "into rows with numpy.flatnonzero."
        )
    if rows.size and (rows.min() < 0 or rows.max() >= num_examples):
        raise ValueError(
            f"The rows of client {client} run from {rows.min()} to {rows.max()}; expected 0 to "
            f"{num_examples - 1}. The partition must come from the targets of this data set."
        )
    return rows.astype(np.int32)


def labels(targets) -> np.ndarray:
    """Check class labels, and return them as an array [N]."""
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


def num_clients(value: int, num_examples: int) -> None:
    """Check that there is a client, and at most one for each example."""
    expected = f"1 to {num_examples}, the number of examples: ask for fewer clients or more data"
    count("num_clients", value, 1, num_examples, expected)


def num_classes(value: int, total: int) -> None:
    """Check that clients have at least one class, and at most all C classes of the targets."""
    count("num_classes", value, 1, total, f"1 to {total}, the number of classes of the targets")


def random_state(seed: int) -> np.random.RandomState:
    """Return NumPy's older generator of a seed, with which the papers draw their splits."""
    count("seed", seed, 0, 2**32 - 1, "an integer from 0 to 2**32 - 1")
    return np.random.RandomState(int(seed))
