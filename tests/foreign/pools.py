"""What follows the convolutions: pooling by a framework's own functions, or jnp over space."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = jax.Array
QUERIES = 3  # rows of either parameter: few are what XLA miscompiles

OVER_SPACE: dict[str, Callable[..., Array]] = {"mean": jnp.mean, "max": jnp.max, "sum": jnp.sum}
"""Of an array and the axes of space."""


def own_shape(pooling: str, features: int) -> tuple[int, int] | None:
    """Return the shape of the pooling's parameter, None if it has none."""
    return (QUERIES, features) if pooling in ("queries", "weights") else None


def pool(pooling: str, h: Array, parameter: Array | None, framework: dict[str, Any]) -> Array:
    """Pool features [B, *space, F] in one of the ways of `cells.FACTORS`.

    `framework` has the framework's own functions of h, by the names of poolings.
    """
    if pooling in framework:
        return framework[pooling](h)
    if pooling in OVER_SPACE:
        return OVER_SPACE[pooling](h, axis=tuple(range(1, h.ndim - 1)))
    tokens = h.reshape(h.shape[0], -1, h.shape[-1])
    return attended(tokens, parameter) if pooling == "queries" else multiplied(tokens, parameter)


def attended(tokens: Array, queries: Array) -> Array:
    """Let learned queries [Q, F], broadcast over the batch, attend to tokens [B, T, F]: [B, Q, F].

    XLA miscompiles the first product, one of whose operands is the broadcast, with the softmax.
    """
    every = jnp.broadcast_to(queries, (len(tokens), *queries.shape))
    attention = jax.nn.softmax(jnp.einsum("btf,bqf->btq", tokens, every), axis=1)
    return jnp.einsum("btq,btf->bqf", attention, tokens)


def multiplied(tokens: Array, weights: Array) -> Array:
    """Apply a linear layer with weights [Q, F] broadcast over the batch, and take the maximum."""
    every = jnp.broadcast_to(weights, (len(tokens), *weights.shape))
    return jnp.einsum("btf,bqf->btq", tokens, every).max(1)


def multiplied_one_by_one(tokens: Array, weights: Array) -> Array:
    """Apply a linear layer to one example's tokens [T, F], each by itself, and take the maximum.

    As equinox's layers are: a matrix times a vector, mapped over tokens, examples and clients.
    """
    return jax.vmap(lambda token: weights @ token)(tokens).max(0)
