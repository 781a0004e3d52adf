"""Running statistics of BatchNorm, kept so that a mean over clients is that of their mixture.

flax keeps each channel's mean and variance. A mean of variances lacks the variance between clients,
and E[x^2] of a channel that is 2000 give or take one half, 4,000,000.25, is rounded to a multiple
of 0.25 in float32. So what is kept are moments of x - c, where c is a number that all clients have
from their common start:

    shift            c
    mean             E[x - c]
    second_moment    E[(x - c)^2]
    within           the variance of a client's own x; after a merge their mean

All four add up over clients. The variance is second_moment - mean^2, or `within` where these agree
to rounding: so a client's own variance is never the difference of two large numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen
import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax.leaves import has_moments
from fisherjax.typing import AnyArray, Array, Key, Params

# Below that many standard deviations the squares of a mean cost less than two digits of seven.
_FAR = 8
# How far sums of clients' moments round apart, in units in the last place.
_ROUNDING = 8
ENOUGH = 32
"""Examples that say where channels lie; more would say it no better."""


def collections(params: Params) -> dict[str, Any]:
    """Give the collections that a module is applied with: statistics of x - c, and each c."""
    if not has_moments(params):
        return {"params": params}
    return {"params": params["params"], "batch_stats": _each(params["moments"], _stats)}


def to_flax(params: Params) -> dict[str, Any]:
    """Return flax's own collections of params: "params", and "batch_stats" if there are any.

    Example:
        >>> import jax, fisherjax as fj
        >>> network, images = fj.networks.NormedCNN(), jnp.zeros((1, 28, 28, 1))
        >>> params = fj.networks.init(network, jax.random.key(0), images)
        >>> jax.tree.map(jnp.shape, to_flax(params)["batch_stats"]["norm1"])
        {'mean': (16,), 'var': (16,)}
    """
    variables = collections(params)
    if "batch_stats" not in variables:
        return variables
    return variables | {"batch_stats": _each(variables["batch_stats"], _absolute)}


def from_flax(module: flax.linen.Module, variables: Mapping[str, Any], inputs: AnyArray) -> Params:
    """Return the params of a network that flax trained, as `init` returns those of a new one.

    Args:
        module: The network.
        variables: Its collections "params" and "batch_stats".
        inputs: A batch [B, ...] as the module takes it; its values do not matter.

    Returns:
        The content of "params" where there are no running statistics, or {"params", "moments"}:
        channels that lie far from zero are counted from their running means.

    Raises:
        ValueError: If the network keeps anything besides parameters and running statistics.

    Example:
        >>> import jax, fisherjax as fj
        >>> network, images = fj.networks.NormedCNN(), jnp.zeros((1, 28, 28, 1))
        >>> variables = network.init(jax.random.key(0), images)
        >>> print(from_flax(network, variables, images)["moments"]["norm1"]["second_moment"][0])
        1.0
    """
    check_collections(module, variables)
    if "batch_stats" not in variables:
        return variables["params"]
    stats = _with_shifts(variables["batch_stats"])
    given = {"params": variables["params"], "batch_stats": stats}
    with flax.linen.intercept_methods(_placing(_running)):
        placed = module.apply(given, inputs[:1], mutable=["batch_stats"])[1]["batch_stats"]
    return {"params": variables["params"], "moments": _each(placed, _counted_from_shift)}


def to_moments(stats: Any) -> Any:
    """Turn running statistics into moments that add up over clients, for an `apply_train` by hand.

    Every dict with a `mean` and a `var`, wherever it lies in nested ones, becomes one with `mean`,
    `second_moment` and `within`, all counted from zero.

    Example:
        >>> to_moments({"norm": {"mean": jnp.array(2.0), "var": jnp.array(9.0)}})["norm"].keys()
        dict_keys(['mean', 'second_moment', 'within'])
    """
    return _each(stats, lambda own: _moments({"within": ()}, own))


def from_moments(moments: Any) -> Any:
    """Turn moments, or their means over clients, into running statistics: `to_moments` undone.

    Example:
        >>> import jax
        >>> stats = {"mean": jnp.array([-1.0, 1.0]), "var": jnp.zeros(2)}
        >>> from_moments(jax.tree.map(jnp.mean, to_moments(stats)))["var"].item()
        1.0
    """
    return _each(_each(moments, _stats), _absolute)


def first(
    module: flax.linen.Module, key: Key, variables: Mapping[str, Any], inputs: AnyArray | None
) -> Params:
    """Return the params of a new network: its statistics are flax's first ones.

    They are counted from where channels lie in the network that sees the inputs, if there are any
    and these are far from zero; biases are zero at first, and layers of what is near stay near.
    """
    stats = _with_shifts(variables["batch_stats"])
    if inputs is not None and _are_far(inputs):
        given = {"params": variables["params"], "batch_stats": stats}
        with flax.linen.intercept_methods(_placing(_of_batch)):
            placed = module.apply(
                given, inputs, train=True, mutable=["batch_stats"], rngs={"params": key}
            )[1]["batch_stats"]
        # The means and variances stay flax's first ones, 0 and 1.
        stats = _each(stats, lambda own, new: own | {"shift": new["shift"]}, placed)
    return {"params": variables["params"], "moments": _each(stats, _counted_from_shift)}


def updated(moments: Any, stats: Any) -> Any:
    """Write what a module returned as moments, with the leaves that there were."""
    # What nobody changes is taken as it was.
    shifts = lambda own: {"shift": own["shift"]} if "shift" in own else {}  # noqa: E731
    return _each(moments, lambda own, new: _moments(own, new | shifts(own)), stats)


def check_collections(module: flax.linen.Module, variables: Mapping[str, Any]) -> None:
    """Refuse a network that keeps anything besides parameters and running statistics."""
    if others := sorted(set(variables) - {"params", "batch_stats"}):
        raise ValueError(
            f"{type(module).__name__} keeps the collections {others} besides its parameters; "
            "expected parameters, and batch_stats, only. Call module.init yourself, put all into "
            "one pytree, and give fisherjax.Model a mask and apply_train."
        )


def centred(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """Run every BatchNorm on x - c, whose statistics it has."""
    if not _is_batch_norm(context):
        return call(*args, **kwargs)
    shift = context.module.get_variable("batch_stats", "shift")
    if shift is None:  # statistics of fisherjax 0.2 are those of x
        return call(*args, **kwargs)
    x, args, kwargs = _inputs(args, kwargs)
    moved = x - jnp.expand_dims(shift, _reduced(x, context.module.axis))
    # In the dtype of x: another one would be that of what the network computes from here on.
    moved = moved.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else moved
    return call(moved, *args, **kwargs)


def counting(weights: Array) -> Callable:
    """Make what tells every BatchNorm in training which rows of the minibatch count."""

    def interceptor(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        if not _is_batch_norm(context):
            return call(*args, **kwargs)
        x, args, kwargs = _inputs(args, kwargs)
        rows = weights.reshape(-1, *(1,) * (x.ndim - 1)) > 0
        # flax's fast variance, E[x^2] - E[x]^2, cancels. The module is this call's own.
        object.__setattr__(context.module, "use_fast_variance", False)
        return centred(call, (x, *args), {"mask": rows} | kwargs, context)

    return interceptor


def _are_far(inputs: AnyArray) -> bool:
    """Whether any channel lies far from zero; True while that is not known."""
    if checks.is_traced(inputs):
        return True
    # By NumPy, so that a network that is drawn under `jit` from known inputs is not run in there.
    rows = np.asarray(inputs).astype(float).reshape(-1, inputs.shape[-1])
    return bool((np.abs(rows.mean(0)) > _FAR * rows.std(0)).any())


def _placing(where: Callable[[Any, Array], tuple[Array, Array]]) -> Callable:
    """Make what chooses each c, given a function to a channel's mean and standard deviation."""

    def interceptor(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        if _is_batch_norm(context):
            module = context.module
            x, args, kwargs = _inputs(args, kwargs)
            mean, deviation = where(module, x)
            shift = module.get_variable("batch_stats", "shift")
            # Most channels stay where they are, to the bit.
            is_far = jnp.abs(mean) > _FAR * deviation
            chosen = jnp.where(is_far, mean, 0).reshape(shift.shape).astype(shift.dtype)
            module.put_variable("batch_stats", "shift", chosen)
            args = (x, *args)
        return call(*args, **kwargs)

    return interceptor


def _of_batch(module: Any, x: Array) -> tuple[Array, Array]:
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    axes = _reduced(x, module.axis)
    return x.mean(axes), x.std(axes)


def _running(module: Any, x: Array) -> tuple[Array, Array]:
    del x
    mean, var = (module.get_variable("batch_stats", name) for name in ("mean", "var"))
    return mean, jnp.sqrt(var)


def _is_batch_norm(context: Any) -> bool:
    is_norm = isinstance(context.module, flax.linen.BatchNorm)
    return is_norm and context.method_name == "__call__"


def _inputs(args: tuple, kwargs: dict) -> tuple[Array, tuple, dict]:
    """Take the inputs of a BatchNorm, which may be given by name, from its arguments."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["x"], (), {name: value for name, value in kwargs.items() if name != "x"}


def _reduced(x: Array, features: int | Sequence[int]) -> tuple[int, ...]:
    """Give the axes over which statistics are taken."""
    features = (features,) if isinstance(features, int) else features
    return tuple(axis for axis in range(x.ndim) if axis not in {f % x.ndim for f in features})


def _each(tree: Any, change: Callable[..., dict], *others: Any) -> Any:
    """Change what is kept of each normalisation: a dict that has a mean."""
    if not isinstance(tree, dict):
        return others[0] if others else tree
    if "mean" in tree and {"var", "second_moment"} & set(tree):
        return change(tree, *others)
    return {name: _each(x, change, *(o[name] for o in others)) for name, x in tree.items()}


def _with_shifts(stats: Any) -> Any:
    return _each(stats, lambda own: own | {"shift": jnp.zeros_like(own["mean"])})


def _counted_from_shift(stats: dict) -> dict:
    """Turn statistics of x, and c, into moments of x - c."""
    stats = stats | {"mean": stats["mean"] - stats["shift"]}
    return _moments({"shift": (), "within": ()}, stats)


def _absolute(stats: dict) -> dict:
    """Turn statistics of x - c into those of x."""
    stats = dict(stats)
    shift = stats.pop("shift", None)
    return stats if shift is None else stats | {"mean": stats["mean"] + shift}


def _moments(like: dict, stats: dict) -> dict:
    """Turn statistics of x - c into its moments; those of 0.2 have no c."""
    kept = dict(stats)
    var = kept.pop("var")
    kept["second_moment"] = var + jnp.square(kept["mean"])
    return kept | ({"within": var} if "within" in like else {})


def _stats(moments: dict) -> dict:
    """Turn moments of x - c into its statistics."""
    kept = dict(moments)
    second, within = kept.pop("second_moment"), kept.pop("within", None)
    var = second - jnp.square(kept["mean"])
    if within is not None:
        rounding = _ROUNDING * jnp.finfo(second.dtype).eps * second
        var = jnp.where(jnp.abs(var - within) <= rounding, within, var)
    # Rounding may leave less than nothing of a channel that is constant.
    return kept | {"var": jnp.maximum(var, 0)}
