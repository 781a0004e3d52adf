"""Find which units of which layers each layer takes, so that units can be permuted consistently.

Merging by matching units (OTFusion, PFNM) permutes the units of a layer, and with them the rows of
the next layer's matrix. To find these rows, the numbers of a layer's units are sent through the
network in place of activations and read where the next layer takes its inputs. So every reshape,
pooling or layout of images is followed as the network computes it.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from fisherjax import tree
from fisherjax._core import compat
from fisherjax._layers.arrangement import inputs_of_use
from fisherjax._layers.equations import Flat
from fisherjax._layers.layer import Layer, Part
from fisherjax._layers.reading import network_of
from fisherjax.typing import Apply, Array, Inputs, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wiring:
    """Static description of a network of dense and convolution layers.

    Attributes:
        layers: Layers in the order of their first use.
        sources: For each layer the numbers of the layers whose units are its inputs; () if it takes
            the inputs of the network.
        spans: For each layer (b, c): the rows of its matrix V are [b, units, c], followed by a bias
            if it has one; (0, 0) if it has no sources.
    """

    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    sources: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    spans: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class _Units:
    """The units in a value of the network.

    Attributes:
        numbers: For each entry of the value the number of its unit, from 1, or 0 if it has none.
            None if the value is not made of units, but of inputs, or of mixed units.
        sources: Numbers of the layers that the units belong to.
        mixed: The reason why units are mixed in this value; "" if they are not.
    """

    numbers: Any = None
    sources: frozenset[int] = frozenset()
    mixed: str = ""


def wiring(apply: Apply, params: Params, inputs: Inputs) -> Wiring:
    """Find the layers of a network, and whose units each of them takes.

    Args:
        apply: The network: dense and convolution layers, and between them anything that treats
            all units alike. Where two branches are added, their units are identified. A skip
            connection, which passes a branch unchanged, does not count as a source.
        params: Params of one client, or their shapes.
        inputs: A minibatch [B, ...], or its shape.

    Raises:
        LayersNotFoundError: If the network cannot be read.
        ValueError: If a leaf belongs to no such layer, or if units are mixed between two layers;
            the message names the leaf or the operation.

    Example:
        >>> params = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}
        >>> found = wiring(lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"], params, jnp.ones((5, 3)))
        >>> [layer.kernel for layer in found.layers], found.sources, found.spans
        (['a', 'b'], ((), (0,)), ((0, 0), (1, 1)))
    """
    params = jax.tree.map(tree.shape_of, params)
    network, parts, uncovered = network_of(apply, params, tree.shape_of(inputs, 2))
    _check_layers(parts, uncovered)
    # Unit numbers have values at trace time, even if the params are traced.
    with jax.ensure_compile_time_eval():
        found = _follow_units(network, parts)
    sources, spans = [], []
    for part, units in zip(parts, found, strict=True):
        sources.append(tuple(sorted(units.sources)))
        spans.append(_span(part, units) if units.sources else (0, 0))
    return Wiring(tuple(part.layer for part in parts), tuple(sources), tuple(spans))


def _check_layers(parts: list[Part], uncovered: dict[str, str]) -> None:
    reasons = dict(uncovered)
    for part in parts:
        layer, reason = part.layer, None
        if layer.form != "product" or len(layer.outputs) != 1:
            kinds = {"table": "an embedding or a shift", "scale": "a scale, as of BatchNorm"}
            reason = f"it is {kinds.get(layer.form, 'a product over several axes')}"
        elif layer.groups:
            reason = "it has a matrix for each group of units, as a grouped convolution"
        elif layer.index or layer.part_of or len(part.uses) > 1:
            reason = "it is used more than once, or is one of a stack"
        if reason is not None:
            reasons[layer.kernel] = reason
    if reasons:
        listed = "; ".join(f"'{name}': {reason}" for name, reason in sorted(reasons.items()))
        raise ValueError(
            "Units can be matched only if all leaves belong to dense and convolution layers, each "
            f"used once. These leaves do not: {listed}. Train a network without them, or merge by "
            "algorithms.fedfisher, which takes any network."
        )


def _follow_units(network: Flat, parts: list[Part]) -> list[_Units]:
    """Send unit numbers through a network, and return those that each layer takes [B, T, rows]."""
    made = {part.uses[0].tangent[0]: place for place, part in enumerate(parts)}
    known, read = dict.fromkeys(network.inputs, _Units()), [_Units()] * len(parts)
    upstream: list[frozenset[int]] = [frozenset()] * len(parts)
    for number, one in enumerate(network.equations):
        operands = [None if isinstance(v, Literal) else known.get(v) for v in one.invars]
        if number in made:
            place = made[number]
            use, name = parts[place].uses[0], parts[place].layer.kernel
            (taken,) = filter(None, operands)
            if taken.mixed:
                raise ValueError(
                    f"The inputs of layer '{name}' are not units of another layer: {taken.mixed}. "
                    "Expected activation functions, pooling and reshapes between layers, and sums "
                    "of branches. Merge by algorithms.fedfisher, which takes any network."
                )
            if taken.numbers is not None:
                seen = inputs_of_use(use, one, jnp.asarray(taken.numbers))
                read[place] = dataclasses.replace(taken, numbers=np.asarray(seen))
            upstream[place] = taken.sources.union(*(upstream[i] for i in taken.sources))
            shape, columns = one.outvars[0].aval.shape, use.tangent_axes[2]
            known[one.outvars[0]] = _Units(_number_units(shape, columns), frozenset([place]))
        elif any(operands):
            results = _transform(one, operands, upstream)
            known |= dict.fromkeys(one.outvars, results)
    return read


def _number_units(shape: tuple[int, ...], columns: tuple[int, ...]) -> np.ndarray:
    """Return an array of this shape with the unit numbers, from 1, along the axes `columns`."""
    sizes = [size if axis in columns else 1 for axis, size in enumerate(shape)]
    # There is one axis of outputs (`_check_layers`), so numbers are in the order of V's columns.
    numbers = 1 + np.arange(math.prod(sizes)).reshape(sizes)
    return np.broadcast_to(numbers, shape)


def _transform(
    equation: Any, operands: list[_Units | None], upstream: list[frozenset[int]]
) -> _Units:
    """Return the units in the result of an equation between layers."""
    name, how = equation.primitive.name, equation.params
    data = [units for units in operands if units is not None]
    for units in data:
        if units.mixed:
            return units
    if all(units.numbers is None for units in data):
        return _Units()
    if any(units.numbers is None for units in data):
        return _Units(mixed=f"{name} joins units and the network's inputs")
    inner = how.get("call_jaxpr", how.get("jaxpr", how.get("fun_jaxpr")))
    if inner is not None and name not in _MIXES:
        return _transform_inside(inner, operands, upstream)
    if name in _MOVES:
        return _move(equation, operands, name)
    if name in _ELEMENTWISE:
        return functools.reduce(lambda a, b: _join(a, b, name, upstream), data)
    (one, *_) = data
    if name in ("reduce_max", "reduce_min", "reduce_sum"):
        extremes = _extremes(one.numbers, lambda x: x.max(how["axes"]))
    elif name.startswith("reduce_window"):
        extremes = _extremes(one.numbers, lambda x: _largest_in_window(x, how))
    else:
        return _Units(mixed=f"{name} is applied to them")
    if (extremes[0] != extremes[1]).any():
        return _Units(mixed=f"{name} runs over several of them")
    return dataclasses.replace(one, numbers=extremes[0])


# Equations that compute each entry of the result from the same entry of the operands.
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign", "pow", "integer_pow"),
    *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "square", "logistic"),
    *("tanh", "sin", "cos", "tan", "asinh", "atan", "erf", "erfc", "erf_inv", "add_any"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "is_finite", "floor", "ceil"),
    *("round", "select_n", "clamp", "convert_element_type", "reduce_precision", "stop_gradient"),
    *("copy", "copy_p", "optimization_barrier"),
}
# Equations that move entries and change none.
_MOVES = {
    *("reshape", "transpose", "broadcast_in_dim", "slice", "squeeze", "expand_dims", "rev"),
    *("concatenate", "stack", "pad"),
}
_MIXES = {"scan", "while", "cond"}
_NONE = np.iinfo(np.int32).max


def _transform_inside(
    jaxpr: Any, operands: list[_Units | None], upstream: list[frozenset[int]]
) -> _Units:
    """Follow units through a function with a custom derivative, such as ReLU."""
    body = getattr(jaxpr, "jaxpr", jaxpr)
    known = {v: units for v, units in zip(body.invars, operands, strict=True) if units is not None}
    for one in body.eqns:
        units = [None if isinstance(v, Literal) else known.get(v) for v in one.invars]
        if any(units):
            known |= dict.fromkeys(one.outvars, _transform(one, units, upstream))
    return known[body.outvars[0]]


def _move(equation: Any, operands: list[_Units | None], name: str) -> _Units:
    """Move unit numbers as the equation moves entries."""
    data = [units for units in operands if units is not None]
    if any(units.sources != data[0].sources for units in data):
        return _Units(mixed=f"{name} puts units of several layers side by side")
    shapes = [v.aval.shape for v in equation.invars]
    values = [
        np.zeros(shape, np.int32) if units is None else jnp.asarray(units.numbers, jnp.int32)
        for units, shape in zip(operands, shapes, strict=True)
    ]
    (numbers,) = compat.evaluate(equation, values)
    return dataclasses.replace(data[0], numbers=np.asarray(numbers))


def _join(a: _Units, b: _Units, name: str, upstream: list[frozenset[int]]) -> _Units:
    """Join two branches; a skip connection takes the units of the branch that it passes."""
    if ((a.numbers != b.numbers) & (a.numbers > 0) & (b.numbers > 0)).any():
        return _Units(mixed=f"{name} joins units of different places")
    sources = a.sources | b.sources
    for skip, other in ((a, b), (b, a)):
        # All layers of `skip` are upstream of `other`: it is a skip connection past `other`.
        if other.sources and all(skip.sources <= upstream[place] for place in other.sources):
            sources = other.sources
    return _Units(np.maximum(a.numbers, b.numbers), sources)


def _extremes(numbers: np.ndarray, largest: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest and the smallest number other than 0 that `largest` finds by entry."""
    least = _NONE - np.asarray(largest(np.where(numbers > 0, _NONE - numbers, 0)))
    return np.asarray(largest(numbers)), np.where(least == _NONE, 0, least)


def _largest_in_window(numbers: np.ndarray, how: dict[str, Any]) -> Array:
    return jax.lax.reduce_window(
        jnp.asarray(numbers, jnp.int32),
        np.int32(0),
        jax.lax.max,
        how["window_dimensions"],
        how["window_strides"],
        how["padding"],
        how["base_dilation"],
        how["window_dilation"],
    )


def _span(part: Part, units: _Units) -> tuple[int, int]:
    """Return (b, c) such that the rows of a layer's matrix are [b, units, c]."""
    largest, least = _extremes(units.numbers, lambda x: x.max((0, 1)))
    rows, number = len(largest), largest.max()
    # Number of successive rows that belong to the first unit.
    inner = int((np.cumsum(largest != largest[0]) == 0).sum())
    outer = rows // (number * inner)
    regular = np.tile(np.repeat(1 + np.arange(number), inner), outer)
    if (largest != least).any() or not np.array_equal(regular, largest):
        raise ValueError(
            f"Layer '{part.layer.kernel}' takes the units of the layer before it in an order other "
            "than positions and channels, or in another order at each location. Expected dense "
            "and convolution layers with reshapes between them. Merge by algorithms.fedfisher, "
            "which takes any network."
        )
    return int(outer), inner
