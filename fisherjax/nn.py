"""Convolution and pooling that are fast inside compiled loops, on a CPU above all.

XLA's CPU convolution is slow, several times more so inside a loop; a convolution written as
patches times a matrix is not. `conv_general_dilated` has the signature of lax's, so it is injected
with `flax.linen.Conv(..., conv_general_dilated=nn.conv_general_dilated)`, and the parameters keep
their shape.

Images are [B, H, W, C]; kernels are [kh, kw, cin, cout].
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fisherjax.typing import Array

# kw * cin from which the derivative for the images is summed over rows of the kernel: measured.
_WIDE = 48

_OBSERVER: contextvars.ContextVar[Callable[..., Array] | None] = contextvars.ContextVar(
    "fisherjax_convolution_observer", default=None
)


@contextlib.contextmanager
def observe_convolutions(callback: Callable[..., Array]) -> Iterator[None]:
    """Let `callback` replace the output of every patch convolution traced in this context.

    The K-FAC pass enters it to tag layers that its graph matcher would not recognise. Python runs
    only while JAX traces, so a function that was compiled outside the context ignores it.

    Args:
        callback: called as `callback(y, lhs, rhs, window_strides=..., padding=..., ...)` with the
            output y [B, H', W', cout], the layer's input, its four-dimensional kernel and the
            remaining arguments of `jax.lax.conv_general_dilated`; returns what takes y's place.

    Example:
        >>> import jax.numpy as jnp
        >>> from fisherjax import nn
        >>> x, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
        >>> numbers = ("NHWC", "HWIO", "NHWC")
        >>> with nn.observe_convolutions(lambda y, lhs, rhs, **settings: 0 * y):
        ...     y = nn.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=numbers)
        >>> float(y.sum())
        0.0
    """
    token = _OBSERVER.set(callback)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


def conv_general_dilated(
    lhs: Array,
    rhs: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> Array:
    r"""Convolve as patches times a matrix, where that is possible.

    .. math:: y_{bt} = P_{bt} K, \qquad P \in R^{B \times T \times k_h k_w c_{in}}

    The rows of K are the kernel's in (kh, kw, cin) order. Where kw cin is large, tangents of
    the images are multiplied one row of the kernel after the other, so that patches of them never
    lie in memory. What patches do not cover (dilation, groups, other layouts, other than two
    spatial axes) goes to `jax.lax.conv_general_dilated`.

    Args:
        lhs: images [B, H, W, cin].
        rhs: kernel [kh, kw, cin, cout].
        window_strides: strides along height and width.
        padding: "VALID", "SAME", "SAME_LOWER" or ((top, bottom), (left, right)).
        lhs_dilation: as in lax.
        rhs_dilation: as in lax.
        dimension_numbers: as in lax; patches need ("NHWC", "HWIO", "NHWC").
        feature_group_count: as in lax.
        batch_group_count: as in lax.
        precision: of the matrix product, as in lax.
        preferred_element_type: of the matrix product, as in lax.

    Returns:
        The output [B, H', W', cout].

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from fisherjax import nn
        >>> x, kernel = jnp.ones((2, 28, 28, 1)), jnp.ones((5, 5, 1, 6))
        >>> numbers = ("NHWC", "HWIO", "NHWC")
        >>> nn.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=numbers).shape
        (2, 24, 24, 6)
    """
    settings = {
        "window_strides": tuple(window_strides),
        "padding": padding,
        "lhs_dilation": tuple(lhs_dilation or (1,) * (lhs.ndim - 2)),
        "rhs_dilation": tuple(rhs_dilation or (1,) * (lhs.ndim - 2)),
        "dimension_numbers": lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers),
        "feature_group_count": feature_group_count,
        "batch_group_count": batch_group_count,
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    if not _patches_cover(lhs, rhs, settings):
        return lax.conv_general_dilated(lhs, rhs, **settings)
    y = _patch_product(lhs, rhs, settings)
    callback = _OBSERVER.get()
    return y if callback is None else callback(y, lhs, rhs, **settings)


def max_pool(x: Array, window: int | tuple[int, int]) -> Array:
    """Take the maximum over windows that do not overlap; rows and columns left over are cropped.

    The gradient goes to the first maximum of a window, row by row, as in `lax.reduce_window` and in
    PyTorch. That matters: a constant background makes ties in most windows, and sharing the
    gradient among them, as `jnp.max` does, changes the output factor of a first convolution by 6 %
    on MNIST.

    Args:
        x: images [B, H, W, C].
        window: height and width of a window, which are the strides too.

    Returns:
        The maxima [B, H // height, W // width, C].

    Example:
        >>> import jax.numpy as jnp
        >>> from fisherjax import nn
        >>> nn.max_pool(jnp.arange(25.0).reshape(1, 5, 5, 1), 2)[0, :, :, 0]
        Array([[ 6.,  8.],
               [16., 18.]], dtype=float32)
    """
    height, width = (window, window) if isinstance(window, int) else window
    rows, columns = x.shape[1] // height, x.shape[2] // width
    x = x[:, : rows * height, : columns * width]
    return _window_maximum(x.reshape(x.shape[0], rows, height, columns, width, x.shape[3]))


@jax.custom_jvp
def _window_maximum(windows: Array) -> Array:
    """Take the maximum of [B, H', height, W', width, C] over each window."""
    # Within rows first, then over rows: so it is fast.
    return _maximum(_maximum(windows, axis=4), axis=2)


@_window_maximum.defjvp
def _window_maximum_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    # The rule of the chain of maxima would pass a gradient through one selection after the other;
    # one selection by the number of the maximum measured six times as fast on a CPU.
    (windows,), (tangent,) = primals, tangents
    y = _window_maximum(windows)
    height, width = windows.shape[2], windows.shape[4]
    places = [(i, j) for i in range(height) for j in range(width)]
    first = jnp.full(y.shape, len(places) - 1, jnp.int32)
    for number, (i, j) in reversed(list(enumerate(places[:-1]))):
        first = jnp.where(windows[:, :, i, :, j] == y, number, first)
    number = jnp.arange(len(places)).reshape(height, 1, width, 1)
    is_first = first[:, :, None, :, None] == number
    return y, jnp.where(is_first, tangent, 0).sum((2, 4))


def _maximum(x: Array, axis: int) -> Array:
    first, *others = [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]
    for other in others:
        first = jnp.maximum(first, other)
    return first


def patches(
    images: Array,
    kernel_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
) -> Array:
    """Cut out what a convolution kernel sees at each output location.

    Args:
        images: [B, H, W, C].
        kernel_shape: height kh and width kw of the kernel.
        window_strides: strides along height and width.
        padding: "VALID", "SAME", "SAME_LOWER" or ((top, bottom), (left, right)); zeros.

    Returns:
        Patches [B, H', W', kh * kw * C], in (kh, kw, C) order as the rows of a reshaped kernel.

    Example:
        >>> import jax.numpy as jnp
        >>> from fisherjax import nn
        >>> nn.patches(jnp.ones((2, 5, 5, 3)), (3, 3), (2, 2), "VALID").shape
        (2, 2, 2, 27)
    """
    bands = _bands(images, kernel_shape, window_strides, padding)
    rows, _ = _output_size(images.shape[1:3], kernel_shape, window_strides, padding)
    return _windows(bands, 1, kernel_shape[0], rows, window_strides[0])


def _bands(
    images: Array,
    kernel_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
) -> Array:
    """Cut out what a row of the kernel sees, [B, H, W', kw * C]; H with padding.

    Columns first, then rows: 5 + 5 copies in place of 25, and so many sums in the derivative.
    """
    shape = images.shape[1:3]
    pads = _pads(shape, kernel_shape, window_strides, padding)
    if any(low or high for low, high in pads):
        edges = [(0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0)]
        images = lax.pad(images, jnp.zeros((), images.dtype), edges)
    _, columns = _output_size(shape, kernel_shape, window_strides, padding)
    return _windows(images, 2, kernel_shape[1], columns, window_strides[1])


def _windows(images: Array, axis: int, width: int, count: int, stride: int) -> Array:
    """Put `width` neighbours along an axis in front of the channels, [B, H', W', width * C]."""
    slices = [_every(images, axis, i, count, stride) for i in range(width)]
    return jnp.stack(slices, axis=3).reshape(*slices[0].shape[:3], width * images.shape[3])


def _every(images: Array, axis: int, first: int, count: int, stride: int) -> Array:
    span = (count - 1) * stride + 1
    return lax.slice_in_dim(images, first, first + span, stride, axis)


def _patches_cover(lhs: Array, rhs: Array, settings: dict[str, Any]) -> bool:
    if lhs.ndim != 4 or lhs.dtype != rhs.dtype or lhs.shape[3] != rhs.shape[2]:
        return False
    numbers = settings["dimension_numbers"]
    layout = (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec))
    if layout != ((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2)):
        return False
    dilations = {*settings["lhs_dilation"], *settings["rhs_dilation"]}
    groups = {settings["feature_group_count"], settings["batch_group_count"]}
    strides, padding = settings["window_strides"], settings["padding"]
    size = _output_size(lhs.shape[1:3], rhs.shape[:2], strides, padding)
    return dilations == groups == {1} and min(size) > 0


def _pads(
    shape: Sequence[int],
    kernel_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    if isinstance(padding, str):
        return lax.padtype_to_pads(shape, kernel_shape, window_strides, padding)
    return list(padding)


def _output_size(
    shape: Sequence[int],
    kernel_shape: Sequence[int],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
) -> tuple[int, ...]:
    pads = _pads(shape, kernel_shape, window_strides, padding)
    return tuple(
        (shape[axis] + sum(pads[axis]) - kernel_shape[axis]) // stride + 1
        for axis, stride in enumerate(window_strides)
    )


def _patch_product(lhs: Array, rhs: Array, settings: dict[str, Any]) -> Array:
    padding = settings["padding"]
    how = _How(
        settings["window_strides"],
        padding if isinstance(padding, str) else tuple(map(tuple, padding)),
        settings["precision"],
        settings["preferred_element_type"],
    )
    is_wide = rhs.shape[0] > 1 and rhs.shape[1] * rhs.shape[2] >= _WIDE
    return (_wide_product if is_wide else _product_of_patches)(lhs, rhs, how)


class _How(NamedTuple):
    window_strides: tuple[int, int]
    padding: str | tuple[tuple[int, int], ...]
    precision: Any
    preferred_element_type: Any


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _wide_product(lhs: Array, rhs: Array, how: _How) -> Array:
    """Multiply patches, but pass derivatives to the images without patches of tangents."""
    return _product_of_patches(lhs, rhs, how)


def _wide_product_jvp(
    how: _How, primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    (lhs, rhs), (images, kernel) = primals, tangents
    y = _wide_product(lhs, rhs, how)
    terms = []
    if not isinstance(images, SymbolicZero):
        terms.append(_product_of_rows(images, rhs, how))
    if not isinstance(kernel, SymbolicZero):
        terms.append(_product_of_patches(lhs, kernel, how))
    return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)


_wide_product.defjvp(_wide_product_jvp, symbolic_zeros=True)


def _product_of_patches(lhs: Array, rhs: Array, how: _How) -> Array:
    cut = patches(lhs, rhs.shape[:2], how.window_strides, how.padding)
    kernel = rhs.reshape(-1, rhs.shape[3]).T
    # XLA's CPU product is twice as slow where the sum is long and the result small, as in the
    # kernel's derivative: repeating the kernel splits that sum into groups.
    groups = math.gcd(8, math.prod(cut.shape[:3]))
    y = jnp.einsum(
        "gnk,gok->gno",
        cut.reshape(groups, -1, cut.shape[3]),
        jnp.broadcast_to(kernel, (groups, *kernel.shape)),
        precision=how.precision,
        preferred_element_type=how.preferred_element_type,
    )
    return y.reshape(*cut.shape[:3], rhs.shape[3])


def _product_of_rows(lhs: Array, rhs: Array, how: _How) -> Array:
    """Add up the products of the kernel's rows: patches as a whole never lie in memory."""
    bands = _bands(lhs, rhs.shape[:2], how.window_strides, how.padding)
    rows, _ = _output_size(lhs.shape[1:3], rhs.shape[:2], how.window_strides, how.padding)
    dtype = how.preferred_element_type or rhs.dtype
    parts = [
        jnp.matmul(
            _every(bands, 1, row, rows, how.window_strides[0]),
            rhs[row].reshape(-1, rhs.shape[3]),
            precision=how.precision,
            preferred_element_type=jnp.promote_types(dtype, jnp.float32),
        )
        for row in range(rhs.shape[0])
    ]
    return sum(parts[1:], parts[0]).astype(dtype)
