"""Read a network whose blocks are steps of a scan by one of its blocks.

The body of such a loop is read as the first block of each stack of leaves. A loop can be read so if
all params in it are slices of whole leaves, which nothing else uses, if all of them belong to
layers, and if what is carried from block to block depends on the inputs or on no params.
"""

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from jax.extend.core import Literal

from fisherjax._layers import mixing, uses
from fisherjax._layers.equations import Flat, Loop
from fisherjax._layers.layer import Part, group
from fisherjax._layers.views import LoopObstacle, View
from fisherjax.typing import Array

Blocks = dict[int, list[Part]]
"""The layers of a loop's first block, by number of the loop's equation."""
NETWORK = -1  # stands for the number of a loop's equation, for layers in no loop


def read(network: Flat, *, is_apart: bool = False) -> uses.Reading:
    """Read the uses of all leaves, those in a loop as uses of its first block.

    Raises:
        LoopObstacle: If a loop must be unrolled to be read.
    """
    whole = {v: uses.whole(leaf, v) for leaf, v in enumerate(network.leaves)}
    walk = uses.start(network, whole, {*network.inputs}, [network.output], is_apart)
    faults, loops, stacks = [], {}, []
    for number, equation in enumerate(network.equations):
        if number in network.loops:
            loops[number], found = _read_loop(walk, equation, network.loops[number])
            stacks += found
        else:
            faults.append(uses.read_equation(walk, number, equation))
    others = {v: view for v, view in whole.items() if view.leaf not in stacks}
    reading = uses.finish(walk, others, [network.output], faults)._replace(loops=loops)
    elsewhere = {use.leaf for use in reading.uses} | reading.obstacles.keys()
    if not elsewhere.isdisjoint(stacks) or len({*stacks}) < len(stacks):
        raise LoopObstacle("a stack of layers is used twice")
    return reading


def _read_loop(walk: uses.Walk, equation: Any, loop: Loop) -> tuple[uses.Reading, list[int]]:
    """Read a step of a loop over blocks; also return the leaves that it takes slices of."""
    operands = list(zip(loop.arguments, equation.invars, strict=True))
    views = {loop.arguments[i]: _first_block(walk, equation.invars[i]) for i in loop.slices}
    data = {
        v
        for v, outer in operands
        if v not in views and (_is_in(outer, walk.data) or mixing.has_examples(v))
    }
    outputs, before = [v for v in loop.outputs if v is not None], None
    while data != before:
        # A value that is carried depends on the inputs if that of the step before does.
        before = data
        step = uses.start(loop, views, data, outputs, walk.is_apart)
        faults = [uses.read_equation(step, i, one) for i, one in enumerate(loop.equations)]
        carried = zip((loop.arguments[i] for i in loop.carry), loop.outputs, strict=False)
        data = data | {v for v, out in carried if _is_in(out, step.data)}
    reading = uses.finish(step, views, outputs, faults)
    if reading.fault or reading.obstacles:
        raise LoopObstacle("a leaf of the blocks belongs to no layer")
    results = zip(equation.outvars, loop.outputs, strict=True)
    walk.data.update(v for v, out in results if _is_in(out, step.data))
    return reading, [view.leaf for view in views.values()]


def _first_block(walk: uses.Walk, variable: Any) -> View:
    """Return the view of a stack's first slice, as the unrolled network has it."""
    view = walk.views.get(variable)
    if (
        view is None
        or view.index
        or view.axes[:1] != ((0,),)
        or view.rows is not None
        or view.factor is not None
    ):
        raise LoopObstacle("its params are no slices of whole leaves")
    axes = tuple(None if axes is None else tuple(a - 1 for a in axes) for axes in view.axes[1:])
    return View(view.leaf, view.shape[1:], axes, (0,))


def group_block(reading: uses.Reading, names: tuple[str, ...], leaves: list[Array]) -> list[Part]:
    """Group the uses in a loop into the layers of its first block.

    Raises:
        LoopObstacle: If a leaf makes no layer, or two of them.
    """
    parts, uncovered = group(reading, names, leaves)
    if uncovered or len({part.layer.leaf for part in parts}) < len(parts):
        raise LoopObstacle("a leaf of the blocks is used in several ways")
    return parts


class _Flow(NamedTuple):
    """An equation of which only the variables are known."""

    invars: list[Any]
    outvars: list[Any]


def unroll(
    network: Flat, blocks: Blocks, layers: list[tuple[int, Part]]
) -> tuple[Flat, list[Part]]:
    """Return which values all equations of an unrolled network pass on, and all its layers."""
    flow: list[Any] = []
    places: dict[tuple[int, int], int] = {}
    for number, one in enumerate(network.equations):
        places[number, 0] = len(flow)
        if number not in blocks:
            flow.append(one)
            continue
        loop, operands, results = network.loops[number], list(one.invars), []
        for step in _steps(one):
            places[number, step] = len(flow)
            known = dict(zip(loop.arguments, operands, strict=True))
            for inner in loop.equations:
                operands_of = [_rename(known, v) for v in inner.invars]
                known |= {v: (number, step, v) for v in inner.outvars}
                flow.append(_Flow(operands_of, [known[v] for v in inner.outvars]))
            results.append([None if v is None else _rename(known, v) for v in loop.outputs])
            for place, v in zip(loop.carry, results[-1], strict=False):
                operands[place] = operands[place] if v is None else v
        for i, v in enumerate(one.outvars):
            # What is carried comes from the last step; the results of all steps are stacked.
            sources = results[-1:] if i < len(loop.carry) else results
            flow.append(_Flow([step[i] for step in sources if step[i] is not None], [v]))
    parts = []
    for number, found in itertools.groupby(layers, key=lambda entry: entry[0]):
        block = [part for _, part in found]
        if number == NETWORK:
            parts += [_move(part, lambda i: places[i, 0]) for part in block]
            continue
        for step in _steps(network.equations[number]):
            at = partial(operator.add, places[number, step])
            parts += [_move(_layer_of_block(part, step), at) for part in block]
    return network._replace(equations=flow, loops={}), parts


def _steps(equation: Any) -> range:
    steps = range(equation.params["length"])
    return steps[::-1] if equation.params["reverse"] else steps


def _rename(known: dict[Any, Any], variable: Any) -> Any:
    return variable if isinstance(variable, Literal) else known.get(variable, variable)


def _layer_of_block(part: Part, step: int) -> Part:
    layer = part.layer
    return part._replace(layer=layer._replace(kernel=f"{layer.leaf}[{step}]", index=(step,)))


def _move(part: Part, at: Callable[[int], int]) -> Part:
    """Return a part whose uses are in equations with other numbers."""

    def moved(place: Any) -> Any:
        return (at(place[0]), place[1]) if isinstance(place, tuple) else place

    return part._replace(
        uses=[u._replace(tangent=moved(u.tangent), inputs=moved(u.inputs)) for u in part.uses]
    )


def _is_in(variable: Any, known: set[Any]) -> bool:
    return variable is not None and not isinstance(variable, Literal) and variable in known
