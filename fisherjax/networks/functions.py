"""Make pure functions of flax modules: their parameters, `apply` and `apply_train`.

Running statistics of BatchNorm are leaves of params that no gradient trains. They are stored as
moments. The moments of all examples are the means of the clients' moments, weighted by their
numbers of examples: averaging leaves computes the statistics of the mixture; see `statistics`.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp

from fisherjax import tree
from fisherjax._core import batches
from fisherjax._core.caching import cached
from fisherjax.networks import statistics
from fisherjax.typing import (
    Apply,
    ApplyTrain,
    Array,
    Inputs,
    Key,
    Likelihood,
    Model,
    Params,
    Positions,
)


def init(
    module: flax.linen.Module,
    key: Key,
    inputs: Inputs,
    *,
    normalize: Callable[[Any], Array] | None = None,
) -> Params:
    """Draw a network's parameters: the content of flax's collection "params", nested dicts.

    With BatchNorm they are {"params": ..., "moments": ...}, where the moments hold each mean and
    variance of flax's "batch_stats" in a form that adds up over clients. If a channel's mean over
    the first 32 inputs is more than 8 standard deviations from zero, such as that of a year, its
    moments are relative to this mean, which is stored in a frozen leaf `shift` that all clients
    get. These means are not private: compute them from public inputs or from zeros.

    Args:
        module: The network.
        key: Random key of the initialisers.
        inputs: A batch [B, ...] of NumPy or JAX, or its shape and dtype. Its values are used only
            if the network has BatchNorm.
        normalize: The function that `model` gets, because the network sees normalised inputs.

    Raises:
        ValueError: If the network has collections besides parameters and running statistics.

    Example:
        >>> from fisherjax.networks import LeNet
        >>> init(LeNet(), jax.random.key(0), jnp.zeros((1, 28, 28, 1)))["conv2"]["kernel"].shape
        (5, 5, 6, 16)
    """
    # Only the initialisers run.
    variables = module.lazy_init(key, tree.shape_of(inputs, 1))
    statistics.check_collections(module, variables)
    if "batch_stats" not in variables:
        return variables["params"]
    seen = None
    is_shape = isinstance(jax.tree.leaves(inputs)[0], jax.ShapeDtypeStruct)
    if not is_shape and _takes_train(module):
        # Under `jit`, values that are known are computed at once.
        with jax.ensure_compile_time_eval():
            few = batches.take(inputs, slice(statistics.MEAN_EXAMPLES))
            few = jax.tree.map(jnp.asarray, few) if normalize is None else normalize(few)
            seen = _cast(few, variables["params"])
    return statistics.first_params(module, key, variables, seen)


@cached
def apply_fn(
    module: flax.linen.Module,
    normalize: Callable[[Array], Array] | None = None,
    *,
    any_width: bool = False,
) -> Apply:
    """Make the function `apply(params, inputs [B, ...]) -> outputs [B, ..., C]` of a flax module.

    BatchNorm uses the running statistics. Equal arguments give the same function object, so that
    nothing compiles again.

    Args:
        module: The network, with hashable fields.
        normalize: Function applied to the inputs first, such as `datasets.normalizer(dataset)`, so
            that images stay uint8 in memory.
        any_width: Whether dense and convolution layers take their widths from params, as networks
            that `algorithms.pfnm` made require. Otherwise leaves of other shapes are refused.

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
    module, layers = context.module, (flax.linen.Dense, flax.linen.Conv)
    if isinstance(module, layers) and context.method_name == "__call__":
        kernel = module.get_variable("params", "kernel")
        if kernel is not None and kernel.shape[-1] != module.features:
            # The module belongs to this call only: others keep their widths.
            object.__setattr__(module, "features", kernel.shape[-1])
    return call(*args, **kwargs)


