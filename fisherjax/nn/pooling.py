"""Max pooling with a fast derivative that breaks ties like PyTorch."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fisherjax.typing import Array


def max_pool(x: Array, window: int | tuple[int, int]) -> Array:
    """Compute the maximum over windows of images [B, H, W, C] that do not overlap.

    Remaining rows and columns are cropped. The gradient goes to the first maximum of a window, row
    by row, as in `lax.reduce_window` and in PyTorch. This matters: a constant background has ties
    in most windows, and dividing the gradient among them, as `jnp.max` does, changes the output
    factor of a first convolution by 6 % on MNIST.

    Example:
        >>> max_pool(jnp.arange(25.0).reshape(1, 5, 5, 1), 2)[0, :, :, 0]
        Array([[ 6.,  8.],
               [16., 18.]], dtype=float32)
    """
    height, width = (window, window) if isinstance(window, int) else window
    rows, columns = x.shape[1] // height, x.shape[2] // width
    x = x[:, : rows * height, : columns * width]
    return _window_maximum(x.reshape(x.shape[0], rows, height, columns, width, x.shape[3]))


@jax.custom_jvp
def _window_maximum(windows: Array) -> Array:
    """Compute the maximum of [B, H', height, W', width, C] over each window."""
    # Maxima within rows first, then over rows: this order is fast.
    return _maximum(_maximum(windows, axis=4), axis=2)


@_window_maximum.defjvp
def _window_maximum_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # The derivative of a chain of maxima has one selection after the other. A single selection, by
    # the number of the maximum, is six times as fast on a CPU.
    (windows,), (tangent,) = primals, tangents
    y = _window_maximum(windows)
    height, width = windows.shape[2], windows.shape[4]
    places = [(i, j) for i in range(height) for j in range(width)]
    # From the last place to the first, so that the first of equal values is selected.
    first = jnp.full(y.shape, len(places) - 1, jnp.int32)
    for number, (i, j) in reversed(list(enumerate(places[:-1]))):
        first = jnp.where(windows[:, :, i, :, j] == y, number, first)
    number = jnp.arange(len(places)).reshape(height, 1, width, 1)
    is_first = first[:, :, None, :, None] == number
    return y, jnp.where(is_first, tangent, 0).sum((2, 4))


def _maximum(x: Array, axis: int) -> Array:
    slices = [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
    return functools.reduce(jnp.maximum, slices)
