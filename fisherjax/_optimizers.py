"""Run any optax optimiser: pass the arguments that it accepts, and find its final params.

Optimisers differ in their arguments. Most need only a gradient; some need the loss as `value`
(`reduce_on_plateau`, `polyak_sgd`) or evaluate it at other params (`lbfgs`, `sam`); some keep their
final params in their state. `with_extra_args` passes each optimiser the arguments that it accepts,
`check` raises an error before compilation if an optimiser cannot run, and `final_params` returns
the params at the end.
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
from fisherjax._other_libraries import summary
from fisherjax.typing import Array, Params

ALGORITHM_ARGUMENTS = ("start", "extras", "last_epoch", "factor")
"""Extra arguments for the optimisers of algorithms."""
_LOSS = (("value", "grad", "value_fn", "grad_fn"), ("value", "grad", "value_fn"), ("value",))
# The most arguments first, because some optimisers use arguments that they do not require.
_LOSS_CHOICES = (*_LOSS, ("grad_fn",), ())


class Refused(ValueError):
    """An optimiser cannot be used. Wrappers pass this error on as it is."""


_KEEPERS = (optax.contrib.SAMState, optax.contrib.ScheduleFreeState)


@functools.lru_cache(maxsize=64)
def with_extra_args(base: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Make an optimiser accept any extra arguments, of which it gets those that `update` takes.

    `optax.with_extra_args_support` does not change an optimiser that takes some of the arguments
    only, such as `optax.contrib.sam`, which then fails. Each optimiser is wrapped once, so that
    `jit` does not compile again.

    Example:
        >>> import jax.numpy as jnp
        >>> chain = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau())
        >>> plateau = with_extra_args(chain)
        >>> w = jnp.ones(2)
        >>> step, _ = plateau.update(w, plateau.init(w), w, value=jnp.array(3.0), last_epoch=True)
        >>> print(step)
        [-1. -1.]
    """

    def update(updates: Params, state: Any, params: Params = None, **given: Any) -> tuple:
        accepted = _accepted(base, updates, state, params, given)
        return base.update(updates, state, params, **accepted)

    return optax.GradientTransformationExtraArgs(base.init, update)


def _accepted(
    base: optax.GradientTransformation, gradient: Params, state: Any, params: Any, given: dict
) -> dict[str, Any]:
    """Return the largest subset of arguments that an optimiser accepts, by name or by tracing."""
    kind = optax.GradientTransformationExtraArgs
    if isinstance(base, optax.GradientTransformation) and not isinstance(base, kind):
        return {}  # this type takes no extra arguments
    named = inspect.signature(base.update).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in named):
        names = {parameter.name for parameter in named}
        return {name: x for name, x in given.items() if name in names}
    # An optimiser with **kwargs may pass them on to another one that does not accept all.
    errors: list[Exception] = []
    for subset in _subsets(given):
        try:
            jax.eval_shape(functools.partial(base.update, **subset), gradient, state, params)
        # The user's optimiser may raise an error of any type.
        except Exception as failed:
            errors.append(failed)
        else:
            return subset
    raise errors[-1]


def _subsets(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield subsets of extra arguments, each once, the largest first."""
    seen: list[set[str]] = []
    for extra in (ALGORITHM_ARGUMENTS, ()):
        for loss in _LOSS_CHOICES:
            names = {name for name in given if name in extra + loss}
            if names not in seen:
                seen.append(names)
                yield {name: x for name, x in given.items() if name in names}


def loss_arguments(
    loss: Callable[[Params], Array], value: Array, gradient: Params
) -> dict[str, Any]:
    """Return the extra arguments that describe the loss at the current params.

    They are named as in optax: the `value`, its gradient `grad`, the function `value_fn(params)`,
    and `grad_fn(params, step)`, its gradient at other params.

    Example:
        >>> import jax.numpy as jnp
        >>> square, x = lambda x: x @ x, jnp.array([1.0, 2.0])
        >>> sorted(loss_arguments(square, square(x), 2 * x))
        ['grad', 'grad_fn', 'value', 'value_fn']
    """

    def gradient_at(params: Params, *_: Any) -> Params:
        return jax.grad(loss)(params)

    return {"value": value, "grad": gradient, "value_fn": loss, "grad_fn": gradient_at}


def check(
    name: str,
    optimizer: optax.GradientTransformation,
    params: Params,
    without: str = "",
    extras: Any = (),
) -> None:
    """Check that an optimiser can take steps of these params; only shapes are traced.

    Args:
        name: Name of the argument, for messages.
        optimizer: An optax optimiser.
        params: Params that it optimises, or their shapes.
        without: Reason why the optimiser gets no loss; empty if it gets one.
        extras: The extra argument `extras` of an algorithm's optimiser, or its shapes.

    Raises:
        ValueError: If its `init` or `update` fails, its steps have other shapes than params, its
            state changes shape from step to step, or it keeps final params for a part of params.

    Example:
        >>> import jax.numpy as jnp
        >>> check("optimizer", optax.adam(0.1), jnp.ones(2))
        >>> check("optimizer", optax.lbfgs(), jnp.ones(2), without="The server has no loss.")
        Traceback (most recent call last):
        fisherjax._optimizers.Refused: optimizer cannot take a step (TypeError: ...
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(tree.shape_of, (params, extras)))
    _checked(name, optimizer, structure, tuple(leaves), without)


# Results are cached, so that equal optimisers and shapes are traced once.
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
            f"{name} cannot start from these params ({summary(error)}). Labels and masks must "
            "have the structure of params, here with leaves "
            f"{list(tree.names(params))}, and optimisers that need other arguments than params, as "
            "optax.lookahead does, cannot be used."
        ) from error

    def step(state: Any, params: Params, extras: Any) -> tuple:
        given = {"start": params, "extras": extras, "last_epoch": jnp.array(False)}
        if not without:
            given |= loss_arguments(_any_loss, _any_loss(params), params)
        return with_extra_args(optimizer).update(params, state, params, **given)

    try:
        updates, after = jax.eval_shape(step, state, params, extras)
    except Exception as error:
        why = without or "It gets the gradient, value, value_fn(params) and grad_fn(params)."
        raise Refused(
            f"{name} cannot take a step ({summary(error)}). {why} Use an optimiser that needs no "
            "other arguments and updates params themselves (optax.lookahead does not), such as "
            "optax.sgd(1e-2) or optax.adam(1e-3)."
        ) from error
    _check_same("steps", name, params, updates)
    _check_same("state", name, state, after)
    _check_keeper(name, params, state)


