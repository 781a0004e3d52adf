"""Expressions of leaves that are not computed before a product with the inputs needs them.

`rewriting` has the reason for them, and `choices` that for those of each example.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax

from fisherjax._core import compat
from fisherjax.typing import Array


class Concatenated(NamedTuple):
    """Values side by side along an axis."""

    parts: tuple[Array, ...]
    axis: int


class Sum(NamedTuple):
    """A sum of values of equal shape, which may be computed themselves."""

    terms: tuple[Any, ...]


class Product(NamedTuple):
    """A product of two matrices, which may be computed.

    The axes are those that are contracted; `how` are the settings of `jax.lax.dot_general`.
    """

    left: Any
    right: Any
    axes: tuple[int, int]
    how: dict[str, Any]


class Scaled(NamedTuple):
    """A value times a number, as the function `scale` multiplies by it."""

    value: Any
    scale: Callable[[Any], Any]


class Repeated(NamedTuple):
    """A value of params, repeated `number` times along a new first axis."""

    value: Array
    number: int


class Condition(NamedTuple):
    """A number for each example, [B], repeated along further axes to `shape`."""

    value: Array
    shape: tuple[int, ...]


class Chosen(NamedTuple):
    """For each example n the entries of case which[n]; all cases are [B, ...]."""

    which: Array
    cases: tuple[Any, ...]


Choice = Repeated | Condition | Chosen
Computed = Concatenated | Sum | Product | Scaled | Choice


def evaluate(value: Any) -> Array:
    """Return the array that a value stands for."""
    match value:
        case Concatenated():
            return jax.lax.concatenate(value.parts, value.axis)
        case Sum():
            return reduce(jax.lax.add, map(evaluate, value.terms))
        case Product():
            left, right = value.axes
            return contract(evaluate(value.left), left, value.right, right, value.how)
        case Scaled():
            return value.scale(evaluate(value.value))
        case Repeated():
            shape, axes = value.value.shape, range(1, value.value.ndim + 1)
            return jax.lax.broadcast_in_dim(value.value, (value.number, *shape), [*axes])
        case Condition():
            return jax.lax.broadcast_in_dim(value.value, value.shape, (0,))
        case Chosen():
            cases = [*map(evaluate, value.cases)]
            which = evaluate(Condition(value.which, cases[0].shape))
            return jax.lax.select_n(which, *cases)
    return value


def is_computed(value: Any) -> bool:
    return isinstance(value, Computed)


def is_choice(value: Any) -> bool:
    """Return whether a value is an expression that `choices` rewrites."""
    return isinstance(value, Choice)


def move(equation: Any, value: Any) -> Any:
    """Move the entries of an expression by moving those of its parts; None if that is not done."""
    name = equation.primitive.name
    if isinstance(value, Concatenated):
        return _move_parts(equation, value)
    if name not in ("transpose", "convert_element_type", "reshape", "squeeze", "broadcast_in_dim"):
        return None

    def moved(x: Any) -> Any:
        found = move(equation, x) if is_computed(x) else None
        return apply(equation, [x]) if found is None else found

    if isinstance(value, Sum):
        return Sum(tuple(map(moved, value.terms)))
    if isinstance(value, Scaled) and name in ("transpose", "convert_element_type"):
        return value._replace(value=moved(value.value))
    if isinstance(value, Product) and name == "convert_element_type":
        how = value.how | {"preferred_element_type": None}
        return Product(moved(value.left), moved(value.right), value.axes, how)
    if isinstance(value, Product) and name == "transpose":
        swapped = Product(value.right, value.left, (value.axes[1], value.axes[0]), value.how)
        return swapped if equation.params["permutation"] == (1, 0) else value
    return None


def _move_parts(equation: Any, whole: Concatenated) -> Any:
    name, how, shape = equation.primitive.name, equation.params, equation.outvars[0].aval.shape
    old, axis = equation.invars[0].aval.shape, whole.axis
    if name == "slice" and set(how["strides"] or ()) <= {1}:
        ends = [sum(part.shape[axis] for part in whole.parts[:i]) for i in range(len(whole.parts))]
        start, limit = how["start_indices"], how["limit_indices"]
        wanted = start[axis], limit[axis] - start[axis]
        others = [
            (a, b - a) for i, (a, b) in enumerate(zip(start, limit, strict=True)) if i != axis
        ]
        is_part = others == [(0, n) for i, n in enumerate(old) if i != axis]
        for end, part in zip(ends, whole.parts, strict=True):
            if is_part and wanted == (end, part.shape[axis]):
                return part
        return None
    if name == "convert_element_type":
        return whole._replace(parts=tuple(apply(equation, [x]) for x in whole.parts))
    if name == "transpose":
        parts = tuple(apply(equation, [x]) for x in whole.parts)
        return Concatenated(parts, how["permutation"].index(axis))
    if name == "broadcast_in_dim":
        place, dims = how["broadcast_dimensions"][axis], how["broadcast_dimensions"]
        if shape[place] != old[axis]:
            return None
        sizes = [(*shape[:place], x.shape[axis], *shape[place + 1 :]) for x in whole.parts]
        pairs = zip(whole.parts, sizes, strict=True)
        return Concatenated(tuple(jax.lax.broadcast_in_dim(x, n, dims) for x, n in pairs), place)
    if name == "squeeze" or (name == "reshape" and how["dimensions"] is None):
        same = [i for i, n in enumerate(shape) if n == old[axis]]
        before = math.prod(old[:axis])
        place = next((i for i in same if math.prod(shape[:i]) == before), None)
        if place is None:
            return None
        sizes = [(*shape[:place], x.shape[axis], *shape[place + 1 :]) for x in whole.parts]
        pairs = zip(whole.parts, sizes, strict=True)
        return Concatenated(tuple(x.reshape(n) for x, n in pairs), place)
    return None


def contract(x: Array, axis: int, weight: Any, other: int, how: dict[str, Any]) -> Array:
    """Contract an axis of x with one of a matrix, which may be computed; its free axis is last."""
    match weight:
        case Product():
            # The factor whose free axis meets x comes first.
            factors, axes = (weight.left, weight.right), weight.axes
            y = contract(x, axis, factors[other], 1 - axes[other], how).astype(x.dtype)
            return contract(y, y.ndim - 1, factors[1 - other], axes[1 - other], how)
        case Scaled():
            return contract(weight.scale(x), axis, weight.value, other, how)
        case Sum():
            products = (contract(x, axis, term, other, how) for term in weight.terms)
            return reduce(jax.lax.add, products)
    settings = {name: how[name] for name in ("precision", "preferred_element_type")}
    numbers = ((axis,), (other,)), ((), ())
    return jax.lax.dot_general(x, evaluate(weight), numbers, **settings)


def apply(equation: Any, values: list[Any]) -> Any:
    return compat.evaluate(equation, [evaluate(x) for x in values])[0]
