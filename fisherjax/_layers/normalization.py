"""Which leaves belong to a normalisation, read off a network's equations.

A value is normalised where it is divided by a root of its own mean square or variance, as in
LayerNorm, GroupNorm and RMSNorm, or of kept statistics, as in BatchNorm. The scale that multiplies
it, the shift that is then added and the statistics are the leaves of a normalisation, whatever
their names. A root of a sum over a kernel, as in weight normalisation, divides no such value.
"""

from collections.abc import Iterable
from typing import Any

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._layers import equations
from fisherjax._layers.normalized_values import (
    _ROOTS,
    _by_rule,
    _data,
    _has_examples,
    _known,
    _plain,
    _Value,
    _Walk,
)
from fisherjax._layers.views import MANY
from fisherjax.typing import Array, Model, Params

_INSIDE = {"scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def normalizations(model: Model, params: Params, inputs: Array) -> frozenset[str]:
    """Find the leaves that belong to normalisations, by what the network computes with them.

    These are scales and shifts of normalised values and the statistics that values are normalised
    by, of BatchNorm, LayerNorm, GroupNorm, RMSNorm and the like. A leaf that the network does not
    use belongs to them where those beside it do.

    Args:
        model: The network, as it is evaluated.
        params: Its params, or their shapes.
        inputs: A batch [B, ...], or its shape and dtype; values are not read.

    Returns:
        Names of leaves, as `fisherjax.tree.names` has them.

    Raises:
        ValueError: If the network cannot be read, or leaves meet a root inside a loop, a branch or
            a function with derivatives of its own.

    Example:
        >>> import jax.numpy as jnp, fisherjax as fj
        >>> def apply(params, x):
        ...     hidden = x @ params["in"]
        ...     centered = hidden - hidden.mean(-1, keepdims=True)
        ...     spread = jnp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        ...     return (params["a"] * centered / spread) @ params["normal_head"]
        >>> params = {"in": jnp.ones((4, 3)), "a": jnp.ones(3), "normal_head": jnp.ones((3, 2))}
        >>> normalizations(fj.Model(apply, fj.likelihoods.categorical), params, jnp.ones((1, 4)))
        frozenset({'a'})
    """
    checks.model(model)
    checks.outputs(model, params, inputs)
    network, names = _flat(model, params, inputs), tree.names(params)
    *leaves, data = network.arguments
    values = {v: _Value(leaves=frozenset({i})) for i, v in enumerate(leaves)}
    values[data] = _data(data)
    # What has the axis of the examples is theirs, such as a recurrent network's first state.
    values |= {v: _data(v) if _has_examples(v) else _Value() for v, _ in network.constants}
    walk = _Walk(values, {}, [v.aval.shape for v in leaves], set(), set())
    for equation in network.equations:
        _read(walk, equation)
    if walk.unread:
        raise ValueError(
            f"The network uses {[names[i] for i in sorted(walk.unread)]} beside a root inside a "
            "loop, a branch or a function with derivatives of its own, where normalisations are "
            "not looked for; expected plain operations. Write where=lambda name: ... instead."
        )
    kept = {names[i] for i in walk.found}
    used = {v for e in network.equations for v in equations.variables(e.invars)}
    idle = [name for v, name in zip(leaves, names, strict=True) if v not in used]
    return frozenset(kept | {n for n in idle if _parent(n) in set(map(_parent, kept))})


def _flat(model: Model, params: Params, inputs: Array) -> equations.Flat:
    many = tree.shape_of(inputs, MANY)
    try:
        return equations.flatten(model.apply, params, many)
    except Exception as error:
        raise ValueError(
            f"The network could not be read ({type(error).__name__}: {error}); expected an apply "
            "that treats every example alike. Write where=lambda name: ... instead."
        ) from error


def _read(walk: _Walk, equation: Any) -> None:
    operands = [_known(walk, v) for v in equation.invars]
    for v in equation.outvars:
        walk.makers[v] = equation
    name, result = equation.primitive.name, equation.outvars[0]
    if name in _INSIDE and any(x.leaves for x in operands) and _has_root(equation.params.values()):
        walk.unread.update(*(x.leaves for x in operands))
    value = _by_rule(walk, name, equation, operands)
    if value is None:
        value = _plain(equation, operands, result)
    walk.values[result] = value
    for v in equation.outvars[1:]:
        walk.values[v] = _plain(equation, operands, v)


def _has_root(values: Iterable[Any]) -> bool:
    """Whether any of the jaxprs among these holds a root."""
    for value in values:
        if isinstance(value, tuple | list):
            if _has_root(value):
                return True
            continue
        jaxpr = getattr(value, "jaxpr", value)
        for equation in getattr(jaxpr, "eqns", ()):
            if equation.primitive.name in _ROOTS or _has_root(equation.params.values()):
                return True
    return False


def _parent(name: str) -> str:
    return name.rpartition("/")[0]
