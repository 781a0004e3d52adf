"""Any optimiser of optax in any loop: what its step is told, and which params are its answer.

Optimisers differ in what they ask for. Most take a gradient; some want the loss as `value`
(`reduce_on_plateau`, `polyak_sgd`) or may evaluate it elsewhere (`lbfgs`, `sam`); some hold their
answer in their state. `supported` gives each what it takes, `check` refuses what cannot run before
anything is compiled, and `answer` reads off the params at the end.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fisherjax import tree
from fisherjax._core.caching import cached
from fisherjax.typing import Array, Params

OWN = ("start", "extras", "last_epoch")
"""What algorithms' wrappers of an optimiser are told besides."""
_LOSS = (("value", "grad", "value_fn", "grad_fn"), ("value", "grad", "value_fn"), ("value",))
# All that there is first: some use what they do not insist on.
_TOLD = (*_LOSS, ("grad_fn",), ())


class Refused(ValueError):
    """An optimiser that cannot be used, said in our words: nobody who wraps it says it again."""


_KEEPERS = (optax.contrib.SAMState, optax.contrib.ScheduleFreeState)


@functools.lru_cache(maxsize=64)
def supported(
    base: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Make an optimiser take any extra arguments; it is told those that its `update` accepts.

    `optax.with_extra_args_support` leaves an optimiser alone that takes some but not all, such as
    `optax.contrib.sam`, which then fails. One object for one optimiser, or `jit` would compile
    again.

    Example:
        >>> import jax.numpy as jnp
        >>> plateau = supported(optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau()))
        >>> w = jnp.ones(2)
        >>> step, _ = plateau.update(w, plateau.init(w), w, value=jnp.array(3.0), last_epoch=True)
        >>> print(step)
        [-1. -1.]
    """

    def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        return base.update(updates, state, params, **_told(base, updates, state, params, given))

    return optax.GradientTransformationExtraArgs(base.init, update)


def _told(
    base: optax.GradientTransformation, gradient: Params, state: Any, params: Any, given: dict
) -> dict[str, Any]:
    """Find the most that an optimiser takes of what is given: by its names, or by tracing it."""
    kind = optax.GradientTransformationExtraArgs
    if isinstance(base, optax.GradientTransformation) and not isinstance(base, kind):
        return {}  # by its type it takes none
    named = inspect.signature(base.update).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in named):
        names = {parameter.name for parameter in named}
        return {name: x for name, x in given.items() if name in names}
    # What it takes any of it may pass on to another that does not.
    errors: list[Exception] = []
    for told in _choices(given):
        try:
            jax.eval_shape(functools.partial(base.update, **told), gradient, state, params)
        # Of any type, as it is somebody else's function that fails.
        except Exception as failed:
            errors.append(failed)
        else:
            return told
    raise errors[-1]


def _choices(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give subsets of extra arguments, each once, the largest first."""
    seen: list[set[str]] = []
    for own in (OWN, ()):
        for loss in _TOLD:
            names = {name for name in given if name in own + loss}
            if names not in seen:
                seen.append(names)
                yield {name: x for name, x in given.items() if name in names}


def loss_arguments(
    loss: Callable[[Params], Array], value: Array, gradient: Params
) -> dict[str, Any]:
    """Make the extra arguments by which optimisers learn of the loss at the current params.

    They are optax's names: the `value`, its gradient `grad`, the function `value_fn(params)`, and
    `grad_fn(params, step)`, its gradient elsewhere.

    Example:
        >>> import jax.numpy as jnp
        >>> square, x = lambda x: x @ x, jnp.array([1.0, 2.0])
        >>> sorted(loss_arguments(square, square(x), 2 * x))
        ['grad', 'grad_fn', 'value', 'value_fn']
    """

    def elsewhere(params: Params, *_: Any) -> Params:
        return jax.grad(loss)(params)

    return {"value": value, "grad": gradient, "value_fn": loss, "grad_fn": elsewhere}


