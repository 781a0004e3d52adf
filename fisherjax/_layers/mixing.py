"""Tell whether an equation computes something over several examples, or by their places."""

from typing import Any

import jax.numpy as jnp
from jax.extend import source_info_util

from fisherjax._layers import views
from fisherjax._layers.equations import variables
from fisherjax._layers.views import MANY

COPIED = (
    "each example has a copy of it as its kernel, as under a vmapped lax.cond; let jnp.where "
    "choose between the outputs of both branches instead"
)
"""The reason for an obstacle that `copies_in` finds."""
RAGGED = "ragged_dot_general"
RAGGED_HINT = (
    " In place of jax.lax.ragged_dot, multiply by all kernels and choose, as jnp.einsum("
    "'bi,gio,bg->bo', x, kernels, jax.nn.one_hot(group, len(kernels))) does."
)
_BY_INDEX = "gather", "scatter", "dynamic_slice", "dynamic_update_slice"


def fault(equation: Any, *, mixes: bool, is_by_place: bool) -> str:
    """Return what is wrong with an equation that mixes examples or depends on their places."""
    if not (mixes or is_by_place):
        return ""
    line = source_info_util.summarize(equation.source_info)
    place = equation.primitive.name + (f" in {line}" if line else "")
    if mixes:
        return (
            f"The network computes something over all examples of a batch ({place}), like "
            "BatchNorm in training mode, or draws random numbers for them, like dropout, but the "
            "Fisher information is a mean over single examples. Let apply use running statistics "
            "and no random numbers. If it only sorts or splits the batch, as jax.lax.map(..., "
            "batch_size=n) does, then write it for one example and map it by jax.vmap."
        )
    return (
        f"The outputs of an example depend on its place in the batch ({place}), as those of "
        "x + jnp.arange(len(x))[:, None] do, but the Fisher information is a mean over single "
        "examples, in minibatches of any order. Pass what differs between examples, such as a "
        "time or noise, with the inputs."
    )


def mixes_examples(equation: Any, results: list[Any], data: set[Any]) -> bool:
    """Return whether a result has lost the axis of the examples, or is computed along it."""
    # A result with two such axes, examples times examples, mixes them too.
    if not all(map(has_examples, results)):
        return True
    how, name = equation.params, equation.primitive.name
    # Axes along which the equation combines entries.
    along = []
    if name.startswith("cum"):
        along = [how["axis"]]
    elif name == "sort":
        along = [how["dimension"]]
    elif name == "rev":
        along = how["dimensions"]
    elif name == "fft":
        along = range(-len(how["fft_lengths"]), 0)
    elif name == RAGGED:
        along = how["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    elif "window_dimensions" in how:
        along = [axis for axis, size in enumerate(how["window_dimensions"]) if size > 1]
    elif name == "conv_general_dilated":
        # An example with a kernel of its own is a group of channels, which are not combined.
        is_apart = how["feature_group_count"] % MANY == 0
        along = how["dimension_numbers"].lhs_spec[2 if is_apart else 1 :]
    shapes = [v.aval.shape for v in variables(equation.invars[:1]) if v in data]
    return any(shape[axis] % MANY == 0 for shape in shapes for axis in along)


def draws_for_batch(equation: Any) -> bool:
    """Return whether an equation draws random numbers for all examples by one key, as dropout does.

    The outputs of an example then depend on its place in the batch.
    """
    is_draw = equation.primitive.name in ("random_bits", "rng_bit_generator")
    return is_draw and any(map(has_examples, equation.outvars))


def follow_places(equation: Any, places: set[Any], data: set[Any]) -> tuple[list[Any], bool]:
    """Return which results depend on the places of examples in the batch, but not on the inputs.

    `places` has the operands of this kind. Also return whether the equation combines one with
    features, such as noise for each place. As row numbers places are no fault: x[arange(B), last].
    """
    name, operands = equation.primitive.name, variables(equation.invars)
    if name == "iota":
        is_of_examples = equation.params["shape"][equation.params["dimension"]] == MANY
        return equation.outvars if is_of_examples else [], False
    if places.isdisjoint(operands):
        return [], False
    if all(v in places or v not in data for v in operands):
        return [v for v in equation.outvars if has_examples(v)], False
    has_body = any(key.endswith("jaxpr") or key == "branches" for key in equation.params)
    is_float = any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in equation.outvars)
    return [], is_float and not has_body and not name.startswith(_BY_INDEX)


def copies_in(
    equation: Any, copies: dict[Any, set[int]], data: set[Any]
) -> tuple[set[int], set[int]]:
    """Return which leaves an equation moves, or uses as kernels, of those copied for each example.

    Others are tables with a row for each position, such as the queries of a decoder: they are added
    to features, or meet a kernel of params.
    """
    name, operands = equation.primitive.name, variables(equation.invars)
    found = {v: copies[v] for v in operands if v in copies}
    if not found:
        return set(), set()
    kernels = {
        "dot_general": operands,
        "conv_general_dilated": operands[1:],
        "gather": operands[:1],
    }
    if name in kernels and data.issuperset(operands):
        return set(), set().union(*(found.get(v, ()) for v in kernels[name]))
    axes = ((),) * len(operands[0].aval.shape)
    is_move = len(operands) == 1 and views.follow_axes(equation, axes) is not None
    is_moved = is_move or name in ("mul", "select_n", "stop_gradient")
    # The sum of a table and features is no kernel.
    is_moved = is_moved or (name in ("add", "sub") and len(found) == len({*operands}))
    return set().union(*found.values()) if is_moved else set(), set()


def has_examples(variable: Any) -> bool:
    """Return whether a variable has one axis of examples, alone or merged with others."""
    sizes = getattr(variable.aval, "shape", ())
    return 0 in sizes or [size % MANY for size in sizes].count(0) == 1


def is_loop_counter(equation: Any, variable: Any) -> bool:
    """Return whether a variable is a loop's counter, which does not really depend on the inputs."""
    is_loop, aval = equation.primitive.name in ("scan", "while"), variable.aval
    return is_loop and not aval.shape and jnp.issubdtype(aval.dtype, jnp.integer)
