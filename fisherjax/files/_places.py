"""Map the leaves of a pytree to arrays of a file with other names or axes."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fisherjax._core.checks import nearest

Place = str | tuple[str, tuple[int, ...]]
"""A leaf's name in a file, or a pair of it and the axes that transpose the leaf for the file."""


Places = Mapping[str, Place] | Callable[[str], Place]
"""A dict or a function from names of leaves to their places in a file. A leaf whose name is not in
the dict has the same name and axes in the file."""


class _Place(NamedTuple):
    """A leaf's name in a file, and the axes that transpose the leaf to the file's array."""

    name: str
    axes: tuple[int, ...]

    def back(self, array: np.ndarray) -> np.ndarray:
        """Transpose the file's array to the leaf."""
        # The inverse of a permutation is what sorts it.
        return array.transpose(np.argsort(self.axes))


def _parsed(name: str, entry: Any) -> tuple[str, tuple[int, ...] | None]:
    """Read a mapping's entry for a leaf: its name in the file, and axes if there are any."""
    if isinstance(entry, str):
        return entry, None
    try:
        theirs, axes = entry
        # NumPy's integers are accepted, floats are not.
        axes = tuple(map(operator.index, axes))
    except (TypeError, ValueError):
        theirs = axes = None
    if not isinstance(theirs, str):
        raise TypeError(
            f"mapping has {entry!r} for {name!r}; expected the name in the file, or a pair of it "
            "and axes such as ('fc.weight', (1, 0))"
        )
    return theirs, axes


def _places(ranks: dict[str, int], mapping: Places | None) -> dict[str, _Place]:
    """Find the place in the file of each leaf, given the numbers of axes of all leaves."""
    mapping = {} if mapping is None else mapping
    if not (callable(mapping) or isinstance(mapping, Mapping)):
        raise TypeError(
            f"mapping is a {type(mapping).__name__}; expected a dict from names of leaves to names "
            "in the file, such as {'dense/kernel': ('fc.weight', (1, 0))}, or a function"
        )
    # A misspelled leaf would otherwise be stored under its own name, unnoticed until it is read.
    if not callable(mapping) and (unknown := [name for name in mapping if name not in ranks]):
        raise ValueError(
            f"mapping has the keys {_some(unknown)}, but the leaves are {_some(ranks)}; expected "
            "keys that are names of leaves, and values that are names in the file. For "
            f"{unknown[0]!r}, did you mean {nearest(unknown[0], ranks)}?"
        )
    places: dict[str, _Place] = {}
    owners: dict[str, str] = {}
    for name, rank in ranks.items():
        entry = mapping(name) if callable(mapping) else mapping.get(name, name)
        theirs, axes = _parsed(name, entry)
        axes = tuple(range(rank)) if axes is None else axes
        # NumPy would accept negative axes, whose inverse above would be another permutation.
        if sorted(axes) != list(range(rank)):
            raise ValueError(
                f"mapping transposes {name!r}, which has {rank} axes, by {axes}; expected each of "
                f"{tuple(range(rank))} once"
            )
        # The second array would replace the first in the file.
        if (other := owners.setdefault(theirs, name)) != name:
            raise ValueError(
                f"{other!r} and {name!r} are both called {theirs!r} in the file: give each leaf "
                "its own name in `mapping`"
            )
        places[name] = _Place(theirs, axes)
    return places


def _some(words: Iterable[str], between: str = ", ") -> str:
    words = list(words)
    return between.join(words[:20]) + f"{between}and {len(words) - 20} more" * (len(words) > 20)
