"""Convolution as patches times a matrix, and who may watch it."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fisherjax.typing import Array

Pair = Sequence[int]
Padding = str | Sequence[tuple[int, int]]

_LAYOUT = ("NHWC", "HWIO", "NHWC")
# kw * cin from which the derivative for the images is summed over rows of the kernel: measured.
_WIDE = 48
# What patches know of the settings that are handed on, as lax has it; any other is lax's to judge.
_OTHERS = {"batch_group_count": 1, "precision": None, "preferred_element_type": None}

# A context variable, not a global: another thread that traces meanwhile is not watched.
_OBSERVER: contextvars.ContextVar[Callable[..., Array] | None] = contextvars.ContextVar(
    "fisherjax_convolution_observer", default=None
)


@contextlib.contextmanager
def observe_convolutions(callback: Callable[..., Array]) -> Iterator[None]:
    """Let `callback` replace the output of every patch convolution traced in this context.

    The K-FAC pass enters it to see convolutions where there are only patches. Python runs only
    while JAX traces, so a function that was compiled outside the context ignores it.
    `callback(y, lhs, rhs, window_strides=..., padding=..., ...)` is given the output
    y [B, H', W', cout] and the arguments of `jax.lax.conv_general_dilated`, and returns what takes
    y's place.

    Example:
        >>> x, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((3, 3, 1, 2))
        >>> layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        >>> with observe_convolutions(lambda y, lhs, rhs, **settings: 0 * y):
        ...     print(conv_general_dilated(x, kernel, (1, 1), "VALID", **layout).sum())
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
    window_strides: Pair,
    padding: Padding,
    lhs_dilation: Pair | None = None,
    rhs_dilation: Pair | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    **others: Any,
) -> Array:
    """Convolve images [B, H, W, cin] with a kernel [kh, kw, cin, cout] as patches times a matrix.

        y_bt = P_bt K,    patches P [B, T, kh kw cin], output y [B, H', W', cout]

    The rows of K are the kernel's in (kh, kw, cin) order. Where kw cin is large, tangents of
    the images are multiplied one row of the kernel after the other, so that patches of them never
    lie in memory. What patches do not cover (dilation, groups, other layouts, other than two
    spatial axes) goes to `jax.lax.conv_general_dilated`, whose arguments these are; its precision
    and preferred_element_type are those of the matrix product.

    Example:
        >>> x, kernel = jnp.ones((2, 28, 28, 1)), jnp.ones((5, 5, 1, 6))
        >>> numbers = ("NHWC", "HWIO", "NHWC")
        >>> conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=numbers).shape
        (2, 24, 24, 6)
    """
    settings = {
        "window_strides": tuple(window_strides),
        "padding": padding,
        "lhs_dilation": tuple(lhs_dilation or (1,) * (lhs.ndim - 2)),
        "rhs_dilation": tuple(rhs_dilation or (1,) * (lhs.ndim - 2)),
        "dimension_numbers": lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers),
        "feature_group_count": feature_group_count,
    }
    settings |= _OTHERS | others
    if others.keys() - _OTHERS or not _patches_cover(lhs, rhs, settings):
        return lax.conv_general_dilated(lhs, rhs, **settings)
    settings["padding"] = _pads(lhs, rhs.shape[:2], settings["window_strides"], padding)
    how = _How(*(settings[name] for name in _How._fields))
    # A kernel of one row has one band, which is all of its patches: nothing to add up.
    is_wide = rhs.shape[0] > 1 and rhs.shape[1] * rhs.shape[2] >= _WIDE
    y = (_wide_product if is_wide else _product_of_patches)(lhs, rhs, how)
    callback = _OBSERVER.get()
    return y if callback is None else callback(y, lhs, rhs, **settings)


def patches(images: Array, kernel_shape: Pair, window_strides: Pair, padding: Padding) -> Array:
    """Cut out what a kernel of shape (kh, kw) sees of images [B, H, W, C] at each output location.

    The patches are [B, H', W', kh * kw * C], in (kh, kw, C) order as the rows of a reshaped kernel.
    Padding is "VALID", "SAME", "SAME_LOWER" or ((top, bottom), (left, right)), with zeros.

    Example:
        >>> patches(jnp.ones((2, 5, 5, 3)), (3, 3), (2, 2), "VALID").shape
        (2, 2, 2, 27)
    """
    bands = _bands(images, kernel_shape, window_strides, padding)
    return _windows(bands, 1, kernel_shape[0], window_strides[0])


