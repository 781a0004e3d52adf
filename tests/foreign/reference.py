"""The outputs of a network by NumPy in float64: loops over the window, and nothing of JAX."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from tests.foreign import networks
from tests.foreign.cells import Cell


def outputs(cell: Cell, params: Any, inputs: Any) -> np.ndarray:
    """Compute the outputs of a cell's network for inputs [B, *space, channels]."""
    shape, parts = networks.SHAPES[cell.convolution], networks.canonical(cell, params)
    h = np.asarray(inputs, np.float64)
    h = np.maximum(convolution(h, *parts["first"]), 0)
    settings = shape.stride, shape.dilation, shape.groups
    h = np.maximum(convolution(h, *parts["second"], *settings), 0)
    extra, _ = parts.get("extra", (None, None))
    h = pooled(cell.pooling, h, extra)
    if cell.framework == "equinox":  # channels first
        h = np.moveaxis(h, -1, 1) if cell.pooling != "queries" else h
    kernel, bias = parts["head"]
    return h.reshape(len(h), -1) @ kernel + (0 if bias is None else bias)


def convolution(
    x: np.ndarray,
    kernel: np.ndarray,
    bias: np.ndarray,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> np.ndarray:
    """Convolve [B, *space, inputs] with a kernel [*window, inputs / groups, outputs], padded."""
    *window, _, features = kernel.shape
    space = x.shape[1:-1]
    size = [-(-n // stride) for n in space]
    # As much padding on either side as it takes; one more behind where it is odd.
    total = [
        max((m - 1) * stride + (w - 1) * dilation + 1 - n, 0)
        for n, m, w in zip(space, size, window, strict=True)
    ]
    x = np.pad(x, [(0, 0), *((t // 2, t - t // 2) for t in total), (0, 0)])
    y = np.zeros((len(x), *size, features)) + bias
    for place in product(*map(range, window)):
        seen = tuple(
            slice(p * dilation, p * dilation + (m - 1) * stride + 1, stride)
            for p, m in zip(place, size, strict=True)
        )
        parts = np.split(x[(slice(None), *seen)], groups, axis=-1)
        kernels = np.split(kernel[place], groups, axis=-1)
        products = [part @ own for part, own in zip(parts, kernels, strict=True)]
        y += np.concatenate(products, axis=-1)
    return y


def pooled(pooling: str, h: np.ndarray, extra: np.ndarray | None) -> np.ndarray:
    """Pool [B, *space, F] in one of the ways of `cells.FACTORS`."""
    space, tokens = tuple(range(1, h.ndim - 1)), h.reshape(len(h), -1, h.shape[-1])
    if pooling in ("max_pool", "avg_pool"):
        return _windows(h, np.max if pooling == "max_pool" else np.mean)
    if pooling == "queries":
        attention = np.exp(tokens @ extra.T)  # [B, T, Q]
        attention /= attention.sum(1, keepdims=True)
        return attention.swapaxes(1, 2) @ tokens
    if pooling == "weights":
        return (tokens @ extra.T).max(1)
    reduced = {"global_pool": np.mean, "mean": np.mean, "max": np.max, "sum": np.sum}[pooling]
    return reduced(h, axis=space)


def _windows(h: np.ndarray, reduced: Callable[..., np.ndarray]) -> np.ndarray:
    """Reduce windows of two along each axis of space."""
    for axis in range(1, h.ndim - 1):
        pairs = [np.take(h, range(i, h.shape[axis] // 2 * 2, 2), axis) for i in (0, 1)]
        h = reduced(np.stack(pairs), axis=0)
    return h
