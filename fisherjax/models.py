"""The papers' networks in flax, with their initialisation, and the pair (params, apply) of a model.

Nothing else in the library needs flax: any `apply(params, inputs) -> outputs` will do.

Source: Jhunjhunwala, Wang, Joshi, "FedFisher: Leveraging Fisher Information for One-Shot Federated
Learning", AISTATS 2024 (LeNet for MNIST-like images, the FedNet CNN for 32 x 32 images, both
without biases); Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos: An Experimental
Study", ICDE 2022, and its code (SimpleCNN and SimpleCNNMNIST). Deviation: images are [H, W, C] and
are flattened in that order.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp

from fisherjax import nn
from fisherjax.typing import Apply, Array, Key, Params


class MLP(flax.linen.Module):
    """Map inputs of any shape through dense layers with ReLU between them.

    Args:
        features: widths of the hidden layers.
        num_classes: number of outputs.
        use_bias: whether layers have a bias.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fisherjax import models
        >>> params = models.init(models.MLP(), jax.random.key(0), jnp.zeros((1, 64)))
        >>> {name: layer["kernel"].shape for name, layer in params.items()}
        {'dense1': (64, 64), 'dense2': (64, 64), 'dense3': (64, 10)}
    """

    features: tuple[int, ...] = (64, 64)
    num_classes: int = 10
    use_bias: bool = False

    @flax.linen.compact
    def __call__(self, inputs: Array) -> Array:
        """Return the outputs [B, num_classes] of inputs [B, ...]."""
        hidden = inputs.reshape(inputs.shape[0], math.prod(inputs.shape[1:]))
        return _dense_layers(hidden, (*self.features, self.num_classes), self.use_bias)


class LeNet(flax.linen.Module):
    """Classify images: conv5 6, pool, conv5 16, pool, dense 120, 84, num_classes.

    Args:
        num_classes: number of outputs.
        use_bias: whether layers have a bias; 44,190 parameters without, on 28 x 28 x 1 images.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fisherjax import models
        >>> params = models.init(models.LeNet(), jax.random.key(0), jnp.zeros((1, 28, 28, 1)))
        >>> params["conv2"]["kernel"].shape
        (5, 5, 6, 16)
    """

    num_classes: int = 10
    use_bias: bool = False

    @flax.linen.compact
    def __call__(self, inputs: Array) -> Array:
        """Return the outputs [B, num_classes] of images [B, H, W, C]."""
        hidden = _conv_layers(self, inputs, (6, 16), self.use_bias)
        return _dense_layers(hidden, (120, 84, self.num_classes), self.use_bias)


SimpleCNN = partial(LeNet, use_bias=True)
"""NIID-Bench's network for 32 x 32 x 3 images: LeNet with biases, 62,006 parameters."""

SimpleCNNMNIST = partial(LeNet, use_bias=True)
"""NIID-Bench's network for 28 x 28 x 1 images: LeNet with biases, 44,426 parameters."""


class CNN(flax.linen.Module):
    """Classify images: conv5 32, pool, conv5 64, pool, dense 512, 128, num_classes ("FedNet").

    Args:
        num_classes: number of outputs.
        use_bias: whether layers have a bias; 939,616 parameters without, on 32 x 32 x 3 images.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fisherjax import models
        >>> params = models.init(models.CNN(), jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
        >>> params["dense1"]["kernel"].shape
        (1600, 512)
    """

    num_classes: int = 10
    use_bias: bool = False

    @flax.linen.compact
    def __call__(self, inputs: Array) -> Array:
        """Return the outputs [B, num_classes] of images [B, H, W, C]."""
        hidden = _conv_layers(self, inputs, (32, 64), self.use_bias)
        return _dense_layers(hidden, (512, 128, self.num_classes), self.use_bias)


