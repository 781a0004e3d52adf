"""Define networks as users write them in flax, whose compiling `compile_tasks` counts."""

from functools import partial
from typing import Any

import flax.linen


class FlaxCNN(flax.linen.Module):
    """The network of flax's MNIST example, 824,458 parameters."""

    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        """Return the outputs [B, 10] of images [B, 28, 28, 1]."""
        for channels in (32, 64):
            x = flax.linen.relu(flax.linen.Conv(channels, (3, 3))(x))
            x = flax.linen.avg_pool(x, (2, 2), (2, 2))
        x = flax.linen.relu(flax.linen.Dense(256)(x.reshape((len(x), -1))))
        return flax.linen.Dense(10)(x)


class ResNet18(flax.linen.Module):
    """ResNet-18 for images of 32 x 32: four stages of two blocks, each layer with BatchNorm.

    Source: He, Zhang, Ren, Sun, Deep residual learning for image recognition, CVPR 2016.
    """

    width: int = 64

    @flax.linen.compact
    def __call__(self, x: Any, train: bool = False) -> Any:
        """Return the outputs [B, 10] of images [B, H, W, C]."""
        norm = partial(flax.linen.BatchNorm, use_running_average=not train)
        conv = partial(flax.linen.Conv, use_bias=False)
        x = flax.linen.relu(norm()(conv(self.width, (3, 3))(x)))
        for stage in range(4):
            channels = self.width * 2**stage
            for block in range(2):
                strides = (2, 2) if stage and not block else (1, 1)
                y = flax.linen.relu(norm()(conv(channels, (3, 3), strides)(x)))
                y = norm()(conv(channels, (3, 3))(y))
                if x.shape != y.shape:
                    x = norm()(conv(channels, (1, 1), strides)(x))
                x = flax.linen.relu(x + y)
        return flax.linen.Dense(10)(x.mean((1, 2)))


class _Block(flax.linen.Module):
    """A block of a transformer, as the body of a scan."""

    @flax.linen.compact
    def __call__(self, x: Any, _: Any) -> tuple[Any, None]:
        y = flax.linen.LayerNorm()(x)
        x = x + flax.linen.MultiHeadDotProductAttention(4)(y, y)
        y = flax.linen.gelu(flax.linen.Dense(128)(flax.linen.LayerNorm()(x)))
        return x + flax.linen.Dense(64)(y), None


class Blocks(flax.linen.Module):
    """A transformer of width 64 for images of 4 x 4 pixels, which scans its blocks or not."""

    blocks: int
    scan: bool

    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        """Return the outputs [B, 10] of images [B, 4, 4, C]."""
        x = flax.linen.Dense(64)(x.reshape(len(x), 16, -1))
        if self.scan:
            axes, keys = {"params": 0}, {"params": True}
            how = {"variable_axes": axes, "split_rngs": keys, "length": self.blocks}
            x, _ = flax.linen.scan(_Block, **how)()(x, None)
        else:
            for _ in range(self.blocks):
                x, _ = _Block()(x, None)
        return flax.linen.Dense(10)(x.mean(1))
