"""Split a network's params into three kinds of leaves: trained, statistics and frozen.

*Trained* leaves are those that the model's mask trains, all of them without a mask. *Statistics*
are other leaves of which `apply_train` returns new values, such as running moments: clients send
them, and the server averages them, whatever the method is. *Frozen* leaves are the rest:
clients do not send them, and a merge returns them unchanged.

A tree of one kind has the structure of params, with None in place of leaves of other kinds. JAX
does not count None as a leaf, so that the names of leaves stay the same.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.typing import Apply, Array, Inputs, Key, Model, Params

TRAINED, STATISTICS, FROZEN = "trained", "statistics", "frozen"
# Equations that call a function with their own arguments in the same order.
_CALLS = {
    *("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call", "core_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
# Equations that return their arguments unchanged.
_SAME = {"stop_gradient", "copy", "copy_p", "name", "optimization_barrier", "sharding_constraint"}
_VARIANCE = re.compile(r"(?<![a-z])var(iance)?(?![a-z])")


class Leaves(NamedTuple):
    """The leaves of params by kind: three trees of their structure, with None for other kinds."""

    trained: Params
    statistics: Params
    frozen: Params


def split(model: Model, params: Params, inputs: Inputs, batch_size: int = 2) -> Leaves:
    """Split the leaves of a network's params by kind.

    Args:
        model: The model, whose mask marks the trained leaves and whose `apply_train` returns the
            statistics.
        params: All leaves of the network.
        inputs: Inputs [N, ...] of the network; only their shape is read.
        batch_size: Examples of the minibatch with which `apply_train` is traced.

    Raises:
        ValueError: If the mask does not fit params.

    Example:
        >>> import fisherjax as fj
        >>> apply, mask = lambda p, x: x @ p["base"] @ p["head"], {"base": False, "head": True}
        >>> model = fj.Model(apply, fj.likelihoods.gaussian, mask=mask)
        >>> found = split(model, {"base": jnp.eye(2), "head": jnp.ones((2, 1))}, jnp.ones((3, 2)))
        >>> tree.names(found.trained), tree.names(found.frozen)
        (('head',), ('base',))
    """
    return split_by_kind(kinds(model, params, inputs, batch_size), params)


def split_by_kind(kinds: Sequence[str], params: Params) -> Leaves:
    """Split leaves by their kinds, one for each leaf in order, as `kinds` returns them."""
    all_kinds = TRAINED, STATISTICS, FROZEN
    return Leaves(*(_pick(params, [x == kind for x in kinds]) for kind in all_kinds))


def split_by_name(params: Params, statistics: Sequence[str], frozen: Sequence[str]) -> Leaves:
    """Split the leaves of params by the names of those that are not trained.

    Raises:
        ValueError: If params have no leaf of one of the names.

    Example:
        >>> split_by_name({"a": 1.0, "b": 2.0}, (), ("b",)).frozen
        {'a': None, 'b': 2.0}
    """
    names = tree.names(params)
    if unknown := sorted({*statistics, *frozen}.difference(names)):
        raise ValueError(
            f"The updates have the leaves {unknown}, but params only {list(names)}. Pass the "
            "params of the network that the clients trained."
        )
    kinds = dict.fromkeys(statistics, STATISTICS) | dict.fromkeys(frozen, FROZEN)
    return split_by_kind([kinds.get(name, TRAINED) for name in names], params)


def replace(kind: Params, values: dict[str, Any]) -> Params:
    """Return a tree of one kind with some of its leaves, by name, replaced.

    Example:
        >>> replace({"a": None, "b": 2.0}, {"b": 3.0})
        {'a': None, 'b': 3.0}
    """
    leaves = tree.by_name(kind)
    replaced = [values.get(name, leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(kind), replaced)


def trained(model: Model, params: Params) -> Params:
    """Return the leaves that the mask trains: those that a Fisher of the network acts on.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda p, x: x * p["a"] + p["b"], fj.likelihoods.gaussian)
        >>> trained(model._replace(mask=(("a", True), ("b", False))), {"a": 1.0, "b": 2.0})
        {'a': 1.0, 'b': None}
    """
    return split_trained(model, params)[0]


def bind_untrained(model: Model, params: Params) -> tuple[Apply, Params]:
    """Return a network as a function of its trained leaves, and these leaves.

    The function holds the other leaves. Use it inside a compiled function that takes all of params
    as an argument: there the leaves that it holds are no constants of the program.
    """
    trained_leaves, others = split_trained(model, params)
    if not jax.tree.leaves(others):
        return model.apply, params

    def apply(trained: Params, inputs: Array) -> Array:
        return model.apply(join(trained, others), inputs)

    return apply, trained_leaves


def split_trained(model: Model, params: Params) -> tuple[Params, Params]:
    """Split params into the leaves that the mask trains and all others."""
    mask = checks.mask(model, params)
    return _pick(params, mask), _pick(params, [not chosen for chosen in mask])


def join(*parts: Params) -> Params:
    """Join trees of several kinds: at each place stands the first leaf that is not None.

    Example:
        >>> join({"a": 1.0, "b": None}, {"a": None, "b": 2.0})
        {'a': 1.0, 'b': 2.0}
    """
    some = [part for part in parts if part is not None]
    return jax.tree.map(
        lambda *leaves: next((x for x in leaves if x is not None), None), *some, is_leaf=_is_none
    )


def select(kind: Params, values: Any) -> Params:
    """Select the leaves of a tree with the structure of params at which `kind` has leaves.

    Example:
        >>> select({"a": 1.0, "b": None}, {"a": 3.0, "b": 2.0})
        {'a': 3.0, 'b': None}
    """
    leaves, structure = jax.tree.flatten(kind, is_leaf=_is_none)
    pairs = zip(leaves, jax.tree.leaves(values, is_leaf=_is_none), strict=True)
    return jax.tree.unflatten(structure, [None if x is None else new for x, new in pairs])


def kinds(model: Model, params: Params, inputs: Inputs, batch_size: int = 2) -> tuple[str, ...]:
    """Return the kind of each leaf in order; the arguments are those of `split`."""
    mask = checks.mask(model, params)
    if all(mask):
        return (TRAINED,) * len(mask)
    returned = (False,) * len(mask)
    if model.apply_train is not None:
        given = tree.shape_of(params), tree.shape_of(inputs, batch_size)
        shapes, structure = jax.tree.flatten(given)
        returned = _returned(model.apply_train, structure, tuple(shapes), batch_size)
    return tuple(
        TRAINED if chosen else STATISTICS if new else FROZEN
        for chosen, new in zip(mask, returned, strict=True)
    )


def by_name(kind: Params) -> dict[str, Any]:
    """Return the leaves of a tree of one kind by name, with None for leaves of other kinds.

    Example:
        >>> by_name({"a": None, "b": 2.0})
        {'a': None, 'b': 2.0}
    """
    leaves = jax.tree.leaves(kind, is_leaf=_is_none)
    return dict(zip(tree.names(kind, _is_none), leaves, strict=True))


def check_moments(names: Sequence[str]) -> None:
    """Check that no statistic is a running variance, whose mean is not that of the mixture.

    Example:
        >>> check_moments(["norm/mean", "norm/second_moment"])
    """
    for name in names:
        # Each occurrence is checked by itself, because the name of a layer may contain the word.
        spans = [(word.start(), word.end()) for word in _VARIANCE.finditer(name)]
        for mean in [f"{name[:first]}mean{name[last:]}" for first, last in spans]:
            if mean not in names:
                continue
            raise ValueError(
                f"The statistic '{name}' stands beside '{mean}', and a mean of variances over "
                "clients lacks the variance between them. Keep E[x^2], which is the variance + "
                "mean^2, in its place, as networks.to_moments and networks.from_moments do: means "
                "of moments are the moments of the mixture."
            )


def has_moments(params: Params) -> bool:
    """Return whether params are those that `networks.init` makes with running statistics."""
    return isinstance(params, dict) and set(params) == {"params", "moments"}


def kind_of_moment(name: str) -> str:
    """Return the kind of a leaf that `networks.init` makes with running statistics, by its name.

    Example:
        >>> kind_of_moment("moments/norm1/mean"), kind_of_moment("params/norm1/scale")
        ('statistics', 'trained')
    """
    if not name.startswith("moments/"):
        return TRAINED
    return FROZEN if name.endswith("/shift") else STATISTICS


def check_all_trained(method: str, *others: Params) -> None:
    """Check that all leaves are trained, for a method that permutes the units of layers."""
    if untrained := [name for other in others for name in tree.names(other)]:
        raise ValueError(
            f"{method} changes the order of a layer's units, but {untrained} are not trained and "
            "keep theirs; expected a network without frozen leaves and running statistics."
        )


# Tracing a network is slow, so that equal shapes are traced once.
@cached
def _returned(
    apply_train: Callable, structure: Any, shapes: tuple, batch_size: int
) -> tuple[bool, ...]:
    """Return for each leaf whether `apply_train` returns another value than its input."""

    def new_leaves(leaves: list[Array], key: Key, weights: Array) -> list[Array]:
        params, inputs = jax.tree.unflatten(structure, leaves)
        _, new = apply_train(params, inputs, key, weights)
        # It does not change a leaf that it does not return.
        return jax.tree.leaves(params if new is None else join(select(params, new), params))

    key = jax.eval_shape(partial(jax.random.key, 0))
    weights = jax.ShapeDtypeStruct((batch_size,), jnp.result_type(float))
    program = jax.make_jaxpr(new_leaves)(list(shapes), key, weights).jaxpr
    return tuple(_origin(program, x) != place for place, x in enumerate(program.outvars))


def _origin(program: Any, variable: Any) -> int | None:
    """Return the place of the argument that a variable is equal to; None if it is computed."""
    for place, argument in enumerate(program.invars):
        if argument is variable:
            return place
    for equation in program.eqns:
        for place, output in enumerate(equation.outvars):
            if output is variable and equation.primitive.name in _SAME:
                return _origin(program, equation.invars[place])
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if output is variable and equation.primitive.name in _CALLS and inner is not None:
                # Some primitives hold a closed jaxpr, others an open one.
                inner = getattr(inner, "jaxpr", inner)
                found = _origin(inner, inner.outvars[place])
                return None if found is None else _origin(program, equation.invars[found])
    return None


def _pick(params: Params, chosen: Sequence[bool]) -> Params:
    values, structure = jax.tree.flatten(params)
    pairs = zip(values, chosen, strict=True)
    return jax.tree.unflatten(structure, [x if is_chosen else None for x, is_chosen in pairs])


def _is_none(x: Any) -> bool:
    return x is None
