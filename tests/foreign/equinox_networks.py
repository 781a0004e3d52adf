"""The networks in equinox, whose modules are of one example and keep channels first."""

import equinox as eqx
import jax
import jax.numpy as jnp

from tests.foreign import networks, pools

# equinox's own poolings and their settings.
OWN = {
    "max_pool": ("MaxPool", 2, 2),
    "avg_pool": ("AvgPool", 2, 2),
    "global_pool": ("AdaptiveAvgPool", 1),
}


class CNN(eqx.Module):
    """Two convolutions, pooling and a dense layer."""

    first: eqx.nn.Conv
    second: eqx.nn.Conv
    head: eqx.nn.Linear
    extra: jax.Array | None
    pooling: str = eqx.field(static=True)
    rank: int = eqx.field(static=True)

    def __init__(self, shape, pooling, size, key):
        conv = {"kernel_size": networks.WINDOW, "padding": "SAME", "key": key}
        self.first = eqx.nn.Conv(shape.rank, networks.CHANNELS, networks.FIRST, **conv)
        conv |= {"stride": shape.stride, "dilation": shape.dilation, "groups": shape.groups}
        self.second = eqx.nn.Conv(shape.rank, networks.FIRST, shape.features, **conv)
        self.head = eqx.nn.Linear(size, networks.CLASSES, key=key)
        extra = pools.own_shape(pooling, shape.features)
        self.extra = extra and jax.random.normal(key, extra)
        self.pooling, self.rank = pooling, shape.rank

    def __call__(self, x):
        first = jax.nn.relu(self.first(jnp.moveaxis(x, -1, 0)))
        h = jax.nn.relu(self.second(first))
        pooled = self.pool(h)
        return [first, h, pooled, self.head(pooled.ravel())]

    def pool(self, h):
        if self.pooling in OWN:
            kind, *settings = OWN[self.pooling]
            return getattr(eqx.nn, f"{kind}{self.rank}d")(*settings)(h)
        if self.pooling in pools.OVER_SPACE:
            return pools.OVER_SPACE[self.pooling](h, axis=tuple(range(1, h.ndim)))
        tokens = h.reshape(h.shape[0], -1).T
        if self.pooling == "queries":
            return pools.attended(tokens[None], self.extra)[0]
        return pools.multiplied_one_by_one(tokens, self.extra)


def build(shape: networks.Shape, pooling: str, is_stock: bool, example: jax.Array) -> tuple:
    """Return the shapes of params, and the function of params and inputs."""
    del is_stock, example
    size = networks.pooled_size(shape, pooling)
    module = eqx.filter_eval_shape(lambda: CNN(shape, pooling, size, jax.random.key(0)))
    params, static = eqx.partition(module, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)
