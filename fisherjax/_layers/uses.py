"""Where each parameter of a network meets the examples, read off its flat list of equations.

A parameter is followed from its leaf through what only moves its entries (see `views`) to the
equation whose other operand depends on the inputs. Where that equation is a matrix product, a
convolution, a look-up, a sum or an elementwise product, the gradient of an example has a known form
(see `layers`); anything else is a reason why the leaf is not covered.
"""

from collections import Counter
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import Literal

from fisherjax._layers import operations, views
from fisherjax._layers.equations import Flat, variables
from fisherjax._layers.operations import SHIFT, Use
from fisherjax._layers.views import MANY, Axes, Obstacle, View


class Reading(NamedTuple):
    """What was found in a network.

    Attributes:
        uses: In the order of their equations.
        obstacles: {number of a leaf: why it is not covered}.
        mixes_examples: Whether something depends on several examples.
    """

    uses: list[Use]
    obstacles: dict[int, str]
    mixes_examples: bool


class _Walk(NamedTuple):
    """What is known so far, filled in from equation to equation."""

    consumers: Counter
    added: dict  # {variable whose only use is a sum: what it is added to}
    data: set  # variables that depend on the inputs
    views: dict[Any, View]  # variables that have the entries of a leaf
    changed: dict[Any, dict[int, str]]  # made of params by anything else: {leaf: what was done}
    products: dict[Any, tuple[int, Axes]]  # results of products, moved: number of the use, axes
    uses: list[Use]
    obstacles: dict[int, str]


def read(network: Flat) -> Reading:
    """Follow the leaves through the equations of a network on `MANY` examples."""
    *leaves, inputs = network.arguments
    # What has the axis of the examples is theirs, such as a recurrent network's first state.
    data = {inputs, *(v for v, _ in network.constants if _has_examples(v))}
    shapes = [v.aval.shape for v in leaves]
    plain = [View(i, s, tuple((a,) for a in range(len(s)))) for i, s in enumerate(shapes)]
    consumers = Counter(v for e in network.equations for v in variables(e.invars))
    sums = [variables(e.invars) for e in network.equations if e.primitive.name == "add"]
    pairs = [pair for v in sums if len(v) == 2 for pair in (v, v[::-1])]
    added = {v: other for v, other in pairs if consumers[v] == 1}
    walk = _Walk(consumers, added, data, dict(zip(leaves, plain, strict=True)), {}, {}, [], {})
    mixes = False
    for number, equation in enumerate(network.equations):
        if walk.data.isdisjoint(variables(equation.invars)):
            _prepare(walk, number, equation)
        else:
            mixes = _meet(walk, number, equation) or mixes
    _give_up(walk, network.output, "it is an output of the network by itself")
    for leaf, shape in enumerate(shapes):
        places = {use.index for use in walk.uses if use.leaf == leaf}
        if not places:
            walk.obstacles.setdefault(leaf, "it is not used by the network")
        elif places != {()} and sorted(places) != [(i,) for i in range(shape[0])]:
            walk.obstacles.setdefault(leaf, "not all of it is used, or not in the same way")
    return Reading(walk.uses, walk.obstacles, mixes)


def _meet(walk: _Walk, number: int, equation: Any) -> bool:
    """Read an equation that depends on the inputs, and say whether it mixes examples."""
    source = next(v for v in variables(equation.invars) if v in walk.data)
    results = [v for v in equation.outvars if not _counts(equation, v)]
    walk.data.update(results)
    for operand, v in enumerate(equation.invars):
        view = _get(walk.views, v)
        if view is None:
            _give_up(walk, v)
        else:
            _try(walk, number, operand, equation, view)
    # A bias may follow where the result of a product is only moved.
    use, axes = walk.products.get(source, (None, ()))
    is_passed_on = len(equation.invars) == 1 and walk.consumers[source] == 1
    if use is not None and is_passed_on and (moved := views.moved(equation, axes)) is not None:
        walk.products[equation.outvars[0]] = use, moved
    return _mixes(equation, results, walk.data)


def _prepare(walk: _Walk, number: int, equation: Any) -> None:
    """Read an equation that does not depend on the inputs."""
    name, result = equation.primitive.name, equation.outvars[0]
    operands = [v for v in variables(equation.invars) if v in walk.views or v in walk.changed]
    if not operands:
        walk.data.update(filter(_has_examples, equation.outvars))
        return
    place = next((i for i, v in enumerate(equation.invars) if _get(walk.views, v)), -1)
    view = None if place < 0 else walk.views[equation.invars[place]]
    same_shape = place >= 0 and result.aval.shape == equation.invars[place].aval.shape
    one = view if sum(v in walk.views for v in operands) == 1 else None
    if one is not None and len(operands) == 1 and place == 0:
        followed = views.followed(number, equation, one)
        # Repeated for each example and then added to what depends on the inputs, as haiku's
        # biases are: the sum is its use.
        is_added = walk.added.get(result) in walk.data
        if followed is not None and MANY in result.aval.shape and not is_added:
            walk.data.add(result)
            _try(walk, number, None, equation, followed)
            return
        if followed is not None:
            walk.views[result] = followed
            return
    if one is not None and same_shape and name == "add" and len(operands) == 1:
        # A constant, as in 1 + scale, changes no gradient.
        walk.views[result] = one
        return
    if one is not None and same_shape and name == "mul" and one.factor is None:
        # By what does not depend on it, such as a running standard deviation.
        _give_up(walk, equation.invars[1 - place])
        walk.views[result] = one._replace(factor=((number, 1 - place), one.axes))
        return
    said = _inside(name) or f"{name} is applied to it before it meets the inputs"
    reasons = {walk.views[v].leaf: said for v in operands if v in walk.views}
    for v in operands:
        reasons |= walk.changed.get(v, {})
    walk.changed.update(dict.fromkeys(equation.outvars, reasons))


