"""Three kinds of leaves of a network's params, told apart once, where params enter.

*Trained* are those that the model's mask trains, all without one. *Statistics* are others that
`apply_train` returns anew, such as running moments: clients send them, and the server averages
them, whatever the method. *Frozen* is the rest: nobody sends it, and it leaves a merge as it came.

A tree of one kind has the structure of params, with None in place of the leaves of other kinds,
which JAX takes for no leaves: names of leaves stay what they are.
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
from fisherjax.typing import Apply, Array, ArrayOrShape, Model, Params

TRAINED, STATISTICS, FROZEN = "trained", "statistics", "frozen"
# Equations that run a function as it stands, whose arguments are theirs in the same order.
_CALLS = {
    *("jit", "pjit", "checkpoint", "remat", "remat2", "closed_call", "core_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}
# Equations whose results are their arguments.
_SAME = {"stop_gradient", "copy", "copy_p", "name", "optimization_barrier", "sharding_constraint"}
_VARIANCE = re.compile(r"(?<![a-z])var(iance)?(?![a-z])")


class Leaves(NamedTuple):
    """The leaves of params by kind, each a tree of their structure, None for other leaves."""

    trained: Params
    statistics: Params
    frozen: Params


def split(model: Model, params: Params, inputs: ArrayOrShape, batch_size: int = 2) -> Leaves:
    """Tell a network's leaves apart.

    Args:
        model: Its mask says what is trained, and its `apply_train` what are statistics.
        params: All leaves.
        inputs: As the network takes them, of which only the shape is read.
        batch_size: Of a minibatch as `apply_train` takes it.

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
    return of_kinds(kinds(model, params, inputs, batch_size), params)


def of_kinds(kinds: Sequence[str], params: Params) -> Leaves:
    """Tell leaves apart by their kinds in order, as `kinds` gives them."""
    every = TRAINED, STATISTICS, FROZEN
    return Leaves(*(_pick(params, [x == kind for x in kinds]) for kind in every))


def named(params: Params, statistics: Sequence[str], frozen: Sequence[str]) -> Leaves:
    """Tell the leaves of params apart by the names of those that are not trained.

    Raises:
        ValueError: If a name is that of no leaf.

    Example:
        >>> named({"a": 1.0, "b": 2.0}, (), ("b",)).frozen
        {'a': None, 'b': 2.0}
    """
    names, others = tree.names(params), {*statistics, *frozen}
    if unknown := sorted(others.difference(names)):
        raise ValueError(
            f"The updates know the leaves {unknown}, but params only {list(names)}. Pass the "
            "params of the network that the clients trained."
        )
    chosen = [[x not in others for x in names]]
    chosen += [[x in group for x in names] for group in (statistics, frozen)]
    return Leaves(*(_pick(params, own) for own in chosen))


def filled(kind: Params, values: dict[str, Any]) -> Params:
    """Put other values, by name, in place of the leaves of a tree of one kind.

    Example:
        >>> filled({"a": None, "b": 2.0}, {"b": 3.0})
        {'a': None, 'b': 3.0}
    """
    own = tree.by_name(kind)
    return jax.tree.unflatten(jax.tree.structure(kind), [values.get(n, x) for n, x in own.items()])


def trained(model: Model, params: Params) -> Params:
    """Give the leaves that the mask trains: what a `fisher` operator of the network acts on.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda p, x: x * p["a"] + p["b"], fj.likelihoods.gaussian)
        >>> trained(model._replace(mask=(("a", True), ("b", False))), {"a": 1.0, "b": 2.0})
        {'a': 1.0, 'b': None}
    """
    return apart(model, params)[0]


def opened(model: Model, params: Params) -> tuple[Apply, Params]:
    """Give a network as a function of its trained leaves, and these; the others are bound.

    For use inside of a compiled function to which all of params are an argument: what is bound
    there is no constant of the program.
    """
    own, others = apart(model, params)
    if not jax.tree.leaves(others):
        return model.apply, params

    def apply(trained: Params, inputs: Array) -> Array:
        return model.apply(join(trained, others), inputs)

    return apply, own


def apart(model: Model, params: Params) -> tuple[Params, Params]:
    """Give the leaves that the mask trains, and all others."""
    mask = checks.mask(model, params)
    return _pick(params, mask), _pick(params, [not chosen for chosen in mask])


def join(*parts: Params) -> Params:
    """Put trees of several kinds together: at each place the first leaf that there is.

    Example:
        >>> join({"a": 1.0, "b": None}, {"a": None, "b": 2.0})
        {'a': 1.0, 'b': 2.0}
    """
    some = [part for part in parts if part is not None]
    return jax.tree.map(
        lambda *leaves: next((x for x in leaves if x is not None), None), *some, is_leaf=_is_none
    )


