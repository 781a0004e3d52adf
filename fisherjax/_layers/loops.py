"""Trace a network whose blocks are steps of a scan, and keep the loop.

A network may stack the leaves of L equal blocks, [L, ...], and run them by `jax.lax.scan`. If it is
unrolled, its program grows with L, and so does the time to compile it. Here the body of the scan is
read once, as the first block of each stack. Its layers then have inputs [L, B, T, a] and output
gradients [L, B, T, o]. These are gradients with respect to perturbations of the layers' results,
which are zero, and of which each step of the loop takes its slice.

A loop is kept if all params in it are slices of whole leaves, which nothing else uses, if all of
them belong to layers, and if only what depends on the inputs is carried from block to block. Any
other loop over layers is unrolled, as `pairs` does with all of them.
"""

import itertools
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from fisherjax import tree
from fisherjax._layers import arrangement, equations, pairs, uses
from fisherjax._layers.equations import Flat, Loop
from fisherjax._layers.feeders import feeders
from fisherjax._layers.layer import Part, group
from fisherjax._layers.operations import Use
from fisherjax._layers.views import LoopObstacle, Place, Source
from fisherjax.typing import Apply, Array, Params

_Blocks = dict[int, list[Part]]
"""The layers of a loop's first block, by number of the loop's equation."""
_Values = dict[Any, Array]
"""Values by place."""
_NETWORK = -1  # number of the network's own program; those of loops have the equation's number


def trace(apply: Apply, params: Params, inputs: Array) -> pairs.Trace:
    """Run a network as `pairs.trace` does, but keep the loops over its blocks.

    Example:
        >>> def apply(params, x):
        ...     return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["w"])[0]
        >>> traced = trace(apply, {"w": jnp.ones((6, 3, 3))}, jnp.ones((5, 3)))
        >>> [layer.kernel for layer in traced.layers], traced.activations[0].shape
        (['w[0]'], (6, 5, 1, 3))
        >>> [layer.kernel for layer in traced.blocks]
        ['w[0]', 'w[1]', 'w[2]', 'w[3]', 'w[4]', 'w[5]']
    """
    if inputs.shape[0] == 1:
        return pairs.first_example(trace(apply, params, jnp.concatenate([inputs, inputs])))
    names, leaves = tree.names(params), jax.tree.leaves(params)
    try:
        network, reading = pairs.read_network(apply, params, inputs, _read, keep_loops=True)
        blocks = {
            number: _group_block(loop, names, leaves) for number, loop in reading.loops.items()
        }
    except LoopObstacle:
        return pairs.trace(apply, params, inputs)
    parts, uncovered = group(reading, names, leaves)
    if not blocks:
        return pairs.trace_network(network, parts, uncovered, params, inputs)
    return _trace(network, parts, blocks, [*leaves, inputs])._replace(uncovered=uncovered)


def _read(network: Flat) -> uses.Reading:
    """Read the uses of all leaves, those in a loop as uses of its first block.

    Raises:
        LoopObstacle: If a loop must be unrolled to be read.
    """
    *leaves, inputs = network.arguments
    stacked = [leaf for loop in network.loops.values() for leaf in loop.stacks.values()]
    views = {v: uses.whole(leaf, v) for leaf, v in enumerate(leaves) if leaf not in stacked}
    walk = uses.start(network, views, {inputs}, [network.output])
    if any(walk.consumers[leaves[leaf]] > 1 for leaf in stacked):
        raise LoopObstacle("a stack of layers is used twice")
    mixes, loops = False, {}
    for number, equation in enumerate(network.equations):
        if number in network.loops:
            loops[number] = _read_loop(walk, equation, network.loops[number])
        else:
            mixes = uses.read_equation(walk, number, equation) or mixes
    return uses.finish(walk, views, [network.output], mixes)._replace(loops=loops)


