"""A residual network for small images, normalised by groups of channels."""

from functools import partial

import flax.linen
import jax.numpy as jnp

from fisherjax.networks.images import convolve, dense
from fisherjax.typing import Array


class ResNet18(flax.linen.Module):
    """ResNet-18 with GroupNorm for images of about 32 x 32 pixels.

        h <- relu(h' + norm(conv3(relu(norm(conv3(h))))))

    Four stages of two blocks; the first block of the later stages halves height and width and
    doubles the channels, where h' = norm(conv1(h)), and elsewhere h' = h. The stem is conv3 with
    stride one and without pooling. GroupNorm has no running statistics, so that clients' models
    average as they are. With 100 classes it has 11,220,132 parameters.

    Args:
        num_classes: Number of outputs C.
        width: Number of channels of the first stage.
        groups: Number of groups of GroupNorm, which divides the width.

    Example:
        >>> import jax, fisherjax as fj
        >>> network, images = ResNet18(10, width=4), jnp.zeros((2, 32, 32, 3))
        >>> params = jax.eval_shape(
        ...     lambda k: fj.networks.init(network, k, images), jax.random.key(0)
        ... )
        >>> jax.eval_shape(fj.networks.apply_fn(network), params, images).shape
        (2, 10)

    Source: He, Zhang, Ren, Sun, Deep residual learning for image recognition, CVPR 2016; with
    GroupNorm for CIFAR-100 as in Reddi et al., Adaptive Federated Optimization, ICLR 2021, and
    FedFish, which do not state the number of groups: Acar et al., FedDyn, ICLR 2021 (code), has 2.
    """

    num_classes: int = 100
    width: int = 64
    groups: int = 2

    @flax.linen.compact
    def __call__(self, images: Array) -> Array:
        """Return the outputs [B, num_classes] of images [B, H, W, C]."""
        if images.ndim != 4 or self.width % self.groups:
            raise ValueError(
                f"ResNet18 got inputs of shape {images.shape}, width={self.width} and "
                f"groups={self.groups}; expected images [B, H, W, C] and a multiple of the groups."
            )
        hidden = flax.linen.relu(_conv(images, self.width, 3, 1, self.groups, "stem"))
        for stage in range(4):
            channels = self.width * 2**stage
            for block in (1, 2):
                stride = 2 if stage and block == 1 else 1
                name = partial("{}_{}_{}".format, stage + 1, block)
                inner = flax.linen.relu(_conv(hidden, channels, 3, stride, self.groups, name("a")))
                inner = _conv(inner, channels, 3, 1, self.groups, name("b"))
                if hidden.shape != inner.shape:
                    hidden = _conv(hidden, channels, 1, stride, self.groups, name("shortcut"))
                hidden = flax.linen.relu(hidden + inner)
        return dense(hidden.mean((1, 2)), self.num_classes, "head", use_bias=True)


def _conv(x: Array, channels: int, size: int, stride: int, groups: int, name: str) -> Array:
    """Apply a convolution without bias and GroupNorm."""
    how = {"use_bias": False, "stride": stride, "padding": size // 2}
    hidden = convolve(x, channels, size, f"conv{name}", **how)
    norm = flax.linen.GroupNorm(groups, name=f"norm{name}", param_dtype=jnp.result_type(float))
    return norm(hidden)
