"""Follow the entries of a parameter through equations that only move, repeat, cast or cut them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

# Networks are traced, never run, at this number of examples. An axis belongs to the examples if its
# size is a multiple of it. It is a prime that no usual network has as a width or length. In a
# network with layers of that width two axes look like examples, so that it is refused as one that
# mixes examples (`uses`) or whose axes are shared (`split_examples`), but not read wrongly.
MANY = 10007

Axes = tuple[tuple[int, ...] | None, ...]
"""For each axis of a value, the axes of the leaf that it runs over; None where entries repeat."""
Place = tuple[int, int | None]
"""A value in a network: (number of an equation, number of its operand or None for its result)."""
Source = Place | range | None
"""The inputs of a use: a value, a range of rows, or None for no inputs."""

_IDENTITIES = {
    *("copy", "copy_p", "reduce_precision", "sharding_constraint", "reshard", "mesh_cast"),
    *("name", "optimization_barrier", "pvary", "pcast"),
}
SHARED = "the examples of its inputs share an axis with something else"
"""The reason for an obstacle that a network of one example at a time does not have."""
_ELSEWHERE = "parts of it are used in different ways"


class Obstacle(Exception):
    """The reason why a leaf belongs to no layer."""


class LoopObstacle(Exception):
    """The reason why a loop over blocks must be unrolled to be read."""


class View(NamedTuple):
    """A value that has the entries of a leaf.

    Attributes:
        leaf: Number of the leaf among the leaves of params.
        shape: Shape of the leaf, or of the slice of a stacked leaf that this value is; if rows were
            looked up, the axes of the row numbers in place of the first axis.
        axes: For each axis of the value, the axes of `shape` that it runs over.
        index: Index of the slice in a stack of layers; () if the value is the whole leaf.
        rows: Rows of the leaf that the value has: a range, the place of their row numbers, or None
            if it has all rows.
        factor: Place of the array that the value was multiplied by, and the axes of `shape` that
            this array runs over; None if it was not multiplied.
    """

    leaf: int
    shape: tuple[int, ...]
    axes: Axes
    index: tuple[int, ...] = ()
    rows: Source = None
    factor: tuple[Place, Axes] | None = None


def sort_axes(
    pairs: Iterable[tuple[tuple[int, ...], int]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sort pairs (axes of the leaf, axis of a value) by the former, and return both sides."""
    pairs = sorted(pairs)
    if not is_ordered(pairs):
        raise Obstacle("its axes were merged in another order than its own")
    return tuple(a for group, _ in pairs for a in group), tuple(axis for _, axis in pairs)


def is_ordered(pairs: Iterable[tuple[tuple[int, ...], int]]) -> bool:
    """Return whether merged axes of the leaf are in the same order as in the leaf."""
    axes = [axis for group, _ in sorted(pairs) for axis in group]
    return axes == sorted(axes)


def check_whole(view: View, axes: Sequence[int] | None = None) -> View:
    """Return a view that has all of its leaf unchanged; `axes` are those it runs over.

    Raises:
        Obstacle: If the view has a part of the leaf only, or was multiplied.
    """
    if view.factor is not None:
        raise Obstacle("it is multiplied by something before it is used")
    wide = {axis for axis, size in enumerate(view.shape) if size > 1}
    if view.rows is not None or (axes is not None and not wide <= set(axes)):
        raise Obstacle(_ELSEWHERE)
    return view


def split_examples(shape: Sequence[int], axes: Iterable[int]) -> tuple[tuple[int], tuple[int, ...]]:
    """Split axes into the axis of the examples and the others.

    Raises:
        Obstacle: If not exactly one of them is an axis of examples.
    """
    axes = tuple(axes)
    found = tuple(axis for axis in axes if shape[axis] == MANY)
    if len(found) != 1:
        raise Obstacle(SHARED)
    return found, tuple(axis for axis in axes if axis not in found)


