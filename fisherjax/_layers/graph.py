"""Which layer feeds which: what has to move with the units of a layer, if they change places.

The numbers of a layer's units are sent through the network in place of activations, and read where
the next layer takes them: so every reshape, pooling or layout of images tells what it did to them.
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
from fisherjax._layers.equations import Flat
from fisherjax._layers.layer import Layer, Part
from fisherjax._layers.pairs import inputs_of_use, network_of
from fisherjax.typing import Apply, Array, ArrayOrShape, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wiring:
    """A network of dense and convolution layers, static.

    Attributes:
        layers: In the order in which the network uses them first.
        sources: For each layer the places of those whose units are its inputs; () where they are
            the network's.
        spans: For each layer (b, c): its matrix V has rows [b, units, c], and a bias; (0, 0) where
            it has no sources.
    """

    layers: tuple[Layer, ...] = dataclasses.field(metadata={"static": True})
    sources: tuple[tuple[int, ...], ...] = dataclasses.field(metadata={"static": True})
    spans: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class _Units:
    """A value on the way: for each entry the number of its unit, from 1, and 0 where it has none.

    Attributes:
        numbers: None where the value is not made of units: of inputs, or of what mixed them.
        sources: Whose units.
        mixed: What mixed them, in words.
    """

    numbers: Any = None
    sources: frozenset[int] = frozenset()
    mixed: str = ""


def wiring(apply: Apply, params: Params, inputs: ArrayOrShape) -> Wiring:
    """Read which layers a network has, and whose units each one takes.

    Args:
        apply: The network, of dense and convolution layers with anything between them that treats
            every unit alike. Where two branches are added, units of both are the same; what passes
            by a branch unchanged, as the skip of a residual block, is not counted.
        params: Of one client; shapes suffice.
        inputs: A minibatch [B, ...]; shapes suffice.

    Raises:
        LayersNotFoundError: If the network cannot be read at all.
        ValueError: If a leaf belongs to no such layer, or something between two layers mixes units;
            it says what.

    Example:
        >>> params = {"a": jnp.ones((3, 4)), "b": jnp.ones((4, 2))}
        >>> found = wiring(lambda p, x: jax.nn.relu(x @ p["a"]) @ p["b"], params, jnp.ones((5, 3)))
        >>> [layer.kernel for layer in found.layers], found.sources, found.spans
        (['a', 'b'], ((), (0,)), ((0, 0), (1, 1)))
    """
    params = jax.tree.map(tree.shape_of, params)
    network, parts, uncovered = network_of(apply, params, tree.shape_of(inputs, 2))
    _check(parts, uncovered)
    # Numbers are known now, even where the params are traced.
    with jax.ensure_compile_time_eval():
        found = _followed(network, parts)
    sources, spans = [], []
    for part, units in zip(parts, found, strict=True):
        sources.append(tuple(sorted(units.sources)))
        spans.append(_span(part, units) if units.sources else (0, 0))
    return Wiring(tuple(part.layer for part in parts), tuple(sources), tuple(spans))


def _check(parts: list[Part], uncovered: dict[str, str]) -> None:
    reasons = dict(uncovered)
    for part in parts:
        layer, what = part.layer, None
        if layer.form != "product" or len(layer.outputs) != 1:
            what = {"table": "an embedding or a shift", "scale": "a scale, as of BatchNorm"}
            what = f"it is {what.get(layer.form, 'a product over several axes')}"
        elif layer.index or layer.part_of or len(part.uses) > 1:
            what = "it is used more than once, or is one of a stack"
        if what is not None:
            reasons[layer.kernel] = what
    if reasons:
        said = "; ".join(f"'{name}': {reason}" for name, reason in sorted(reasons.items()))
        raise ValueError(
            "Units can be matched where all leaves belong to dense and convolution layers, each "
            f"used once. Here some do not: {said}. Train without them, or merge by "
            "algorithms.fedfisher, which takes any network."
        )


def _followed(network: Flat, parts: list[Part]) -> list[_Units]:
    """Send units through a network; give what each layer takes, numbers [B, T, rows]."""
    made = {part.uses[0].tangent[0]: place for place, part in enumerate(parts)}
    *_, inputs = network.arguments
    known, read = {inputs: _Units()}, [_Units()] * len(parts)
    upstream: list[frozenset[int]] = [frozenset()] * len(parts)
    for number, one in enumerate(network.equations):
        operands = [None if isinstance(v, Literal) else known.get(v) for v in one.invars]
        if number in made:
            place = made[number]
            use, name = parts[place].uses[0], parts[place].layer.kernel
            (taken,) = filter(None, operands)
            if taken.mixed:
                raise ValueError(
                    f"Layer '{name}' takes what is not units of a layer: {taken.mixed}. Expected "
                    "activations, pooling and reshapes between layers, and sums of branches."
                )
            if taken.numbers is not None:
                seen = inputs_of_use(use, one, jnp.asarray(taken.numbers))
                read[place] = dataclasses.replace(taken, numbers=np.asarray(seen))
            upstream[place] = taken.sources.union(*(upstream[i] for i in taken.sources))
            shape, columns = one.outvars[0].aval.shape, use.tangent_axes[2]
            known[one.outvars[0]] = _Units(_numbered(shape, columns), frozenset([place]))
        elif any(operands):
            results = _passed(one, operands, upstream)
            known |= dict.fromkeys(one.outvars, results)
    return read


def _numbered(shape: tuple[int, ...], columns: tuple[int, ...]) -> np.ndarray:
    """Number the entries along the axes of a layer's outputs, from 1."""
    sizes = [size if axis in columns else 1 for axis, size in enumerate(shape)]
    # Axes of the outputs are in their order, or there is only one.
    numbers = 1 + np.arange(math.prod(sizes)).reshape(sizes)
    return np.broadcast_to(numbers, shape)