def _read_loop(walk: uses.Walk, equation: Any, loop: Loop) -> uses.Reading:
    """Read a step of a loop over blocks as the first block of each stack."""
    slices = {loop.arguments[i]: leaf for i, leaf in loop.stacks.items()}
    views = {v: uses.whole(leaf, v, (0,)) for v, leaf in slices.items()}
    data = {
        v
        for v, outer in zip(loop.arguments, equation.invars, strict=True)
        if v not in slices and (_is_in(outer, walk.data) or uses.has_examples(v))
    }
    outputs, before = [v for v in loop.outputs if v is not None], None
    while data != before:
        # A value that is carried depends on the inputs if that of the step before does.
        before = data
        step = uses.start(loop, views, data, outputs)
        mixes = [uses.read_equation(step, i, one) for i, one in enumerate(loop.equations)]
        carried = zip((loop.arguments[i] for i in loop.carry), loop.outputs, strict=False)
        data = data | {v for v, out in carried if _is_in(out, step.data)}
    reading = uses.finish(step, views, outputs, any(mixes))
    if reading.mixes_examples or reading.obstacles:
        raise LoopObstacle("a leaf of the blocks belongs to no layer")
    results = zip(equation.outvars, loop.outputs, strict=True)
    walk.data.update(v for v, out in results if _is_in(out, step.data))
    return reading


def _group_block(reading: uses.Reading, names: tuple[str, ...], leaves: list[Array]) -> list[Part]:
    """Group the uses in a loop into the layers of its first block."""
    parts, uncovered = group(reading, names, leaves)
    if uncovered or len({part.layer.leaf for part in parts}) < len(parts):
        raise LoopObstacle("a leaf of the blocks is used in several ways")
    return parts


class _Program(NamedTuple):
    """The network, or a step of a loop, with its layers.

    Attributes:
        network: The equations.
        parts: The layers.
        uses: Their uses, by the place of the value whose gradient they need.
        sources: The places of the values that uses read.
        length: Number of blocks; 0 for the network.
    """

    network: Flat | Loop
    parts: list[Part]
    uses: dict[Place, Use]
    sources: list[Source]
    length: int


def _program(network: Flat | Loop, parts: list[Part], length: int = 0) -> _Program:
    found = pairs.uses_by_place(parts)
    read = dict.fromkeys(use.inputs for use in found.values() if isinstance(use.inputs, tuple))
    return _Program(network, parts, found, list(read), length)


def _trace(
    network: Flat, parts: list[Part], blocks: _Blocks, arguments: list[Array]
) -> pairs.Trace:
    """Run a network, and return its layers; those of a loop's first block stand for all blocks."""
    programs = {_NETWORK: _program(network, parts)}
    for number, found in blocks.items():
        length = network.equations[number].params["length"]
        programs[number] = _program(network.loops[number], found, length)
    outputs, tangents_of, read = _run(programs, arguments)
    # The layers in the order of their first use, each with the number of its program.
    order = [(min(p for p, _ in pairs.uses_by_place([part])), _NETWORK, part) for part in parts]
    order += [(number, number, part) for number, found in blocks.items() for part in found]
    layers = [(number, part) for _, number, part in sorted(order, key=lambda entry: entry[0])]
    batch = outputs.shape[0]

    def activations(number: int, part: Part) -> Array:
        one = partial(arrangement.activations, part, programs[number].network, batch=batch)
        return _over_blocks(one, programs[number].length, read[number])

    def pullback(cotangent: Array) -> tuple[Array, ...]:
        tangents = tangents_of(cotangent)

        def of_layer(number: int, part: Part) -> Array:
            one = partial(arrangement.layer_tangents, part)
            return _over_blocks(one, programs[number].length, tangents[number], read[number])

        return tuple(of_layer(*entry) for entry in layers)

    every = _unroll(network, blocks, layers)
    return pairs.Trace(
        outputs,
        tuple(part.layer for _, part in layers),
        tuple(activations(*entry) for entry in layers),
        pullback,
        uncovered={},
        feeders=feeders(*every),
        locations=tuple(
            tuple(pairs.location_sizes(programs[number].network, use) for use in part.uses)
            for number, part in layers
        ),
        stacks=frozenset(part.layer.kernel for found in blocks.values() for part in found),
        blocks=tuple(part.layer for part in every[1]),
    )


