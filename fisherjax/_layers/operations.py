"""Read an equation in which a parameter meets the examples, and the layout of its gradient.

An equation uses a parameter in one of five ways, here called the *form* of the use: a matrix
product, a convolution, a lookup of rows, a sum (a shift) or an elementwise product (a scale). In
each of them the gradient of one example is a known expression of the inputs and of the gradient
with respect to the result. There is a function for each form, which returns a `Use`, or raises an
`Obstacle` with the reason why the gradient has no such expression.
"""

from typing import Any, NamedTuple

from fisherjax._layers import views
from fisherjax._layers.views import MANY, Axes, Obstacle, Place, View

PRODUCT, CONVOLUTION, LOOKUP = "product", "convolution", "lookup"
SHIFT, SCALE = "shift", "scale"

Groups = tuple[tuple[int, ...], ...]
"""Axes of a value by role: examples, positions, positions to sum over (of sums only), features."""


class Use(NamedTuple):
    """An equation in which a leaf, or a slice of a stacked leaf, meets the examples.

    Attributes:
        form: Form of the use: PRODUCT, CONVOLUTION, LOOKUP, SHIFT or SCALE.
        leaf: Number of the leaf among the leaves of params.
        index: Index of the slice in a stack of layers; () if the whole leaf is used.
        outputs: Axes of the slice that are outputs of the layer; the others are its inputs, except
            `groups`.
        tangent: Place of the value whose gradient is the output gradient g.
        tangent_axes: Axes of that value by role.
        inputs: Place of the value that the inputs a are read from: the other operand of a product,
            the row numbers of a table (or their range), the factor of a scale. None if the inputs
            are constant.
        input_axes: Axes of that value by role.
        after: For a sum that adds a bias, the number of the use whose product it follows.
        groups: Axes of the slice along which each group of inputs has a matrix of its own; they are
            before the features of `tangent_axes` and `input_axes`.
        shape: Shape of the slice if its axis of outputs is split into groups and outputs; else ().
    """

    form: str
    leaf: int
    index: tuple[int, ...]
    outputs: tuple[int, ...]
    tangent: Place
    tangent_axes: Groups
    inputs: Place | range | None = None
    input_axes: Groups = ()
    after: int | None = None
    groups: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()


def product(number: int, operand: int, equation: Any, view: View) -> tuple[Use, Axes]:
    """Read a matrix product; return the use, and the leaf's axes along those of the result."""
    contracted, batched = equation.params["dimension_numbers"]
    mine, theirs = contracted[operand], contracted[1 - operand]
    shape, batch = equation.invars[1 - operand].aval.shape, batched[1 - operand]
    # Axes along which the leaf has a matrix for each group of the inputs.
    apart = zip(batched[operand], batch, strict=True)
    grouped = {b: label for a, b in apart if (label := view.axes[a])}
    rest = [a for a in range(len(shape)) if a not in (*theirs, *batch)]
    kept = [a for a in range(len(view.axes)) if a not in (*mine, *batched[operand])]
    labelled = {a: group for a, group in enumerate(view.axes) if group is not None}
    if not labelled.keys() >= {*mine, *kept}:
        raise Obstacle("its entries are repeated before it is used")
    # The result has the batched axes first, then the remaining axes of the left and of the right
    # operand; ~a stands for axis a of the parameter.
    ours = [~a for a in kept]
    result = [*batch, *rest, *ours] if operand == 1 else [*batch, *ours, *rest]
    example, positions = views.split_examples(
        shape, [b for b in (*batch, *rest) if b not in grouped]
    )
    rows, row_axes = views.sort_axes(zip((labelled[a] for a in mine), theirs, strict=True))
    outputs, columns = views.sort_axes((labelled[a], result.index(~a)) for a in kept)
    groups, group_axes = views.sort_axes((label, b) for b, label in grouped.items())
    views.check_whole(view, groups + rows + outputs)
    places, columns = (
        tuple(map(result.index, positions)),
        (*map(result.index, group_axes), *columns),
    )
    tangent = (number, None), ((result.index(*example),), places, columns)
    inputs = (number, 1 - operand), (example, positions, group_axes + row_axes)
    labels = tuple(view.axes[~a] if a < 0 else grouped.get(a) for a in result)
    found = Use(PRODUCT, view.leaf, view.index, outputs, *tangent, *inputs, groups=groups)
    return found, labels


