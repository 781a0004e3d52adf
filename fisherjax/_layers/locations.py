"""Which locations of each layer count, given which positions of a sequence do.

At T positions a layer meets an example T times, or T times the size of further axes, such as those
of heads. With m [B, T] the positions that count, T_n of example n, the factors of K-FAC are the
mean of those of each sentence by itself,

    A = E_n[sum_t m_nt a_nt a_nt^T],   G = E_n[sum_k sum_t m_nt g_nkt g_nkt^T / T_n],

so that kron(A, G) has the scale of the exact block however long the padding is. A layer that meets
an example once, behind a pooling, is no sequence: its one location counts.
"""

import math

import jax.numpy as jnp

from fisherjax._layers.pairs import Trace
from fisherjax.typing import Array

Counted = tuple[Array | None, ...]
"""For each layer which locations count, [B, T]; None where all do."""


def counted(seen: Trace, mask: Array | None) -> Counted:
    """Arrange a mask [B, T] for the locations of each layer, one use beside the other.

    Raises:
        ValueError: If a layer has several locations per example, but none of its axes is T long.
    """
    if mask is None:
        return (None,) * len(seen.layers)
    return tuple(
        None if layer.form == "scale" else _of_layer(layer.kernel, uses, mask)
        for layer, uses in zip(seen.layers, seen.locations, strict=True)
    )


def _of_layer(name: str, uses: tuple[tuple[int, ...], ...], mask: Array) -> Array:
    # Steps of a recurrent layer are uses of one location each, in whichever direction it goes.
    single = sum(math.prod(axes) == 1 for axes in uses)
    if single > 1 and mask.shape[1] > 1:
        _refuse(name, f"{single} times", mask.shape[1], "and does not tell at which of them")
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


def _refuse(name: str, met: str, length: int, reason: str) -> None:
    raise ValueError(
        f"Layer '{name}' meets each example {met}, {reason}, but positions returns which of "
        f"{length} positions count. Expected layers with as many locations as positions, or with "
        "one, behind a pooling. Let positions return a mask of that length if all layers have it, "
        "pad to another length where two axes agree by chance, leave positions out if nothing is "
        "padded, or use fisher.diagonal, which does not divide by locations."
    )


def selected(values: Array, counts: Array | None) -> Array:
    """Put zeros for locations that do not count, [B, T, f]."""
    # Selected, not multiplied: zero times NaN is NaN.
    return values if counts is None else jnp.where(counts[..., None], values, 0)


def number(counts: Array) -> Array:
    """Count locations of each example, [B, 1, 1]; 1 for none, to divide by."""
    return jnp.maximum(counts.sum(1), 1)[:, None, None]
