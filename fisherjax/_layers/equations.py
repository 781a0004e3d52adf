"""Trace a network to one flat list of equations, without inner calls and loops over layers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from fisherjax import nn
from fisherjax._core import compat
from fisherjax._layers import choices, computed, rewriting
from fisherjax._layers.rewriting import CONSTANTS, INPUTS, PARAMS, Value
from fisherjax.typing import Apply, Params

# Loops with more steps, and loops over the examples, are kept: no layers are found inside them.
_MOST_STEPS = 128
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}

EvaluateEquation = Callable[[int, Any, list[Any]], list[Any]]
"""`(number of an equation, equation, values of its operands) -> values of its results`."""


class Loop(NamedTuple):
    """The body of a scan over blocks, whose params are slices of stacked leaves.

    Attributes:
        arguments: Variables of the constants, of the carry and of the slices of one step.
        constants: Pairs of a variable and its value.
        equations: Equations of one step, without calls.
        outputs: Variables of the next carry and of the stacked results; None where the network does
            not need them.
        carry: Numbers of the arguments that are the carry.
        slices: Numbers of the arguments that are slices of params.
    """

    arguments: list[Any]
    constants: list[tuple[Any, Any]]
    equations: list[Any]
    outputs: list[Any]
    carry: range
    slices: tuple[int, ...]


class Flat(NamedTuple):
    """The equations of a network, in order, without those that its outputs do not need.

    Attributes:
        leaves: Variables of the leaves of params.
        inputs: Variables of the inputs.
        constants: Pairs of a variable and its value.
        equations: Equations of a jaxpr, with `primitive`, `params`, `invars` and `outvars`.
        output: Variable of the outputs.
        loops: The bodies of the scans over blocks that were kept, by number of their equation.
    """

    leaves: list[Any]
    inputs: list[Any]
    constants: list[tuple[Any, Any]]
    equations: list[Any]
    output: Any
    loops: dict[int, Loop]

    @property
    def arguments(self) -> list[Any]:
        """Return the variables of the leaves of params, followed by those of the inputs."""
        return [*self.leaves, *self.inputs]


def flatten(apply: Apply, params: Params, inputs: Any, *, keep_loops: bool = False) -> Flat:
    """Trace a network on a minibatch [B, ...] to a list of equations without calls.

    Loops over layers are unrolled; or, if `keep_loops`, kept if all params in them are slices.
    """

    def run_inlined(params: Params, inputs: Any) -> Any:
        # `nn.conv_general_dilated` computes patches times a matrix; the observer replaces that by
        # lax's convolution, which `operations` can read. The observer acts only while JAX traces,
        # but a function that the network jits may have been traced before, and JAX would return
        # that trace from its cache. `jax_debug_key_reuse` is part of the key of this cache and
        # changes no value that is computed here, so its other setting makes JAX trace anew. If
        # JAX ever drops it from the key, then a convolution that was compiled before is read as
        # slices and a product, which tests/layers/test_equations.py would show.
        # JAX adds its options at run time, so type checkers do not know them.
        current = jax.config.jax_debug_key_reuse  # pyright: ignore[reportAttributeAccessIssue]
        trace_anew = jax.debug_key_reuse(not current)
        with nn.observe_convolutions(_convolve), trace_anew:
            jaxpr = jax.make_jaxpr(apply)(params, inputs)
        leaves = [(leaf, PARAMS) for leaf in jax.tree.leaves(params)]
        data = [(x, INPUTS) for x in jax.tree.leaves(inputs)]
        return computed.evaluate(_run_jaxpr(jaxpr, [*leaves, *data], keep_loops)[0][0])

    closed = jax.make_jaxpr(run_inlined)(params, inputs)
    jaxpr = closed.jaxpr
    equations, needed = _drop_unneeded(jaxpr.eqns, jaxpr.outvars)
    number = len(jax.tree.leaves(params))
    leaves, data = jaxpr.invars[:number], jaxpr.invars[number:]
    loops = _find_loops(leaves, data, equations, needed) if keep_loops else {}
    constants = list(zip(jaxpr.constvars, closed.consts, strict=True))
    return Flat(leaves, data, constants, equations, jaxpr.outvars[0], loops)


def _drop_unneeded(equations: list[Any], outputs: Sequence[Any]) -> tuple[list[Any], set[Any]]:
    """Return the equations that the outputs need, and all variables that are needed."""
    needed, kept = {*variables(outputs)}, []
    for equation in reversed(equations):
        if needed.intersection(equation.outvars):
            needed.update(variables(equation.invars))
            kept.append(equation)
    return kept[::-1], needed


def _find_loops(
    leaves: list[Any], inputs: list[Any], equations: list[Any], needed: set[Any]
) -> dict[int, Loop]:
    """Trace the body of each scan over slices of params."""
    origins, loops = dict.fromkeys(leaves, PARAMS) | dict.fromkeys(inputs, INPUTS), {}
    for number, one in enumerate(equations):
        found = [CONSTANTS if isinstance(v, Literal) else origins.get(v, 0) for v in one.invars]
        origins |= dict.fromkeys(one.outvars, max(found, default=CONSTANTS))
        slices = tuple(i for i, origin in enumerate(found) if origin == PARAMS)
        if slices and _is_loop(one):
            loops[number] = _read_loop(one, slices, needed)
    return loops


def _read_loop(equation: Any, slices: tuple[int, ...], needed: set[Any]) -> Loop:
    """Trace the body of a scan to a list of equations without calls."""
    first, count = compat.scan_parts(equation.params)
    jaxpr = equation.params["jaxpr"]

    def step(*values: Any) -> list[Any]:
        pairs = [(x, PARAMS if i in slices else INPUTS) for i, x in enumerate(values)]
        return [computed.evaluate(value) for value, _ in _run_jaxpr(jaxpr, pairs)]

    avals = [v.aval for v in getattr(jaxpr, "jaxpr", jaxpr).invars]
    closed = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals))
    arguments, results = closed.jaxpr.invars, closed.jaxpr.outvars
    wanted, before = [v in needed for v in equation.outvars], None
    body = closed.jaxpr.eqns
    # A carry may be needed by the next step only.
    while wanted != before:
        before = wanted
        kept = [v for v, is_wanted in zip(results, wanted, strict=True) if is_wanted]
        body, inside = _drop_unneeded(closed.jaxpr.eqns, kept)
        carried = [v in inside for v in arguments[first : first + count]]
        carried += [False] * (len(results) - count)
        wanted = [a or b for a, b in zip(wanted, carried, strict=True)]
    outputs = [v if is_wanted else None for v, is_wanted in zip(results, wanted, strict=True)]
    constants = list(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    return Loop(arguments, constants, body, outputs, range(first, first + count), slices)


def _is_loop(equation: Any) -> bool:
    return equation.primitive.name == "scan" and equation.params["length"] <= _MOST_STEPS


def _is_over_blocks(scan: Any, origins: list[int]) -> bool:
    """Return whether a scan of data, with more than one step, has params as slices only."""
    others = origins[: sum(compat.scan_parts(scan.params))]
    return scan.params["length"] > 1 and PARAMS not in others and INPUTS in origins


def names(network: Flat) -> list[str]:
    """Return the names of all equations, with those of the loops that were kept at the end."""
    every = [network.equations, *(loop.equations for loop in network.loops.values())]
    return [equation.primitive.name for one in every for equation in one]


def wiring(network: Flat) -> list[tuple]:
    """Return for each equation its name and the equations, or arguments, that its operands are of.

    Two traces with the same wiring differ at most in the sizes of their values.
    """
    found = []
    for one in (network, *network.loops.values()):
        places: dict[Any, tuple] = {v: (-1, i) for i, v in enumerate(one.arguments)}
        for number, equation in enumerate(one.equations):
            operands = (None if isinstance(v, Literal) else places.get(v) for v in equation.invars)
            found.append((equation.primitive.name, *operands))
            places |= {v: (number, i) for i, v in enumerate(equation.outvars)}
    return found


def variables(operands: Sequence[Any]) -> list[Any]:
    """Return the operands that are variables, without literals, which cannot be hashed."""
    return [v for v in operands if not isinstance(v, Literal)]


def _convolve(y: Any, images: Any, kernel: Any, **settings: Any) -> Any:
    del y
    return jax.lax.conv_general_dilated(images, kernel, **settings)


def evaluate(
    network: Flat | Loop,
    arguments: Sequence[Any],
    evaluate_equation: EvaluateEquation,
    outputs: Iterable[Any],
) -> list[Any]:
    """Evaluate a network or a step of a loop; return its outputs, None for those not needed."""
    values = dict(network.constants) | dict(zip(network.arguments, arguments, strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    for number, one in enumerate(network.equations):
        results = evaluate_equation(number, one, [read(v) for v in one.invars])
        values |= dict(zip(one.outvars, results, strict=True))
    return [None if v is None else read(v) for v in outputs]


def _run_jaxpr(jaxpr: Any, arguments: list[Value], keep_loops: bool = False) -> list[Value]:
    """Evaluate a jaxpr without calls, on pairs of a value and what it depends on.

    A scan over blocks is unrolled, unless `keep_loops`. Products with computed kernels are
    rewritten as products with leaves.
    """
    # The body of a rematerialised function is an open jaxpr, without constants.
    body, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    pairs = {v: (value, CONSTANTS) for v, value in zip(body.constvars, consts, strict=True)}
    pairs |= dict(zip(body.invars, arguments, strict=True))

    def read(variable: Any) -> Value:
        return (variable.val, CONSTANTS) if isinstance(variable, Literal) else pairs[variable]

    for one in body.eqns:
        operands, name = [read(v) for v in one.invars], one.primitive.name
        if name in _CALLS:
            inner = one.params.get("jaxpr", one.params.get("call_jaxpr"))
            results = _run_jaxpr(inner, operands, keep_loops)
            pairs |= dict(zip(one.outvars, results, strict=True))
            continue
        if (choice := choices.rewrite(one, operands)) is not None:
            pairs[one.outvars[0]] = choice
            continue
        operands = [
            (computed.evaluate(x) if computed.is_choice(x) else x, origin) for x, origin in operands
        ]
        if (rewritten := rewriting.rewrite(one, operands)) is not None:
            pairs |= dict(zip(one.outvars, rewritten, strict=True))
            continue
        origins = [origin for _, origin in operands]
        operands = [(computed.evaluate(value), origin) for value, origin in operands]
        # A value that several equations need is computed once.
        pairs |= {
            v: x for v, x in zip(one.invars, operands, strict=True) if not isinstance(v, Literal)
        }
        if (
            _is_loop(one)
            and PARAMS in origins
            and not (keep_loops and _is_over_blocks(one, origins))
        ):
            results = _unroll(one.params, operands)
        else:
            values = compat.evaluate(one, [value for value, _ in operands])
            results = [(value, max(origins, default=CONSTANTS)) for value in values]
        pairs |= dict(zip(one.outvars, results, strict=True))
    return [read(v) for v in body.outvars]


def _unroll(scan: dict[str, Any], operands: list[Value]) -> list[Value]:
    """Evaluate the steps of a scan one by one, each with its slices of the stacked params."""
    first, count = compat.scan_parts(scan)
    consts, carry = operands[:first], operands[first : first + count]
    stacked = operands[first + count :]
    steps = range(scan["length"])
    results = {}
    for step in reversed(steps) if scan["reverse"] else steps:
        slices = [(jax.lax.index_in_dim(x, step, keepdims=False), origin) for x, origin in stacked]
        step_results = _run_jaxpr(scan["jaxpr"], [*consts, *carry, *slices])
        carry, results[step] = step_results[:count], step_results[count:]
        # The next step reads each result as a value.
        carry, results[step] = (
            [(computed.evaluate(x), origin) for x, origin in found]
            for found in (carry, results[step])
        )
    columns = zip(*(results[step] for step in steps), strict=True)
    return carry + [
        (jax.numpy.stack([x for x, _ in column]), max(origin for _, origin in column))
        for column in columns
    ]
