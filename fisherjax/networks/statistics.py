"""Store running statistics of BatchNorm as moments, whose mean over clients is the mixture's.

flax stores each channel's mean and variance. The mean of the clients' variances lacks the variance
between clients. E[x^2] would not: but for a channel of 2000 plus or minus one half it is
4,000,000.25, which float32 rounds to a multiple of 0.25. Therefore moments of x - c are stored,
with a number c that all clients have from their common start:

    shift            c
    mean             E[x - c]
    second_moment    E[(x - c)^2]
    within           the variance of a client's own x; after a merge their mean

All four add up over clients. The variance is second_moment - mean^2, or `within` if the two are
equal up to rounding: a client's own variance is never the difference of two large numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np

from fisherjax._core import checks
from fisherjax._core.batches import take
from fisherjax.leaves import has_moments
from fisherjax.typing import AnyArray, Array, Key, Params

# If a mean is below so many standard deviations, its square costs fewer than two of seven digits.
_FAR = 8
# Largest rounding error of sums of clients' moments, in units in the last place.
_ROUNDING = 8
MEAN_EXAMPLES = 32
"""Number of examples from which the means of channels are estimated."""


def collections(params: Params) -> dict[str, Any]:
    """Return flax's collections for applying a module, with statistics of x - c, and each c."""
    if not has_moments(params):
        return {"params": params}
    return {"params": params["params"], "batch_stats": _each(params["moments"], _stats)}


def to_flax(params: Params) -> dict[str, Any]:
    """Return flax's own collections: "params", and "batch_stats" if there are running statistics.

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
        inputs: A batch [B, ...] of inputs; only its shape matters.

    Returns:
        The content of "params" if there are no running statistics, else {"params", "moments"}. The
        moments of channels that are far from zero are relative to their running means.

    Raises:
        ValueError: If the network has collections besides parameters and running statistics.

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
        one = take(inputs, slice(1))
        placed = module.apply(given, one, mutable=["batch_stats"])[1]["batch_stats"]
    return {"params": variables["params"], "moments": _each(placed, _counted_from_shift)}


def to_moments(stats: Any) -> Any:
    """Convert running statistics to moments that add up over clients, for your own `apply_train`.

    Every dict with a `mean` and a `var`, at any depth of nested dicts, becomes one with `mean`,
    `second_moment` and `within`, relative to zero.

    Example:
        >>> to_moments({"norm": {"mean": jnp.array(2.0), "var": jnp.array(9.0)}})["norm"].keys()
        dict_keys(['mean', 'second_moment', 'within'])
    """
    return _each(stats, lambda own: _moments({"within": ()}, own))


def from_moments(moments: Any) -> Any:
    """Convert moments, or their means over clients, to running statistics; inverts `to_moments`.

    Example:
        >>> import jax
        >>> stats = {"mean": jnp.array([-1.0, 1.0]), "var": jnp.zeros(2)}
        >>> from_moments(jax.tree.map(jnp.mean, to_moments(stats)))["var"].item()
        1.0
    """
    return _each(_each(moments, _stats), _absolute)


def first_params(
    module: flax.linen.Module, key: Key, variables: Mapping[str, Any], inputs: AnyArray | None
) -> Params:
    """Return the params of a new network, with the initial statistics of flax.

    If there are inputs that are far from zero, the moments of channels that these inputs make far
    from zero are relative to the channels' means. Otherwise no channel is far, because initial
    biases are zero.
    """
    stats = _with_shifts(variables["batch_stats"])
    if inputs is not None and _are_far(inputs):
        given = {"params": variables["params"], "batch_stats": stats}
        with flax.linen.intercept_methods(_placing(_of_batch)):
            placed = module.apply(
                given, inputs, train=True, mutable=["batch_stats"], rngs={"params": key}
            )[1]["batch_stats"]
        # The means and variances stay those of flax, 0 and 1.
        stats = _each(stats, lambda own, new: own | {"shift": new["shift"]}, placed)
    return {"params": variables["params"], "moments": _each(stats, _counted_from_shift)}


def updated(moments: Any, stats: Any) -> Any:
    """Convert statistics that a module returned to moments, with the same leaves as before."""
    # Shifts never change.
    shifts = lambda own: {"shift": own["shift"]} if "shift" in own else {}  # noqa: E731
    return _each(moments, lambda own, new: _moments(own, new | shifts(own)), stats)


def check_collections(module: flax.linen.Module, variables: Mapping[str, Any]) -> None:
    """Check that a network has no collections besides parameters and running statistics."""
    if others := sorted(set(variables) - {"params", "batch_stats"}):
        raise ValueError(
            f"{type(module).__name__} has the collections {others} besides its parameters; "
            "expected only params and batch_stats. Call module.init yourself, put all collections "
            "into one pytree, and pass a mask and apply_train to fisherjax.Model."
        )


def centred(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    """Run every BatchNorm on x - c, because it has the statistics of x - c."""
    if not _is_batch_norm(context):
        return call(*args, **kwargs)
    shift = context.module.get_variable("batch_stats", "shift")
    if shift is None:  # fisherjax 0.2 stored statistics of x
        return call(*args, **kwargs)
    x, args, kwargs = _inputs(args, kwargs)
    moved = x - jnp.expand_dims(shift, _reduced(x, context.module.axis))
    # In the dtype of x, because the following layers compute in this dtype.
    moved = moved.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else moved
    return call(moved, *args, **kwargs)


def counting(weights: Array) -> Callable:
    """Make an interceptor that masks rows of weight zero in every BatchNorm in training."""

    def interceptor(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        if not _is_batch_norm(context):
            return call(*args, **kwargs)
        x, args, kwargs = _inputs(args, kwargs)
        rows = weights.reshape(-1, *(1,) * (x.ndim - 1)) > 0
        # flax's fast variance, E[x^2] - E[x]^2, cancels. The module belongs to this call only.
        object.__setattr__(context.module, "use_fast_variance", False)
        return centred(call, (x, *args), {"mask": rows} | kwargs, context)

    return interceptor


def _are_far(inputs: AnyArray) -> bool:
    """Return whether any channel is far from zero; True for traced inputs."""
    if checks.is_traced(inputs):
        return True

    # NumPy computes it at once, also under `jit`: a network with near inputs is not run.
    def is_far(x: AnyArray) -> bool:
        rows = np.asarray(x).astype(float).reshape(-1, x.shape[-1])
        return bool((np.abs(rows.mean(0)) > _FAR * rows.std(0)).any())

    return any(map(is_far, jax.tree.leaves(inputs)))


def _placing(where: Callable[[Any, Array], tuple[Array, Array]]) -> Callable:
    """Make an interceptor that sets each c from `where`, which returns means and deviations."""

    def interceptor(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
        if _is_batch_norm(context):
            module = context.module
            x, args, kwargs = _inputs(args, kwargs)
            mean, deviation = where(module, x)
            shift = module.get_variable("batch_stats", "shift")
            # Channels that are not far have a shift of exactly zero.
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
    """Return the inputs of a BatchNorm, which may be passed by name, and its other arguments."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["x"], (), {name: value for name, value in kwargs.items() if name != "x"}