def follow(number: int, equation: Any, view: View) -> View | None:
    """Return the view that an equation makes of its first operand; None if it changes entries."""
    name, how, source = equation.primitive.name, equation.params, equation.invars[0].aval.shape
    if name == "slice" and set(how["strides"] or ()) <= {1}:
        ends = list(zip(how["start_indices"], how["limit_indices"], strict=True))
        return _slice(view, ends, [a for a, size in enumerate(source) if ends[a] != (0, size)])
    if name == "gather":
        axes = lookup_axes(equation, view)
        if axes is None or len(view.shape) != 2 or view.rows is not None or view.factor is not None:
            return None
        # Row numbers may have several axes, such as pairs of positions: they take the place of the
        # axis of rows, in their order.
        places = [a for a, axis in enumerate(axes) if axis is None]
        shape = tuple(equation.outvars[0].aval.shape[a] for a in places)
        known = {a: (i,) for i, a in enumerate(places)}
        axes = tuple(known.get(a, axis and (len(places),)) for a, axis in enumerate(axes))
        return view._replace(shape=(*shape, view.shape[1]), axes=axes, rows=(number, 1))
    new = getattr(equation.outvars[0].aval, "shape", ())
    is_plain = view.axes == tuple((a,) for a in range(len(view.shape)))
    if isinstance(view.rows, tuple) and name == "reshape" and is_plain and new[-1:] == source[-1:]:
        # Another shape of the row numbers, as of pairs of positions that were looked up in a line.
        return view._replace(shape=new, axes=tuple((a,) for a in range(len(new))))
    axes = follow_axes(equation, view.axes)
    return None if axes is None else view._replace(axes=axes)


def _slice(view: View, ends: list[tuple[int, int]], axes: list[int]) -> View | None:
    """Return the view of a slice [start, end) along each axis; `axes` are those that it cuts."""
    if not axes:
        return view
    (start, end), axis = ends[axes[0]], axes[0]
    if len(axes) > 1 or view.rows is not None or view.factor is not None:
        return None
    if axis == 0 and end - start == 1 and not view.index and view.axes[0] == (0,):
        # The slice is one layer of a stack: from here on axes are counted in its own shape.
        rest = (None if a is None else tuple(i - 1 for i in a) for a in view.axes[1:])
        return View(view.leaf, view.shape[1:], ((), *rest), (start,))
    wide = [a for a, size in enumerate(view.shape) if size > 1]
    is_rows = len(wide) == 2 and view.axes[axis] == (wide[0],)
    return view._replace(rows=range(start, end)) if is_rows else None


def follow_axes(equation: Any, axes: Axes) -> Axes | None:
    """Return the axes of an equation's result from its operand's; None if it changes entries."""
    name, how, result = equation.primitive.name, equation.params, equation.outvars[0].aval
    old, new = equation.invars[0].aval.shape, getattr(result, "shape", ())
    if name == "convert_element_type":
        return axes if jnp.issubdtype(result.dtype, jnp.floating) else None
    # Older versions of JAX write a slice of everything for an index into an axis of size one.
    if (name in _IDENTITIES or (name == "slice" and old == new)) and len(equation.invars) == 1:
        return axes
    if name == "transpose":
        return tuple(axes[a] for a in how["permutation"])
    if name in ("reshape", "squeeze", "expand_dims"):
        if name == "reshape" and how["dimensions"] is not None:
            # Such a reshape, as by order="F", transposes first.
            axes, old = (tuple(x[a] for a in how["dimensions"]) for x in (axes, old))
        return _reshape(axes, old, new)
    if name == "tile" and all(n in (1, m) for n, m in zip(old, new, strict=True)):
        return broadcast_axes(axes, old, new)
    if name == "broadcast_in_dim":
        places = dict(zip(how["broadcast_dimensions"], range(len(old)), strict=True))
        expanded = [axes[places[a]] if a in places else () for a in range(len(new))]
        sizes = [old[places[a]] if a in places else 1 for a in range(len(new))]
        return broadcast_axes(expanded, sizes, new)
    return None


def broadcast_axes(axes: Sequence, old: Sequence[int], new: Sequence[int]) -> Axes:
    """Return the axes of a value of shape `old` after it is broadcast to shape `new`."""
    # A scalar has no axes.
    pairs = zip(axes or [()] * len(new), old or [1] * len(new), new, strict=True)
    return tuple(a if n == m else None for a, n, m in pairs)


def _reshape(axes: Axes, old: Sequence[int], new: Sequence[int]) -> Axes | None:
    """Return the axes after a reshape that merges neighbours and adds or drops axes of size one.

    An axis along which entries repeat may also be split. Return None for any other reshape.
    """
    left = [(a, size) for a, size in zip(axes, old, strict=True) if size > 1]
    result: list = []
    for wanted in new:
        group, size = [], 1
        while size < wanted and left:
            a, n = left.pop(0)
            if a is None and not group and n > wanted and n % wanted == 0:
                left.insert(0, (a, n // wanted))
                n = wanted
            group.append(a)
            size *= n
        if size != wanted or (None in group and set(group) != {None}):
            return None
        result.append(None if None in group else tuple(axis for a in group for axis in a))
    return tuple(result)


def lookup_axes(equation: Any, view: View) -> Axes | None:
    """Return the axes of a gather's result if it looks up rows of the leaf, else None.

    An axis of the row numbers has None in place of axes of the leaf.
    """
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
