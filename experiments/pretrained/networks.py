"""Networks for images that have weights, as pure functions of the names that their files have.

Leaves have the names and the layout of PyTorch's state dicts. Convolutions are fisherjax's products
of patches. Dropout of the originals is left out.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import fisherjax as fj
from fisherjax.typing import Array


class Layers(NamedTuple):
    """What a network is computed with.

    Attributes:
        take: `(name, shape) -> leaf`, a leaf of the network.
        normalize: `(x [B, H, W, C], name) -> x`, with each channel's mean 0 and variance 1.
    """

    take: Callable[[str, tuple[int, ...]], Array]
    normalize: Callable[[Array, str], Array]


class Network(NamedTuple):
    """A network for images.

    Attributes:
        outputs: `(layers, x [B, H, W, C], number of classes) -> [B, classes]`, of scaled pixels x.
        head: Name of the last layer.
        shape: Shape of an image, [H, W, C].
        mean: Mean of each channel of pixels in [0, 1], which is subtracted.
        std: Number by which each channel is divided then.
        file: Name of its file of weights, see `weights`; "" if there is none to fetch.
        epsilon: What BatchNorm adds to variances.
    """

    outputs: Callable[[Layers, Array, int], Array]
    head: str
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    file: str = ""
    epsilon: float = 1e-5


def _conv(
    layers: Layers,
    x: Array,
    name: str,
    width: int,
    size: int = 3,
    stride: int = 1,
    padding: Any = None,
    groups: int = 1,
) -> Array:
    """Convolve, without a bias; the padding is half of the kernel if none is given."""
    kernel = layers.take(f"{name}.weight", (width, x.shape[3] // groups, size, size))
    padding = 2 * ((size // 2, size // 2),) if padding is None else padding
    return fj.nn.conv_general_dilated(
        x,
        kernel.transpose(2, 3, 1, 0),
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def _conv_bias(layers: Layers, x: Array, name: str, width: int) -> Array:
    return _conv(layers, x, name, width) + layers.take(f"{name}.bias", (width,))


def _norm(layers: Layers, x: Array, name: str) -> Array:
    scale, shift = (layers.take(f"{name}.{leaf}", (x.shape[-1],)) for leaf in ("weight", "bias"))
    return layers.normalize(x, name) * scale + shift


def _dense(layers: Layers, x: Array, name: str, width: int) -> Array:
    kernel = layers.take(f"{name}.weight", (width, x.shape[-1]))
    return x @ kernel.T + layers.take(f"{name}.bias", (width,))


def _flat(x: Array) -> Array:
    """Flatten images in PyTorch's order, channels first."""
    return x.transpose(0, 3, 1, 2).reshape(len(x), -1)


def _svhn(layers: Layers, x: Array, num_classes: int) -> Array:
    """Compute six 3 x 3 convolutions with BatchNorm, and two dense layers."""
    for block, width in enumerate((32, 64, 128)):
        for place in (0, 3):
            x = _conv_bias(layers, x, f"features.{block}.{place}", width)
            x = jax.nn.relu(_norm(layers, x, f"features.{block}.{place + 1}"))
        x = fj.nn.max_pool(x, 2)
    hidden = jax.nn.relu(_dense(layers, _flat(x), "classifier.1", 256))
    return _dense(layers, hidden, "classifier.4", num_classes)


def _mnist(layers: Layers, x: Array, num_classes: int) -> Array:
    """Compute two 3 x 3 convolutions and two dense layers."""
    for place, width in ((0, 32), (3, 64)):
        x = fj.nn.max_pool(jax.nn.relu(_conv_bias(layers, x, f"features.{place}", width)), 2)
    hidden = jax.nn.relu(_dense(layers, _flat(x), "classifier.0", 128))
    return _dense(layers, hidden, "classifier.2", num_classes)


def _usps(layers: Layers, x: Array, num_classes: int) -> Array:
    """Compute two 3 x 3 convolutions with BatchNorm, and two dense layers."""
    for place, width in ((0, 32), (4, 64)):
        x = _conv_bias(layers, x, f"features.{place}", width)
        x = fj.nn.max_pool(jax.nn.relu(_norm(layers, x, f"features.{place + 1}")), 2)
    hidden = jax.nn.relu(_dense(layers, _flat(x), "classifier.1", 128))
    return _dense(layers, hidden, "classifier.4", num_classes)


def _block(layers: Layers, x: Array, name: str, width: int, stride: int) -> Array:
    """Compute the two convolutions of a residual block."""
    hidden = _norm(layers, _conv(layers, x, f"{name}.conv1", width, 3, stride), f"{name}.bn1")
    hidden = _conv(layers, jax.nn.relu(hidden), f"{name}.conv2", width)
    return _norm(layers, hidden, f"{name}.bn2")


