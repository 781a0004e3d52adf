"""Make networks with adapters: the base is frozen and held once, and adapters are trained."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from fisherjax import leaves, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.adapters import base
from fisherjax.adapters._evaluation import Changed, evaluate
from fisherjax.adapters.base import Adapter
from fisherjax.typing import Array, Key, Model, Params


def attach(
    model: Model,
    params: Params,
    targets: Callable[[str], bool] | Collection[str],
    *,
    rank: int | Mapping[str, int],
    alpha: float | None = None,
    transposed: bool = False,
    key: Key,
) -> tuple[Model, dict[str, Any]]:
    """Make a network whose base is frozen, with a trained adapter of each target, and its params.

    A product of the network with a target's kernel W becomes x W + scale (x A^T) B^T, so that
    clients that train side by side share the base, and W + scale (B A)^T is never formed.

    Args:
        model: The network; its own mask is not used.
        params: Params of the base.
        targets: Kernels to adapt: their names, or a function of a leaf's name.
        rank: Rank of all adapters, or by name.
        alpha: Numerator of the scale alpha / rank; None (default) makes every scale one.
        transposed: Whether these kernels are [outputs, inputs], as in PyTorch and equinox, instead
            of [inputs, outputs]. The names of their adapters then end in "^T".
        key: Random key of A, which is uniform with variance 1 / (3 inputs); B is zero.

    Returns:
        The model, and its params {"base": params, "adapters": {name: Adapter}}, of which the mask
        trains A and B only.

    Raises:
        ValueError: If there is no target, one is no leaf, a leaf has other than two axes, or rank
            or alpha is not positive.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> with_adapters, start = attach(
        ...     model, {"w": jnp.eye(3)}, ["w"], rank=1, key=jax.random.key(0)
        ... )
        >>> print(with_adapters.apply(start, jnp.ones(3)), fj.leaves.trained(with_adapters, start))
        [1. 1. 1.] {'adapters': {'w': Adapter(a=Array(...), b=Array(...), scale=None)}, ...}

    Source: Hu et al., LoRA: low-rank adaptation of large language models, ICLR 2022; A starts as in
        its code, by Kaiming's uniform initialisation with slope sqrt(5).
    """
    checks.model(model)
    checks.key(key)
    if alpha is not None:
        checks.positive("alpha", alpha)
    params = checks.arrays(params)
    kernels = tree.by_name(params)
    names = [name for name in kernels if targets(name)] if callable(targets) else list(targets)
    if not names or not kernels.keys() >= set(names):
        raise ValueError(
            f"targets selects {sorted(names)} of the leaves {list(kernels)}; expected some of them."
        )
    made = {}
    for number, name in enumerate(names):
        shape = kernels[name].shape
        if len(shape) != 2:
            raise ValueError(f"The target {name!r} has shape {shape}; expected a matrix.")
        inputs, outputs = shape[::-1] if transposed else shape
        r = checks.count("rank", rank[name] if isinstance(rank, Mapping) else rank)
        bound = 1 / jnp.sqrt(inputs)
        draw = partial(jax.random.uniform, jax.random.fold_in(key, number), (r, inputs))
        dtype = kernels[name].dtype
        scale = jnp.asarray(1.0 if alpha is None else alpha / r, dtype)
        a = draw(dtype, -bound, bound)
        made[name + "^T" * transposed] = Adapter(a, jnp.zeros((outputs, r), dtype), scale)
    start = {"base": params, "adapters": made}
    mask = {
        "base": jax.tree.map(lambda _: False, params),
        "adapters": {name: Adapter(True, True, False) for name in made},  # pyright: ignore
    }
    return _with_adapters(model)._replace(mask=mask), start


def dense(model: Model, start: Mapping[str, Any]) -> Model:
    """Return the network of the base that trains the adapted kernels only.

    Algorithms that `merge_products` wraps are made for it: `fisher.kfac` of it, at `merged` params,
    computes the factors of exactly the matrices that adapters change.

    Args:
        model: The network of the base, as passed to `attach`.
        start: Params of the network with adapters.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda params, x: x @ params["w"], fj.likelihoods.gaussian)
        >>> _, start = attach(model, {"w": jnp.eye(3)}, ["w"], rank=1, key=jax.random.key(0))
        >>> dense(model, start).mask
        (('w', True),)
    """
    adapted = {kernel_of(name) for name in start["adapters"]}
    names = tree.names(start["base"])
    return model._replace(mask=tuple((name, name in adapted) for name in names))


def merged(params: Mapping[str, Any]) -> Params:
    """Return params of the base with the changes of the adapters added.

    Example:
        >>> change = Adapter(jnp.ones((1, 2)), jnp.ones((2, 1)), 0.5)
        >>> print(merged({"base": {"w": jnp.eye(2)}, "adapters": {"w": change}})["w"])
        [[1.5 0.5]
         [0.5 1.5]]
    """
    kernels = tree.by_name(params["base"])
    changed = {
        kernel: kernels[kernel] + change.astype(kernels[kernel].dtype)
        for kernel, change in changes(params["adapters"]).items()
    }
    return leaves.replace(params["base"], changed)


def changes(adapters: Mapping[str, Adapter]) -> dict[str, Array]:
    """Return the change of each kernel, in its layout, by the name of its leaf."""
    return {
        kernel_of(name): base.product(x).T if name.endswith("^T") else base.product(x)
        for name, x in adapters.items()
    }


def kernel_of(name: str) -> str:
    """Return the name of the kernel that an adapter changes."""
    return name.removesuffix("^T")


@cached
def _with_adapters(model: Model) -> Model:
    def run(function: Callable, params: Mapping[str, Any], *rest: Any) -> Any:
        kernels = tree.by_name(params["base"])
        changed = {
            kernel_of(name): Changed.by(kernels[kernel_of(name)], x, name.endswith("^T"))
            for name, x in params["adapters"].items()
        }
        return evaluate(function, params["base"], changed, *rest)

    def apply(params: Mapping[str, Any], inputs: Any) -> Array:
        return run(model.apply, params, inputs)

    train = model.apply_train
    if train is None:
        return model._replace(apply=apply, mask=None)

    def apply_train(
        params: Mapping[str, Any], inputs: Any, key: Key, weights: Array
    ) -> tuple[Any, Any]:
        outputs, new = run(train, params, inputs, key, weights)
        return outputs, None if new is None else {**params, "base": new}

    return model._replace(apply=apply, apply_train=apply_train, mask=None)