def convolution(number: int, equation: Any, view: View, is_apart: bool) -> tuple[Use, Axes]:
    """Read a convolution with the view as kernel; return the same pair as `product`.

    `is_apart` says that the network was mapped over single examples.
    """
    how = equation.params
    if how["batch_group_count"] != 1:
        raise Obstacle("its convolution has groups of examples")
    if any(axes is None or len(axes) > 1 for axes in view.axes):
        raise Obstacle("its entries are repeated or merged before it is used")
    layout, ndim = how["dimension_numbers"], len(view.axes)
    example = (layout.out_spec[0],)
    # Of a network of one example at a time JAX merges the examples with the images of each: such
    # an axis is split again, by its size, when the values are arranged.
    if not is_apart or equation.outvars[0].aval.shape[example[0]] % MANY:
        views.split_examples(equation.outvars[0].aval.shape, example)
    channel, outputs = layout.out_spec[1], view.axes[layout.rhs_spec[0]]
    tangent = (number, None), (example, tuple(layout.out_spec[2:]), (channel,))
    # Patches have the kernel's axes without that of the outputs, spatial axes before channels.
    rows = tuple(view.axes[axis] for axis in (*layout.rhs_spec[2:], layout.rhs_spec[1]))
    labels = tuple(outputs if axis == channel else None for axis in range(ndim))
    place, shape, groups, count = *outputs, (), (), how["feature_group_count"]
    if count > 1:
        # The outputs are those of one group after the other: [n * o] -> [n, o].
        shape = (*view.shape[:place], count, view.shape[place] // count, *view.shape[place + 1 :])
        groups, outputs = outputs, (place + 1,)
    inputs = (number, 0), rows
    found = Use(CONVOLUTION, view.leaf, view.index, outputs, *tangent, *inputs, None, groups, shape)
    return found, labels


def lookup(number: int, equation: Any, view: View) -> Use:
    """Read a lookup of rows."""
    axes, shape = views.lookup_axes(equation, view), equation.outvars[0].aval.shape
    if axes is None:
        raise Obstacle("it is used by a gather that does not look up rows")
    places = [a for a, axis in enumerate(axes) if axis is None]
    example, positions = views.split_examples(shape, places)
    outputs, columns = views.sort_axes((x, a) for a, x in enumerate(axes) if x is not None)
    tangent = (number, None), (example, positions, columns)
    # The row numbers have the same axes in the same order, and one more axis at the end.
    order = (places.index(*example),), tuple(map(places.index, positions))
    return Use(LOOKUP, view.leaf, view.index, outputs, *tangent, (number, 1), order)


def scale(number: int, operand: int, equation: Any, view: View) -> Use:
    """Read an elementwise product."""
    factor, axes = view.factor or (None, ())
    views.check_whole(view._replace(factor=None))
    if None in axes:
        raise Obstacle("its entries are repeated before it is used")
    example, held, summed = elementwise(operand, equation, view)
    _, columns = views.sort_axes(held)
    tangent = (number, operand), (example, (), summed, columns)
    # The factor's other axes have size one, because it is no larger than the leaf.
    single = tuple(a for a, axis in enumerate(axes) if not axis)
    _, factor_axes = views.sort_axes((axis, a) for a, axis in enumerate(axes) if axis)
    every = tuple(range(len(view.shape)))
    return Use(SCALE, view.leaf, view.index, every, *tangent, factor, (single, factor_axes))


def elementwise(
    operand: int | None, equation: Any, view: View
) -> tuple[tuple[int], list[tuple[tuple[int, ...], int]], tuple[int, ...]]:
    """Split the axes of an elementwise result by role.

    Returns:
        The axis of the examples; pairs (axes of the leaf, axis of the result) for those that the
        leaf has; and the other axes, over which the leaf is repeated.
    """
    shape = equation.outvars[0].aval.shape
    old = shape if operand is None else equation.invars[operand].aval.shape
    labels = views.broadcast_axes(view.axes, old, shape)
    example, others = views.split_examples(shape, range(len(shape)))
    held = sorted((label, axis) for axis in others if (label := labels[axis]))
    return example, held, tuple(axis for axis in others if not labels[axis])
