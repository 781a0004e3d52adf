"""Which leaves belong to a normalisation, read off a network's equations.

A value is normalised where it is divided by a root of its own mean square or variance, as in
LayerNorm, GroupNorm and RMSNorm, or of kept statistics, as in BatchNorm. The scale that multiplies
it, the shift that is then added and the statistics are the leaves of a normalisation, whatever
their names. A root of a sum over a kernel, as in weight normalisation, divides no such value.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from jax.extend.core import Literal

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._layers import equations
from fisherjax._layers.views import MANY
from fisherjax.typing import ArrayOrShape, Model, Params

_MOVES = {
    *("reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim", "convert_element_type"),
    *("copy", "copy_p", "reduce_precision", "sharding_constraint", "stop_gradient", "tile"),
    *("slice", "dynamic_slice", "gather", "concatenate", "rev"),
}
_REDUCTIONS = {"reduce_sum", "dot_general", "reduce_window_sum", "conv_general_dilated"}
_ROOTS = {"rsqrt": -1, "sqrt": 1}
_INSIDE = {"scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
# How many values a factor may lie behind the one that is normalised.
_LONGEST = 16
_NONE: frozenset[int] = frozenset()
# In place of the leaves of a mean that the network holds as a constant.
_CONSTANT = frozenset({-1})


class _Root(NamedTuple):
    """The root that a value is divided by (-1), or is (1), and what is under it."""

    under: Any
    power: int


class _Base(NamedTuple):
    """A value that a product of factors starts from, and what came after it."""

    variable: Any
    scales: frozenset[int] = _NONE
    centers: frozenset[int] = _NONE


class _Value(NamedTuple):
    """What is known of a variable.

    Attributes:
        data: Whether it depends on the inputs.
        leaves: Of what does not: all that it is made of. Of what is normalised: its statistics.
        apart: Of what does not: whether its entries are those of leaves or of constants, changed
            each by itself.
        bases: Of what depends on the inputs: newest first.
        scales: Leaves among its factors, where it has no bases or is normalised.
        root: The root among its factors.
        normal: Whether it is normalised, and has no shift yet.
    """

    data: bool = False
    leaves: frozenset[int] = _NONE
    apart: bool = True
    bases: tuple[_Base, ...] = ()
    scales: frozenset[int] = _NONE
    root: _Root | None = None
    normal: bool = False


class _Walk(NamedTuple):
    """What is known so far."""

    values: dict[Any, _Value]
    makers: dict[Any, Any]  # the equation of each variable
    shapes: list[tuple[int, ...]]  # of the leaves
    found: set[int]
    unread: set[int]


def normalizations(model: Model, params: Params, inputs: ArrayOrShape) -> frozenset[str]:
    """Find the leaves that belong to normalisations, by what the network computes with them.

    These are scales and shifts of normalised values and the statistics that values are normalised
    by, of BatchNorm, LayerNorm, GroupNorm, RMSNorm and the like. A leaf that the network does not
    use belongs to them where those beside it do.

    Args:
        model: The network, as it is evaluated.
        params: Its params, or their shapes.
        inputs: A batch [B, ...], or its shape and dtype; values are not read.

    Returns:
        Names of leaves, as `fisherjax.tree.names` has them.

    Raises:
        ValueError: If the network cannot be read, or leaves meet a root inside a loop, a branch or
            a function with derivatives of its own.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> def apply(params, x):
        ...     hidden = x @ params["in"]
        ...     centered = hidden - hidden.mean(-1, keepdims=True)
        ...     spread = jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        ...     return (params["a"] * centered / spread) @ params["normal_head"]
        >>> params = {"in": jnp.ones((4, 3)), "a": jnp.ones(3), "normal_head": jnp.ones((3, 2))}
        >>> normalizations(fj.Model(apply, fj.likelihoods.categorical), params, jnp.ones((1, 4)))
        frozenset({'a'})
    """
    checks.model(model)
    checks.outputs(model, params, inputs)
    network, names = _flat(model, params, inputs), tree.names(params)
    *leaves, data = network.arguments
    values = {v: _Value(leaves=frozenset({i})) for i, v in enumerate(leaves)}
    values[data] = _data(data)
    # What has the axis of the examples is theirs, such as a recurrent network's first state.
    values |= {v: _data(v) if _has_examples(v) else _Value() for v, _ in network.constants}
    walk = _Walk(values, {}, [v.aval.shape for v in leaves], set(), set())
    for equation in network.equations:
        _read(walk, equation)
    if walk.unread:
        raise ValueError(
            f"The network uses {[names[i] for i in sorted(walk.unread)]} beside a root inside a "
            "loop, a branch or a function with derivatives of its own, where normalisations are "
            "not looked for; expected plain operations. Write where=lambda name: ... instead."
        )
    kept = {names[i] for i in walk.found}
    used = {v for e in network.equations for v in equations.variables(e.invars)}
    idle = [name for v, name in zip(leaves, names, strict=True) if v not in used]
    return frozenset(kept | {n for n in idle if _parent(n) in set(map(_parent, kept))})


def _flat(model: Model, params: Params, inputs: ArrayOrShape) -> equations.Flat:
    many = tree.shape_of(inputs, MANY)
    try:
        return equations.flat(model.apply, params, many)
    except Exception as error:
        raise ValueError(
            f"The network could not be read ({type(error).__name__}: {error}); expected an apply "
            "that treats every example alike. Write where=lambda name: ... instead."
        ) from error


def _read(walk: _Walk, equation: Any) -> None:
    operands = [_known(walk, v) for v in equation.invars]
    for v in equation.outvars:
        walk.makers[v] = equation
    name, result = equation.primitive.name, equation.outvars[0]
    if name in _INSIDE and any(x.leaves for x in operands) and _has_root(equation.params.values()):
        walk.unread.update(*(x.leaves for x in operands))
    value = _by_rule(walk, name, equation, operands)
    if value is None:
        value = _plain(equation, operands, result)
    walk.values[result] = value
    for v in equation.outvars[1:]:
        walk.values[v] = _plain(equation, operands, v)


def _by_rule(walk: _Walk, name: str, equation: Any, operands: list[_Value]) -> _Value | None:
    """Read an equation that keeps what is known of a value; None if it is none."""
    result = equation.outvars[0]
    if name in _MOVES:
        return _moved(operands)
    if name in _ROOTS:
        return _rooted(equation.invars[0], operands[0], _ROOTS[name])
    if name == "pow" and (power := _half(equation.invars[1])) is not None:
        return _rooted(equation.invars[0], operands[0], power)
    if name == "integer_pow" and equation.params["y"] == -1:
        return _inverse(operands[0])
    if name == "mul" or (name == "dot_general" and _is_elementwise(equation)):
        return _product(walk, operands, result)
    if name == "div":
        below = _divisor(equation, *operands)
        return None if below is None else _product(walk, [operands[0], below], result)
    if name in ("add", "add_any", "sub", "max"):
        is_array = any(getattr(equation.invars[1].aval, "shape", ()))
        return _sum(walk, name, operands, result, is_array)
    return None


def _is_elementwise(equation: Any) -> bool:
    """Whether a product sums nothing and has no entry of one side with several of the other."""
    (contracted, _), (left, right) = equation.params["dimension_numbers"]
    ranks = [len(v.aval.shape) for v in equation.invars]
    return not contracted and (len(left) == ranks[0] or len(right) == ranks[1])


def _plain(equation: Any, operands: list[_Value], result: Any) -> _Value:
    """Describe the result of an equation that may do anything."""
    if any(x.data for x in operands) or _has_examples(result):
        return _data(result)
    # One that makes entries of several others, such as a sum over a kernel, has another shape.
    shape = getattr(result.aval, "shape", ())
    sizes = [getattr(v.aval, "shape", ()) for v in equation.invars]
    is_apart = equation.primitive.name not in _REDUCTIONS and (shape in sizes or not sizes)
    apart = is_apart and all(x.apart for x in operands)
    return _Value(leaves=_union(x.leaves for x in operands), apart=apart)


def _moved(operands: list[_Value]) -> _Value | None:
    first, *others = operands
    return None if any(x.leaves or x.data for x in others) else first


def _rooted(under: Any, value: _Value, power: int) -> _Value | None:
    """Describe a root: of a statistic, which a look at what is under it decides later."""
    if value.data:
        return _Value(data=True, root=_Root(under, power))
    shape = getattr(under.aval, "shape", ())
    return _Value(leaves=value.leaves, root=_Root(under, power)) if value.apart and shape else None


def _divisor(equation: Any, value: _Value, below: _Value) -> _Value | None:
    is_kept = not below.data and below.leaves and below.apart and below.root is None
    if is_kept and any(base.centers for base in value.bases):
        # After a kept mean, a leaf that divides is a kept deviation.
        root = _Root(equation.invars[1], -1)
        return below._replace(root=root, scales=_NONE)
    return _inverse(below)


def _inverse(value: _Value) -> _Value | None:
    if value.root is not None and not value.bases:
        return value._replace(root=_Root(value.root.under, -value.root.power))
    return value if not value.data else None


def _product(walk: _Walk, operands: list[_Value], result: Any) -> _Value | None:
    # What is normalised or starts from data comes first; a second one makes a value of its own.
    left, right = sorted(operands, key=lambda x: not x.bases)
    if right.bases or right.normal or (left.root and right.root):
        return None
    scales = _factors(right)
    if right.data and right.root is None:
        return None
    if not left.bases:
        data, leaves = _is_data(operands), left.leaves | right.leaves
        both = _factors(left) | scales
        root = left.root or right.root
        apart = left.apart and right.apart
        return _Value(data, leaves, apart, (), both, root)
    if left.normal:
        # One scale; what else follows is another layer's.
        if right.root is not None or (scales and left.scales):
            return None
        walk.found.update(scales)
        return left._replace(scales=left.scales | scales)
    after = tuple(b._replace(scales=b.scales | scales) for b in left.bases)
    if right.root is None or right.root.power > 0:
        return _Value(data=True, bases=(_Base(result), *after)[:_LONGEST])
    return _normalized(walk, left, right, right.root, result)


def _normalized(
    walk: _Walk, left: _Value, right: _Value, root: _Root, result: Any
) -> _Value | None:
    """Divide a value by a root, if that is of its own statistics or of kept ones."""
    under = _known(walk, root.under)
    if under.data:
        for base in left.bases:
            inside = _statistic(walk, root.under, base.variable)
            if inside is not None:
                scales = base.scales | right.scales
                walk.found.update(scales | inside)
                return _Value(True, bases=(_Base(result),), scales=scales, normal=True)
        return None
    # By a kept variance: the newest value that all of a kept mean was subtracted from.
    most = max((len(b.centers) for b in left.bases), default=0)
    first = next((b for b in left.bases if most and len(b.centers) == most), _Base(None))
    if not under.leaves and not most:
        return None  # a number for each channel that is none of its statistics
    scales, kept = first.scales | right.scales, under.leaves | (first.centers - _CONSTANT)
    walk.found.update(scales | kept)
    return _Value(True, kept, bases=(_Base(result),), scales=scales, normal=True)


def _sum(
    walk: _Walk, name: str, operands: list[_Value], result: Any, is_array: bool
) -> _Value | None:
    left, right = operands
    if name != "sub" and not left.data and (right.data or right.leaves):
        left, right = right, left
    is_number = not right.data and not right.leaves
    if left.root is not None and not left.bases:
        # A deviation, and a small number.
        return left if is_number and name != "sub" else None
    if not left.data or not left.bases or right.root is not None or name == "max":
        return None
    if left.normal:
        if not right.data:
            walk.found.update(_shift(walk, left, right))
        return None
    if right.data:
        # Less its mean, for instance.
        older = left.bases if name == "sub" else ()
        return _Value(data=True, bases=(_Base(result), *older)[:_LONGEST])
    if name != "sub":
        return None
    center = right.leaves or (_CONSTANT if is_array else _NONE)
    own = tuple(b._replace(centers=b.centers | center) for b in left.bases)
    return _Value(data=True, bases=(_Base(result), *own)[:_LONGEST])


def _shift(walk: _Walk, normal: _Value, added: _Value) -> frozenset[int]:
    """Say which leaves of what is added to a normalised value are its shift."""
    # A network that was simplified adds bias - mean * scale / deviation.
    if added.leaves & (normal.scales | normal.leaves):
        return added.leaves
    if not added.apart:
        return _NONE
    # A table of positions that follows has other axes.
    sizes = {math.prod(walk.shapes[i]) for i in normal.scales}
    wide = [sum(n > 1 for n in walk.shapes[i]) for i in added.leaves]
    same = {math.prod(walk.shapes[i]) for i in added.leaves} <= sizes
    return added.leaves if same or (not sizes and max(wide, default=2) <= 1) else _NONE


def _statistic(walk: _Walk, under: Any, base: Any) -> frozenset[int] | None:
    """Say which leaves are in a statistic of a value; None if it is none, or of something else."""
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


def _factors(value: _Value) -> frozenset[int]:
    """Give the leaves that a product with a value scales by, each entry by itself."""
    is_made_of_leaves = not value.data and value.root is None and value.apart
    return value.leaves if is_made_of_leaves else value.scales


def _known(walk: _Walk, variable: Any) -> _Value:
    return _Value() if isinstance(variable, Literal) else walk.values[variable]


def _data(variable: Any) -> _Value:
    return _Value(data=True, bases=(_Base(variable),))


def _is_data(operands: list[_Value]) -> bool:
    return any(x.data for x in operands)


def _has_examples(variable: Any) -> bool:
    return any(size and size % MANY == 0 for size in getattr(variable.aval, "shape", ()))


def _has_root(values: Iterable[Any]) -> bool:
    """Whether any of the jaxprs among these holds a root."""
    for value in values:
        if isinstance(value, tuple | list):
            if _has_root(value):
                return True
            continue
        jaxpr = getattr(value, "jaxpr", value)
        for equation in getattr(jaxpr, "eqns", ()):
            if equation.primitive.name in _ROOTS or _has_root(equation.params.values()):
                return True
    return False


def _half(exponent: Any) -> int | None:
    value = getattr(exponent, "val", None)
    return {0.5: 1, -0.5: -1}.get(float(value)) if value is not None else None


def _union(sets: Iterable[frozenset[int]]) -> frozenset[int]:
    return frozenset().union(*sets)


def _parent(name: str) -> str:
    return name.rpartition("/")[0]