def _try(walk: _Walk, number: int, operand: int | None, equation: Any, view: View) -> None:
    try:
        use, labels = _use(walk, number, operand, equation, view)
    except Obstacle as obstacle:
        walk.obstacles.setdefault(view.leaf, str(obstacle))
    else:
        if labels:
            walk.products[equation.outvars[0]] = len(walk.uses), labels
        walk.uses.append(use)


def _use(
    walk: _Walk, number: int, operand: int | None, equation: Any, view: View
) -> tuple[Use, Axes]:
    """Read what an equation does with a view: the use, and of a product what its result's axes are.

    Without an operand, it is the equation's result that is repeated for each example.
    """
    name = equation.primitive.name
    if operand is None or name in ("add", "add_any"):
        return _sum(walk, number, operand, equation, view), ()
    if name == "mul":
        return operations.scale(number, operand, equation, view), ()
    if name == "dot_general":
        return operations.product(number, operand, equation, views.whole(view))
    if name == "conv_general_dilated" and operand == 1:
        return operations.convolution(number, equation, views.whole(view))
    if name == "gather" and operand == 0:
        return operations.lookup(number, equation, views.whole(view)), ()
    if name == "sub":
        raise Obstacle("it is subtracted, as a running mean")
    raise Obstacle(_inside(name) or f"it is used by {name}, which is not a layer")


def _sum(walk: _Walk, number: int, operand: int | None, equation: Any, view: View) -> Use:
    if view.factor is not None:
        raise Obstacle("it is multiplied by something before it is used")
    shape = equation.outvars[0].aval.shape
    example, held, summed = operations.elementwise(operand, equation, view)
    # The last axis is that of the outputs; those of size one do not matter.
    wide = [pair for pair in held if shape[pair[1]] > 1] or held
    outputs, columns = views.ordered(wide[-1:])
    views.ordered(held)
    rows = tuple(axis for _, axis in held if axis not in columns)
    other = None if operand is None else equation.invars[1 - operand]
    after, axes = walk.products.get(other, (None, ()))
    if after is not None and other is not None:
        # A sum repeats axes of size one: a score [B, 1] plus thresholds [K] has no bias.
        axes = views.along(axes, other.aval.shape, shape)
    own = [(axis, a) for a, axis in enumerate(axes) if axis and shape[a] > 1]
    # A bias has the product's outputs in the same order, all of them and nothing else.
    is_bias = [a for _, a in sorted(own)] == [a for _, a in wide if shape[a] > 1]
    is_bias = is_bias and views.is_ordered(own) and view.rows is None
    after = after if is_bias and walk.consumers[other] == 1 else None
    tangent = (number, operand), (example, rows, summed, columns)
    return Use(SHIFT, view.leaf, view.index, outputs, *tangent, view.rows, (), after)


def _give_up(walk: _Walk, variable: Any, reason: str = "it is used by something else too") -> None:
    reasons = _get(walk.changed, variable) or {}
    if (view := _get(walk.views, variable)) is not None:
        reasons = {view.leaf: reason}
    for leaf, said in reasons.items():
        walk.obstacles.setdefault(leaf, said)


def _mixes(equation: Any, results: list[Any], data: set[Any]) -> bool:
    """Whether what depends on the inputs has lost the examples' axis, or runs along it."""
    # The axis has a multiple of MANY, a prime, as its size; examples times examples have two.
    if not all(map(_has_examples, results)):
        return True
    how, name = equation.params, equation.primitive.name
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
        along = how["dimension_numbers"].lhs_spec[1:]
    shapes = [v.aval.shape for v in variables(equation.invars[:1]) if v in data]
    return any(shape[axis] % MANY == 0 for shape in shapes for axis in along)


def _has_examples(variable: Any) -> bool:
    sizes = getattr(variable.aval, "shape", ())
    return 0 in sizes or [size % MANY for size in sizes].count(0) == 1


def _counts(equation: Any, variable: Any) -> bool:
    """Whether a variable is the counter of a loop, which only seems to depend on its inputs."""
    is_loop, aval = equation.primitive.name in ("scan", "while"), variable.aval
    return is_loop and not aval.shape and jnp.issubdtype(aval.dtype, jnp.integer)


def _inside(name: str) -> str | None:
    # Loops, branches and functions with derivatives of their own have equations of their own.
    if name in ("scan", "while", "cond") or name.startswith("custom_"):
        return f"it is used inside {name}, where layers are not looked for"
    return None


def _get(known: dict[Any, Any], variable: Any) -> Any:
    return None if isinstance(variable, Literal) else known.get(variable)
