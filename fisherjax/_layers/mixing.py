"""Tell whether an equation computes something over several examples of a batch."""

from typing import Any

import jax.numpy as jnp

from fisherjax._layers.equations import variables
from fisherjax._layers.views import MANY


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


def has_examples(variable: Any) -> bool:
    """Return whether a variable has one axis of examples, alone or merged with others."""
    sizes = getattr(variable.aval, "shape", ())
    return 0 in sizes or [size % MANY for size in sizes].count(0) == 1


def is_loop_counter(equation: Any, variable: Any) -> bool:
    """Return whether a variable is a loop's counter, which does not really depend on the inputs."""
    is_loop, aval = equation.primitive.name in ("scan", "while"), variable.aval
    return is_loop and not aval.shape and jnp.issubdtype(aval.dtype, jnp.integer)
