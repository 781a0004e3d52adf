"""The networks in flax nnx."""

from functools import partial

import jax
from flax import nnx

import fisherjax as fj
from tests.foreign import linen_networks, networks, pools


class CNN(nnx.Module):
    """Two convolutions, pooling and a dense layer."""

    def __init__(self, shape, pooling, is_stock, size, rngs):
        # Left out, it is the framework's own.
        own = {} if is_stock else {"conv_general_dilated": fj.nn.conv_general_dilated}
        window = (networks.WINDOW,) * shape.rank
        conv = partial(nnx.Conv, kernel_size=window, rngs=rngs, **own)
        self.first = conv(networks.CHANNELS, networks.FIRST)
        self.second = conv(
            networks.FIRST,
            shape.features,
            strides=shape.stride,
            kernel_dilation=shape.dilation,
            feature_group_count=shape.groups,
        )
        self.pooling, self.rank = pooling, shape.rank
        extra = pools.own_shape(pooling, shape.features)
        if extra:
            self.extra = nnx.Param(jax.random.normal(rngs.params(), extra))
        self.head = nnx.Linear(size, networks.CLASSES, rngs=rngs)

    def __call__(self, x):
        first = nnx.relu(self.first(x))
        h = nnx.relu(self.second(first))
        extra = self.extra[...] if hasattr(self, "extra") else None
        # flax's functions of pooling are those of linen.
        pooled = pools.pool(self.pooling, h, extra, linen_networks.framework(self.rank))
        return [first, h, pooled, self.head(pooled.reshape(len(x), -1))]


def build(shape: networks.Shape, pooling: str, is_stock: bool, example: jax.Array) -> tuple:
    """Return the shapes of params, and the function of params and inputs."""
    size = networks.pooled_size(shape, pooling)
    make = partial(CNN, shape, pooling, is_stock, size)
    graph, params, rest = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)
    # What is not a param are the numbers of draws, which nothing here reads.
    rest = jax.tree.map(lambda leaf: jax.numpy.zeros(leaf.shape, leaf.dtype), rest)
    return params, lambda params, x: nnx.merge(graph, params, rest)(x)
