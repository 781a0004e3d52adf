"""Rewrite products with a computed kernel as products with the leaves that it is made of.

    x [K, L] = [x K, x L],   x [K; L] = x_1 K + x_2 L,   x (W + A B) = x W + (x A) B,
    x (s W) = (s x) W,       x + (p + q) = (x + p) + q

A network may concatenate kernels, as a fast LSTM does, add an adapter to a kernel or scale it,
before its inputs meet the result. While a network is traced, such a result is a *computed* value,
an expression of leaves. A product or a sum with the inputs is computed by parts, so that each leaf
meets the inputs by itself. Any other equation gets the value of the expression, as the network has
it, and its leaves are then read as before.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._core import checks
from fisherjax._layers.computed import (
    Concatenated,
    Product,
    Scaled,
    Sum,
    apply,
    contract,
    evaluate,
    is_computed,
    move,
)
from fisherjax.typing import Array

# What a value depends on. A result has the largest number among its operands.
CONSTANTS, PARAMS, INPUTS = range(3)


Value = tuple[Any, int]
"""An array, or an expression that was not computed, and what it depends on."""


def rewrite(equation: Any, operands: Sequence[Value]) -> list[Value] | None:
    """Return the results of an equation with computed operands or results, or None if it has none.

    None also stands for an equation that needs the values of its operands.
    """
    values, origins = [value for value, _ in operands], [origin for _, origin in operands]
    origin = max(origins, default=CONSTANTS)
    if origin == CONSTANTS or not (origin == PARAMS or any(is_computed(x) for x in values)):
        return None
    name = equation.primitive.name
    if name == "split" and isinstance(whole := values[0], Concatenated):
        sizes = [part.shape[whole.axis] for part in whole.parts]
        is_same = equation.params["axis"] == whole.axis and [*equation.params["sizes"]] == sizes
        return [(part, origin) for part in whole.parts] if is_same else None
    if name == "unstack" and origin == PARAMS:
        # Since jax 0.12 a loop over an array is one equation; older versions write such slices.
        whole, axis = evaluate(values[0]), equation.params["axis"]
        places = range(whole.shape[axis])
        return [(jax.lax.index_in_dim(whole, i, axis, keepdims=False), origin) for i in places]
    if len(values) == 1 and is_computed(values[0]):
        result = move(equation, values[0])
    elif origin == PARAMS:
        result = _compute(equation, values, origins)
    else:
        result = _meet(equation, values, origins)
    return None if result is None else [(result, origin)]


def _compute(equation: Any, values: list[Any], origins: list[int]) -> Any:
    """Return the expression of an equation of params, or None if it is of another kind."""
    name, shapes = equation.primitive.name, [v.aval.shape for v in equation.invars]
    if name == "dynamic_slice" and not checks.is_traced(values[1:]):
        sizes = equation.params["slice_sizes"]
        # Like JAX, which moves a slice that would end outside.
        ends = zip(values[1:], shapes[0], sizes, strict=True)
        starts = [min(max(int(i), 0), n - size) for i, n, size in ends]
        limits = [i + size for i, size in zip(starts, sizes, strict=True)]
        return jax.lax.slice(evaluate(values[0]), starts, limits)
    if name == "concatenate":
        return Concatenated(tuple(map(evaluate, values)), equation.params["dimension"])
    if name in ("mul", "div") and () in shapes and any(len(shape) > 1 for shape in shapes):
        place = shapes.index(())
        if name == "div" and place == 0:
            return None
        number = values[place]

        def scale(x: Any) -> Any:
            factor = jnp.asarray(number, x.dtype)
            return apply(equation, [factor, x] if place == 0 else [x, factor])

        return Scaled(values[1 - place], scale)
    if name == "stack":
        axis, parts = equation.params["axis"], map(evaluate, values)
        return Concatenated(tuple(jnp.expand_dims(x, axis) for x in parts), axis)
    if name == "add" and () not in shapes:
        if any(isinstance(x, Concatenated) for x in values):
            return _add_by_parts(equation, values)
        # A leaf plus a constant is read as the leaf.
        if min(origins) < PARAMS and not any(is_computed(x) for x in values):
            return None
        shape = equation.outvars[0].aval.shape
        wide = [
            x if s == shape else jnp.broadcast_to(evaluate(x), shape)
            for x, s in zip(values, shapes, strict=True)
        ]
        return Sum(tuple(wide))
    if name == "dot_general":
        for side, x in enumerate(values):
            if isinstance(x, Concatenated) and not is_computed(values[1 - side]):
                return _multiply_by_parts(equation, values[1 - side], x, side)
        (left, right), batched = equation.params["dimension_numbers"]
        is_plain = [len(shape) for shape in shapes] == [2, 2] and len(left) == 1
        if is_plain and batched == ((), ()) and min(origins) == PARAMS:
            return Product(values[0], values[1], (left[0], right[0]), equation.params)
    return None


def _meet(equation: Any, values: list[Any], origins: list[int]) -> Any:
    """Return the result of an equation with inputs and an expression, or None."""
    name = equation.primitive.name
    if name == "add":
        if any(isinstance(x, Concatenated) for x in values):
            return _add_by_parts(equation, values)
        for x, other in (values, values[::-1]):
            if isinstance(other, Sum) and not is_computed(x):
                return reduce(lambda y, term: apply(equation, [y, term]), _terms(other), x)
        return None
    if name not in ("dot_general", "conv_general_dilated") or len(values) != 2:
        return None
    side = origins.index(PARAMS) if PARAMS in origins else 0
    if origins[side] != PARAMS or not is_computed(values[side]):
        return None
    return _multiply(equation, evaluate(values[1 - side]), values[side], side)


def _multiply(equation: Any, x: Array, weight: Any, side: int) -> Any:
    """Multiply inputs by a weight, which is operand number `side`, by its parts."""
    match weight:
        case Scaled():
            return _multiply(equation, weight.scale(x), weight.value, side)
        case Sum():
            products = [evaluate(_multiply(equation, x, term, side)) for term in weight.terms]
            return reduce(jax.lax.add, products)
        case Product() if equation.primitive.name == "dot_general":
            return _multiply_by_product(equation, x, weight, side)
        case Concatenated():
            return _multiply_by_parts(equation, x, weight, side)
    weight = evaluate(weight)
    return apply(equation, [x, weight] if side == 1 else [weight, x])


def _multiply_by_product(equation: Any, x: Array, weight: Product, side: int) -> Array:
    contracted, batched = equation.params["dimension_numbers"]
    if batched != ((), ()) or len(contracted[side]) != 1:
        return _multiply(equation, x, evaluate(weight), side)
    y = contract(x, contracted[1 - side][0], weight, contracted[side][0], equation.params)
    return y if side == 1 else jnp.moveaxis(y, -1, 0)


def _multiply_by_parts(equation: Any, x: Array, weight: Concatenated, side: int) -> Any:
    place, along = _axes_of_parts(equation, weight.axis, side)
    if place is not None:
        parts = [_multiply(equation, x, part, side) for part in weight.parts]
        return Concatenated(tuple(parts), place)
    if along is None:
        return _multiply(equation, x, evaluate(weight), side)
    pieces = _cut(x, [part.shape[weight.axis] for part in weight.parts], along)
    both = zip(pieces, weight.parts, strict=True)
    return reduce(jax.lax.add, [_multiply(equation, *pair, side) for pair in both])


def _axes_of_parts(equation: Any, axis: int, side: int) -> tuple[int | None, int | None]:
    """Return the axis of the result that a weight's axis becomes, or that of the inputs it meets.

    At most one of them is not None.
    """
    layout = equation.params["dimension_numbers"]
    if equation.primitive.name == "conv_general_dilated":
        is_plain = side == 1 and equation.params["feature_group_count"] == 1
        return (layout.out_spec[1] if is_plain and axis == layout.rhs_spec[0] else None), None
    contracted, batched = layout
    if axis in contracted[side]:
        return None, contracted[1 - side][contracted[side].index(axis)]
    if axis in batched[side]:
        return None, None
    ndims = [len(v.aval.shape) for v in equation.invars]
    # The result has the batched axes, then the free axes of the left and of the right operand.
    free = [
        [a for a in range(n) if a not in (*contracted[i], *batched[i])] for i, n in enumerate(ndims)
    ]
    return len(batched[0]) + (len(free[0]) if side else 0) + free[side].index(axis), None


def _add_by_parts(equation: Any, values: list[Any]) -> Concatenated | None:
    """Add a concatenation and a value of the same shape, or a number."""
    [whole, *_] = [x for x in values if isinstance(x, Concatenated)]
    sizes, columns = [part.shape[whole.axis] for part in whole.parts], []
    for x in values:
        if isinstance(x, Concatenated):
            found = [part.shape[x.axis] for part in x.parts]
            if x.axis != whole.axis or found != sizes:
                return None
            columns.append(x.parts)
        else:
            x = evaluate(x)
            # Some operands are broadcast by the sum itself.
            is_cut = jnp.ndim(x) > 0 and x.shape[whole.axis] == sum(sizes)
            columns.append(_cut(x, sizes, whole.axis) if is_cut else [x] * len(sizes))
    parts = zip(*columns, strict=True)
    return Concatenated(tuple(apply(equation, [*pair]) for pair in parts), whole.axis)


def _terms(value: Sum) -> list[Any]:
    """Return the terms of a sum and of the sums in it."""
    return [x for term in value.terms for x in (_terms(term) if isinstance(term, Sum) else [term])]


def _cut(x: Array, sizes: list[int], axis: int) -> list[Array]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    pairs = zip(ends, sizes, strict=True)
    return [jax.lax.slice_in_dim(x, end - size, end, axis=axis) for end, size in pairs]
