"""Split values into parts that a merge does not couple; compute clients' shares of the vote."""

import math
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from fisherjax import tree
from fisherjax._core.compiler import jit
from fisherjax.fisher import Dense, Diagonal, Kronecker, Operator
from fisherjax.fisher.operators import Template


class Part(NamedTuple):
    """Leaves that a merge does not couple to others, with numbers as their names.

    Two layers of the same shapes then have the same structure, so that they compile once.

    Attributes:
        names: Names of leaves and layers, by their numbers.
        values: Values whose leaves are names of arrays in the file.
    """

    names: dict[str, str]
    values: dict[str, Any]

    def with_names(self, message: Any) -> str:
        """Return a message with the names of leaves in place of their numbers."""

        def named(quoted: re.Match[str]) -> str:
            return "/".join(self.names.get(word, word) for word in quoted[0].split("/"))

        # A number stands alone, or after what it is of, such as 'grams/0'.
        return re.sub(r"(?<=')[^']*(?=')", named, str(message))


def split(values: dict[str, Any]) -> list[Part]:
    """Split values into the smallest parts that a merge does not couple: layers, or leaves."""
    params, fisher, grams = values["params"], values.get("fisher"), values.get("grams")
    # A full matrix couples all leaves, and so do permutations of units along the wiring.
    if isinstance(fisher, Dense) or "wiring" in values:
        return [Part({name: name for name in params}, values)]
    groups = [[name] for name in params]
    if isinstance(fisher, Kronecker):
        # A layer couples its kernel and bias; layers that share a leaf are coupled too.
        for layer in fisher.layers:
            leaves = {layer.leaf, layer.bias}
            coupled = [group for group in groups if leaves & set(group)]
            joint = [name for group in coupled for name in group]
            groups = [group for group in groups if group not in coupled] + [joint]
    parts = []
    for group in groups:
        # Numbered from zero in each part, so that equal layers of a deep network share a program.
        numbers = {name: str(number) for number, name in enumerate(group)}
        part: dict[str, Any] = {"params": {numbers[name]: params[name] for name in group}}
        if isinstance(fisher, Kronecker):
            part["fisher"], numbers = _renamed(fisher.select(group), numbers)
        elif isinstance(fisher, Diagonal):
            part["fisher"] = Diagonal({numbers[name]: fisher.entries[name] for name in group})
        if grams is not None:
            # The Gram matrix of a transposed kernel has a mark behind the leaf's name.
            leaf_of = {x: x.removesuffix("^T") for x in grams}
            part["grams"] = {
                numbers[leaf] + x[len(leaf) :]: grams[x]
                for x, leaf in leaf_of.items()
                if leaf in numbers
            }
        parts.append(Part({number: name for name, number in numbers.items()}, part))
    return parts


def _renamed(fisher: Kronecker, names: dict[str, str]) -> tuple[Kronecker, dict[str, str]]:
    """Rename the leaves of an operator, and its layers with them; return all new names too."""
    layers = tuple(
        layer._replace(
            # A layer that is a part of a leaf has a suffix behind the leaf's name, which stays.
            kernel=names[layer.leaf] + layer.kernel[len(layer.leaf) :],
            bias=None if layer.bias is None else names.get(layer.bias),
            part_of=None if layer.part_of is None else names.get(layer.part_of),
        )
        for layer in fisher.layers
    )
    old = dict(zip(fisher.template.names(), fisher.template.shapes, strict=True))
    leaves, structure = jax.tree.flatten({number: name for name, number in names.items()})
    every = names | {x.kernel: y.kernel for x, y in zip(fisher.layers, layers, strict=True)}
    factors = {every[name]: x for name, x in fisher.factors.items()}
    entries = {every[name]: x for name, x in fisher.entries.items()}
    template = Template(structure, tuple(old[name] for name in leaves))
    return Kronecker(factors, entries, layers, template), every


def strengths_of(values: dict[str, Any], weight: float) -> dict[str, float]:
    """Compute p_i times the mean eigenvalue of F_i for each layer, or p_i without curvature."""
    if "grams" in values:
        kernels = {
            x.removesuffix("^T"): float(np.diagonal(g).mean()) for x, g in values["grams"].items()
        }
        # Other leaves are a plain mean over the clients with positive weight.
        return {
            x: weight * kernels[x] if x in kernels else float(weight > 0) for x in values["params"]
        }
    if "counts" in values:
        # Hidden units count equally; an output unit counts with the client's examples of its class.
        last, examples = values["wiring"].layers[-1], float(values["counts"].sum())
        outputs = {last.leaf, last.bias}
        present = float(weight > 0)
        return {x: present * (examples if x in outputs else 1.0) for x in values["params"]}
    if "fisher" not in values:
        return dict.fromkeys(values["params"], weight)
    # Scaled to one first, because the mean of a small Fisher underflows in float32.
    means, exponents = _scales(values["fisher"])
    named = zip(tree.names(means), jax.tree.leaves(means), jax.tree.leaves(exponents), strict=True)
    return {x or "all": weight * math.ldexp(float(mean), int(power)) for x, mean, power in named}


@jit
def _scales(fisher: Operator) -> tuple[Any, Any]:
    scaled, exponents = fisher.at_scale_one()
    return scaled.block_means(), exponents
