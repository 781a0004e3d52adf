"""Which layers feed which, and which one makes the outputs.

A layer feeds those whose inputs its outputs reach without passing another layer. Units are not
followed, as `wiring` does: here it only counts from where something can come, so that any network
is read, and a skip counts, since what passes by makes the inputs too.

The layer that makes the outputs is the one whose product, with its bias, is the output. Its size
says nothing: de-normalised outputs, a softplus of them and the sum of two branches have it too. So
the product is followed, equation by equation, and whatever changes its values is in the way.
"""

import itertools
from typing import Any

from jax.extend.core import Literal

from fisherjax._layers import views
from fisherjax._layers.equations import Flat, variables
from fisherjax._layers.layer import Part
from fisherjax._layers.operations import Use
from fisherjax._layers.views import Axes

Feeders = tuple[tuple[str, ...], ...]
"""For each layer the names of those before it, in the forward order, that make its inputs."""


def feeders(network: Flat, parts: list[Part]) -> Feeders | None:
    """Read whose outputs are whose inputs; None where each layer takes those of the one before.

    A scale belongs to what is between layers: it feeds nothing, and what it takes goes on. Of a
    layer that is used several times the uses count together, but never what comes after it.
    """
    made, taken = {}, {}
    for place, part in enumerate(parts):
        if part.layer.form != "scale":
            for use in part.uses:
                made[use.tangent] = place
                taken.setdefault(use.inputs, []).append(place)
    known: dict[Any, frozenset[int]] = {}
    found: list[frozenset[int]] = [frozenset()] * len(parts)
    for number, one in enumerate(network.equations):
        passed = []
        for i, v in enumerate(one.invars):
            sources = frozenset() if isinstance(v, Literal) else known.get(v, frozenset())
            for place in taken.get((number, i), ()):
                found[place] |= sources
            # Of a table that is added, the operand is what the layer gives.
            passed.append(_only(made, (number, i), sources))
        results = _only(made, (number, None), frozenset().union(*passed))
        known |= dict.fromkeys(one.outvars, results)
    layers = [place for place, part in enumerate(parts) if part.layer.form != "scale"]
    chain = {place: (before,) for before, place in itertools.pairwise(layers)}
    own = [tuple(s for s in sorted(sources) if s < i) for i, sources in enumerate(found)]
    if all(own[place] == chain.get(place, ()) for place in layers):
        return None
    return tuple(tuple(parts[s].layer.kernel for s in sources) for sources in own)


def _only(made: dict, place: tuple, sources: frozenset[int]) -> frozenset[int]:
    return frozenset([made[place]]) if place in made else sources


def output_part(network: Flat, parts: list[Part], uncovered: dict[str, str]) -> int | str:
    """Return the place of the dense layer that makes the outputs, or in words why none does.

    Leaves that belong to no layer, each with the reason, are named where there is none.
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
                reason = _alone(parts, place, network.output.aval.shape)
                return place if reason is None else reason
            reason = f"after layer '{part.layer.kernel}', {changes[-1]}"
    some = [f"'{name}' ({said})" for name, said in uncovered.items()][:3]
    return f"{reason}; of no layer are {', '.join(some)}" if some else reason


def _alone(parts: list[Part], place: int, shape: tuple[int, ...]) -> str | None:
    """Say why a layer whose product is the output is none to solve for, None if it is one."""
    layer = parts[place].layer
    if len(parts[place].uses) > 1 or [part.layer.leaf for part in parts].count(layer.leaf) > 1:
        return f"'{layer.leaf}' is used more than once, as of an embedding that is the head too"
    if not layer.is_dense:
        return f"'{layer.kernel}' is of a convolution, of a stack or of a product over several axes"
    if layer.columns != shape[-1]:
        return f"'{layer.kernel}' has {layer.columns} outputs, and those of a target {shape[-1]}"
    return None


def _change(network: Flat, users: dict, part: Part, use: Use) -> str | None:
    """Follow a product to the output; say what changes its values on the way, None if nothing."""
    value = network.equations[use.tangent[0]].outvars[0]
    order = list(itertools.chain(*use.tangent_axes))
    # Of each axis of the value its place among examples, positions and outputs.
    axes: Axes = tuple((order.index(axis),) for axis in range(len(order)))
    has_bias = part.layer.bias is not None
    while value is not network.output:
        names = list(dict.fromkeys(one.primitive.name for one in users[value]))
        if len(users[value]) > 1:
            said = "its outputs are used more than once, as by a softmax, a normalisation or a skip"
            return f"{said} (by {', '.join(names)})"
        [equation] = users[value]
        if has_bias and names == ["add"]:
            # The first sum after the product of a layer that has a bias is with that.
            has_bias, moved = (
                False,
                views.along(axes, value.aval.shape, equation.outvars[0].aval.shape),
            )
        else:
            moved = views.moved(equation, axes)
        is_reshape = names == ["reshape"] and equation.params["dimensions"] is None
        if moved is None and is_reshape and _in_order(axes, value):
            # Entries that are in order stay so, whatever the new axes are.
            moved = tuple((axis,) for axis in range(equation.outvars[0].aval.ndim))
        if moved is None:
            return f"{_WORDS.get(names[0], names[0])} changes its outputs"
        axes, value = moved, equation.outvars[0]
    if _in_order(axes, value):
        return None
    return "its outputs are repeated, or lie in another order than examples, positions, outputs"


# What is behind a few equations that say little.
_WORDS = {
    "add": "a sum (of a skip, another branch, an offset)",
    "mul": "a product (a temperature, a de-normalisation, a gate)",
    "div": "a quotient (a temperature, a normalisation)",
    "concatenate": "concatenate (of several outputs)",
    "gather": "an indexing or permutation (gather)",
    "reduce_sum": "a sum or mean over axes (reduce_sum)",
    "custom_jvp_call": "a function such as ReLU or softplus (custom_jvp_call)",
    "logistic": "a sigmoid",
}


def _in_order(axes: Axes, value: Any) -> bool:
    """Whether entries lie by examples, then positions, then outputs, none of them repeated."""
    groups = [group for group, n in zip(axes, value.aval.shape, strict=True) if n > 1]
    known = [group for group in groups if group is not None]
    flat = list(itertools.chain(*known))
    return len(known) == len(groups) and flat == sorted(flat)
