"""Trace a network whose blocks are steps of a scan, and keep the loop.

A network may stack the leaves of L equal blocks, [L, ...], and run them by `jax.lax.scan`. If it is
unrolled, its program grows with L, and so does the time to compile it. Here the loop is kept where
`blocks` can read it, and its layers have inputs [L, B, T, a] and output gradients [L, B, T, o].
These are gradients with respect to perturbations of the layers' results, which are zero, and of
which each step of the loop takes its slice: kfac-jax, which computes them for `pairs`, does not
look for its tags inside a scan. Any other loop over layers is unrolled, as `pairs` does with all of
them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from fisherjax import tree
from fisherjax._core.batches import num_rows
from fisherjax._layers import arrangement, blocks, equations, pairs
from fisherjax._layers.blocks import NETWORK, Blocks
from fisherjax._layers.equations import Flat, Loop
from fisherjax._layers.feeders import feeders
from fisherjax._layers.layer import Part, group
from fisherjax._layers.operations import Use
from fisherjax._layers.reading import LayersNotFoundError, read_network
from fisherjax._layers.views import LoopObstacle, Place, Source
from fisherjax.typing import Apply, Array, Inputs, Params

_Values = dict[Any, Array]
"""Values by place."""


def trace(apply: Apply, params: Params, inputs: Inputs) -> pairs.Trace:
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
    if num_rows(inputs) == 1:
        return pairs.first_example(trace(apply, params, pairs.twice(inputs)))
    names, leaves = tree.names(params), jax.tree.leaves(params)
    try:
        network, reading = read_network(apply, params, inputs, blocks.read, keep_loops=True)
        first = {n: blocks.group_block(r, names, leaves) for n, r in reading.loops.items()}
    except (LoopObstacle, LayersNotFoundError):
        return pairs.trace(apply, params, inputs)
    parts, uncovered = group(reading, names, leaves)
    if not first:
        return pairs.trace_network(network, parts, uncovered, params, inputs)
    return _trace(network, parts, first, [*leaves, *jax.tree.leaves(inputs)])._replace(
        uncovered=uncovered
    )


def of_layers(traced: pairs.Trace, function: Callable, *values: Sequence[Any]) -> list[Any]:
    """Apply `function(number of the layer, *its values)` to layers, and to all blocks of stacks.

    It is mapped over the groups of a layer, which are the last axis but one of its values, and the
    first axis of its results.
    """
    entries, results = list(zip(*values, strict=True)), [None] * len(traced.layers)

    def apply(number: int, *values: Any) -> Any:
        one = partial(function, number)
        return (jax.vmap(one, in_axes=-2) if traced.layers[number].groups else one)(*values)

    stacks: dict[int, list[int]] = {}
    for number, layer in enumerate(traced.layers):
        if layer.kernel in traced.stacks:
            stacks.setdefault(len(entries[number][0]), []).append(number)
        else:
            results[number] = apply(number, *entries[number])
    for numbers in stacks.values():
        # One loop for all stacks, in which XLA computes once what they have in common.
        every = partial(_each, apply, numbers)
        found = jax.lax.map(every, [entries[number] for number in numbers])
        for number, result in zip(numbers, found, strict=True):
            results[number] = result
    return results


def _each(function: Callable, numbers: list[int], entries: list[tuple]) -> list[Any]:
    return [function(number, *x) for number, x in zip(numbers, entries, strict=True)]


class _Program(NamedTuple):
    """The network, or a step of a loop, with its layers.

    Attributes:
        network: The equations.
        parts: The layers.
        uses: Their uses, by the place of the value whose gradient they need.
        sources: For each place of a value that uses read, the first place of the same value.
        length: Number of blocks; 0 for the network.
    """

    network: Flat | Loop
    parts: list[Part]
    uses: dict[Place, Use]
    sources: dict[Source, Source]
    length: int


def _program(network: Flat | Loop, parts: list[Part], length: int = 0) -> _Program:
    found = pairs.uses_by_place(parts)
    first: dict[Any, Source] = {}
    sources: dict[Source, Source] = {}
    for use in found.values():
        if isinstance(use.inputs, tuple):
            equation = network.equations[use.inputs[0]]
            # Queries, keys and values read one value, of which a loop keeps one copy. The factor of
            # a scale is broadcast, so that it is a value of its own; and a literal has no hash.
            v = equation.invars[use.inputs[1]]
            is_shared = equation.primitive.name != "mul" and not isinstance(v, Literal)
            sources[use.inputs] = first.setdefault(v if is_shared else use.inputs, use.inputs)
    return _Program(network, parts, found, sources, length)


def _trace(network: Flat, parts: list[Part], first: Blocks, arguments: list[Array]) -> pairs.Trace:
    """Run a network, and return its layers; those of a loop's first block stand for all blocks."""
    programs = {NETWORK: _program(network, parts)}
    for number, found in first.items():
        length = network.equations[number].params["length"]
        programs[number] = _program(network.loops[number], found, length)
    outputs, tangents_of, read = _run(network, programs, arguments)
    # The layers in the order of their first use, each with the number of its program.
    order = [(min(p for p, _ in pairs.uses_by_place([part])), NETWORK, part) for part in parts]
    order += [(number, number, part) for number, found in first.items() for part in found]
    layers = [(number, part) for _, number, part in sorted(order, key=lambda entry: entry[0])]
    batch = outputs.shape[0]

    def activations(number: int, part: Part) -> Array:
        one = partial(arrangement.activations, part, programs[number].network, batch=batch)
        return _over_blocks(one, programs[number].length, read[number])

    def pullback(cotangent: Array) -> tuple[Array, ...]:
        tangents = tangents_of(cotangent)

        def of_layer(number: int, part: Part) -> Array:
            one = partial(arrangement.layer_tangents, part, batch=batch)
            return _over_blocks(one, programs[number].length, tangents[number], read[number])

        return tuple(of_layer(*entry) for entry in layers)

    every = blocks.unroll(network, first, layers)
    return pairs.Trace(
        outputs,
        tuple(part.layer for _, part in layers),
        tuple(activations(*entry) for entry in layers),
        pullback,
        uncovered={},
        feeders=feeders(*every),
        locations=tuple(
            tuple(pairs.location_sizes(programs[number].network, use, batch) for use in part.uses)
            for number, part in layers
        ),
        stacks=frozenset(part.layer.kernel for found in first.values() for part in found),
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
    network: Flat, programs: dict[int, _Program], arguments: list[Array]
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
            carry = network.loops[number].carry

            def step(values: list[Array], slices: tuple) -> tuple[list[Array], tuple]:
                arguments = [*operands[: carry.start], *values, *slices[0]]
                outputs, inputs = _run_program(programs[number], arguments, slices[1])
                # What nothing needs is carried as it is.
                both = zip(values, outputs, strict=False)
                carried = [old if new is None else new for old, new in both]
                return carried, (outputs[len(carry) :], inputs)

            values, stacks = operands[carry.start : carry.stop], operands[carry.stop :]
            how = {name: one.params[name] for name in ("length", "reverse")}
            last, (results, read[number]) = jax.lax.scan(
                step, values, (stacks, perturbed[number]), **how
            )
            return [*last, *results]

        (outputs,), read[NETWORK] = _run_program(
            programs[NETWORK], arguments, perturbed[NETWORK], evaluate_loop
        )
        return outputs, [read[number] for number in programs]

    outputs, pull, read = jax.vjp(run, [_zeros(one) for one in programs.values()], has_aux=True)

    def tangents(cotangent: Array) -> dict[int, _Values]:
        values = zip(programs.items(), pull(cotangent)[0], strict=True)
        return {number: dict(zip(one.uses, x, strict=True)) for (number, one), x in values}

    values = {}
    for (number, one), found in zip(programs.items(), read, strict=True):
        firsts = dict(zip(dict.fromkeys(one.sources.values()), found, strict=True))
        values[number] = {place: firsts[first] for place, first in one.sources.items()}
    return outputs, tangents, values


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
        if evaluate_loop is not None and isinstance(network, Flat) and number in network.loops:
            return evaluate_loop(number, one, operands)
        return evaluate_one(number, one, operands)

    wanted = [network.output] if isinstance(network, Flat) else network.outputs
    outputs = equations.evaluate(network, arguments, evaluate, wanted)
    firsts = dict.fromkeys(program.sources.values())
    return outputs, [inputs[place] for place in firsts]


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
