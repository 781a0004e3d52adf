"""Find values that are divided by a root of their own statistics, and the leaves in them.

`normalizations` walks through the equations of a network; `apply_rule` and `default_value` compute
what is known of the result of one equation from what is known of its operands. An example: in

    u = x - mean,   v = mean(u^2) + eps,   y = u * rsqrt(v) * scale + shift

`v` depends on data, `rsqrt(v)` is a root of `v`, and `u` is a base. The product `u * rsqrt(v)` is
normalised, because `v` is a statistic of the base `u`. The leaves `scale` and `shift` then belong
to a normalisation.
"""

import math
from typing import Any, NamedTuple

from jax.extend.core import Literal

from fisherjax._layers import equations
from fisherjax._layers.views import MANY

_MOVES = {
    *("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "convert_element_type"),
    *("copy", "copy_p", "reduce_precision", "sharding_constraint", "stop_gradient", "tile"),
    *("slice", "dynamic_slice", "gather", "concatenate", "rev"),
}
_REDUCTIONS = {"reduce_sum", "dot_general", "reduce_window_sum", "conv_general_dilated"}
ROOTS = {"rsqrt": -1, "sqrt": 1}
# Most factors between a base and its division by a root.
_LONGEST = 16
_NONE: frozenset[int] = frozenset()
# Stands for the leaves of a mean that the network holds as a constant.
_CONSTANT = frozenset({-1})


class Root(NamedTuple):
    """A root among the factors of a value.

    Attributes:
        under: Variable whose root it is.
        power: 1 for a factor, -1 for a divisor.
    """

    under: Any
    power: int


class Base(NamedTuple):
    """A value that may have been normalised later, by a division by a root of its statistics.

    Attributes:
        variable: The variable.
        scales: Leaves that it was multiplied by since.
        centers: Leaves that were subtracted from it since.
    """

    variable: Any
    scales: frozenset[int] = _NONE
    centers: frozenset[int] = _NONE


class Value(NamedTuple):
    """What is known of a variable.

    Attributes:
        data: Whether it depends on the inputs.
        leaves: Leaves that it is computed from, if it does not depend on the inputs. If it is
            normalised, the leaves of its statistics.
        entrywise: For a value that does not depend on the inputs, whether each entry is computed
            from one entry of each leaf or constant.
        bases: Bases of a value that depends on the inputs, newest first.
        scales: Leaves among its factors, if it has no bases or is normalised.
        root: The root among its factors, or None.
        normal: Whether it is normalised, and no shift was added yet.
    """

    data: bool = False
    leaves: frozenset[int] = _NONE
    entrywise: bool = True
    bases: tuple[Base, ...] = ()
    scales: frozenset[int] = _NONE
    root: Root | None = None
    normal: bool = False


class Walk(NamedTuple):
    """State of the walk through a network's equations.

    Attributes:
        values: What is known of each variable.
        makers: The equation that computes each variable.
        shapes: Shapes of the leaves.
        found: Leaves that belong to normalisations.
        unread: Leaves that are used inside an equation that is not read, next to a root.
    """

    values: dict[Any, Value]
    makers: dict[Any, Any]
    shapes: list[tuple[int, ...]]
    found: set[int]
    unread: set[int]


def apply_rule(walk: Walk, name: str, equation: Any, operands: list[Value]) -> Value | None:
    """Return what is known of the result of an equation that a rule covers, else None."""
    result = equation.outvars[0]
    if name in _MOVES:
        return None if any(x.leaves or x.data for x in operands[1:]) else operands[0]
    if name in ROOTS:
        return _take_root(equation.invars[0], operands[0], ROOTS[name])
    if name == "pow" and (power := _half_power(equation.invars[1])) is not None:
        return _take_root(equation.invars[0], operands[0], power)
    if name == "integer_pow" and equation.params["y"] == -1:
        return _invert(operands[0])
    if name == "mul" or (name == "dot_general" and _is_elementwise(equation)):
        return _multiply(walk, operands, result)
    if name == "div":
        below = _invert_divisor(equation, *operands)
        return None if below is None else _multiply(walk, [operands[0], below], result)
    if name in ("add", "add_any", "sub", "max"):
        return _add(walk, name, equation, operands)
    return None


def _is_elementwise(equation: Any) -> bool:
    """Return whether a product multiplies each entry with one entry of the other operand."""
    (contracted, _), (left, right) = equation.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in equation.invars]
    return not contracted and (len(left) == ranks[0] or len(right) == ranks[1])