def _passed(equation: Any, operands: list[_Units | None], upstream: list[frozenset[int]]) -> _Units:
    """Say what an equation between layers makes of units."""
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
        return _inside(inner, operands, upstream)
    if name in _MOVES:
        return _moved(equation, operands, name)
    if name in _ELEMENTWISE:
        return functools.reduce(lambda a, b: _joined(a, b, name, upstream), data)
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


# What is applied to each entry of its operands by itself.
_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "rem", "max", "min", "neg", "abs", "sign", "pow", "integer_pow"),
    *("exp", "exp2", "expm1", "log", "log1p", "sqrt", "rsqrt", "cbrt", "square", "logistic"),
    *("tanh", "sin", "cos", "tan", "asinh", "atan", "erf", "erfc", "erf_inv", "add_any"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "is_finite", "floor", "ceil"),
    *("round", "select_n", "clamp", "convert_element_type", "reduce_precision", "stop_gradient"),
    *("copy", "copy_p", "optimization_barrier"),
}
# What gives every entry another place, and changes none.
_MOVES = {
    *("reshape", "transpose", "broadcast_in_dim", "slice", "squeeze", "expand_dims", "rev"),
    *("concatenate", "stack", "pad"),
}
_MIXES = {"scan", "while", "cond"}
_NONE = np.iinfo(np.int32).max


def _inside(jaxpr: Any, operands: list[_Units | None], upstream: list[frozenset[int]]) -> _Units:
    """Follow units through a function with a derivative of its own, such as ReLU."""
    body = getattr(jaxpr, "jaxpr", jaxpr)
    known = {v: units for v, units in zip(body.invars, operands, strict=True) if units is not None}
    for one in body.eqns:
        own = [None if isinstance(v, Literal) else known.get(v) for v in one.invars]
        if any(own):
            known |= dict.fromkeys(one.outvars, _passed(one, own, upstream))
    return known[body.outvars[0]]


def _moved(equation: Any, operands: list[_Units | None], name: str) -> _Units:
    """Move numbers as the equation moves entries."""
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


def _joined(a: _Units, b: _Units, name: str, upstream: list[frozenset[int]]) -> _Units:
    """Join two branches: what went through layers has their units, not those of a skip."""
    if ((a.numbers != b.numbers) & (a.numbers > 0) & (b.numbers > 0)).any():
        return _Units(mixed=f"{name} joins units of different places")
    sources = a.sources | b.sources
    for skip, other in ((a, b), (b, a)):
        # `a` is what `b` was computed of, and passed by.
        if other.sources and all(skip.sources <= upstream[place] for place in other.sources):
            sources = other.sources
    return _Units(np.maximum(a.numbers, b.numbers), sources)


def _extremes(numbers: np.ndarray, largest: Any) -> tuple[np.ndarray, np.ndarray]:
    """Give the largest and the smallest number that an entry is made of, but for 0."""
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
    """Read how the rows of a layer's matrix go through the units of those before it."""
    largest, least = _extremes(units.numbers, lambda x: x.max((0, 1)))
    rows, number = len(largest), largest.max()
    # How often the first unit comes in a row.
    inner = int((np.cumsum(largest != largest[0]) == 0).sum())
    outer = rows // (number * inner)
    regular = np.tile(np.repeat(1 + np.arange(number), inner), outer)
    if (largest != least).any() or not np.array_equal(regular, largest):
        raise ValueError(
            f"Layer '{part.layer.kernel}' takes the units before it in an order that is none of "
            "positions and channels, or another one at each place. Expected dense layers and "
            "convolutions, with reshapes between them."
        )
    return int(outer), inner
