"""The networks in haiku."""

from functools import partial

import haiku as hk
import jax

from tests.foreign import networks, pools


def network(shape: networks.Shape, pooling: str, x: jax.Array) -> list[jax.Array]:
    """Compute two convolutions, pooling and a dense layer."""
    conv = partial(getattr(hk, f"Conv{shape.rank}D"), kernel_shape=networks.WINDOW)
    first = jax.nn.relu(conv(networks.FIRST, name="first")(x))
    second = conv(
        shape.features,
        stride=shape.stride,
        rate=shape.dilation,
        feature_group_count=shape.groups,
        name="second",
    )
    h = jax.nn.relu(second(first))
    size = pools.own_shape(pooling, shape.features)
    extra = size and hk.get_parameter("extra", size, x.dtype, hk.initializers.RandomNormal())
    pooled = pools.pool(pooling, h, extra, framework(shape.rank))
    # Without a bias: haiku broadcasts it before it adds it, and heads that are solved anew are
    # refused where the library does not recognise that as the layer's own.
    head = hk.Linear(networks.CLASSES, with_bias=False, name="head")
    return [first, h, pooled, head(hk.Flatten()(pooled))]


def framework(rank: int) -> dict:
    """Return haiku's own pooling, for so many axes of space."""
    window = (*(2,) * rank, 1)  # the last is of channels
    own = {"window_shape": window, "strides": window, "padding": "VALID"}

    def over_all(h: jax.Array) -> jax.Array:
        space = (*h.shape[1:-1], 1)
        return hk.avg_pool(h, space, space, "VALID")

    return {
        "max_pool": lambda h: hk.max_pool(h, **own),
        "avg_pool": lambda h: hk.avg_pool(h, **own),
        "global_pool": over_all,
    }


def build(shape: networks.Shape, pooling: str, is_stock: bool, example: jax.Array) -> tuple:
    """Return the shapes of params, and the function of params and inputs."""
    del is_stock
    made = hk.without_apply_rng(hk.transform(partial(network, shape, pooling)))
    return jax.eval_shape(made.init, jax.random.key(0), example), made.apply