def init(model: flax.linen.Module, key: Key, inputs: Array) -> Params:
    """Draw a model's parameters.

    Args:
        model: a flax module that has parameters only, no running statistics.
        key: a typed key.
        inputs: a batch [B, ...] of inputs (NumPy or JAX); only shape and dtype are used.

    Returns:
        The content of flax's "params" collection, nested dicts of arrays.

    Raises:
        ValueError: if the model keeps anything besides parameters.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fisherjax import models
        >>> params = models.init(models.MLP((32,)), jax.random.key(0), jnp.zeros((5, 8, 8, 1)))
        >>> params["dense1"]["kernel"].shape
        (64, 32)
    """
    dtype = jax.dtypes.canonicalize_dtype(inputs.dtype)
    # Lazily: nothing but the initialisers runs.
    variables = model.lazy_init(key, jax.ShapeDtypeStruct((1, *inputs.shape[1:]), dtype))
    others = sorted(set(variables) - {"params"})
    if others:
        raise ValueError(
            f"{type(model).__name__} keeps the collections {others} besides its parameters; "
            "expected parameters only. Call model.init yourself, put all into one pytree, and give "
            "training.train a mask and apply_train."
        )
    return variables["params"]


def apply_fn(model: flax.linen.Module, normalize: Callable[[Array], Array] | None = None) -> Apply:
    """Make the function `apply(params, inputs) -> outputs` of a flax model.

    Compiled loops recognise a function by its identity: call this once and keep the result.

    Args:
        model: a flax module.
        normalize: applied to the inputs first, for instance `data.normalizer(dataset)`, so that
            images stay uint8 in memory.

    Returns:
        A function of params and inputs [B, ...], with outputs [B, ..., C].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fisherjax import models
        >>> model = models.MLP()
        >>> apply = models.apply_fn(model, normalize=lambda x: x / 16)
        >>> params = models.init(model, jax.random.key(0), jnp.zeros((1, 64)))
        >>> apply(params, jnp.ones((3, 64))).shape
        (3, 10)
    """

    def apply(params: Params, inputs: Array) -> Array:
        inputs = inputs if normalize is None else normalize(inputs)
        # K-FAC does not recognise a layer whose parameters are cast on their way to it.
        dtype = jax.tree.leaves(params)[0].dtype
        inputs = inputs.astype(dtype) if jnp.issubdtype(inputs.dtype, jnp.floating) else inputs
        return model.apply({"params": params}, inputs)

    return apply


def _uniform(fan_in: int) -> Callable[..., Array]:
    """Return an initialiser that draws from U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    bound = fan_in**-0.5

    def draw(key: Key, shape: tuple[int, ...], dtype: Any = float) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


def _dense_layers(hidden: Array, features: tuple[int, ...], use_bias: bool) -> Array:
    for number, width in enumerate(features, start=1):
        initializer = _uniform(hidden.shape[-1])
        hidden = flax.linen.Dense(
            width,
            use_bias=use_bias,
            param_dtype=jnp.result_type(float),
            kernel_init=initializer,
            bias_init=initializer,
            name=f"dense{number}",
        )(hidden)
        hidden = flax.linen.relu(hidden) if number < len(features) else hidden
    return hidden


def _conv_layers(
    model: flax.linen.Module, images: Array, features: tuple[int, ...], use_bias: bool
) -> Array:
    """Apply valid 5 x 5 convolutions, each followed by 2 x 2 pooling and ReLU; flatten."""
    if images.ndim != 4 or min(images.shape[1:3]) < 16:
        raise ValueError(
            f"{type(model).__name__} got inputs of shape {images.shape}; expected images "
            "[B, H, W, C] of at least 16 x 16 pixels. Use MLP for smaller ones."
        )
    hidden = images
    for number, channels in enumerate(features, start=1):
        initializer = _uniform(25 * hidden.shape[-1])
        hidden = flax.linen.Conv(
            channels,
            (5, 5),
            padding="VALID",
            use_bias=use_bias,
            param_dtype=jnp.result_type(float),
            kernel_init=initializer,
            bias_init=initializer,
            conv_general_dilated=nn.conv_general_dilated,
            name=f"conv{number}",
        )(hidden)
        # The maximum commutes with ReLU and leaves it a quarter of the work.
        hidden = flax.linen.relu(nn.max_pool(hidden, 2))
    return hidden.reshape(hidden.shape[0], math.prod(hidden.shape[1:]))
