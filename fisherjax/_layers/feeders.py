"""Find which layers feed which, and which layer computes the outputs.

A layer feeds another one if its outputs reach the inputs of that layer without passing through a
third layer. A skip connection counts, too. Single units are not followed, as `graph.wiring` does,
so that every network can be read.

The layer that computes the outputs is the one whose product, with its bias, is the output of the
network. The size of the outputs does not show that: de-normalised outputs, their softplus and the
sum of two branches have the same size. So the product is followed equation by equation, and any
equation that changes its values is a reason why the layer is not the last one.
"""

import itertools
from typing import Any, TypeAlias

from jax.extend.core import Literal

from fisherjax._layers import views
from fisherjax._layers.equations import Flat, variables
from fisherjax._layers.layer import Part
from fisherjax._layers.operations import Use
from fisherjax._layers.views import Axes

Feeders: TypeAlias = tuple[tuple[str, ...], ...]
"""For each layer the names of the layers, in forward order, whose outputs make its inputs."""


def feeders(network: Flat, parts: list[Part]) -> Feeders | None:
    """Return the feeders of each layer, or None if each layer is fed by the one before it.

    A scale feeds nothing, and passes on what feeds it. For a layer that is used several times the
    feeders of all uses count, except layers that come later in forward order.
    """
    # {place of a value: layer}, for the outputs and for the inputs of layers.
    outputs, inputs = {}, {}
    for number, part in enumerate(parts):
        if part.layer.form != "scale":
            for use in part.uses:
                outputs[use.tangent] = number
                inputs.setdefault(use.inputs, []).append(number)
    known: dict[Any, frozenset[int]] = {}
    found: list[frozenset[int]] = [frozenset()] * len(parts)
    for number, one in enumerate(network.equations):
        passed = []
        for i, v in enumerate(one.invars):
            sources = frozenset() if isinstance(v, Literal) else known.get(v, frozenset())
            for layer in inputs.get((number, i), ()):
                found[layer] |= sources
            # For a table that is added, this operand is the output of the layer.
            passed.append(_sources(outputs, (number, i), sources))
        results = _sources(outputs, (number, None), frozenset().union(*passed))
        known |= dict.fromkeys(one.outvars, results)
    layers = [number for number, part in enumerate(parts) if part.layer.form != "scale"]
    chain = {number: (before,) for before, number in itertools.pairwise(layers)}
    earlier = [tuple(s for s in sorted(sources) if s < i) for i, sources in enumerate(found)]
    if all(earlier[number] == chain.get(number, ()) for number in layers):
        return None
    return tuple(tuple(parts[s].layer.kernel for s in sources) for sources in earlier)


def _sources(outputs: dict, place: tuple, sources: frozenset[int]) -> frozenset[int]:
    return frozenset([outputs[place]]) if place in outputs else sources


def output_part(network: Flat, parts: list[Part], uncovered: dict[str, str]) -> int | str:
    """Return the number of the dense layer that computes the outputs, or the reason why none does.

    The reason names some leaves of `uncovered`, which belong to no layer, with their own reasons.
    """
    users: dict[Any, list[Any]] = {}
    for equation in network.equations:
        for v in variables(equation.invars):
            users.setdefault(v, []).append(equation)
    reason = "no dense layer was found"
    for place, part in enumerate(parts):
        if part.layer.form == "product":
            changes = [_change(network, users, part, use) for use in part.uses]
            if None in changes:
                reason = _reason_against(parts, place, network.output.aval.shape)
                return place if reason is None else reason
            reason = f"after layer '{part.layer.kernel}', {changes[-1]}"
    some = [f"'{name}' ({why})" for name, why in uncovered.items()][:3]
    return f"{reason}; these leaves belong to no layer: {', '.join(some)}" if some else reason


def _reason_against(parts: list[Part], place: int, shape: tuple[int, ...]) -> str | None:
    """Return why a layer whose product is the output cannot be solved for, or None if it can."""
    layer = parts[place].layer
    if len(parts[place].uses) > 1 or [part.layer.leaf for part in parts].count(layer.leaf) > 1:
        return f"'{layer.leaf}' is used more than once, like an embedding that is also the head"
    if not layer.is_dense:
        kinds = "a convolution, a stack of layers or a product over several axes"
        return f"'{layer.kernel}' belongs to {kinds}"
    if layer.columns != shape[-1]:
        return f"'{layer.kernel}' has {layer.columns} outputs, but the network has {shape[-1]}"
    return None


def _change(network: Flat, users: dict, part: Part, use: Use) -> str | None:
    """Follow a product to the output, and return what changes its values on the way, or None."""
    value = network.equations[use.tangent[0]].outvars[0]
    order = list(itertools.chain(*use.tangent_axes))
    # For each axis of the value its position in the order examples, positions, outputs.
    axes: Axes = tuple((order.index(axis),) for axis in range(len(order)))
    has_bias = part.layer.bias is not None
    while value is not network.output:
        names = list(dict.fromkeys(one.primitive.name for one in users[value]))
        if len(users[value]) > 1:
            examples = "as by a softmax, a normalisation or a skip connection"
            return f"its outputs are used more than once, {examples} (by {', '.join(names)})"
        [equation] = users[value]
        if has_bias and names == ["add"]:
            # The first sum after the product of a layer with a bias adds that bias.
            has_bias, shape = False, equation.outvars[0].aval.shape
            moved = views.broadcast_axes(axes, value.aval.shape, shape)
        else:
            moved = views.follow_axes(equation, axes)
        is_reshape = names == ["reshape"] and equation.params["dimensions"] is None
        if moved is None and is_reshape and _in_order(axes, value):
            # A reshape does not change the order of entries, whatever the new axes are.
            moved = tuple((axis,) for axis in range(equation.outvars[0].aval.ndim))
        if moved is None:
            return f"{_DESCRIPTIONS.get(names[0], names[0])} changes its outputs"
        axes, value = moved, equation.outvars[0]
    if _in_order(axes, value):
        return None
    return "its outputs are repeated, or lie in another order than examples, positions, outputs"


# What an equation usually stands for, where its name does not tell.
_DESCRIPTIONS = {
    "add": "a sum (of a skip connection, another branch, an offset)",
    "mul": "a product (a temperature, a de-normalisation, a gate)",
    "div": "a quotient (a temperature, a normalisation)",
    "concatenate": "concatenate (of several outputs)",
    "gather": "an indexing or permutation (gather)",
    "reduce_sum": "a sum or mean over axes (reduce_sum)",
    "custom_jvp_call": "a function such as ReLU or softplus (custom_jvp_call)",
    "logistic": "a sigmoid",
}


def _in_order(axes: Axes, value: Any) -> bool:
    """Return whether entries are in the order examples, positions, outputs, none repeated."""
    groups = [group for group, n in zip(axes, value.aval.shape, strict=True) if n > 1]
    known = [group for group in groups if group is not None]
    flat = list(itertools.chain(*known))
    return len(known) == len(groups) and flat == sorted(flat)