def like(kind: Params, values: Any) -> Params:
    """Take those leaves of a tree of the structure of params that a tree of one kind has.

    Example:
        >>> like({"a": 1.0, "b": None}, {"a": 3.0, "b": 2.0})
        {'a': 3.0, 'b': None}
    """
    own, structure = jax.tree.flatten(kind, is_leaf=_is_none)
    pairs = zip(own, jax.tree.leaves(values, is_leaf=_is_none), strict=True)
    return jax.tree.unflatten(structure, [None if x is None else new for x, new in pairs])


def kinds(
    model: Model, params: Params, inputs: ArrayOrShape, batch_size: int = 2
) -> tuple[str, ...]:
    """Say of each leaf in order which kind it is; arguments as in `split`."""
    mask = checks.mask(model, params)
    if all(mask):
        return (TRAINED,) * len(mask)
    returned = (False,) * len(mask)
    if model.apply_train is not None:
        shapes, structure = jax.tree.flatten(jax.tree.map(tree.shape_of, params))
        few = tree.shape_of(inputs, batch_size)
        returned = _returned(model.apply_train, structure, tuple(shapes), few)
    return tuple(
        TRAINED if chosen else STATISTICS if new else FROZEN
        for chosen, new in zip(mask, returned, strict=True)
    )


def places(kind: Params) -> dict[str, Any]:
    """Give the leaves of a tree of one kind by name, and None by name for those of other kinds.

    Example:
        >>> places({"a": None, "b": 2.0})
        {'a': None, 'b': 2.0}
    """
    found = jax.tree_util.tree_leaves_with_path(kind, is_leaf=_is_none)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in found}


def check_moments(names: Sequence[str]) -> None:
    """Refuse running variances: a mean of variances is not that of the clients' mixture.

    Example:
        >>> check_moments(["norm/mean", "norm/second_moment"])
    """
    for name in names:
        # One word at a time: a layer may be called so too.
        found = [(word.start(), word.end()) for word in _VARIANCE.finditer(name)]
        for mean in [f"{name[:first]}mean{name[last:]}" for first, last in found]:
            if mean not in names:
                continue
            raise ValueError(
                f"The statistic '{name}' stands beside '{mean}', and a mean of variances over "
                "clients lacks the variance between them. Keep E[x^2] in its place, as "
                "networks.to_moments and networks.from_moments do: means of moments are those of "
                "the mixture."
            )


def has_moments(params: Params) -> bool:
    """Say whether params are those of `networks.init` that hold running statistics."""
    return isinstance(params, dict) and set(params) == {"params", "moments"}


def kind_of_moment(name: str) -> str:
    """Say which kind a leaf of `networks.init` with running statistics is, by its name.

    Example:
        >>> kind_of_moment("moments/norm1/mean"), kind_of_moment("params/norm1/scale")
        ('statistics', 'trained')
    """
    if not name.startswith("moments/"):
        return TRAINED
    return FROZEN if name.endswith("/shift") else STATISTICS


def check_all_trained(method: str, *others: Params) -> None:
    """Refuse leaves that are not trained, for a method that moves units to other places."""
    if found := [name for other in others for name in tree.names(other)]:
        raise ValueError(
            f"{method} puts units of a layer in another order, and {found} are not trained and "
            "cannot follow; expected a network without frozen leaves and running statistics."
        )


# Tracing a network takes longer than many a product: equal shapes are traced once.
@cached
def _returned(
    apply_train: Callable, structure: Any, shapes: tuple, inputs: Any
) -> tuple[bool, ...]:
    """Say of each leaf whether `apply_train` returns another than it was given."""

    def new_leaves(leaves: list[Array], *rest: Any) -> list[Array]:
        own = jax.tree.unflatten(structure, leaves)
        _, new = apply_train(own, *rest)
        # What it does not return at all, it does not change.
        return leaves if new is None else jax.tree.leaves(join(like(own, new), own))

    key = jax.eval_shape(partial(jax.random.key, 0))
    weights = jax.ShapeDtypeStruct(inputs.shape[:1], jnp.result_type(float))
    program = jax.make_jaxpr(new_leaves)(list(shapes), inputs, key, weights).jaxpr
    return tuple(_origin(program, x) != place for place, x in enumerate(program.outvars))


def _origin(program: Any, variable: Any) -> int | None:
    """Give the place of the argument that a variable of a program is; None if it is computed."""
    for place, argument in enumerate(program.invars):
        if argument is variable:
            return place
    for equation in program.eqns:
        for place, own in enumerate(equation.outvars):
            if own is variable and equation.primitive.name in _SAME:
                return _origin(program, equation.invars[place])
            inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if own is variable and equation.primitive.name in _CALLS and inner is not None:
                # Closed or not, as primitives differ.
                inner = getattr(inner, "jaxpr", inner)
                found = _origin(inner, inner.outvars[place])
                return None if found is None else _origin(program, equation.invars[found])
    return None


def _pick(params: Params, chosen: Sequence[bool]) -> Params:
    values, structure = jax.tree.flatten(params)
    pairs = zip(values, chosen, strict=True)
    return jax.tree.unflatten(structure, [x if own else None for x, own in pairs])


def _is_none(x: Any) -> bool:
    return x is None
