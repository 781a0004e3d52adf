"""A network as one flat list of equations: what was jitted, and loops over layers, written out."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal

from fisherjax import nn
from fisherjax._core import compat
from fisherjax.typing import Apply, Params

# Loops of more steps, or over the examples, stay loops: layers are not looked for inside.
_MOST_STEPS = 128
_CALLS = {"jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2"}
# What a value comes from; the larger one decides.
_CONSTANTS, _PARAMS, _INPUTS = range(3)

Evaluate = Callable[[int, Any, list[Any]], list[Any]]
"""`(number, equation, values of its operands) -> values of what it defines`."""


class Flat(NamedTuple):
    """A network's equations, in order and only those that its outputs need.

    Attributes:
        arguments: Variables of the leaves of params and then of the inputs.
        constants: Pairs of a variable and its value.
        equations: Of a jaxpr; each has `primitive`, `params`, `invars` and `outvars`.
        output: Variable of the outputs.
    """

    arguments: list[Any]
    constants: list[tuple[Any, Any]]
    equations: list[Any]
    output: Any


def flat(apply: Apply, params: Params, inputs: Any) -> Flat:
    """Trace a network on a minibatch [B, ...] to a list of equations without calls."""

    def written_out(params: Params, inputs: Any) -> Any:
        # Convolutions in their own form, not as patches times a matrix. The setting is one that
        # JAX's caches of traces go by: what was traced without the observer is traced again.
        # JAX adds its options at run time.
        now = jax.config.jax_debug_key_reuse  # pyright: ignore[reportAttributeAccessIssue]
        other = jax.debug_key_reuse(not now)
        with nn.observe_convolutions(_native), other:
            jaxpr = jax.make_jaxpr(apply)(params, inputs)
        leaves = [(leaf, _PARAMS) for leaf in jax.tree.leaves(params)]
        return _written_out(jaxpr, [*leaves, (inputs, _INPUTS)])[0][0]

    closed = jax.make_jaxpr(written_out)(params, inputs)
    jaxpr, needed, equations = closed.jaxpr, {*variables(closed.jaxpr.outvars)}, []
    for equation in reversed(jaxpr.eqns):
        if needed.intersection(equation.outvars):
            needed.update(variables(equation.invars))
            equations.append(equation)
    constants = list(zip(jaxpr.constvars, closed.consts, strict=True))
    return Flat(jaxpr.invars, constants, equations[::-1], jaxpr.outvars[0])


def variables(operands: Sequence[Any]) -> list[Any]:
    """Leave out literals, which cannot be hashed."""
    return [v for v in operands if not isinstance(v, Literal)]


def _native(y: Any, images: Any, kernel: Any, **settings: Any) -> Any:
    del y
    return jax.lax.conv_general_dilated(images, kernel, **settings)


def evaluate(network: Flat, arguments: Sequence[Any], equation: Evaluate) -> Any:
    """Run a network equation by equation, and return the outputs."""
    values = dict(network.constants) | dict(zip(network.arguments, arguments, strict=True))
    for number, one in enumerate(network.equations):
        operands = [v.val if isinstance(v, Literal) else values[v] for v in one.invars]
        values |= dict(zip(one.outvars, equation(number, one, operands), strict=True))
    return values[network.output]


def _written_out(jaxpr: Any, arguments: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Run a jaxpr on pairs of a value and what it comes from."""
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
            results = _written_out(one.params.get("jaxpr", one.params.get("call_jaxpr")), operands)
        elif name == "scan" and _PARAMS in origins and one.params["length"] <= _MOST_STEPS:
            results = _unrolled(one.params, operands)
        else:
            values = compat.evaluate(one, [value for value, _ in operands])
            results = [(value, max(origins, default=_CONSTANTS)) for value in values]
        pairs |= dict(zip(one.outvars, results, strict=True))
    return [read(v) for v in body.outvars]


def _unrolled(how: dict[str, Any], operands: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    """Write out the steps of a scan, each with its slices of stacked params."""
    first, count = compat.scan_parts(how)
    consts, carry = operands[:first], operands[first : first + count]
    stacked = operands[first + count :]
    steps = range(how["length"])
    results = {}
    for step in reversed(steps) if how["reverse"] else steps:
        slices = [(jax.lax.index_in_dim(x, step, keepdims=False), origin) for x, origin in stacked]
        step_results = _written_out(how["jaxpr"], [*consts, *carry, *slices])
        carry, results[step] = step_results[:count], step_results[count:]
    columns = zip(*(results[step] for step in steps), strict=True)
    return carry + [
        (jax.numpy.stack([x for x, _ in column]), max(origin for _, origin in column))
        for column in columns
    ]