def check(
    name: str,
    optimizer: optax.GradientTransformation,
    params: Params,
    without: str = "",
    extras: Any = (),
) -> None:
    """Refuse an optimiser that cannot take steps of these params; only shapes are traced.

    Args:
        name: Of the argument.
        optimizer: Any of optax.
        params: What it moves, or shapes.
        without: Why it is told nothing of the loss; empty where it is told.
        extras: What an algorithm's wrapper is given besides, or shapes.

    Raises:
        ValueError: If its `init` or `update` fails, its steps have other shapes than params, its
            state changes shape from step to step, or it keeps the answer for a part of the params.

    Example:
        >>> import jax.numpy as jnp
        >>> check("optimizer", optax.adam(0.1), jnp.ones(2))
        >>> check("optimizer", optax.lbfgs(), jnp.ones(2), without="The server has no loss.")
        Traceback (most recent call last):
        fisherjax._optimizers.Refused: optimizer cannot take a step (TypeError: ...
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(tree.shape_of, (params, extras)))
    _checked(name, optimizer, structure, tuple(leaves), without)


# Equal optimisers and shapes are traced once.
@cached
def _checked(
    name: str,
    optimizer: optax.GradientTransformation,
    structure: Any,
    leaves: tuple[jax.ShapeDtypeStruct, ...],
    without: str,
) -> None:
    params, extras = jax.tree.unflatten(structure, leaves)
    try:
        state = jax.eval_shape(optimizer.init, params)
    except Refused:
        raise
    except Exception as error:
        raise Refused(
            f"{name} cannot start from these params ({_said(error)}). Labels and masks must have "
            "the structure of params, here with leaves "
            f"{list(tree.names(params))}, and an optimiser that wants something else than params, "
            "as optax.lookahead does, cannot be used."
        ) from error

    def step(state: Any, params: Params, extras: Any) -> tuple:
        told = {"start": params, "extras": extras, "last_epoch": jnp.array(False)}
        if not without:
            told |= loss_arguments(_any_loss, _any_loss(params), params)
        return supported(optimizer).update(params, state, params, **told)

    try:
        updates, after = jax.eval_shape(step, state, params, extras)
    except Exception as error:
        why = without or "It is told the gradient, value, value_fn(params) and grad_fn(params)."
        raise Refused(
            f"{name} cannot take a step ({_said(error)}). {why} Use an optimiser that needs no "
            "more than that and moves params as they are (optax.lookahead does not), such as "
            "optax.sgd(1e-2) or optax.adam(1e-3)."
        ) from error
    _check_same("steps", name, params, updates)
    _check_same("state", name, state, after)
    _check_keeper(name, params, state)


def _any_loss(params: Params) -> Array:
    # Of which nothing but the shape is looked at.
    return jnp.asarray(sum(jnp.sum(leaf).astype(float) for leaf in jax.tree.leaves(params)))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _check_same(what: str, name: str, before: Any, after: Any) -> None:
    structures = jax.tree.structure(before), jax.tree.structure(after)
    shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(x)] for x in (before, after)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        expected = "those of params" if what == "steps" else "as init makes it"
        raise Refused(
            f"{name} makes {what} with leaves of shapes {shapes[1]}, in {structures[1]}; expected "
            f"{shapes[0]}, {expected}, in {structures[0]}. Optimisers that take a gradient of each "
            "example, as optax.contrib.dpsgd does, cannot be used: see privacy.dp_sgd."
        )


def _check_keeper(name: str, params: Params, state: Any) -> None:
    found = _keepers(state)
    if len(found) > 1 or any(_point(x) != jax.tree.structure(params) for x in found):
        raise Refused(
            f"{name} has optax.contrib.sam or schedule_free more than once, or for a part of the "
            "params; expected one of them for all params, or neither."
        )


def _point(keeper: Any) -> Any:
    kept = keeper.z if isinstance(keeper, optax.contrib.ScheduleFreeState) else keeper.cache
    return jax.tree.structure(kept)


def _keepers(state: Any) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _KEEPERS))
    # In its opaque mode sam keeps nothing: the params are the answer after every step.
    return [x for x in leaves if isinstance(x, _KEEPERS) and getattr(x, "cache", x) is not None]


def check_plain(what: str, base: optax.GradientTransformation, params: Params) -> None:
    """Refuse an optimiser that keeps its answer in its state, where only the params are looked at.

    Example:
        >>> import jax.numpy as jnp
        >>> check_plain("FedNova", optax.contrib.schedule_free_sgd(), jnp.ones(2))
        Traceback (most recent call last):
        fisherjax._optimizers.Refused: FedNova ...
    """
    if _keepers(jax.eval_shape(base.init, params)):
        raise Refused(
            f"{what} goes by every step of the params, and optax.contrib.schedule_free and sam "
            "(but for opaque_mode=True) move them to where the gradient is taken, which is not the "
            "answer; expected another optimiser, such as optax.sgd(1e-2)."
        )


def answer(params: Params, state: Any) -> Params:
    """Give the params that an optimiser has found, which may not be where it is.

    Schedule-free optimisers take gradients beside the average that is their answer, and every other
    step of `sam` is only a look. All others' answer are the params.

    Example:
        >>> import jax.numpy as jnp
        >>> sam = optax.contrib.sam(optax.sgd(1.0), optax.sgd(0.5))
        >>> w = jnp.zeros(1)
        >>> step, state = sam.update(jnp.ones(1), sam.init(w), w)
        >>> print(w + step, answer(w + step, state))
        [0.5] [0.]
    """
    for keeper in _keepers(state):
        if isinstance(keeper, optax.contrib.ScheduleFreeState):
            found = optax.contrib.schedule_free_eval_params(keeper, params)
        else:
            looks = keeper.steps_since_sync > 0
            found = jax.tree.map(lambda own, x: jnp.where(looks, own, x), keeper.cache, params)  # noqa: B023
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), found, params)
    return params
