"""Find the equations in which the parameters of a network meet the examples.

A parameter is followed from its leaf through equations that only move its entries (see `views`) to
the equation whose other operand depends on the inputs. If that equation is a matrix product, a
convolution, a lookup, a sum or an elementwise product, then the gradient of an example is a known
expression (see `operations`). Otherwise the leaf belongs to no layer, and the reason is kept.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend.core import Literal

from fisherjax._layers import mixing, operations, views
from fisherjax._layers.equations import Flat, Loop, variables
from fisherjax._layers.operations import SHIFT, Use
from fisherjax._layers.views import MANY, Axes, Obstacle, View


class Reading(NamedTuple):
    """The uses of a network's leaves.

    Attributes:
        uses: Uses in the order of their equations.
        obstacles: For each leaf that belongs to no layer, by its number, the reason.
        fault: How the network mixes examples, or depends on their places; "" if it does not.
        loops: For each loop over blocks that was kept, by number of its equation, the uses in its
            first block.
    """

    uses: list[Use]
    obstacles: dict[int, str]
    fault: str
    loops: "Mapping[int, Reading]" = MappingProxyType({})


class Walk(NamedTuple):
    """State of the reading, which is updated at each equation.

    Attributes:
        consumers: How often each variable is used.
        summands: For each variable whose only use is a sum, the other summand.
        data: Variables that depend on the inputs.
        places: Variables that depend on the places of examples in the batch, but not on the inputs.
        views: Variables that have the entries of a leaf.
        changed: For variables computed from params in any other way, {leaf: reason}.
        products: For results of products, also moved ones: number of the use, and axes of the leaf.
        copies: For matrices that were repeated for each example, also moved ones: their leaves.
        uses: Uses found so far.
        obstacles: {leaf: reason} found so far.
        is_apart: Whether the network was mapped over single examples.
    """

    consumers: Counter
    summands: dict
    data: set
    places: set
    views: dict[Any, View]
    changed: dict[Any, dict[int, str]]
    products: dict[Any, tuple[int, Axes]]
    copies: dict[Any, set[int]]
    uses: list[Use]
    obstacles: dict[int, str]
    is_apart: bool


def read(network: Flat, *, is_apart: bool = False) -> Reading:
    """Read the uses of all leaves from the equations of a network on `MANY` examples."""
    views = {v: whole(number, v) for number, v in enumerate(network.leaves)}
    walk = start(network, views, {*network.inputs}, [network.output], is_apart)
    faults = [read_equation(walk, number, one) for number, one in enumerate(network.equations)]
    return finish(walk, views, [network.output], faults)


def whole(leaf: int, variable: Any) -> View:
    """Return the view of a variable that is a leaf."""
    shape = variable.aval.shape
    return View(leaf, shape, tuple((axis,) for axis in range(len(shape))))


def start(
    network: Flat | Loop, leaves: dict[Any, View], data: set, outputs: Sequence[Any], is_apart: bool
) -> Walk:
    """Return the state of the reading before the first equation."""
    # A constant with an axis of examples, such as a recurrent network's initial state, is data.
    data = data | {v for v, _ in network.constants if mixing.has_examples(v)}
    consumers = Counter(v for e in network.equations for v in variables(e.invars))
    consumers.update(variables(outputs))
    sums = [variables(e.invars) for e in network.equations if e.primitive.name == "add"]
    pairs = [pair for v in sums if len(v) == 2 for pair in (v, v[::-1])]
    summands = {v: other for v, other in pairs if consumers[v] == 1}
    return Walk(consumers, summands, data, set(), dict(leaves), {}, {}, {}, [], {}, is_apart)


def read_equation(walk: Walk, number: int, equation: Any) -> str:
    """Read the next equation, and return its fault: how it mixes examples, or ""."""
    places, is_by_place = mixing.follow_places(equation, walk.places, walk.data)
    walk.places.update(places)
    if not walk.data.isdisjoint(variables(equation.invars)):
        mixes = _read_of_data(walk, number, equation)
    else:
        _read_of_params(walk, number, equation)
        mixes = mixing.draws_for_batch(equation)
    return mixing.fault(equation, mixes=mixes, is_by_place=is_by_place)


def finish(
    walk: Walk, leaves: dict[Any, View], outputs: Sequence[Any], faults: list[str]
) -> Reading:
    """Return the reading after the last equation; a leaf that is not wholly used is an obstacle."""
    for v in outputs:
        _record_obstacle(walk, v, "it is an output of the network by itself")
    for view in leaves.values():
        _read_rows(walk, view)
        places = {use.index for use in walk.uses if use.leaf == view.leaf}
        if 0 in view.shape:
            walk.obstacles.setdefault(view.leaf, "it has no entries")
        elif not places:
            walk.obstacles.setdefault(view.leaf, "it is not used by the network")
        elif places != {view.index} and sorted(places) != [(i,) for i in range(view.shape[0])]:
            reason = "not all of it is used, or not in the same way"
            walk.obstacles.setdefault(view.leaf, reason)
    return Reading(walk.uses, walk.obstacles, next(filter(None, faults), ""))


def _read_rows(walk: Walk, view: View) -> None:
    """Read single rows of a table that are added, but not all of them, as rows of the table.

    Until then each is the slice of a stack, such as a stack of biases.
    """
    found = [i for i, use in enumerate(walk.uses) if use.leaf == view.leaf]
    forms = {(walk.uses[i].form, len(walk.uses[i].index)) for i in found}
    if len(view.shape) != 2 or view.index or forms != {(SHIFT, 1)}:
        return
    if len({walk.uses[i].index for i in found}) < view.shape[0]:
        for i in found:
            use, [row] = walk.uses[i], walk.uses[i].index
            rows = range(row, row + 1)
            walk.uses[i] = use._replace(index=(), outputs=(1,), inputs=rows, after=None)


def _read_of_data(walk: Walk, number: int, equation: Any) -> bool:
    """Read an equation that depends on the inputs, and return whether it mixes examples."""
    source = next(v for v in variables(equation.invars) if v in walk.data)
    results = [v for v in equation.outvars if not mixing.is_loop_counter(equation, v)]
    walk.data.update(results)
    for operand, v in enumerate(equation.invars):
        view = _get(walk.views, v)
        if view is None:
            _record_obstacle(walk, v)
        else:
            _record_use(walk, number, operand, equation, view)
    moved, kernels = mixing.copies_in(equation, walk.copies, walk.data)
    walk.copies.update(dict.fromkeys(equation.outvars, moved) if moved else {})
    walk.obstacles.update(dict.fromkeys(kernels, mixing.COPIED) | walk.obstacles)
    # If this equation only moves the result of a product, then a bias may still be added to it.
    use, axes = walk.products.get(source, (None, ()))
    is_only_use = len(equation.invars) == 1 and walk.consumers[source] == 1
    if use is not None and is_only_use and (moved := views.follow_axes(equation, axes)) is not None:
        walk.products[equation.outvars[0]] = use, moved
    return mixing.mixes_examples(equation, results, walk.data)


def _read_of_params(walk: Walk, number: int, equation: Any) -> None:
    """Read an equation that does not depend on the inputs."""
    name, result = equation.primitive.name, equation.outvars[0]
    operands = [v for v in variables(equation.invars) if v in walk.views or v in walk.changed]
    if not operands:
        walk.data.update(filter(mixing.has_examples, equation.outvars))
        return
    if name == "stop_gradient":
        return  # its result is a constant, of which a leaf has no gradient
    place = next((i for i, v in enumerate(equation.invars) if _get(walk.views, v)), -1)
    first = None if place < 0 else walk.views[equation.invars[place]]
    same_shape = place >= 0 and result.aval.shape == equation.invars[place].aval.shape
    view = first if sum(v in walk.views for v in operands) == 1 else None
    if view is not None and len(operands) == 1 and place == 0:
        followed = views.follow(number, equation, view)
        # Haiku repeats a bias for each example and then adds it to what depends on the inputs: the
        # use is then that sum, not the repetition.
        is_added = walk.summands.get(result) in walk.data
        if followed is not None and _repeats(followed, result) and not is_added:
            walk.data.add(result)
            _record_use(walk, number, None, equation, followed)
            if sum(size > 1 for size in followed.shape) > 1:
                walk.copies[result] = {followed.leaf}
            return
        if followed is not None:
            walk.views[result] = followed
            return
    if view is not None and same_shape and name == "add" and len(operands) == 1:
        # Adding a constant, as in 1 + scale, changes no gradient.
        walk.views[result] = view
        return
    if view is not None and same_shape and name == "mul" and view.factor is None:
        # The other factor does not depend on the leaf, such as a running standard deviation.
        _record_obstacle(walk, equation.invars[1 - place])
        walk.views[result] = view._replace(factor=((number, 1 - place), view.axes))
        return
    reason = _inner_reason(name) or f"{name} is applied to it before it meets the inputs"
    reasons = {walk.views[v].leaf: reason for v in operands if v in walk.views}
    for v in operands:
        reasons |= walk.changed.get(v, {})
    walk.changed.update(dict.fromkeys(equation.outvars, reasons))


def _record_use(walk: Walk, number: int, operand: int | None, equation: Any, view: View) -> None:
    try:
        use, labels = _read_use(walk, number, operand, equation, view)
    except Obstacle as obstacle:
        walk.obstacles.setdefault(view.leaf, str(obstacle))
    else:
        if labels:
            walk.products[equation.outvars[0]] = len(walk.uses), labels
        walk.uses.append(use)


def _read_use(
    walk: Walk, number: int, operand: int | None, equation: Any, view: View
) -> tuple[Use, Axes]:
    """Return the use of a view by an equation, and for a product the leaf's axes in its result.

    The view is operand number `operand`. None means that it is the equation's result, repeated for
    each example.
    """
    name = equation.primitive.name
    if operand is None or name in ("add", "add_any"):
        return _read_sum(walk, number, operand, equation, view), ()
    if name == "mul":
        return operations.scale(number, operand, equation, view), ()
    if name == "dot_general":
        return operations.product(number, operand, equation, views.check_whole(view))
    if name == "conv_general_dilated" and operand == 1:
        return operations.convolution(number, equation, views.check_whole(view), walk.is_apart)
    if name == "gather" and operand == 0:
        return operations.lookup(number, equation, views.check_whole(view)), ()
    if name == "sub":
        raise Obstacle("it is subtracted, as a running mean")
    raise Obstacle(_inner_reason(name) or f"it is used by {name}, which is not a layer")


def _read_sum(walk: Walk, number: int, operand: int | None, equation: Any, view: View) -> Use:
    if view.factor is not None:
        raise Obstacle("it is multiplied by something before it is used")
    shape = equation.outvars[0].aval.shape
    example, held, summed = operations.elementwise(operand, equation, view)
    # The last axis is that of the outputs; axes of size one do not count.
    wide = [pair for pair in held if shape[pair[1]] > 1] or held
    looked_up = isinstance(view.rows, tuple)
    # The rows that were looked up have all their outputs, even if there is one.
    last = [pair for pair in held if pair[0] == (len(view.shape) - 1,)] if looked_up else wide[-1:]
    outputs, columns = views.sort_axes(last)
    outputs = (1,) if looked_up else outputs
    views.sort_axes(held)
    rows = tuple(axis for _, axis in held if axis not in columns)
    other = None if operand is None else equation.invars[1 - operand]
    after, axes = walk.products.get(other, (None, ()))
    if after is not None and other is not None:
        # A sum repeats axes of size one: a score [B, 1] plus thresholds [K] has no bias.
        axes = views.broadcast_axes(axes, other.aval.shape, shape)
    product = [(axis, a) for a, axis in enumerate(axes) if axis and shape[a] > 1]
    # A bias has all output axes of the product in the same order, and no others.
    is_bias = [a for _, a in sorted(product)] == [a for _, a in wide if shape[a] > 1]
    is_bias = is_bias and views.is_ordered(product) and view.rows is None
    after = after if is_bias and walk.consumers[other] == 1 else None
    tangent = (number, operand), (example, rows, summed, columns)
    return Use(SHIFT, view.leaf, view.index, outputs, *tangent, view.rows, (), after)


def _record_obstacle(
    walk: Walk, variable: Any, reason: str = "it is used by something else too"
) -> None:
    """Record that the leaves which a variable is made of belong to no layer."""
    reasons = _get(walk.changed, variable) or {}
    if (view := _get(walk.views, variable)) is not None:
        reasons = {view.leaf: reason}
    for leaf, why in reasons.items():
        walk.obstacles.setdefault(leaf, why)


def _repeats(view: View, variable: Any) -> bool:
    """Return whether a view is repeated for each example."""
    sizes = zip(view.axes, variable.aval.shape, strict=True)
    return any(axes is None and size == MANY for axes, size in sizes)


def _inner_reason(name: str) -> str | None:
    """Return the reason why a leaf is not read inside an equation with equations of its own."""
    if name in ("scan", "while", "cond") or name.startswith("custom_"):
        return f"it is used inside {name}, where layers are not looked for"
    return None


def _get(known: dict[Any, Any], variable: Any) -> Any:
    return None if isinstance(variable, Literal) else known.get(variable)