def default_value(equation: Any, operands: list[Value], result: Any) -> Value:
    """Return what is known of the result of an equation that no rule covers."""
    if any(x.data for x in operands) or has_examples(result):
        return data_value(result)
    # An equation that combines several entries, such as a sum over a kernel, changes the shape.
    shape, *sizes = (getattr(v.aval, "shape", ()) for v in (result, *equation.invars))
    keeps_shape = equation.primitive.name not in _REDUCTIONS and (shape in sizes or not sizes)
    entrywise = keeps_shape and all(x.entrywise for x in operands)
    return Value(leaves=_NONE.union(*(x.leaves for x in operands)), entrywise=entrywise)


def _take_root(under: Any, value: Value, power: int) -> Value | None:
    """Return a root; `_normalize` decides later whether `under` is a statistic."""
    is_kept = value.data or (value.entrywise and getattr(under.aval, "shape", ()))
    leaves = _NONE if value.data else value.leaves
    return Value(value.data, leaves, root=Root(under, power)) if is_kept else None


def _invert_divisor(equation: Any, value: Value, below: Value) -> Value | None:
    """Return the inverse of a divisor."""
    is_leaf = not below.data and below.leaves and below.entrywise and below.root is None
    if is_leaf and any(base.centers for base in value.bases):
        # After a running mean was subtracted, a leaf that divides is a running deviation.
        return below._replace(root=Root(equation.invars[1], -1), scales=_NONE)
    return _invert(below)


def _invert(value: Value) -> Value | None:
    if value.root is not None and not value.bases:
        return value._replace(root=Root(value.root.under, -value.root.power))
    return value if not value.data else None


def _multiply(walk: Walk, operands: list[Value], result: Any) -> Value | None:
    # The operand with bases comes first. If both have bases, then no rule covers the product.
    left, right = sorted(operands, key=lambda x: not x.bases)
    if right.bases or right.normal or (left.root and right.root):
        return None
    if right.data and right.root is None:
        return None
    scales = _scale_leaves(right)
    if not left.bases:
        data, leaves = left.data or right.data, left.leaves | right.leaves
        both, root = _scale_leaves(left) | scales, left.root or right.root
        return Value(data, leaves, left.entrywise and right.entrywise, (), both, root)
    if left.normal:
        # A normalisation has one scale; further factors belong to another layer.
        if right.root is not None or (scales and left.scales):
            return None
        walk.found.update(scales)
        return left._replace(scales=left.scales | scales)
    after = tuple(b._replace(scales=b.scales | scales) for b in left.bases)
    if right.root is None or right.root.power > 0:
        return Value(data=True, bases=(Base(result), *after)[:_LONGEST])
    return _normalize(walk, left, right, right.root.under, result)


def _normalize(walk: Walk, left: Value, right: Value, root_of: Any, result: Any) -> Value | None:
    """Return the normalised value if a root is of the value's own or of running statistics."""
    under = known_value(walk, root_of)
    if under.data:
        for base in left.bases:
            inside = _statistic_leaves(walk, root_of, base.variable)
            if inside is not None:
                scales = base.scales | right.scales
                walk.found.update(scales | inside)
                return Value(True, bases=(Base(result),), scales=scales, normal=True)
        return None
    # The root of a running variance: the base is the newest one from which all leaves of a running
    # mean were subtracted.
    most = max((len(b.centers) for b in left.bases), default=0)
    first = next((b for b in left.bases if most and len(b.centers) == most), Base(None))
    if not under.leaves and not most:
        return None  # a constant for each channel that is no statistic
    scales, statistics = first.scales | right.scales, under.leaves | (first.centers - _CONSTANT)
    walk.found.update(scales | statistics)
    return Value(True, statistics, bases=(Base(result),), scales=scales, normal=True)


