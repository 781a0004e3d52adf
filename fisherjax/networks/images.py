"""Networks for images: dense layers, and convolutional networks with pooling."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen
import jax
import jax.numpy as jnp

from fisherjax import nn
from fisherjax.typing import Array


class MLP(flax.linen.Module):
    """A network of dense layers with ReLU between them, for inputs of any shape.

    Args:
        features: Widths of the hidden layers.
        num_classes: Number of outputs C.
        use_bias: Whether layers have biases (default False).

    Example:
        >>> import jax, fisherjax as fj
        >>> params = fj.networks.init(MLP(), jax.random.key(0), jnp.zeros((1, 64)))
        >>> {name: params[name]["kernel"].shape for name in sorted(params)}
        {'dense1': (64, 64), 'dense2': (64, 64), 'dense3': (64, 10)}
    """

    features: tuple[int, ...] = (64, 64)
    num_classes: int = 10
    use_bias: bool = False

    @flax.linen.compact
    def __call__(self, inputs: Array) -> Array:
        """Return the outputs [B, num_classes] of inputs [B, ...]."""
        return _dense_layers(inputs, (*self.features, self.num_classes), self.use_bias)


class ResidualMLP(flax.linen.Module):
    """A dense layer, residual blocks h + relu(h A) B and a dense layer, for inputs of any shape.

    Args:
        width: Width of the hidden layers.
        blocks: Number of blocks.
        num_classes: Number of outputs C.
        use_bias: Whether layers have biases (default False).

    Example:
        >>> import jax, fisherjax as fj
        >>> network, inputs = ResidualMLP(blocks=1), jnp.zeros((1, 64))
        >>> params = fj.networks.init(network, jax.random.key(0), inputs)
        >>> {name: params[name]["kernel"].shape for name in sorted(params)}
        {'head': (64, 10), 'in1': (64, 64), 'out1': (64, 64), 'stem': (64, 64)}

    Source: He, Zhang, Ren, Sun, Identity mappings in deep residual networks, ECCV 2016: nothing
        follows the sum. Deviation: dense layers, no normalisation, and no activation before A.
    """

    width: int = 64
    blocks: int = 4
    num_classes: int = 10
    use_bias: bool = False

    @flax.linen.compact
    def __call__(self, inputs: Array) -> Array:
        """Return the outputs [B, num_classes] of inputs [B, ...]."""
        layer = partial(dense, use_bias=self.use_bias)
        hidden = layer(inputs.reshape(len(inputs), -1), self.width, "stem")
        for number in range(1, self.blocks + 1):
            inner = flax.linen.relu(layer(hidden, self.width, f"in{number}"))
            hidden = hidden + layer(inner, self.width, f"out{number}")
        return layer(hidden, self.num_classes, "head")


class LeNet(flax.linen.Module):
    """LeNet for images: conv5 6, pool, conv5 16, pool, dense 120, 84, num_classes.

    Without biases it has 44,190 parameters for 28 x 28 x 1 images.

    Args:
        num_classes: Number of outputs C.
        use_bias: Whether layers have biases (default False).
        batch_norm: Whether all layers but the last have BatchNorm (default False).
    """

    num_classes: int = 10
    use_bias: bool = False
    batch_norm: bool = False
    channels: ClassVar[tuple[int, ...]] = (6, 16)
    features: ClassVar[tuple[int, ...]] = (120, 84)

    @flax.linen.compact
    def __call__(self, inputs: Array, train: bool = False) -> Array:
        """Return the outputs [B, num_classes] of images [B, H, W, C]."""
        if inputs.ndim != 4 or min(inputs.shape[1:3]) < 16:
            raise ValueError(
                f"{type(self).__name__} got inputs of shape {inputs.shape}; expected images "
                "[B, H, W, C] of at least 16 x 16 pixels. Use MLP for smaller ones."
            )
        hidden, norm = inputs, _norm(train) if self.batch_norm else None
        for number, channels in enumerate(self.channels, start=1):
            hidden = convolve(hidden, channels, 5, f"conv{number}", use_bias=self.use_bias)
            hidden = hidden if norm is None else norm(name=f"norm{number}")(hidden)
            # The maximum commutes with ReLU; pooled first, ReLU has a quarter of the work.
            hidden = flax.linen.relu(nn.max_pool(hidden, 2))
        widths = (*self.features, self.num_classes)
        return _dense_layers(hidden, widths, self.use_bias, norm, len(self.channels))


SimpleCNN = SimpleCNNMNIST = partial(LeNet, use_bias=True)
"""LeNet with biases, as in NIID-Bench: 62,006 parameters for CIFAR-10, 44,426 for MNIST."""


class CNN(LeNet):
    """FedNet for images: conv5 32, pool, conv5 64, pool, dense 512, 128, num_classes.

    Without biases it has 939,616 parameters for 32 x 32 x 3 images.
    """

    channels = (32, 64)
    features = (512, 128)


class NormedCNN(LeNet):
    """A CNN with BatchNorm: conv5 16, pool, conv5 32, pool, dense 120, 84, num_classes.

    With biases, scales and shifts it has 121,686 parameters for 32 x 32 x 3 images. Because of its
    running statistics `init` returns {"params": ..., "moments": ...}.

    Example:
        >>> import jax, fisherjax as fj
        >>> variables = fj.networks.init(NormedCNN(), jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
        >>> list(variables), sorted(variables["moments"]["norm1"])
        (['params', 'moments'], ['mean', 'second_moment', 'shift', 'within'])
    """

    use_bias: bool = True
    batch_norm: bool = True
    channels = (16, 32)


class DropoutCNN(flax.linen.Module):
    """A CNN with dropout: conv3 32, conv3 64, pool, dense 128, num_classes.

    With 62 classes it has 1,206,590 parameters for 28 x 28 x 1 images. `model` makes its training
    function.

    Args:
        num_classes: Number of outputs C.
        dropout: Share of the 128 values that training drops, and half that share of the pooled
            ones (default 0.5).

    Source: Reddi et al., Adaptive Federated Optimization, ICLR 2021 (the network for EMNIST, also
    that of FedFish). Deviation: the initialisation is that of the other networks.
    """

    num_classes: int = 62
    dropout: float = 0.5

    @flax.linen.compact
    def __call__(self, images: Array, train: bool = False) -> Array:
        """Return the outputs [B, num_classes] of images [B, H, W, C]."""
        hidden = images
        for number, channels in enumerate((32, 64), start=1):
            hidden = convolve(hidden, channels, 3, f"conv{number}", use_bias=True)
            hidden = flax.linen.relu(hidden)
        hidden = nn.max_pool(hidden, 2).reshape(len(images), -1)
        for number, width in enumerate((128, self.num_classes), start=1):
            share = self.dropout * number / 2  # half of it first
            hidden = flax.linen.Dropout(share, deterministic=not train)(hidden)
            hidden = dense(hidden, width, f"dense{number}", use_bias=True)
            hidden = flax.linen.relu(hidden) if number == 1 else hidden
        return hidden


def convolve(
    x: Array,
    channels: int,
    size: int,
    name: str,
    *,
    use_bias: bool,
    stride: int = 1,
    padding: int | str = "VALID",
) -> Array:
    """Apply a new convolution of size x size pixels, padded by pixels on all sides."""
    convolution = flax.linen.Conv(
        channels,
        (size, size),
        stride,
        padding=padding,
        conv_general_dilated=nn.conv_general_dilated,
        name=name,
        **_layer_settings(size * size * x.shape[-1], use_bias),
    )
    return convolution(x)


def dense(x: Array, width: int, name: str, *, use_bias: bool) -> Array:
    """Apply a new dense layer."""
    return flax.linen.Dense(width, name=name, **_layer_settings(x.shape[-1], use_bias))(x)


def _layer_settings(fan_in: int, use_bias: bool) -> dict[str, Any]:
    """Return the settings of a layer, drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    draw = partial(jax.random.uniform, minval=-(fan_in**-0.5), maxval=fan_in**-0.5)
    dtype = jnp.result_type(float)
    return {"use_bias": use_bias, "param_dtype": dtype, "kernel_init": draw, "bias_init": draw}


def _norm(train: bool) -> Callable[..., flax.linen.BatchNorm]:
    """Make BatchNorm with PyTorch's constants; PyTorch divides the running variance by n - 1."""
    return partial(
        flax.linen.BatchNorm,
        use_running_average=not train,
        momentum=0.9,
        param_dtype=jnp.result_type(float),
    )


def _dense_layers(
    hidden: Array,
    features: tuple[int, ...],
    use_bias: bool,
    norm: Callable[..., flax.linen.BatchNorm] | None = None,
    before: int = 0,
) -> Array:
    """Apply dense layers; their BatchNorms, if any, are numbered from `before` + 1."""
    hidden = hidden.reshape(hidden.shape[0], math.prod(hidden.shape[1:]))
    for number, width in enumerate(features, start=1):
        hidden = dense(hidden, width, f"dense{number}", use_bias=use_bias)
        if number < len(features):
            hidden = hidden if norm is None else norm(name=f"norm{before + number}")(hidden)
            hidden = flax.linen.relu(hidden)
    return hidden