def _any_loss(params: Params) -> Array:
    # Only its shape is used.
    return jnp.asarray(sum(jnp.sum(leaf).astype(float) for leaf in jax.tree.leaves(params)))


def _check_same(what: str, name: str, before: Any, after: Any) -> None:
    structures = jax.tree.structure(before), jax.tree.structure(after)
    shapes = [[jnp.shape(leaf) for leaf in jax.tree.leaves(x)] for x in (before, after)]
    if structures[0] != structures[1] or shapes[0] != shapes[1]:
        expected = "those of params" if what == "steps" else "as init makes it"
        raise Refused(
            f"{name} makes {what} with leaves of shapes {shapes[1]}, in {structures[1]}; expected "
            f"{shapes[0]}, {expected}, in {structures[0]}. Optimisers that need gradients of "
            "single examples, as optax.contrib.dpsgd does, cannot be used: see privacy.dp_sgd."
        )


def _check_keeper(name: str, params: Params, state: Any) -> None:
    keepers = _keepers(state)
    if len(keepers) > 1 or any(_point(x) != jax.tree.structure(params) for x in keepers):
        raise Refused(
            f"{name} has optax.contrib.sam or schedule_free more than once, or for a part of the "
            "params; expected one of them for all params, or neither."
        )


def _point(keeper: Any) -> Any:
    kept = keeper.z if isinstance(keeper, optax.contrib.ScheduleFreeState) else keeper.cache
    return jax.tree.structure(kept)


def _keepers(state: Any) -> list[Any]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _KEEPERS))
    # In its opaque mode sam keeps nothing: params are final after every step.
    return [x for x in leaves if isinstance(x, _KEEPERS) and getattr(x, "cache", x) is not None]


def check_plain(what: str, base: optax.GradientTransformation, params: Params) -> None:
    """Check that an optimiser keeps no final params in its state, for a method that reads params.

    Example:
        >>> import jax.numpy as jnp
        >>> check_plain("FedNova", optax.contrib.schedule_free_sgd(), jnp.ones(2))
        Traceback (most recent call last):
        fisherjax._optimizers.Refused: FedNova ...
    """
    if _keepers(jax.eval_shape(base.init, params)):
        raise Refused(
            f"{what} measures every step of the params, but optax.contrib.schedule_free and sam "
            "(without opaque_mode=True) move these to the point where the gradient is computed, "
            "which is not the result; expected another optimiser, such as optax.sgd(1e-2)."
        )


def ends_elsewhere(state: Any) -> bool:
    """Return whether `final_params` may return others than the current params.

    Example:
        >>> import jax.numpy as jnp
        >>> ends_elsewhere(optax.sgd(0.1).init(jnp.ones(2)))
        False
    """
    return bool(_keepers(state))


def final_params(params: Params, state: Any) -> Params:
    """Return the final params of an optimiser, which may differ from its current params.

    Schedule-free optimisers compute gradients at other params than the average that they return,
    and every other step of `sam` is only a trial. For all others the current params are final.

    Example:
        >>> import jax.numpy as jnp
        >>> sam = optax.contrib.sam(optax.sgd(1.0), optax.sgd(0.5))
        >>> w = jnp.zeros(1)
        >>> step, state = sam.update(jnp.ones(1), sam.init(w), w)
        >>> print(w + step, final_params(w + step, state))
        [0.5] [0.]
    """
    for keeper in _keepers(state):
        if isinstance(keeper, optax.contrib.ScheduleFreeState):
            found = optax.contrib.schedule_free_eval_params(keeper, params)
        else:
            is_trial = keeper.steps_since_sync > 0
            found = jax.tree.map(lambda own, x: jnp.where(is_trial, own, x), keeper.cache, params)  # noqa: B023
        params = jax.tree.map(lambda new, old: new.astype(old.dtype), found, params)
    return params
