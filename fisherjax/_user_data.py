"""Bring data as users have them to arrays: pairs, data sets of clients, batches of a loader."""

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax._core.batches import as_array_of_numbers, as_inputs, named_leaves, num_rows, take
from fisherjax._minibatches import rows_of
from fisherjax.typing import AnyArray, Examples, Inputs


def whole(data: Any, what: str = "data") -> tuple[Inputs, AnyArray]:
    """Return a data set's inputs and targets as arrays, of `Examples` those of the rows in use.

    Args:
        data: An object with `inputs` and `targets`, or a pair of them.
        what: Name of the data in error messages.

    Raises:
        TypeError: If it is neither, or something is no array of numbers.
        ValueError: If inputs and targets differ in length, or a weight is neither 0 nor 1.

    Example:
        >>> [x.shape for x in whole(([[1, 2], [3, 4], [5, 6]], [0, 1, 0]))]
        [(3, 2), (3,)]
    """
    pair = (data.inputs, data.targets) if hasattr(data, "inputs") else data
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        length = f" of {len(data)}" if isinstance(data, (tuple, list)) else ""
        raise TypeError(
            f"{what} is {checks.kind_of(data)}{length}; expected fisherjax's Dataset or Examples, "
            "or a pair (inputs, targets), such as (data['image'], data['label']). Batches, as of a "
            "PyTorch DataLoader, become Examples by clients.from_batches."
        )
    if _are_several(pair):
        raise TypeError(
            f"{what} is {checks.kind_of(pair)} of two data sets, as of two clients or batches; "
            "expected one, a pair (inputs, targets), beside a partition too. Leave the partition "
            "out if these are the clients, concatenate batches by clients.from_batches, and pass "
            "rows as arrays, numpy.asarray(inputs) and numpy.asarray(targets)."
        )
    if pair[1] is None:
        raise TypeError(f"{what} has no targets; expected one for each example.")
    of = "" if what == "data" else f" of {what}"
    inputs, targets = (
        as_inputs(pair[0], f"inputs{of}"),
        as_array_of_numbers(pair[1], f"targets{of}"),
    )
    if targets.shape[:1] != (num_rows(inputs),):
        shapes = {name: x.shape for name, x in named_leaves(inputs, "").items()}
        raise ValueError(
            f"inputs{of} have shape {shapes.get('', shapes)} and targets {targets.shape}; expected "
            "both to have one row for each example. Several inputs are a dict or a tuple."
        )
    return _rows_in_use(data, what, inputs, targets)


def _are_several(pair: Sequence[Any]) -> bool:
    """Return whether a pair is one of data sets, which may look like rows of two examples."""
    first, second = pair
    if any(hasattr(one, "inputs") for one in pair):
        return True
    if not all(isinstance(one, (tuple, list)) for one in pair):
        return False
    # Rows are lists: a tuple of arrays holds inputs and targets, not targets.
    are_pairs = isinstance(pair, list) and len(first) == len(second) == 2
    return (are_pairs or isinstance(second, tuple)) and not all(map(_is_number, second))


def _is_number(x: Any) -> bool:
    return isinstance(x, (numbers.Number, str)) or getattr(x, "ndim", 1) == 0


def _rows_in_use(data: Any, what: str, inputs: Inputs, targets: AnyArray) -> tuple:
    if not isinstance(data, Examples) or (data.indices is None and data.weights is None):
        return inputs, targets
    checks.examples(data)
    rows, weights = map(np.asarray, rows_of(data))
    if not np.isin(weights, (0, 1)).all():
        raise ValueError(
            f"{what} has weights other than 0 and 1, which a federation does not keep; expected "
            "Examples(inputs, targets). Repeat a row to count it twice."
        )
    return take((inputs, targets), rows[weights > 0])


def client_by_client(data: Any) -> tuple[Any, AnyArray, list[np.ndarray]]:
    """Return the examples of all clients and the rows of each."""
    is_one = hasattr(data, "inputs") or not isinstance(data, Sequence)
    if is_one or any(hasattr(own, "dtype") for own in data):
        raise TypeError(
            f"partition is None and data is {checks.kind_of(data)}; expected a list with one pair "
            "(inputs, targets) for each client, or the rows of each client as partition."
        )
    pairs = [whole(own, f"client {client}") for client, own in enumerate(data)]
    inputs, targets = _concatenated(pairs, "client")
    ends = np.cumsum([len(y) for _, y in pairs])
    return inputs, targets, np.split(np.arange(len(targets), dtype=np.int32), ends[:-1])


def from_batches(batches: Iterable[Any]) -> Examples:
    """Concatenate batches, such as those of a PyTorch DataLoader, into one data set.

    Args:
        batches: Pairs (inputs [B, ...], targets [B, ...]), as many as the iterable has.
            Inputs may be pytrees, and arrays those of any library, as in `federation`. The last
            batch may be shorter.

    Raises:
        TypeError: If it cannot be iterated, or a batch is no pair of arrays.
        ValueError: If there is no batch, or batches differ in shape or dtype.

    Example:
        >>> loader = [(np.ones((2, 3)), [0, 1]), (np.ones((1, 3)), [1])]
        >>> examples = from_batches(loader)
        >>> examples.inputs.shape, examples.targets.tolist()
        ((3, 3), [0, 1, 1])
    """
    hint = "batches (inputs, targets), such as DataLoader(data, batch_size=256)"
    checks.instance("batches", batches, Iterable, hint)
    pairs = []
    for number, one in enumerate(batches):
        # Copied, because a loader may write the next batch into the same array.
        pairs.append(jax.tree.map(lambda x: x.copy(), whole(one, f"batch {number}")))
    return Examples(*_concatenated(pairs, "batch"))


def _concatenated(pairs: Sequence[tuple[Inputs, AnyArray]], unit: str) -> tuple[Inputs, AnyArray]:
    """Concatenate the pairs (inputs, targets) of clients or batches along the first axis."""
    if not pairs:
        raise ValueError(f"There is no {unit}; expected at least one (inputs, targets).")
    for number, one in enumerate(pairs):
        if (given := _row(one)) != (expected := _row(pairs[0])):
            raise ValueError(
                f"An example of {unit} {number} has {given}, but one of {unit} 0 has {expected}; "
                "expected the same structure, shapes and dtypes. Convert one to the other, as by "
                "x.astype('float32') or x.reshape(len(x), -1)."
            )

    columns = zip(*map(jax.tree.leaves, pairs), strict=True)
    return jax.tree.unflatten(jax.tree.structure(pairs[0]), [*map(_joined, columns)])


def _joined(parts: Sequence[AnyArray]) -> AnyArray:
    on_host = all(isinstance(x, np.ndarray) for x in parts)
    return np.concatenate(parts) if on_host else jnp.concatenate(parts)


def _row(one: tuple[Inputs, AnyArray]) -> str:
    """Return the structure, shapes and dtypes of one example in words."""
    named = named_leaves(one[0]) | {"targets": one[1]}
    return ", ".join(f"{name} {tuple(x.shape[1:])} {x.dtype}" for name, x in named.items())
