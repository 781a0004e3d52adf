"""Compute convolutions as patches times a matrix, and let an observer replace their outputs."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from fisherjax.typing import Array

Pair: TypeAlias = Sequence[int]
"""Numbers for the two axes of an image, height and width."""
Padding: TypeAlias = str | Sequence[tuple[int, int]]
"""Padding of images: "SAME", "VALID", or the rows before and after each of the two axes."""

_LAYOUT = ("NHWC", "HWIO", "NHWC")
# Measured: from this kw * cin on, derivatives for the images are summed over rows of the kernel.
_WIDE = 48
# Settings that patches support, with the defaults of lax; lax handles calls with any other.
_OTHERS = {"batch_group_count": 1, "precision": None, "preferred_element_type": None}

# A context variable, so that other threads that trace at the same time have no observer.
_OBSERVER: contextvars.ContextVar[Callable[..., Array] | None] = contextvars.ContextVar(
    "fisherjax_convolution_observer", default=None
)


@contextlib.contextmanager
def observe_convolutions(callback: Callable[..., Array]) -> Iterator[None]:
    """Replace the output of every patch convolution that is traced in this context.

    The K-FAC pass uses it to find convolutions, of which a jaxpr shows only patches. A function
    that was compiled outside the context ignores it, because Python runs only while JAX traces.

    Args:
        callback: `(y, lhs, rhs, window_strides=..., padding=..., ...) -> new y`, a function of the
            output y [B, H', W', cout] and the arguments of `jax.lax.conv_general_dilated`.

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

    The rows of K are those of the kernel in (kh, kw, cin) order. If kw cin is large, tangents of
    the images are multiplied by one row of the kernel after the other, so that their patches are
    never in memory. Groups of channels have a product each, and groups of one channel, as in a
    depthwise convolution, a sum of shifted images times numbers. The arguments are those of
    `jax.lax.conv_general_dilated`, which computes convolutions with dilation, other layouts or
    other than two spatial axes. The arguments precision and preferred_element_type are those of the
    matrix product.

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
    if feature_group_count == 1:
        y = _product(lhs, rhs, how)
    else:
        y = (_shifted_sum if rhs.shape[2] == 1 else _product_of_groups)(lhs, rhs, how)
    callback = _OBSERVER.get()
    return y if callback is None else callback(y, lhs, rhs, **settings)


def patches(images: Array, kernel_shape: Pair, window_strides: Pair, padding: Padding) -> Array:
    """Return the patches of images [B, H, W, C] that a kernel of shape (kh, kw) is applied to.

    The patches are [B, H', W', kh * kw * C], in (kh, kw, C) order like the rows of a reshaped
    kernel. Padding is "VALID", "SAME", "SAME_LOWER" or ((top, bottom), (left, right)), with zeros.

    Example:
        >>> patches(jnp.ones((2, 5, 5, 3)), (3, 3), (2, 2), "VALID").shape
        (2, 2, 2, 27)
    """
    bands = _bands(images, kernel_shape, window_strides, padding)
    return _windows(bands, 1, kernel_shape[0], window_strides[0])


def _bands(images: Array, kernel_shape: Pair, window_strides: Pair, padding: Padding) -> Array:
    """Return the patches of one row of the kernel, [B, H, W', kw * C], where H has the padding.

    With columns first and rows second, a 5 x 5 kernel needs 5 + 5 copies in place of 25, and as
    many sums in the derivative.
    """
    images = _padded(images, _pads(images, kernel_shape, window_strides, padding))
    return _windows(images, 2, kernel_shape[1], window_strides[1])


def _padded(images: Array, pads: Sequence[tuple[int, int]]) -> Array:
    if not any(map(any, pads)):
        return images
    # lax.pad crops for negative padding, which jnp.pad refuses.
    edges = [(0, 0, 0), *((low, high, 0) for low, high in pads), (0, 0, 0)]
    return lax.pad(images, jnp.zeros((), images.dtype), edges)


def _windows(images: Array, axis: int, width: int, stride: int) -> Array:
    """Return windows of `width` neighbours along an axis, [B, H', W', width * C]."""
    slices = _places(images, axis, width, stride)
    return jnp.stack(slices, axis=3).reshape(*slices[0].shape[:3], width * images.shape[3])


def _places(images: Array, axis: int, width: int, stride: int) -> list[Array]:
    """Return a slice for each place of a window of this width that moves along an axis."""
    span = images.shape[axis] - width + 1
    return [lax.slice_in_dim(images, i, i + span, stride, axis) for i in range(width)]


def _pads(
    images: Array, kernel_shape: Pair, window_strides: Pair, padding: Padding
) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(images.shape[1:3], kernel_shape, window_strides, padding)
    # Tuples, because JAX hashes the settings.
    return tuple((before, after) for before, after in padding)