def _reduced(x: Array, features: int | Sequence[int]) -> tuple[int, ...]:
    """Return the axes over which statistics are computed."""
    features = (features,) if isinstance(features, int) else features
    return tuple(axis for axis in range(x.ndim) if axis not in {f % x.ndim for f in features})


def _each(tree: Any, change: Callable[..., dict], *others: Any) -> Any:
    """Apply `change` to the statistics of each normalisation, the dicts that have a mean."""
    if not isinstance(tree, dict):
        return others[0] if others else tree
    if "mean" in tree and {"var", "second_moment"} & set(tree):
        return change(tree, *others)
    return {name: _each(x, change, *(o[name] for o in others)) for name, x in tree.items()}


def _with_shifts(stats: Any) -> Any:
    return _each(stats, lambda own: own | {"shift": jnp.zeros_like(own["mean"])})


def _counted_from_shift(stats: dict) -> dict:
    """Convert statistics of x, and c, to moments of x - c."""
    stats = stats | {"mean": stats["mean"] - stats["shift"]}
    return _moments({"shift": (), "within": ()}, stats)


def _absolute(stats: dict) -> dict:
    """Convert statistics of x - c to those of x."""
    stats = dict(stats)
    shift = stats.pop("shift", None)
    return stats if shift is None else stats | {"mean": stats["mean"] + shift}


def _moments(like: dict, stats: dict) -> dict:
    """Convert statistics of x - c to moments; those of fisherjax 0.2 have no c."""
    kept = dict(stats)
    var = kept.pop("var")
    kept["second_moment"] = var + jnp.square(kept["mean"])
    return kept | ({"within": var} if "within" in like else {})


def _stats(moments: dict) -> dict:
    """Convert moments of x - c to statistics."""
    kept = dict(moments)
    second, within = kept.pop("second_moment"), kept.pop("within", None)
    var = second - jnp.square(kept["mean"])
    if within is not None:
        rounding = _ROUNDING * jnp.finfo(second.dtype).eps * second
        var = jnp.where(jnp.abs(var - within) <= rounding, within, var)
    # Rounding may make the variance of a constant channel negative.
    return kept | {"var": jnp.maximum(var, 0)}
