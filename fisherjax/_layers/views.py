"""Values that have the entries of a parameter, moved: transposed, reshaped, cast, repeated, cut."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

# Networks are read at a number of examples that no other axis has, so that the axis of the examples
# is never mistaken for one of positions or channels that happens to be as long.
MANY = 10007

Axes = tuple[tuple[int, ...] | None, ...]
"""For each axis of a value the axes of the leaf that it runs over; None where it repeats them."""
Place = tuple[int, int | None]
"""A value: (number of the equation, which operand); None is the equation's result."""
Source = Place | range | None
"""What a use reads: a value, rows by their numbers, or nothing."""

# What changes no value.
_SAME = {
    *("copy", "copy_p", "reduce_precision", "sharding_constraint", "reshard", "mesh_cast"),
    *("name", "optimization_barrier", "pvary", "pcast"),
}
_ELSEWHERE = "parts of it are used in different ways"


class Obstacle(Exception):
    """Why a leaf is not covered."""


class View(NamedTuple):
    """A value that has the entries of a leaf.

    Attributes:
        leaf: Number of the leaf.
        shape: Shape of the leaf, or of its slice.
        axes: What each axis of the value runs over, counted in that shape.
        index: Place of the slice in a stack of layers; () is the whole leaf.
        rows: Which rows of the leaf it has, if not all: a range, or the place of their numbers.
        factor: The place of what it was multiplied by, with the axes along which that lies.
    """

    leaf: int
    shape: tuple[int, ...]
    axes: Axes
    index: tuple[int, ...] = ()
    rows: Source = None
    factor: tuple[Place, Axes] | None = None


