"""Find the leaves that belong to a normalisation, from the equations of a network.

A value is normalised where it is divided by a root of its own mean square or variance, as in
LayerNorm, GroupNorm and RMSNorm, or of running statistics, as in BatchNorm. The scale that
multiplies it, the shift that is added next and the statistics are the leaves of a normalisation,
whatever their names are. Weight normalisation divides by a root of a sum over a kernel, which is no
statistic of a value, so its leaves do not count.
"""

from collections.abc import Iterable
from typing import Any

from fisherjax import tree
from fisherjax._core import checks, output_checks
from fisherjax._layers import equations
from fisherjax._layers.normalized_values import (
    ROOTS,
    Value,
    Walk,
    apply_rule,
    data_value,
    default_value,
    has_examples,
    known_value,
)
from fisherjax._layers.views import MANY
from fisherjax.typing import Inputs, Model, Params

_INSIDE = {"scan", "while", "cond", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}


def normalizations(model: Model, params: Params, inputs: Inputs) -> frozenset[str]:
    """Return the names of the leaves that belong to normalisations.

    These are the scales and shifts of normalised values, and the statistics that values are
    normalised by, in BatchNorm, LayerNorm, GroupNorm, RMSNorm and the like. They are found by what
    the network computes, not by their names. A leaf that the network does not use is among them if
    its neighbours in the tree are.

    Args:
        model: The network and its likelihood; `apply` is read, not `apply_train`.
        params: Params of the network, or their shapes.
        inputs: A batch [B, ...], or its shape and dtype; values are not read.

    Returns:
        Names of leaves, as `fisherjax.tree.names` returns them.

    Raises:
        ValueError: If the network cannot be read, or if leaves are used next to a root inside a
            loop, a branch or a function with a custom derivative.

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
    params = tree.as_arrays(params)
    output_checks.outputs(model, params, inputs)
    network, names = _flatten(model, params, inputs), tree.names(params)
    leaves = network.leaves
    values = {v: Value(leaves=frozenset({i})) for i, v in enumerate(leaves)}
    values |= {v: data_value(v) for v in network.inputs}
    # A constant with an axis of examples, such as a recurrent network's initial state, is data.
    values |= {v: data_value(v) if has_examples(v) else Value() for v, _ in network.constants}
    walk = Walk(values, {}, [v.aval.shape for v in leaves], set(), set())
    for equation in network.equations:
        _read(walk, equation)
    if walk.unread:
        raise ValueError(
            f"The network uses {[names[i] for i in sorted(walk.unread)]} next to a root inside a "
            "loop, a branch or a function with a custom derivative, where normalisations are not "
            "found; expected plain operations. Name the leaves by where=lambda name: ... instead."
        )
    found = {names[i] for i in walk.found}
    used = {v for e in network.equations for v in equations.variables(e.invars)}
    unused = [name for v, name in zip(leaves, names, strict=True) if v not in used]
    return frozenset(found | {n for n in unused if _parent(n) in set(map(_parent, found))})


def _flatten(model: Model, params: Params, inputs: Inputs) -> equations.Flat:
    many = tree.shape_of(inputs, MANY)
    try:
        return equations.flatten(model.apply, params, many)
    except Exception as error:
        raise ValueError(
            f"The network could not be read ({type(error).__name__}: {error}); expected an apply "
            "that treats every example alike. Name the leaves by where=lambda name: ... instead."
        ) from error


def _read(walk: Walk, equation: Any) -> None:
    """Store what is known of the results of an equation."""
    operands = [known_value(walk, v) for v in equation.invars]
    name = equation.primitive.name
    if name in _INSIDE and any(x.leaves for x in operands) and _has_root(equation.params.values()):
        walk.unread.update(*(x.leaves for x in operands))
    for v in equation.outvars:
        walk.makers[v], walk.values[v] = equation, default_value(equation, operands, v)
    if (value := apply_rule(walk, name, equation, operands)) is not None:
        walk.values[equation.outvars[0]] = value


def _has_root(values: Iterable[Any]) -> bool:
    """Return whether any jaxpr among these parameters of an equation has a root."""
    for value in values:
        if isinstance(value, tuple | list):
            if _has_root(value):
                return True
            continue
        jaxpr = getattr(value, "jaxpr", value)
        for equation in getattr(jaxpr, "eqns", ()):
            if equation.primitive.name in ROOTS or _has_root(equation.params.values()):
                return True
    return False


def _parent(name: str) -> str:
    return name.rpartition("/")[0]