def _add(walk: Walk, name: str, equation: Any, operands: list[Value]) -> Value | None:
    result, (left, right) = equation.outvars[0], operands
    if name != "sub" and not left.data and (right.data or right.leaves):
        left, right = right, left
    is_number = not right.data and not right.leaves
    if left.root is not None and not left.bases:
        # A small number is added to a deviation.
        return left if is_number and name != "sub" else None
    if not left.data or not left.bases or right.root is not None or name == "max":
        return None
    if left.normal:
        if not right.data:
            walk.found.update(_shift_leaves(walk, left, right))
        return None
    if right.data:
        # Data is subtracted from data, such as a value's mean from the value.
        older = left.bases if name == "sub" else ()
        return Value(data=True, bases=(Base(result), *older)[:_LONGEST])
    if name != "sub":
        return None
    is_array = any(getattr(equation.invars[1].aval, "shape", ()))
    center = right.leaves or (_CONSTANT if is_array else _NONE)
    centered = tuple(b._replace(centers=b.centers | center) for b in left.bases)
    return Value(data=True, bases=(Base(result), *centered)[:_LONGEST])


def _shift_leaves(walk: Walk, normal: Value, added: Value) -> frozenset[int]:
    """Return the leaves of a summand that are the shift of a normalised value."""
    # A simplified network may add bias - mean * scale / deviation.
    if added.leaves & (normal.scales | normal.leaves):
        return added.leaves
    if not added.entrywise:
        return _NONE
    # A table of positions that is added next has other axes than the scale.
    sizes = {math.prod(walk.shapes[i]) for i in normal.scales}
    wide = [sum(n > 1 for n in walk.shapes[i]) for i in added.leaves]
    same = {math.prod(walk.shapes[i]) for i in added.leaves} <= sizes
    return added.leaves if same or (not sizes and max(wide, default=2) <= 1) else _NONE


def _statistic_leaves(walk: Walk, under: Any, base: Any) -> frozenset[int] | None:
    """Return the leaves in `under` if it is a statistic of the value `base`, else None."""
    waiting, seen, inside, reduces, reached = [under], {under}, set(), False, False
    while waiting:
        variable = waiting.pop()
        if variable == base:
            reached = True
            continue
        equation = walk.makers.get(variable)
        if equation is None:
            return None
        reduces = reduces or equation.primitive.name in _REDUCTIONS
        for v in equations.variables(equation.invars):
            known = walk.values[v]
            if known.leaves and not known.data:
                if equation.primitive.name not in ("add", "max"):
                    return None  # a product with params lies between
                inside |= known.leaves
            elif known.data and v not in seen:
                seen.add(v)
                waiting.append(v)
    return frozenset(inside) if reduces and reached else None


def _scale_leaves(value: Value) -> frozenset[int]:
    """Return the leaves that a product with a value scales by."""
    is_of_leaves = not value.data and value.root is None and value.entrywise
    return value.leaves if is_of_leaves else value.scales


def known_value(walk: Walk, variable: Any) -> Value:
    """Return what is known of a variable; of a literal, nothing."""
    return Value() if isinstance(variable, Literal) else walk.values[variable]


def data_value(variable: Any) -> Value:
    """Return what is known of a variable that depends on the inputs in any way."""
    return Value(data=True, bases=(Base(variable),))


def has_examples(variable: Any) -> bool:
    """Return whether a variable has an axis of examples."""
    return any(size and size % MANY == 0 for size in getattr(variable.aval, "shape", ()))


def _half_power(exponent: Any) -> int | None:
    """Return 1 for the exponent 1/2, -1 for -1/2, else None."""
    value = getattr(exponent, "val", None)
    return {0.5: 1, -0.5: -1}.get(float(value)) if value is not None else None