@cached
def augmented(apply: Apply, augment: Callable[[Key, Array], Array]) -> ApplyTrain:
    """Make the `apply_train` of a `fisherjax.Model` that trains on augmented inputs.

    `augment(key, inputs)` returns inputs for `apply(params, inputs)`, such as
    `datasets.crop_and_flip(normalize)`. Only training augments. Equal arguments give the same
    function object, so that nothing compiles again.

    Example:
        >>> noisy = lambda key, x: x + jax.random.normal(key, x.shape)
        >>> apply_train = augmented(lambda w, x: w * x, noisy)
        >>> apply_train(2.0, jnp.zeros(3), jax.random.key(0), jnp.ones(3))[0].shape
        (3,)
    """

    def apply_train(params: Params, inputs: Array, key: Key, weights: Array) -> tuple[Array, None]:
        del weights  # the loss leaves out rows of weight zero
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
    """Make the `fisherjax.Model` of a flax module, with BatchNorm, dropout and augmentation.

    A module with BatchNorm or dropout takes an argument `train`, as is usual in flax. In training,
    BatchNorm normalises by the minibatch and updates running statistics; rows that fill a short
    minibatch count for neither. A module has dropout if it has a field `dropout` that is not zero;
    its key is split from that of the minibatch. Other modules train with `apply_fn`.

    Args:
        module: `module(inputs [B, ...]) -> outputs`, with BatchNorm `module(inputs, train=True)`.
        params: Parameters of `init`; only their structure is read.
        likelihood: Likelihood of the targets given the outputs.
        normalize: Function applied to the inputs first, as in `apply_fn`.
        augment: `(key, inputs) -> inputs`, used in place of normalize in training, such as
            `datasets.crop_and_flip(normalize)`.
        any_width: Whether layers take their widths from params, as in `apply_fn`.
        positions: Function that masks positions of sequences, as in `fisherjax.Model`.

    Returns:
        The model; equal arguments give equal models.

    Raises:
        ValueError: If a module with running statistics or dropout does not take `train`.

    Example:
        >>> import fisherjax as fj
        >>> module, images = fj.networks.NormedCNN(), jnp.zeros((2, 28, 28, 1))
        >>> params = fj.networks.init(module, jax.random.key(0), images)
        >>> model = fj.networks.model(module, params, fj.likelihoods.categorical)
        >>> outputs, new = model.apply_train(params, images, jax.random.key(1), jnp.ones(2))
        >>> print(outputs.shape, new["moments"]["norm1"]["second_moment"][0].round(2))
        (2, 10) 0.9

    Source: Ioffe and Szegedy, Batch normalization, ICML 2015, as in flax.
    """
    apply = apply_fn(module, normalize, any_width=any_width)
    has_moments = statistics.has_moments(params)
    if not has_moments and not _has_dropout(module):
        plain = apply_fn(module, any_width=any_width)
        train = None if augment is None else augmented(plain, augment)
        return Model(apply, likelihood, train, positions=positions)
    if not _takes_train(module):
        raise ValueError(
            f"{type(module).__name__} keeps running statistics or has dropout, but its __call__ "
            "takes no `train`; expected def __call__(self, inputs, train=False), with "
            "BatchNorm(use_running_average=not train) or Dropout(deterministic=not train)."
        )
    by_minibatch = _by_minibatch(module, normalize, augment)
    if not has_moments:
        return Model(apply, likelihood, by_minibatch, positions=positions)
    mask = {name: jax.tree.map(lambda _, t=name == "params": t, x) for name, x in params.items()}
    return Model(apply, likelihood, by_minibatch, mask, positions)


@cached
def _by_minibatch(
    module: flax.linen.Module,
    normalize: Callable[[Array], Array] | None,
    augment: Callable[[Key, Array], Array] | None,
) -> ApplyTrain:
    def apply_train(
        params: Params, inputs: Array, key: Key, weights: Array
    ) -> tuple[Array, Params | None]:
        if augment is not None:
            inputs = augment(_augment_key(key), inputs)
        elif normalize is not None:
            inputs = normalize(inputs)
        given, inputs = statistics.collections(params), _cast(inputs, params)
        rngs = {"dropout": jax.random.split(key)[1]} if _has_dropout(module) else None
        with flax.linen.intercept_methods(statistics.counting(weights)):
            outputs, new = module.apply(
                given, inputs, train=True, mutable=["batch_stats"], rngs=rngs
            )
        if not statistics.has_moments(params):
            return outputs, None
        moments = statistics.updated(params["moments"], new["batch_stats"])
        return outputs, {"params": params["params"], "moments": moments}

    return apply_train


def _augment_key(key: Key) -> Key:
    # The other half is the key of dropout.
    return jax.random.split(key)[0]


def _cast(inputs: Array, params: Params) -> Array:
    """Return floating-point inputs in the dtype of the parameters."""
    dtype = jax.tree.leaves(params)[0].dtype
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, inputs
    )


def _has_dropout(module: flax.linen.Module) -> bool:
    return bool(getattr(module, "dropout", 0))


def _takes_train(module: flax.linen.Module) -> bool:
    return "train" in inspect.signature(type(module).__call__).parameters