def _over_blocks(function: Callable, length: int, *values: _Values) -> Array:
    """Apply a function of values by place, to each of their blocks if they have an axis of them."""
    if not length:
        return function(*values)

    # Places are no keys that JAX could sort, so values are passed as lists.
    def of_block(*slices: list[Array]) -> Array:
        one = [dict(zip(v, x, strict=True)) for v, x in zip(values, slices, strict=True)]
        return function(*one)

    return jax.vmap(of_block, axis_size=length)(*([*v.values()] for v in values))


def _run(
    programs: dict[int, _Program], arguments: list[Array]
) -> tuple[Array, Callable[[Array], dict[int, _Values]], dict[int, _Values]]:
    """Run a network with a perturbation at each layer.

    Returns:
        The outputs, a function from a cotangent of the outputs to the tangents of uses, and the
        values that uses read. Values and tangents are by program and by place; those of a loop have
        a leading axis of blocks.
    """

    def run(perturbations: list[list[Array]]) -> tuple[Array, list[list[Array]]]:
        perturbed, read = dict(zip(programs, perturbations, strict=True)), {}

        def evaluate_loop(number: int, one: Any, operands: list[Array]) -> list[Any]:
            carry = programs[number].network.carry

            def step(values: list[Array], slices: tuple) -> tuple[list[Array], tuple]:
                arguments = [*operands[: carry.start], *values, *slices[0]]
                outputs, inputs = _run_program(programs[number], arguments, slices[1])
                pairs_of = zip(values, outputs, strict=False)
                kept = [old if new is None else new for old, new in pairs_of]
                return kept, (outputs[len(carry) :], inputs)

            values, stacks = operands[carry.start : carry.stop], operands[carry.stop :]
            how = {name: one.params[name] for name in ("length", "reverse")}
            last, (results, read[number]) = jax.lax.scan(
                step, values, (stacks, perturbed[number]), **how
            )
            return [*last, *results]

        (outputs,), read[_NETWORK] = _run_program(
            programs[_NETWORK], arguments, perturbed[_NETWORK], evaluate_loop
        )
        return outputs, [read[number] for number in programs]

    outputs, pull, read = jax.vjp(run, [_zeros(one) for one in programs.values()], has_aux=True)

    def by_place(places: str, values: list[list[Array]]) -> dict[int, _Values]:
        named = zip(programs.items(), values, strict=True)
        return {n: dict(zip(getattr(one, places), x, strict=True)) for (n, one), x in named}

    return outputs, lambda g: by_place("uses", pull(g)[0]), by_place("sources", read)


def _run_program(
    program: _Program,
    arguments: list[Array],
    perturbations: list[Array],
    evaluate_loop: Callable | None = None,
) -> tuple[list[Any], list[Array]]:
    """Return the outputs of a program, and the values that its uses read."""
    network, inputs = program.network, {}
    perturbation = dict(zip(program.uses, perturbations, strict=True))
    evaluate_one = arrangement.at_layers(
        program.uses, inputs, lambda place, value: _perturb(value, perturbation[place])
    )

    def evaluate(number: int, one: Any, operands: list[Array]) -> list[Array]:
        is_loop = isinstance(network, Flat) and number in network.loops
        return (evaluate_loop if is_loop else evaluate_one)(number, one, operands)

    wanted = [network.output] if isinstance(network, Flat) else network.outputs
    outputs = equations.evaluate(network, arguments, evaluate, wanted)
    return outputs, [inputs[place] for place in program.sources]


@jax.custom_jvp
def _perturb(value: Array, perturbation: Array) -> Array:
    """Return value + perturbation for a perturbation of zero, without adding it."""
    del perturbation
    return value


@_perturb.defjvp
def _perturb_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple:
    return primals[0], tangents[0] + tangents[1]


def _zeros(program: _Program) -> list[Array]:
    """Return a perturbation for each use, with a leading axis of blocks in a loop."""
    results = [program.network.equations[number].outvars[0].aval for number, _ in program.uses]
    stack = (program.length,) if program.length else ()
    return [jnp.zeros((*stack, *x.shape), x.dtype) for x in results]


class _Flow(NamedTuple):
    """An equation of which only the variables are known."""

    invars: list[Any]
    outvars: list[Any]


def _unroll(
    network: Flat, blocks: _Blocks, layers: list[tuple[int, Part]]
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
        if number == _NETWORK:
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