def ordered(held: Iterable[tuple[tuple[int, ...], int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sort pairs (axes of the leaf, axis of a value) as in the leaf: all of the ones and others."""
    pairs = sorted(held)
    if not is_ordered(pairs):
        raise Obstacle("its axes were merged in another order than its own")
    return tuple(a for group, _ in pairs for a in group), tuple(axis for _, axis in pairs)


def is_ordered(held: Iterable[tuple[tuple[int, ...], int]]) -> bool:
    """Whether no axes of the leaf were merged in another order than its own."""
    axes = [axis for group, _ in sorted(held) for axis in group]
    return axes == sorted(axes)


def whole(view: View, axes: Sequence[int] | None = None) -> View:
    """Refuse what has only a part of the leaf, or was multiplied; axes are those it runs over."""
    if view.factor is not None:
        raise Obstacle("it is multiplied by something before it is used")
    wide = {axis for axis, size in enumerate(view.shape) if size > 1}
    if view.rows is not None or (axes is not None and not wide <= set(axes)):
        raise Obstacle(_ELSEWHERE)
    return view


def examples(shape: Sequence[int], among: Iterable[int]) -> tuple[tuple[int], tuple[int, ...]]:
    """Split axes into that of the examples and the others."""
    among = tuple(among)
    found = tuple(axis for axis in among if shape[axis] == MANY)
    if len(found) != 1:
        raise Obstacle("the examples of its inputs share an axis with something else")
    return found, tuple(axis for axis in among if axis not in found)


def followed(number: int, equation: Any, view: View) -> View | None:
    """Follow a view, the first operand, through an equation; None if that does more than move."""
    name, how, source = equation.primitive.name, equation.params, equation.invars[0].aval.shape
    if name == "slice" and set(how["strides"] or ()) <= {1}:
        ends = list(zip(how["start_indices"], how["limit_indices"], strict=True))
        return _cut(view, ends, [a for a, size in enumerate(source) if ends[a] != (0, size)])
    if name == "gather":
        axes = looked_up(equation, view)
        if axes is None or axes.count(None) != 1 or len(view.shape) != 2 or view.rows is not None:
            return None
        axes = tuple((0,) if a is None else a for a in axes)
        return view._replace(axes=axes, rows=(number, 1))
    axes = moved(equation, view.axes)
    return None if axes is None else view._replace(axes=axes)


def _cut(view: View, ends: list[tuple[int, int]], axes: list[int]) -> View | None:
    if not axes:
        return view
    (start, end), axis = ends[axes[0]], axes[0]
    if len(axes) > 1 or view.rows is not None or view.factor is not None:
        return None
    if axis == 0 and end - start == 1 and not view.index and view.axes[0] == (0,):
        # A layer of a stack: axes are counted in the slice from here on.
        rest = (None if a is None else tuple(i - 1 for i in a) for a in view.axes[1:])
        return View(view.leaf, view.shape[1:], ((), *rest), (start,))
    wide = [a for a, size in enumerate(view.shape) if size > 1]
    is_rows = len(wide) == 2 and view.axes[axis] == (wide[0],)
    return view._replace(rows=range(start, end)) if is_rows else None


def moved(equation: Any, axes: Axes) -> Axes | None:
    """Follow axes through an equation of one operand; None if it does more than move entries."""
    name, how, result = equation.primitive.name, equation.params, equation.outvars[0].aval
    old, new = equation.invars[0].aval.shape, getattr(result, "shape", ())
    if name == "convert_element_type":
        return axes if jnp.issubdtype(result.dtype, jnp.floating) else None
    # A slice of everything is what older versions make of an axis of size one that is indexed.
    if (name in _SAME or (name == "slice" and old == new)) and len(equation.invars) == 1:
        return axes
    if name == "transpose":
        return tuple(axes[a] for a in how["permutation"])
    if name in ("reshape", "squeeze", "expand_dims"):
        if name == "reshape" and how["dimensions"] is not None:
            # Transposed first, as by order="F".
            axes, old = (tuple(x[a] for a in how["dimensions"]) for x in (axes, old))
        return _reshaped(axes, old, new)
    if name == "tile" and all(n in (1, m) for n, m in zip(old, new, strict=True)):
        return along(axes, old, new)
    if name == "broadcast_in_dim":
        places = dict(zip(how["broadcast_dimensions"], range(len(old)), strict=True))
        spread = [axes[places[a]] if a in places else () for a in range(len(new))]
        return along(spread, [old[places[a]] if a in places else 1 for a in range(len(new))], new)
    return None


def along(axes: Sequence, old: Sequence[int], new: Sequence[int]) -> Axes:
    """Give the axes of a value that is repeated to another shape."""
    # A scalar has no axes, whatever it is repeated to.
    pairs = zip(axes or [()] * len(new), old or [1] * len(new), new, strict=True)
    return tuple(a if n == m else None for a, n, m in pairs)


def _reshaped(axes: Axes, old: Sequence[int], new: Sequence[int]) -> Axes | None:
    """Follow axes through a reshape that merges neighbours, or adds and drops axes of size one."""
    left = [(a, size) for a, size in zip(axes, old, strict=True) if size > 1]
    result: list = []
    for wanted in new:
        group, size = [], 1
        while size < wanted and left:
            a, n = left.pop(0)
            group.append(a)
            size *= n
        if size != wanted or (None in group and set(group) != {None}):
            return None
        result.append(None if None in group else tuple(axis for a in group for axis in a))
    return tuple(result)


def looked_up(equation: Any, view: View) -> Axes | None:
    """Give the axes of rows looked up in a leaf, None for the places; None if it is no look-up."""
    how, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    plain = tuple((axis,) for axis in range(len(view.shape)))
    is_of_rows = 0 in how.start_index_map and tuple(sizes) == (1, *view.shape[1:])
    if view.axes != plain or not is_of_rows or how.operand_batching_dims:
        return None
    kept = [axis for axis in plain if axis[0] not in how.collapsed_slice_dims]
    axes: list = [None] * equation.outvars[0].aval.ndim
    for place, axis in zip(how.offset_dims, kept, strict=True):
        axes[place] = axis if axis[0] else ()
    return tuple(axes)