def _cifar_resnet(blocks: int, layers: Layers, x: Array, num_classes: int) -> Array:
    """Compute a residual network of 6 n + 2 layers, n = `blocks`, whose shortcuts have no leaves.

    Source: He, Zhang, Ren, Sun, Deep residual learning for image recognition, CVPR 2016, option A:
        where the size changes, every other pixel is taken, and new channels are zero.
    """
    x = jax.nn.relu(_norm(layers, _conv(layers, x, "conv1", 16), "bn1"))
    for stage, width in enumerate((16, 32, 64), start=1):
        for number in range(blocks):
            stride = 2 if stage > 1 and number == 0 else 1
            hidden = _block(layers, x, f"layer{stage}.{number}", width, stride)
            if stride == 2:
                x = jnp.pad(x[:, ::2, ::2], (*3 * ((0, 0),), (width // 4, width // 4)))
            x = jax.nn.relu(hidden + x)
    return _dense(layers, x.mean((1, 2)), "linear", num_classes)


def _resnet18(layers: Layers, x: Array, num_classes: int) -> Array:
    """Compute torchvision's ResNet-18.

    Source: He, Zhang, Ren, Sun, Deep residual learning for image recognition, CVPR 2016, option B:
        where the size changes, the shortcut is a 1 x 1 convolution.
    """
    x = jax.nn.relu(_norm(layers, _conv(layers, x, "conv1", 64, 7, 2), "bn1"))
    edges = ((0, 0), (1, 1), (1, 1), (0, 0))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), edges)
    for stage, width in enumerate((64, 128, 256, 512), start=1):
        for number in range(2):
            name, stride = f"layer{stage}.{number}", 2 if stage > 1 and number == 0 else 1
            hidden = _block(layers, x, name, width, stride)
            if stride == 2:
                short = _conv(layers, x, f"{name}.downsample.0", width, 1, 2)
                x = _norm(layers, short, f"{name}.downsample.1")
            x = jax.nn.relu(hidden + x)
    return _dense(layers, x.mean((1, 2)), "fc", num_classes)


# Repeats, kernel, first stride, factor of expansion, channels.
_STAGES = (
    *((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80)),
    *((3, 5, 1, 6, 112), (4, 5, 2, 6, 192), (1, 3, 1, 6, 320)),
)


def _efficientnet_lite0(layers: Layers, x: Array, num_classes: int) -> Array:
    """Compute EfficientNet-lite0: inverted bottlenecks with depthwise convolutions, ReLU6.

    Source: Tan, Le, EfficientNet, ICML 2019; lite: without squeeze-and-excitation.
    """

    def normed(x: Array, conv: str, norm: str, *how: Any) -> Array:
        return _norm(layers, _conv(layers, x, conv, *how), norm)

    x = jax.nn.relu6(normed(x, "_conv_stem", "_bn0", 32, 3, 2, "SAME"))
    number = 0
    for repeats, size, first, factor, width in _STAGES:
        for repeat in range(repeats):
            name, hidden, inner = f"_blocks.{number}", x, factor * x.shape[3]
            stride, number = first if repeat == 0 else 1, number + 1
            if factor > 1:
                expand = f"{name}._expand_conv", f"{name}._bn0"
                hidden = jax.nn.relu6(normed(hidden, *expand, inner, 1))
            depthwise = f"{name}._depthwise_conv", f"{name}._bn1"
            hidden = jax.nn.relu6(normed(hidden, *depthwise, inner, size, stride, "SAME", inner))
            hidden = normed(hidden, f"{name}._project_conv", f"{name}._bn2", width, 1)
            x = hidden + x if hidden.shape == x.shape else hidden
    x = jax.nn.relu6(normed(x, "_conv_head", "_bn1", 1280, 1))
    return _dense(layers, x.mean((1, 2)), "_fc", num_classes)


_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SVHN = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
_LITE = 3 * (127 / 255,), 3 * (128 / 255,)
_RESNET20, _RESNET32 = (functools.partial(_cifar_resnet, blocks) for blocks in (3, 5))
NETWORKS = {
    "svhn": Network(_svhn, "classifier.4", (32, 32, 3), *_SVHN, "digits/svhn.pth"),
    "mnist": Network(_mnist, "classifier.2", (28, 28, 1), (0.1307,), (0.3081,), "digits/mnist.pth"),
    "usps": Network(_usps, "classifier.4", (16, 16, 1), (0.2471,), (0.2994,), "digits/usps.pth"),
    "resnet20": Network(
        _RESNET20, "linear", (32, 32, 3), *_IMAGENET, "cifar10/resnet20.safetensors"
    ),
    "resnet32": Network(
        _RESNET32, "linear", (32, 32, 3), *_IMAGENET, "cifar10/resnet32.safetensors"
    ),
    "efficientnet_lite0": Network(
        *(_efficientnet_lite0, "_fc", (64, 64, 3), *_LITE, "imagenet/efficientnet_lite0.pth"),
        epsilon=1e-3,
    ),
    "resnet18": Network(_resnet18, "fc", (64, 64, 3), *_IMAGENET),
}
"""The networks by name. Images of any size fit those that average over positions in the end."""
