"""Other programs' names and axes of the leaves of a pytree."""

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fisherjax._core.checks import nearest

Place = str | tuple[str, tuple[int, ...]]
"""Their name of a leaf; or that and the axes by which ours is transposed to be theirs."""


Places = Mapping[str, Place] | Callable[[str], Place]
"""From our name of a leaf to its place, as a dict or a function; names that a dict lacks stay."""


class _Place(NamedTuple):
    """A leaf's name in a file, and the axes by which ours is transposed to be the file's."""

    name: str
    axes: tuple[int, ...]

    def back(self, array: np.ndarray) -> np.ndarray:
        """Turn the file's array to ours."""
        return array.transpose(np.argsort(self.axes))


def _parsed(name: str, given: Any) -> tuple[str, tuple[int, ...] | None]:
    """Read what a mapping says of our leaf: their name, and axes if there are any."""
    if isinstance(given, str):
        return given, None
    try:
        theirs, axes = given
        axes = tuple(map(operator.index, axes))
    except (TypeError, ValueError):
        theirs = axes = None
    if not isinstance(theirs, str):
        raise TypeError(
            f"mapping gives {given!r} for {name!r}; expected the file's name, or a pair of it and "
            "axes such as ('fc.weight', (1, 0))"
        )
    return theirs, axes


def _places(ranks: dict[str, int], mapping: Places | None) -> dict[str, _Place]:
    """Find the places of our leaves, which have so many axes."""
    mapping = {} if mapping is None else mapping
    if not (callable(mapping) or isinstance(mapping, Mapping)):
        raise TypeError(
            f"mapping is a {type(mapping).__name__}; expected a dict from our names to the file's, "
            "such as {'dense/kernel': ('fc.weight', (1, 0))}, or a function of our name"
        )
    if not callable(mapping) and (unknown := [name for name in mapping if name not in ranks]):
        raise ValueError(
            f"mapping lists {_some(unknown)}, but our leaves are {_some(ranks)}: its keys are our "
            f"names, its values those of the file. For {unknown[0]!r}, did you mean "
            f"{nearest(unknown[0], ranks)}?"
        )
    places: dict[str, _Place] = {}
    owners: dict[str, str] = {}
    for name, rank in ranks.items():
        given = mapping(name) if callable(mapping) else mapping.get(name, name)
        theirs, axes = _parsed(name, given)
        axes = tuple(range(rank)) if axes is None else axes
        if sorted(axes) != list(range(rank)):
            raise ValueError(
                f"mapping transposes {name!r}, which has {rank} axes, by {axes}: expected each of "
                f"{tuple(range(rank))} once"
            )
        if (other := owners.setdefault(theirs, name)) != name:
            raise ValueError(
                f"{other!r} and {name!r} are both called {theirs!r} in the file: give each a name "
                "of its own"
            )
        places[name] = _Place(theirs, axes)
    return places


def _some(words: Iterable[str], between: str = ", ") -> str:
    words = list(words)
    return between.join(words[:20]) + f"{between}and {len(words) - 20} more" * (len(words) > 20)
