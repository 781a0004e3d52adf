"""The forms in which an equation can use a parameter, and how the axes of its gradient lie.

Each function reads one equation of a kind that `uses` has met: a `Use`, or an `Obstacle` that says
why the gradient of an example has no known form.
"""

from typing import Any, NamedTuple

from fisherjax._layers import views
from fisherjax._layers.views import Axes, Obstacle, Place, View

# Forms of a use.
PRODUCT, CONVOLUTION, LOOKUP = "product", "convolution", "lookup"
SHIFT, SCALE = "shift", "scale"

Groups = tuple[tuple[int, ...], ...]
"""Axes of a value: that of the examples, positions, (of sums: summed positions,) features."""


class Use(NamedTuple):
    """An equation where a leaf, or a slice of one, meets the examples.

    Attributes:
        form: What the equation is.
        leaf: Number of the leaf.
        index: Place of the slice in a stack of layers; () is the whole leaf.
        outputs: Axes of the slice that are outputs.
        tangent: Whose tangent g is.
        tangent_axes: How its axes are arranged.
        inputs: What the inputs a are made of: of a product its other operand, of a table the rows,
            of a scale a factor. None where there is nothing.
        input_axes: How its axes are arranged.
        after: Of a sum: the number of the product it follows, as that layer's bias.
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


def product(number: int, operand: int, equation: Any, view: View) -> tuple[Use, Axes]:
    """Read a matrix product; what its result's axes are comes beside it."""
    contracted, batched = equation.params["dimension_numbers"]
    mine, theirs = contracted[operand], contracted[1 - operand]
    if any(view.axes[axis] for axis in batched[operand]):
        raise Obstacle("there is a matrix of it for each group of its inputs")
    shape, batch = equation.invars[1 - operand].aval.shape, batched[1 - operand]
    rest = [a for a in range(len(shape)) if a not in (*theirs, *batch)]
    own = [a for a in range(len(view.axes)) if a not in (*mine, *batched[operand])]
    labelled = {a: group for a, group in enumerate(view.axes) if group is not None}
    if not labelled.keys() >= {*mine, *own}:
        raise Obstacle("its entries are repeated before it is used")
    # Axes of the result: batched ones first, then what is left of either side; ~a is our own.
    ours = [~a for a in own]
    result = [*batch, *rest, *ours] if operand == 1 else [*batch, *ours, *rest]
    example, positions = views.examples(shape, [*batch, *rest])
    rows, row_axes = views.ordered(zip((labelled[a] for a in mine), theirs, strict=True))
    outputs, columns = views.ordered((labelled[a], result.index(~a)) for a in own)
    views.whole(view, rows + outputs)
    places = tuple(map(result.index, positions))
    tangent = (number, None), ((result.index(*example),), places, columns)
    inputs = (number, 1 - operand), (example, positions, row_axes)
    labels = tuple(view.axes[~a] if a < 0 else None for a in result)
    return Use(PRODUCT, view.leaf, view.index, outputs, *tangent, *inputs), labels


def convolution(number: int, equation: Any, view: View) -> tuple[Use, Axes]:
    """Read a convolution whose kernel the view is; its result's axes come beside it."""
    how = equation.params
    if how["feature_group_count"] != 1 or how["batch_group_count"] != 1:
        raise Obstacle("it belongs to a grouped convolution")
    if any(axes is None or len(axes) > 1 for axes in view.axes):
        raise Obstacle("its entries are repeated or merged before it is used")
    layout, ndim = how["dimension_numbers"], len(view.axes)
    example, _ = views.examples(equation.outvars[0].aval.shape, [layout.out_spec[0]])
    channel, outputs = layout.out_spec[1], view.axes[layout.rhs_spec[0]]
    tangent = (number, None), (example, tuple(layout.out_spec[2:]), (channel,))
    # Patches have the kernel's axes but that of the outputs, places before channels.
    rows = tuple(view.axes[axis] for axis in (*layout.rhs_spec[2:], layout.rhs_spec[1]))
    labels = tuple(outputs if axis == channel else None for axis in range(ndim))
    return Use(CONVOLUTION, view.leaf, view.index, outputs, *tangent, (number, 0), rows), labels


def lookup(number: int, equation: Any, view: View) -> Use:
    """Read a look-up of rows."""
    axes, shape = views.looked_up(equation, view), equation.outvars[0].aval.shape
    if axes is None:
        raise Obstacle("it is used by gather, which is not a look-up of rows")
    places = [a for a, axis in enumerate(axes) if axis is None]
    example, positions = views.examples(shape, places)
    outputs, columns = views.ordered((x, a) for a, x in enumerate(axes) if x is not None)
    tangent = (number, None), (example, positions, columns)
    # The indices have the places in the same order, and one more axis.
    order = (places.index(*example),), tuple(map(places.index, positions))
    return Use(LOOKUP, view.leaf, view.index, outputs, *tangent, (number, 1), order)


def scale(number: int, operand: int, equation: Any, view: View) -> Use:
    """Read an elementwise product."""
    factor, axes = view.factor or (None, ())
    views.whole(view._replace(factor=None))
    if None in axes:
        raise Obstacle("its entries are repeated before it is used")
    example, held, summed = elementwise(operand, equation, view)
    _, columns = views.ordered(held)
    tangent = (number, operand), (example, (), summed, columns)
    # What the factor's other axes have is one entry: it was not larger than what it multiplied.
    single = tuple(a for a, axis in enumerate(axes) if not axis)
    _, own = views.ordered((axis, a) for a, axis in enumerate(axes) if axis)
    every = tuple(range(len(view.shape)))
    return Use(SCALE, view.leaf, view.index, every, *tangent, factor, (single, own))


def elementwise(
    operand: int | None, equation: Any, view: View
) -> tuple[tuple[int], list[tuple[tuple[int, ...], int]], tuple[int, ...]]:
    """Split a result's axes: examples, those that the view has (with its labels), the others."""
    shape = equation.outvars[0].aval.shape
    own = shape if operand is None else equation.invars[operand].aval.shape
    labels = views.along(view.axes, own, shape)
    example, others = views.examples(shape, range(len(shape)))
    held = sorted((label, axis) for axis in others if (label := labels[axis]))
    return example, held, tuple(axis for axis in others if not labels[axis])
