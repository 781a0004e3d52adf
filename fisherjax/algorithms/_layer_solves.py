"""Solve the quadratic of Kronecker factors layer by layer, by one program for each shape.

The blocks of a quadratic are separate systems. Layers of one shape, solved one after another, share
a program that is compiled once, and the server holds the scaled factors and the preconditioner of
one of them at a time.
"""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import quadratic, tree
from fisherjax._core import checks
from fisherjax._core.compiler import jit
from fisherjax._layers.layer import Layer
from fisherjax.fisher import Kronecker, Operator
from fisherjax.fisher.operators import Template
from fisherjax.solvers import Info, Solution, Solver
from fisherjax.typing import Array, Params, Scalar

_KERNEL, _BIAS = "kernel", "bias"
SEVERAL = 3
"""Least number of layers of one shape that are solved apart."""


def about_mean(
    fishers: Operator, params: Params, weights: Array, damping: Scalar, centre: Params = None
) -> quadratic.Quadratic:
    """Make `quadratic.quadratic` with the models' differences from their weighted mean as unknowns.

    A solver's tolerance is relative to the right-hand side, and so are rounding errors. Those of
    differences are as small as the differences are, such as those of fine-tuned models.
    """
    moved, to, origin = _from_mean(fishers, params, weights, centre)
    problem = quadratic.quadratic(fishers, moved, weights, damping, to)
    return problem._replace(origin=origin)


@jit
def _from_mean(
    fishers: Operator, params: Params, weights: Array, centre: Params
) -> tuple[Params, Params, Any]:
    """Return the differences of models and centre from the mean, and the blocks of the mean."""
    mean = tree.weighted_sum(params, weights)
    centre = mean if centre is None else centre
    moved, to = (jax.tree.map(jnp.subtract, x, mean) for x in (params, centre))
    return moved, to, fishers.blocks(mean)


def solve_about_mean(
    solver: Solver,
    fishers: Operator,
    params: Params,
    weights: Array,
    damping: Scalar,
    centre: Params = None,
) -> Solution:
    """Solve `about_mean`, layers of which there are several of one shape one after another.

    It is one system under tracing, and for a solver that is not marked by `solvers.by_leaf`.
    """
    is_traced = checks.is_traced(fishers, params, weights, damping)
    is_apart = getattr(solver, "is_by_leaf", False) and not is_traced
    layers = repeated(fishers) if is_apart else []
    if not layers or not isinstance(fishers, Kronecker):
        return solver(about_mean(fishers, params, weights, damping, centre))
    models, blocks, infos = fishers.template.by_name(params), {}, []
    centres = None if centre is None else fishers.template.by_name(centre)
    taken = {name for layer in layers for name in (layer.leaf, layer.bias)}
    if rest := [name for name in models if name not in taken]:
        own, to = (x and {name: x[name] for name in rest} for x in (models, centres))
        problem = about_mean(fishers.select(rest), own, weights, damping, to)
        # The rest does not make complete params.
        found = solver(problem._replace(restore=None))
        blocks, infos = dict(found.params), [found.info]
    for layer in layers:
        own, to = _leaves_of(layer, models, 1), centres and _leaves_of(layer, centres, 0)
        parts = _of_layer(layer, fishers.factors), _of_layer(layer, fishers.entries)
        how = solver, bool(damping > 0), _nameless(layer)
        blocks[layer.kernel], info = _solve_layer(*how, parts, own, weights, damping, to)
        infos.append(Info(*({layer.kernel: x} for x in info[:3])))
    return Solution(_restored(fishers, blocks), combined(infos))


def repeated(fishers: Operator) -> list[Layer]:
    """Return the layers with whole factors, or scales, of which there are several of one shape."""
    if not isinstance(fishers, Kronecker):
        return []
    leaves = Counter(layer.leaf for layer in fishers.layers if not layer.index)
    keys = {}
    for layer in fishers.layers:
        # A leaf that makes two layers, as it is and transposed, is solved with the others.
        if layer.index or leaves[layer.leaf] == 1:
            parts = _of_layer(layer, fishers.factors), _of_layer(layer, fishers.entries)
            sizes = jax.tree.map(lambda x: (x.shape, x.dtype), parts)
            keys[layer] = _nameless(layer), str(sizes)
    number = Counter(keys.values())
    return [layer for layer, key in keys.items() if number[key] >= SEVERAL]


def combined(infos: list[Info], covered: float | Array = 1.0) -> Info:
    """Combine reports on several layers into one."""
    fields = [[info[number] for info in infos] for number in range(3)]
    iterations, residual, status = ({k: v for one in own for k, v in one.items()} for own in fields)
    return Info(iterations, residual, status, covered)


@partial(jit, static_argnums=(0, 1, 2))
def _solve_layer(
    solver: Solver,
    is_damped: bool,
    layer: Layer,
    parts: tuple[dict[str, dict[str, Array]], dict[str, Array]],
    params: dict[str, Array],
    weights: Array,
    damping: Scalar,
    centre: Params,
) -> tuple[Array, Info]:
    template = Template.of(jax.tree.map(lambda x: x[0], params))
    fishers = Kronecker(*parts, (layer,), template)
    # A traced damping may be zero, for which a preconditioner would be computed in vain.
    damping = damping if is_damped else 0.0
    problem = about_mean(fishers, params, weights, damping, centre)
    found = solver(problem._replace(restore=None))
    return found.params[_KERNEL], Info(*(x[_KERNEL] for x in found.info[:3]))


_restored = jit(Kronecker.restore)


def _leaves_of(layer: Layer, leaves: Mapping[str, Array], axis: int) -> dict[str, Array]:
    """Return the leaves of a layer; those of one in a stack are slices behind so many axes."""
    names = {_KERNEL: layer.leaf} | ({_BIAS: layer.bias} if layer.bias else {})
    if not layer.index:
        return {new: leaves[name] for new, name in names.items()}
    return {new: _slice(axis, leaves[name], layer.index) for new, name in names.items()}


@partial(jit, static_argnums=0)
def _slice(axis: int, leaf: Array, index: tuple[Scalar, ...]) -> Array:
    # The index is an argument, so that all slices of a stack share the program.
    return leaf[(*(slice(None),) * axis, *index)]


def _nameless(layer: Layer) -> Layer:
    bias = _BIAS if layer.bias else None
    return layer._replace(kernel=_KERNEL, bias=bias, index=(), part_of=None)


def _of_layer(layer: Layer, held: Mapping[str, Any]) -> dict[str, Any]:
    return {_KERNEL: held[layer.kernel]} if layer.kernel in held else {}
