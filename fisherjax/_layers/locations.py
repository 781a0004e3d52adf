"""Compute which locations of each layer are padding, from the padding mask of a model.

A model with `positions` returns a mask m [B, T] of the positions that count (`_padding`). A layer
is applied at T locations of an example, or at T times the size of further axes, such as those of
attention heads. With T_n the number of positions of example n that count, the factors of K-FAC are

    A = E_n[sum_t m_nt a_nt a_nt^T],   G = E_n[sum_k sum_t m_nt g_nkt g_nkt^T / T_n],

the mean over sequences of the factors of each sequence without its padding. So kron(A, G) has the
scale of the exact block, however long the padding is. A layer that is applied once to an example,
such as one behind a pooling, has one location, which always counts.
"""

import math

import jax.numpy as jnp

from fisherjax._layers.pairs import Trace
from fisherjax.typing import Array

Counted = tuple[Array | None, ...]
"""For each layer the mask [B, T] of the locations that count, or None if all of them count."""


def counted(traced: Trace, mask: Array | None) -> Counted:
    """Expand a mask [B, T] of positions to the locations of each layer, use after use.

    Raises:
        ValueError: If a layer has several locations per example, and not exactly one of its axes
            has length T.
    """
    if mask is None:
        return (None,) * len(traced.layers)
    return tuple(
        None if layer.form == "scale" else _of_layer(layer.kernel, uses, mask)
        for layer, uses in zip(traced.layers, traced.locations, strict=True)
    )


def _of_layer(name: str, uses: tuple[tuple[int, ...], ...], mask: Array) -> Array:
    # Each step of a recurrent layer is a use with one location; which position it belongs to, and
    # in which direction the layer runs, is not known.
    single = sum(math.prod(axes) == 1 for axes in uses)
    if single > 1 and mask.shape[1] > 1:
        reason = "and which of these times belongs to which position is not known"
        _refuse(name, f"{single} times", mask.shape[1], reason)
    return jnp.concatenate([_of_use(name, axes, mask) for axes in uses], axis=1)


def _of_use(name: str, axes: tuple[int, ...], mask: Array) -> Array:
    batch, length = mask.shape
    if math.prod(axes) == 1:
        return jnp.ones((batch, 1), bool)
    places = [place for place, size in enumerate(axes) if size == length]
    if len(places) != 1:
        sizes = " x ".join(map(str, axes))
        found = "none of these axes is" if not places else "more than one of these axes is"
        _refuse(name, f"at {sizes} locations", length, f"and {found} that long")
    shape = [length if place == places[0] else 1 for place in range(len(axes))]
    return jnp.broadcast_to(mask.reshape(batch, *shape), (batch, *axes)).reshape(batch, -1)


def _refuse(name: str, applied: str, length: int, reason: str) -> None:
    raise ValueError(
        f"Layer '{name}' is applied to each example {applied}, {reason}, but positions returns a "
        f"mask of {length} positions. Expected layers with as many locations as positions, or with "
        "one location, as behind a pooling. If all layers have the same number of locations, then "
        "let positions return a mask of that length. If two axes have the same length by chance, "
        "then pad to another length. If no input is padded, then leave positions out. Or use "
        "fisher.diagonal, which needs no number of locations."
    )


def mask_values(values: Array, counts: Array | None) -> Array:
    """Replace values [B, T, f] at locations that do not count by zeros."""
    # A product with zero would keep NaN.
    return values if counts is None else jnp.where(counts[..., None], values, 0)


def number(counts: Array) -> Array:
    """Return each example's number of locations that count, [B, 1, 1]; at least 1, as a divisor."""
    return jnp.maximum(counts.sum(1), 1)[:, None, None]