def _bands(images: Array, kernel_shape: Pair, window_strides: Pair, padding: Padding) -> Array:
    """Cut out what a row of the kernel sees, [B, H, W', kw * C]; H with padding.

    Columns first, then rows: 5 + 5 copies in place of 25, and so many sums in the derivative.
    """
    pads = _pads(images, kernel_shape, window_strides, padding)
    if any(map(any, pads)):
        # Not jnp.pad, which refuses negative padding; lax crops.
        edges = [(0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0)]
        images = lax.pad(images, jnp.zeros((), images.dtype), edges)
    return _windows(images, 2, kernel_shape[1], window_strides[1])


def _windows(images: Array, axis: int, width: int, stride: int) -> Array:
    """Put `width` neighbours along an axis in front of the channels, [B, H', W', width * C]."""
    slices = _places(images, axis, width, stride)
    return jnp.stack(slices, axis=3).reshape(*slices[0].shape[:3], width * images.shape[3])


def _places(images: Array, axis: int, width: int, stride: int) -> list[Array]:
    """Take what each of the `width` places of a window sees as the window moves along an axis."""
    span = images.shape[axis] - width + 1
    return [lax.slice_in_dim(images, i, i + span, stride, axis) for i in range(width)]


def _pads(
    images: Array, kernel_shape: Pair, window_strides: Pair, padding: Padding
) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(images.shape[1:3], kernel_shape, window_strides, padding)
    # Tuples throughout, because JAX hashes settings.
    return tuple((before, after) for before, after in padding)


def _patches_cover(lhs: Array, rhs: Array, settings: dict[str, Any]) -> bool:
    # What is wrong as a convolution (channels, dtypes) is not covered either: lax says so best.
    if lhs.ndim != 4 or lhs.dtype != rhs.dtype or lhs.shape[3] != rhs.shape[2]:
        return False
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, _LAYOUT)
    ones = {*settings["lhs_dilation"], *settings["rhs_dilation"]}
    ones |= {settings["feature_group_count"], settings["batch_group_count"]}
    if tuple(map(tuple, settings["dimension_numbers"])) != tuple(layout) or ones != {1}:
        return False
    how = settings["window_strides"], settings["padding"]
    return min(lax.conv_general_shape_tuple(lhs.shape, rhs.shape, *how, _LAYOUT)[1:3]) > 0


class _How(NamedTuple):
    """What of the settings matters to patches; hashable, as JAX wants static arguments."""

    window_strides: tuple[int, int]
    padding: tuple[tuple[int, int], ...]
    precision: Any
    preferred_element_type: Any


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _wide_product(lhs: Array, rhs: Array, how: _How) -> Array:
    """Multiply patches, but pass derivatives to the images without patches of tangents."""
    return _product_of_patches(lhs, rhs, how)


@partial(_wide_product.defjvp, symbolic_zeros=True)
def _wide_product_jvp(
    how: _How, primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    (lhs, rhs), (images, kernel) = primals, tangents
    y = _wide_product(lhs, rhs, how)
    # Symbolic zeros save a product where only the images or only the kernel is differentiated, as
    # in the first layer, whose images are data.
    terms = []
    if not isinstance(images, SymbolicZero):
        terms.append(_product_of_rows(images, rhs, how))
    if not isinstance(kernel, SymbolicZero):
        terms.append(_product_of_patches(lhs, kernel, how))
    return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)


def _product_of_patches(lhs: Array, rhs: Array, how: _How) -> Array:
    cut = patches(lhs, rhs.shape[:2], how.window_strides, how.padding)
    # The kernel is transposed first: then the product of its derivative, whose sum is long and
    # whose result is small, takes XLA's CPU half of the time. It is not split into groups that
    # share the kernel: a product with a broadcast operand is miscompiled (see `compiler`).
    y = jnp.einsum(
        "nk,ok->no",
        cut.reshape(-1, cut.shape[3]),
        rhs.reshape(-1, rhs.shape[3]).T,
        precision=how.precision,
        preferred_element_type=how.preferred_element_type,
    )
    return y.reshape(*cut.shape[:3], rhs.shape[3])


def _product_of_rows(lhs: Array, rhs: Array, how: _How) -> Array:
    """Add up the products of the kernel's rows: patches as a whole never lie in memory."""
    bands = _bands(lhs, rhs.shape[:2], how.window_strides, how.padding)
    dtype = how.preferred_element_type or rhs.dtype
    # Added up in at least float32 and rounded once, as within a single product.
    wide = jnp.promote_types(dtype, jnp.float32)
    parts = [
        jnp.matmul(
            images,
            rhs[row].reshape(-1, rhs.shape[3]),
            precision=how.precision,
            preferred_element_type=wide,
        )
        for row, images in enumerate(_places(bands, 1, rhs.shape[0], how.window_strides[0]))
    ]
    return sum(parts[1:], parts[0]).astype(dtype)
