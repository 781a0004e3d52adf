"""The networks in flax linen."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax

import fisherjax as fj
from tests.foreign import networks, pools


class CNN(nn.Module):
    """Two convolutions, pooling and a dense layer."""

    shape: networks.Shape
    pooling: str
    is_stock: bool

    @nn.compact
    def __call__(self, x):
        own = None if self.is_stock else fj.nn.conv_general_dilated
        window, shape = (networks.WINDOW,) * self.shape.rank, self.shape
        conv = partial(nn.Conv, kernel_size=window, conv_general_dilated=own)
        second = conv(
            shape.features,
            strides=shape.stride,
            kernel_dilation=shape.dilation,
            feature_group_count=shape.groups,
            name="second",
        )
        first = nn.relu(conv(networks.FIRST, name="first")(x))
        h = nn.relu(second(first))
        size = pools.own_shape(self.pooling, shape.features)
        extra = size and self.param("extra", nn.initializers.normal(), size)
        pooled = pools.pool(self.pooling, h, extra, framework(shape.rank))
        head = nn.Dense(networks.CLASSES, name="head")
        return [first, h, pooled, head(pooled.reshape(len(x), -1))]


def framework(rank: int) -> dict[str, Any]:
    """Return flax's own pooling, for so many axes of space."""
    window = (2,) * rank
    return {
        "max_pool": lambda h: nn.max_pool(h, window, window),
        "avg_pool": lambda h: nn.avg_pool(h, window, window),
        "global_pool": lambda h: nn.avg_pool(h, h.shape[1:-1]),
    }


def build(shape: networks.Shape, pooling: str, is_stock: bool, example: jax.Array) -> tuple:
    """Return the shapes of params, and the function of params and inputs."""
    module = CNN(shape, pooling, is_stock)
    params = jax.eval_shape(module.init, jax.random.key(0), example)["params"]
    return params, lambda params, x: module.apply({"params": params}, x)
