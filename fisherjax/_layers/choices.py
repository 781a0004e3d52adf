"""Rewrite products with a kernel that is chosen for each example as a choice of products.

    x_n W_c(n) = (x W_c)_n,   with c(n) the case of example n

`jax.vmap` turns a `lax.cond` whose condition depends on the example into `select_n`: all branches
are computed for all examples, and the params that a branch uses are repeated for each example. Here
a *repeated* or *chosen* value is an expression that is not computed until an equation needs its
entries. A product with it becomes one product with each leaf, and the results are chosen, so that
the leaves are read as those of `jnp.where(condition, branch, other)`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax._layers.computed import Chosen, Condition, Repeated, apply, is_choice, is_computed
from fisherjax._layers.rewriting import PARAMS, Value
from fisherjax.typing import Array


def rewrite(equation: Any, operands: Sequence[Value]) -> Value | None:
    """Return the result of an equation as a choice, or None if the operands' entries are needed."""
    values, origin = [value for value, _ in operands], max((x for _, x in operands), default=0)
    name = equation.primitive.name
    if name == "broadcast_in_dim" and not is_computed(values[0]):
        found = _repeat(equation, values[0], origin == PARAMS)
    elif not any(map(is_choice, values)):
        return None
    elif name == "select_n":
        found = _choose(*values)
    elif name == "dot_general":
        found = _multiply(equation, values)
    elif name == "add":
        found = _add(equation, *values)
    else:
        # A condition is the same along further axes, of which JAX 0.7 cuts before it drops one.
        is_cut = name == "slice" and isinstance(values[0], Condition)
        is_moved = len(values) == 1 and (is_cut or _keeps_first_axis(equation))
        found = _move(equation, values[0]) if is_moved else None
    return None if found is None else (found, origin)


def _repeat(equation: Any, value: Any, of_params: bool) -> Repeated | Condition | None:
    old, new = jnp.shape(value), equation.outvars[0].aval.shape
    axes = tuple(equation.params["broadcast_dimensions"])
    if of_params:
        is_repeated = old and new[1:] == old and axes == tuple(range(1, len(new)))
        return Repeated(value, new[0]) if is_repeated else None
    is_condition = jnp.result_type(value) in (jnp.bool_, jnp.int32) and axes == (0,)
    return Condition(value, new) if is_condition and new[:1] == old else None


def _choose(which: Any, *cases: Any) -> Chosen | None:
    is_choice = all(isinstance(case, Repeated | Chosen) for case in cases)
    return Chosen(which.value, cases) if is_choice and isinstance(which, Condition) else None


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the cases of a choice, or to a value that is none."""
    if not isinstance(value, Chosen):
        return function(value)
    return Chosen(value.which, tuple(_map(function, case) for case in value.cases))


def _multiply(equation: Any, values: Sequence[Any]) -> Any:
    """Multiply inputs by a choice of weights, example by example; None for another product."""
    side = 0 if is_choice(values[0]) else 1
    x, weight = values[1 - side], values[side]
    if is_computed(x) or isinstance(weight, Condition):
        return None
    contracted, batched = equation.params["dimension_numbers"]
    place = batched[side].index(0) if 0 in batched[side] else None
    if place is None or (isinstance(weight, Chosen) and place != 0):
        return None
    example = batched[1 - side][place]
    # In a product with the weight itself, which has no axis of examples, that of x is a free one.
    theirs = [a for a in batched[1 - side] if a != example]
    free = [a for a in range(jnp.ndim(x)) if a not in (*contracted[1 - side], *theirs)]
    pairs = [
        ([a - 1 for a in contracted[side]], contracted[1 - side]),
        ([a - 1 for a in batched[side] if a != 0], theirs),
    ]
    numbers = tuple(pair if side == 0 else pair[::-1] for pair in pairs)
    settings = {name: equation.params[name] for name in ("precision", "preferred_element_type")}

    def product(case: Any) -> Array:
        # A case that is no repeated weight is [B, ...], and the equation multiplies it as it is.
        if not isinstance(case, Repeated):
            return apply(equation, [case, x] if side == 0 else [x, case])
        operands = (case.value, x) if side == 0 else (x, case.value)
        y = jax.lax.dot_general(*operands, numbers, **settings)
        # The result has the batched axes, then the free axes of the left and of the right operand.
        first = y.ndim - len(free) if side == 0 else len(theirs)
        found = first + free.index(example)
        return y if found == place else jnp.moveaxis(y, found, place)

    return _map(product, weight)


def _add(equation: Any, left: Any, right: Any) -> Any:
    """Add two choices by the same condition, case by case; None if they are others."""
    is_same = isinstance(left, Chosen) and isinstance(right, Chosen) and left.which is right.which
    if not is_same:
        return None
    sums = []
    for pair in zip(left.cases, right.cases, strict=True):
        found = _add(equation, *pair)
        sums.append(apply(equation, [*pair]) if found is None else found)
    return Chosen(left.which, tuple(sums))


def _keeps_first_axis(equation: Any) -> bool:
    """Return whether an equation only moves the entries of each example."""
    name, how = equation.primitive.name, equation.params
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if name == "transpose":
        return how["permutation"][0] == 0
    if name == "broadcast_in_dim":
        return how["broadcast_dimensions"][:1] == (0,) and new[0] == old[0]
    if name in ("reshape", "squeeze"):
        is_plain = name == "squeeze" or how["dimensions"] is None
        return is_plain and new[:1] == old[:1] and 0 not in (how["dimensions"] or ())
    return name in ("convert_element_type", "stop_gradient")


def _move(equation: Any, value: Any) -> Any:
    name, how, new = equation.primitive.name, equation.params, equation.outvars[0].aval.shape
    if isinstance(value, Condition):
        is_cast = name in ("convert_element_type", "stop_gradient")
        number = apply(equation, [value.value]) if is_cast else value.value
        is_whole = name != "transpose" and new[0] == value.shape[0]
        return Condition(number, new) if is_whole else None

    def moved(case: Any) -> Any:
        if not isinstance(case, Repeated):
            return apply(equation, [case])
        inner = case.value
        if name == "transpose":
            inner = inner.transpose([axis - 1 for axis in how["permutation"][1:]])
        elif name == "broadcast_in_dim":
            axes = [axis - 1 for axis in how["broadcast_dimensions"][1:]]
            inner = jax.lax.broadcast_in_dim(inner, new[1:], axes)
        elif name in ("reshape", "squeeze"):
            inner = inner.reshape(new[1:])
        else:
            inner = apply(equation, [inner])
        return Repeated(inner, case.number)

    return _map(moved, value)
