"""Which layers feed which: whose outputs reach a layer's inputs without passing another layer.

Units are not followed, as `wiring` does: here it only counts from where something can come, so that
any network is read, and a skip counts, since what passes by makes the inputs too.
"""

import itertools
from typing import Any

from jax.extend.core import Literal

from fisherjax.fisher.inline import Flat
from fisherjax.fisher.layers import Part

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