def _patches_cover(lhs: Array, rhs: Array, settings: dict[str, Any]) -> bool:
    groups = settings["feature_group_count"]
    # Invalid arguments (channels, dtypes) are not covered: lax has good error messages.
    if lhs.ndim != 4 or lhs.dtype != rhs.dtype or groups < 1:
        return False
    if lhs.shape[3] != groups * rhs.shape[2] or rhs.shape[3] % groups:
        return False
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, _LAYOUT)
    ones = {*settings["lhs_dilation"], *settings["rhs_dilation"], settings["batch_group_count"]}
    if tuple(map(tuple, settings["dimension_numbers"])) != tuple(layout) or ones != {1}:
        return False
    # lax's function of shapes knows no groups, but the shape of one group is the same.
    shape = (*lhs.shape[:3], rhs.shape[2])
    how = settings["window_strides"], settings["padding"]
    return min(lax.conv_general_shape_tuple(shape, rhs.shape, *how, _LAYOUT)[1:3]) > 0


class _How(NamedTuple):
    """The settings of a product of patches; hashable, because they are static arguments."""

    window_strides: tuple[int, int]
    padding: tuple[tuple[int, int], ...]
    precision: Any
    preferred_element_type: Any


def _product(lhs: Array, rhs: Array, how: _How) -> Array:
    # A kernel of one row has one band, all of its patches: there is no sum.
    is_wide = rhs.shape[0] > 1 and rhs.shape[1] * rhs.shape[2] >= _WIDE
    return (_wide_product if is_wide else _product_of_patches)(lhs, rhs, how)


def _product_of_groups(lhs: Array, rhs: Array, how: _How) -> Array:
    """Multiply each group's patches by its kernel; with groups first, the products are fast."""
    groups = lhs.shape[3] // rhs.shape[2]
    images = lhs.reshape(*lhs.shape[:3], groups, -1)
    kernels = rhs.reshape(*rhs.shape[:3], groups, -1)
    y = jax.vmap(partial(_product, how=how), in_axes=(3, 3), out_axes=3)(images, kernels)
    return y.reshape(*y.shape[:3], rhs.shape[3])


def _shifted_sum(lhs: Array, rhs: Array, how: _How) -> Array:
    """Convolve each channel by itself: sum shifted images times the numbers of the kernel.

    On a CPU it takes a twentieth of the time of the groups' products, and its derivative a third.
    """
    dtype = how.preferred_element_type or rhs.dtype
    # Summed in at least float32 and rounded once, like a product.
    wide = jnp.promote_types(dtype, jnp.float32)
    images = jnp.repeat(lhs, rhs.shape[3] // lhs.shape[3], axis=3)
    rows = _places(_padded(images, how.padding), 1, rhs.shape[0], how.window_strides[0])
    parts = (
        image.astype(wide) * rhs[i, j, 0].astype(wide)
        for i, row in enumerate(rows)
        for j, image in enumerate(_places(row, 2, rhs.shape[1], how.window_strides[1]))
    )
    return reduce(jnp.add, parts).astype(dtype)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _wide_product(lhs: Array, rhs: Array, how: _How) -> Array:
    """Multiply patches and a kernel, with derivatives for the images that need no patches."""
    return _product_of_patches(lhs, rhs, how)


@partial(_wide_product.defjvp, symbolic_zeros=True)
def _wide_product_jvp(
    how: _How, primals: tuple[Array, Array], tangents: tuple[Any, Any]
) -> tuple[Array, Array]:
    (lhs, rhs), (images, kernel) = primals, tangents
    y = _wide_product(lhs, rhs, how)
    # Symbolic zeros save a product if only the images or only the kernel is differentiated, as in
    # the first layer, whose images are data.
    terms = []
    if not isinstance(images, SymbolicZero):
        terms.append(_product_of_rows(images, rhs, how))
    if not isinstance(kernel, SymbolicZero):
        terms.append(_product_of_patches(lhs, kernel, how))
    return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)


def _product_of_patches(lhs: Array, rhs: Array, how: _How) -> Array:
    cut = patches(lhs, rhs.shape[:2], how.window_strides, how.padding)
    # The kernel is transposed first. Then the product of its derivative, which has a long sum and a
    # small result, takes half of the time on a CPU. The product is not split into groups that share
    # the kernel, because a product with a broadcast operand is miscompiled (see `compiler`).
    y = jnp.einsum(
        "nk,ok->no",
        cut.reshape(-1, cut.shape[3]),
        rhs.reshape(-1, rhs.shape[3]).T,
        precision=how.precision,
        preferred_element_type=how.preferred_element_type,
    )
    return y.reshape(*cut.shape[:3], rhs.shape[3])


def _product_of_rows(lhs: Array, rhs: Array, how: _How) -> Array:
    """Sum the products of the kernel's rows, so that whole patches are never in memory."""
    bands = _bands(lhs, rhs.shape[:2], how.window_strides, how.padding)
    dtype = how.preferred_element_type or rhs.dtype
    # Summed in at least float32 and rounded once, like a single product.
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
