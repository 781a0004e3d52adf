"""Trace a network to one flat list of equations, without inner calls and loops over layers."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from fisherjax import nn
from fisherjax._core import compat
from fisherjax.typing import Apply, Params

# Loops with more steps, and loops over the examples, are kept: no layers are found inside them.
_MOST_STEPS = 128
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
# What a value depends on. A result has the largest number among its operands.
_CONSTANTS, _PARAMS, _INPUTS = range(3)

EvaluateEquation = Callable[[int, Any, list[Any]], list[Any]]
"""`(number of an equation, equation, values of its operands) -> values of its results`."""


class Flat(NamedTuple):
    """The equations of a network, in order, without those that its outputs do not need.

    Attributes:
        leaves: Variables of the leaves of params.
        inputs: Variables of the inputs.
        constants: Pairs of a variable and its value.
        equations: Equations of a jaxpr, with `primitive`, `params`, `invars` and `outvars`.
        output: Variable of the outputs.
    """

    leaves: list[Any]
    inputs: list[Any]
    constants: list[tuple[Any, Any]]
    equations: list[Any]
    output: Any


def flatten(apply: Apply, params: Params, inputs: Any) -> Flat:
    """Trace a network on a minibatch [B, ...] to a list of equations without calls."""

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
        leaves = [(leaf, _PARAMS) for leaf in jax.tree.leaves(params)]
        return _run_jaxpr(jaxpr, [*leaves, *((x, _INPUTS) for x in jax.tree.leaves(inputs))])[0][0]

    closed = jax.make_jaxpr(run_inlined)(params, inputs)
    jaxpr, needed, equations = closed.jaxpr, {*variables(closed.jaxpr.outvars)}, []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(variables(equation.invars))
            equations.append(equation)
    constants = list(zip(jaxpr.constvars, closed.consts, strict=True))
    number = len(jax.tree.leaves(params))
    leaves, data = jaxpr.invars[:number], jaxpr.invars[number:]
    return Flat(leaves, data, constants, equations[::-1], jaxpr.outvars[0])


def variables(operands: Sequence[Any]) -> list[Any]:
    """Return the operands that are variables, without literals, which cannot be hashed."""
    return [v for v in operands if not isinstance(v, Literal)]


def _convolve(y: Any, images: Any, kernel: Any, **settings: Any) -> Any:
    del y
    return jax.lax.conv_general_dilated(images, kernel, **settings)


def evaluate(network: Flat, arguments: Sequence[Any], evaluate_equation: EvaluateEquation) -> Any:
    """Evaluate a network equation by equation, and return its outputs."""
    given = zip((*network.leaves, *network.inputs), arguments, strict=True)
    values = dict(network.constants) | dict(given)
    for number, one in enumerate(network.equations):
        operands = [v.val if isinstance(v, Literal) else values[v] for v in one.invars]
        values |= dict(zip(one.outvars, evaluate_equation(number, one, operands), strict=True))
    return values[network.output]


def _run_jaxpr(jaxpr: Any, arguments: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Evaluate a jaxpr without calls, on pairs of a value and what it depends on."""
    # The body of a rematerialised function is an open jaxpr, without constants.
    body, consts = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
    pairs = {v: (value, _CONSTANTS) for v, value in zip(body.constvars, consts, strict=True)}
    pairs |= dict(zip(body.invars, arguments, strict=True))

    def read(variable: Any) -> tuple[Any, int]:
        return (variable.val, _CONSTANTS) if isinstance(variable, Literal) else pairs[variable]

    for one in body.eqns:
        operands, name = [read(v) for v in one.invars], one.primitive.name
        origins = [origin for _, origin in operands]
        if name in _CALLS:
            results = _run_jaxpr(one.params.get("jaxpr", one.params.get("call_jaxpr")), operands)
        elif name == "scan" and _PARAMS in origins and one.params["length"] <= _MOST_STEPS:
            results = _unroll(one.params, operands)
        else:
            values = compat.evaluate(one, [value for value, _ in operands])
            results = [(value, max(origins, default=_CONSTANTS)) for value in values]
        pairs |= dict(zip(one.outvars, results, strict=True))
    return [read(v) for v in body.outvars]


def _unroll(scan: dict[str, Any], operands: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
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
    columns = zip(*(results[step] for step in steps), strict=True)
    return carry + [
        (jax.numpy.stack([x for x, _ in column]), max(origin for _, origin in column))
        for column in columns
    ]
