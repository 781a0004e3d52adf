"""The networks: two convolutions, pooling and a dense layer, as each framework writes them.

Each is made from a `Shape` and the name of a pooling. All return the list of their activations:
after either convolution, after pooling, and the outputs, so that each of them can be compared.
"""

import importlib
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.foreign import pools
from tests.foreign.cells import Cell

Array = jax.Array
Params = Any

CLASSES = 3
CHANNELS = 4
# From 16 features on `fj.nn`'s convolution computes derivatives in another way.
FIRST = 16
SPACE = {1: (24,), 2: (8, 8), 3: (4, 4, 4)}
WINDOW = 3
PARTS = ("first", "second", "extra", "head")
"""The layers' names in every framework; "extra" is the parameter of the pooling."""


class Shape(NamedTuple):
    """What kind of convolution the second one is."""

    rank: int = 2
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    features: int = 8


SHAPES = {
    "plain": Shape(),
    "strided": Shape(stride=2),
    "dilated": Shape(dilation=2),
    "grouped": Shape(groups=4),
    "depthwise": Shape(groups=FIRST, features=FIRST),
    "one_d": Shape(rank=1),
    "three_d": Shape(rank=3),
}


class Network(NamedTuple):
    """A network: its params, and the function (params, inputs [B, ...]) -> activations."""

    params: Params
    layers: Callable[[Params, Array], list[Array]]

    def apply(self, params: Params, inputs: Array) -> Array:
        """Return the outputs alone, [B, C]."""
        return self.layers(params, inputs)[-1]


def build(cell: Cell) -> Network:
    """Make the network of a cell, with random params."""
    name, _, is_stock = cell.framework.partition("_")
    framework = importlib.import_module(f"tests.foreign.{name}_networks")
    shape = SHAPES[cell.convolution]
    shapes, layers = framework.build(shape, cell.pooling, bool(is_stock), images(cell, 1))
    fill = _integers if cell.dtype == "bfloat16" else _normal
    draw = np.random.default_rng(zlib.crc32(cell.name.encode()))
    last = name != "equinox"

    def filled(leaf: Any) -> Array:
        return jnp.asarray(fill(draw, leaf.shape, last), cell.dtype)

    return Network(jax.tree.map(filled, shapes), layers)


def images(cell: Cell, number: int) -> Array:
    """Draw inputs [B, *space, channels]: uniform, or integers that bfloat16 holds exactly."""
    draw = np.random.default_rng(number)
    size = (number, *SPACE[SHAPES[cell.convolution].rank], CHANNELS)
    if cell.dtype == "bfloat16":
        return jnp.asarray(draw.integers(0, 3, size), cell.dtype)
    return jnp.asarray(draw.uniform(size=size), cell.dtype)


def labels(number: int) -> Array:
    """Draw a class for each example."""
    return jnp.asarray(np.random.default_rng(number).integers(0, CLASSES, number), jnp.int32)


def pooled_size(shape: Shape, pooling: str) -> int:
    """Compute how many inputs the dense layer has."""
    space = [-(-size // shape.stride) for size in SPACE[shape.rank]]
    if pooling in ("max_pool", "avg_pool"):
        return shape.features * math.prod(size // 2 for size in space)
    sizes = {"queries": pools.QUERIES * shape.features, "weights": pools.QUERIES}
    return sizes.get(pooling, shape.features)


def _fan_in(shape: tuple[int, ...], outputs_last: bool) -> int:
    return math.prod(shape[:-1] if outputs_last else shape[1:])


def _normal(draw: np.random.Generator, shape: tuple[int, ...], outputs_last: bool) -> np.ndarray:
    """Draw kernels that keep the size of what they multiply, and small biases."""
    is_bias = math.prod(shape) == max(shape)
    scale = 0.1 if is_bias else 1 / math.sqrt(_fan_in(shape, outputs_last))
    return draw.normal(size=shape) * scale


def _integers(draw: np.random.Generator, shape: tuple[int, ...], outputs_last: bool) -> np.ndarray:
    """Draw -1, 0 or 1, about three that are not zero for each output.

    Sums of such products are integers that bfloat16 holds exactly: that a maximum has another
    winner, or a ReLU another sign, is then a fault and not rounding.
    """
    share = min(1.0, 3 / _fan_in(shape, outputs_last)) if len(shape) > 1 else 0.5
    return draw.choice([-1, 0, 1], size=shape, p=[share / 2, 1 - share, share / 2])


def canonical(cell: Cell, params: Params) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
    """Return (kernel [..., inputs, outputs], bias) of each part, in float64, for any framework."""
    found: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        (part,) = (part for part in PARTS if part in jax.tree_util.keystr(path))
        found[part].append(np.asarray(leaf, np.float64))
    return {
        part: _kernel_and_bias(cell, part, sorted(leaves, key=lambda x: x.size))
        for part, leaves in found.items()
        if leaves
    }


def _kernel_and_bias(
    cell: Cell, part: str, leaves: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None]:
    *bias, kernel = leaves
    # equinox stores kernels as [outputs, inputs, *window].
    if cell.framework == "equinox" and part != "extra":
        kernel = np.moveaxis(kernel, (0, 1), (-1, -2))
    return kernel, bias[0].ravel() if bias else None
