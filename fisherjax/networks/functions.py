"""Pure functions of flax's modules: their parameters, `apply`, and how they train.

Running statistics of BatchNorm are leaves like others, that no gradient trains. They are kept as
moments: those of several clients together are the means of theirs, weighted by examples, so that
whatever averages leaves computes the statistics of the mixture; see `statistics`.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core.caching import cached
from fisherjax.networks import statistics
from fisherjax.typing import (
    Apply,
    ApplyTrain,
    Array,
    ArrayOrShape,
    Key,
    Likelihood,
    Model,
    Params,
    Positions,
)


def init(
    module: flax.linen.Module,
    key: Key,
    inputs: ArrayOrShape,
    *,
    normalize: Callable[[Any], Array] | None = None,
) -> Params:
    """Draw a network's parameters: the content of flax's "params" collection, nested dicts.

    With BatchNorm it is {"params": ..., "moments": ...}: of flax's "batch_stats" each mean and
    variance, as moments that add up over clients. A channel whose mean over the first 32 inputs is
    more than 8 of its standard deviations from zero, as that of a year, has its moments counted
    from that mean, in a leaf `shift` which every client gets and nobody changes. These means are
    not private: take them of public inputs, or of zeros.

    Args:
        module: The network.
        key: Of the initialisers.
        inputs: A batch [B, ...] of NumPy or JAX, or its shape and dtype; only these are used
            unless the network has BatchNorm.
        normalize: What `model` is given: the network sees normalised inputs.

    Raises:
        ValueError: If the network keeps anything besides parameters and running statistics.

    Example:
        >>> from fisherjax.networks import LeNet
        >>> init(LeNet(), jax.random.key(0), jnp.zeros((1, 28, 28, 1)))["conv2"]["kernel"].shape
        (5, 5, 6, 16)
    """
    # Lazily: nothing but the initialisers runs.
    variables = module.lazy_init(key, tree.shape_of(inputs, 1))
    statistics.check_collections(module, variables)
    if "batch_stats" not in variables:
        return variables["params"]
    seen = None
    if not isinstance(inputs, jax.ShapeDtypeStruct) and _takes_train(module):
        # What is known stays known under `jit`.
        with jax.ensure_compile_time_eval():
            few = inputs[: statistics.ENOUGH]
            few = jnp.asarray(few) if normalize is None else normalize(few)
            seen = _cast(few, variables["params"])
    return statistics.first(module, key, variables, seen)


@cached
def apply_fn(
    module: flax.linen.Module,
    normalize: Callable[[Array], Array] | None = None,
    *,
    any_width: bool = False,
) -> Apply:
    """Make the function `apply(params, inputs [B, ...]) -> outputs [B, ..., C]` of a flax module.

    What the module is made of can be hashed. `normalize` is applied to the inputs first, such as
    `datasets.normalizer(dataset)`, so that images stay uint8 in memory. BatchNorm uses the running
    statistics. With `any_width` dense and convolution layers are as wide as their leaves say, as
    networks that `algorithms.pfnm` made need it; otherwise leaves of another shape are refused.
    Equal arguments give the same function object, so that nothing compiles again.

    Example:
        >>> from fisherjax.networks import MLP
        >>> params = init(MLP(), jax.random.key(0), jnp.zeros((1, 64)))
        >>> apply_fn(MLP(), normalize=lambda x: x / 16)(params, jnp.ones((3, 64))).shape
        (3, 10)
    """

    def apply(params: Params, inputs: Array) -> Array:
        inputs = inputs if normalize is None else normalize(inputs)
        wide = flax.linen.intercept_methods(_as_wide_as_its_leaves)
        centred = flax.linen.intercept_methods(statistics.centred)
        none = contextlib.nullcontext()
        with wide if any_width else none, centred if statistics.has_moments(params) else none:
            outputs: Any = module.apply(statistics.collections(params), _cast(inputs, params))
            return outputs

    return apply


def _as_wide_as_its_leaves(call: Callable, args: tuple, kwargs: dict, context: Any) -> Any:
    module = context.module
    if (
        isinstance(module, (flax.linen.Dense, flax.linen.Conv))
        and context.method_name == "__call__"
    ):
        kernel = module.get_variable("params", "kernel")
        if kernel is not None and kernel.shape[-1] != module.features:
            # The module is this call's own: others have the width that they were made with.
            object.__setattr__(module, "features", kernel.shape[-1])
    return call(*args, **kwargs)


@cached
def augmented(apply: Apply, augment: Callable[[Key, Array], Array]) -> ApplyTrain:
    """Make the `apply_train` of a `fisherjax.Model` that trains on augmented inputs.

    `augment(key, inputs)` gives inputs for `apply(params, inputs)`, such as
    `datasets.crop_and_flip(normalize)`; outside of training apply alone is used. Equal arguments
    give the same function object, so that nothing compiles again.

    Example:
        >>> noisy = lambda key, x: x + jax.random.normal(key, x.shape)
        >>> apply_train = augmented(lambda w, x: w * x, noisy)
        >>> apply_train(2.0, jnp.zeros(3), jax.random.key(0), jnp.ones(3))[0].shape
        (3,)
    """

    def apply_train(params: Params, inputs: Array, key: Key, weights: Array) -> tuple[Array, None]:
        del weights  # what they leave out is left out of the loss
        return apply(params, augment(_augment_key(key), inputs)), None

    return apply_train


def model(
    module: flax.linen.Module,
    params: Params,
    likelihood: Likelihood,
    *,
    normalize: Callable[[Array], Array] | None = None,
    augment: Callable[[Key, Array], Array] | None = None,
    any_width: bool = False,
    positions: Positions | None = None,
) -> Model:
    """Make the `fisherjax.Model` of a flax module, which trains as its layers and images ask for.

    A module with BatchNorm takes `train`, as is usual in flax, normalises by its minibatch where
    that is true, and keeps running statistics; rows that fill up a short minibatch do not count,
    here nor there. Everything else trains by `apply_fn`.

    Args:
        module: `module(inputs [B, ...]) -> outputs`, with BatchNorm `module(inputs, train=True)`.
        params: What `init` gave, of which only the structure is read.
        likelihood: What the outputs mean.
        normalize: Applied to the inputs first, as in `apply_fn`.
        augment: `(key, inputs) -> inputs` in place of normalize while training, such as
            `datasets.crop_and_flip(normalize)`.
        any_width: Whether it takes params of other widths, as in `apply_fn`.
        positions: Which positions of sequences count, as in `fisherjax.Model`.

    Returns:
        Equal models for equal arguments.

    Raises:
        ValueError: If a module with running statistics does not take `train`.

    Example:
        >>> import fisherjax as fj
        >>> module, images = fj.networks.NormedCNN(), jnp.zeros((2, 28, 28, 1))
        >>> params = fj.networks.init(module, jax.random.key(0), images)
        >>> model = fj.networks.model(module, params, fj.likelihoods.categorical)
        >>> outputs, new = model.apply_train(params, images, jax.random.key(1), jnp.ones(2))
        >>> print(outputs.shape, new["moments"]["norm1"]["second_moment"][0].round(2))
        (2, 10) 0.9

    Source: Ioffe and Szegedy, Batch normalization, ICML 2015, as flax has it.
    """
    apply = apply_fn(module, normalize, any_width=any_width)
    if not statistics.has_moments(params):
        train = (
            None if augment is None else augmented(apply_fn(module, any_width=any_width), augment)
        )
        return Model(apply, likelihood, train, positions=positions)
    if not _takes_train(module):
        raise ValueError(
            f"{type(module).__name__} keeps running statistics, but its __call__ takes no `train`; "
            "expected def __call__(self, inputs, train=False), with "
            "BatchNorm(use_running_average=not train)."
        )
    mask = {name: jax.tree.map(lambda _, t=name == "params": t, x) for name, x in params.items()}
    by_minibatch = _by_minibatch(module, normalize, augment)
    return Model(apply, likelihood, by_minibatch, mask, positions)


@cached
def _by_minibatch(
    module: flax.linen.Module,
    normalize: Callable[[Array], Array] | None,
    augment: Callable[[Key, Array], Array] | None,
) -> ApplyTrain:
    def apply_train(
        params: Params, inputs: Array, key: Key, weights: Array
    ) -> tuple[Array, Params]:
        if augment is not None:
            inputs = augment(_augment_key(key), inputs)
        elif normalize is not None:
            inputs = normalize(inputs)
        given, inputs = statistics.collections(params), _cast(inputs, params)
        with flax.linen.intercept_methods(statistics.counting(weights)):
            outputs, new = module.apply(given, inputs, train=True, mutable=["batch_stats"])
        moments = statistics.updated(params["moments"], new["batch_stats"])
        return outputs, {"params": params["params"], "moments": moments}

    return apply_train


def _augment_key(key: Key) -> Key:
    # The first edition kept the other half for dropout: so its augmentations are drawn again.
    return jax.random.split(key)[0]


def _cast(inputs: Array, params: Params) -> Array:
    """Compute in the dtype of the parameters, whatever that of the data."""
    dtype = jax.tree.leaves(params)[0].dtype
    return inputs.astype(dtype) if jnp.issubdtype(inputs.dtype, jnp.floating) else inputs


def _takes_train(module: flax.linen.Module) -> bool:
    return "train" in inspect.signature(type(module).__call__).parameters
