"""Transformers: a decoder for text, and a classifier of images by their patches."""

from functools import partial

import flax.linen
import jax.numpy as jnp

from fisherjax.typing import Array


class Transformer(flax.linen.Module):
    """A decoder-only transformer, which predicts each next token of a sequence.

        h <- h + attention(norm(h)),    h <- h + W_2 relu(W_1 norm(h)),    z = W norm(h)

    Position t attends to positions up to t. The log-likelihood of a sequence is a sum over its L
    positions: divide a learning rate that suits the mean over positions by L. Padding behind a
    sequence does not change outputs before it; `fisherjax.Model(..., positions=...)` removes it
    from the loss.

    Args:
        num_classes: Number of tokens C.
        width: Width of the hidden vectors, a multiple of num_heads.
        num_layers: Number of blocks; each has attention and two dense layers, of which the first
            has width 4 width.
        num_heads: Number of attention heads.
        context: Length of the longest sequence; each position has one learned vector.
        dropout: Share that training drops of the embedding and of what a block adds, twice
            (default 0); `model` makes the training function.

    Example:
        >>> import jax, fisherjax as fj
        >>> model, tokens = Transformer(num_classes=65), jnp.zeros((2, 80), jnp.uint8)
        >>> params = fj.networks.init(model, jax.random.key(0), tokens)
        >>> jax.eval_shape(fj.networks.apply_fn(model), params, tokens).shape
        (2, 80, 65)

    Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017; as a decoder with the
    normalisation first and learned positions: Radford et al., "Language Models are Unsupervised
    Multitask Learners" (GPT-2), 2019. Deviations: ReLU, no dropout of attention, flax's
    initialisation.
    """

    num_classes: int
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    context: int = 80
    dropout: float = 0.0

    @flax.linen.compact
    def __call__(self, tokens: Array, train: bool = False) -> Array:
        """Return the logits [B, L, num_classes] of tokens [B, L], L up to context."""
        self._check(tokens)
        embed = partial(flax.linen.Embed, features=self.width, param_dtype=jnp.result_type(float))
        hidden = embed(self.num_classes, name="tokens")(tokens)
        hidden = hidden + embed(self.context, name="positions")(jnp.arange(tokens.shape[1]))
        share = self.dropout if train else 0.0
        hidden = _drop(hidden, share)
        for number in range(1, self.num_layers + 1):
            hidden = _Block(self.num_heads, dropout=share, name=f"block{number}")(hidden)
        return _dense(self.num_classes, "head")(_norm("norm")(hidden))

    def _check(self, tokens: Array) -> None:
        _check_heads(self.width, self.num_heads)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(
                f"Transformer got inputs of dtype {tokens.dtype}; expected tokens, integers from 0 "
                f"to {self.num_classes - 1}. Encode the text with text.encode."
            )
        if tokens.ndim != 2 or tokens.shape[1] > self.context:
            raise ValueError(
                f"Transformer got inputs of shape {tokens.shape}; expected tokens [B, L] with L up "
                f"to context={self.context}. Cut the text into shorter windows or raise context."
            )


class VisionTransformer(flax.linen.Module):
    """A transformer over the patches of an image, which classifies images.

        h_t = W_0 x_t + p_t,    blocks as in `Transformer`,    z = W mean_t norm(h_t)

    Here x_t are the pixels of patch t. Every position attends to all positions.

    Args:
        num_classes: Number of classes C.
        patch: Height and width of a patch in pixels; it divides those of the images.
        width: Width of the hidden vectors, a multiple of num_heads.
        num_layers: Number of blocks, as in `Transformer`.
        num_heads: Number of attention heads.

    Example:
        >>> import jax, fisherjax as fj
        >>> network, images = VisionTransformer(), jnp.zeros((2, 28, 28, 1))
        >>> params = fj.networks.init(network, jax.random.key(0), images)
        >>> params["positions"].shape, fj.networks.apply_fn(network)(params, images).shape
        ((49, 32), (2, 10))

    Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021. Deviations: those of
    `Transformer`, and the mean over positions in place of a class token.
    """

    num_classes: int = 10
    patch: int = 4
    width: int = 32
    num_layers: int = 2
    num_heads: int = 4

    @flax.linen.compact
    def __call__(self, images: Array) -> Array:
        """Return the logits [B, num_classes] of images [B, H, W, channels]."""
        _check_heads(self.width, self.num_heads)
        if images.ndim != 4 or images.shape[1] % self.patch or images.shape[2] % self.patch:
            raise ValueError(
                f"VisionTransformer got inputs of shape {images.shape}; expected images [B, H, W, "
                f"channels], H and W multiples of patch={self.patch}. Choose another patch."
            )
        batch, high, wide, channels = images.shape
        rows, columns = high // self.patch, wide // self.patch
        pixels = images.reshape(batch, rows, self.patch, columns, self.patch, channels)
        pixels = pixels.swapaxes(2, 3).reshape(batch, rows * columns, -1)
        hidden = _dense(self.width, "patches")(pixels)
        draw, shape = flax.linen.initializers.normal(0.02), hidden.shape[1:]
        hidden = hidden + self.param("positions", draw, shape, jnp.result_type(float))
        for number in range(1, self.num_layers + 1):
            hidden = _Block(self.num_heads, causal=False, name=f"block{number}")(hidden)
        return _dense(self.num_classes, "head")(_norm("norm")(hidden).mean(1))


class _Block(flax.linen.Module):
    """One layer of a transformer."""

    num_heads: int
    causal: bool = True
    dropout: float = 0.0

    @flax.linen.compact
    def __call__(self, hidden: Array) -> Array:
        _, length, width = hidden.shape
        normed = _norm("norm1")(hidden)
        # Kernels are [inputs, outputs]; flax's own attention has an axis of heads in them.
        query, key, value = (
            _dense(width, name)(normed).reshape(-1, length, self.num_heads, width // self.num_heads)
            for name in ("query", "key", "value")
        )
        before = jnp.tril(jnp.ones((length, length), bool)) if self.causal else None
        heads = flax.linen.dot_product_attention(query, key, value, mask=before)
        mixed = _dense(width, "mix")(heads.reshape(hidden.shape))
        hidden = hidden + _drop(mixed, self.dropout)
        inner = flax.linen.relu(_dense(4 * width, "dense1")(_norm("norm2")(hidden)))
        return hidden + _drop(_dense(width, "dense2")(inner), self.dropout)


def _check_heads(width: int, num_heads: int) -> None:
    if width % num_heads:
        raise ValueError(
            f"width is {width} and num_heads {num_heads}; expected a width that is a multiple "
            "of num_heads."
        )


def _drop(hidden: Array, share: float) -> Array:
    return flax.linen.Dropout(share, deterministic=False)(hidden) if share else hidden


def _dense(features: int, name: str) -> flax.linen.Dense:
    return flax.linen.Dense(features, param_dtype=jnp.result_type(float), name=name)


def _norm(name: str) -> flax.linen.LayerNorm:
    return flax.linen.LayerNorm(param_dtype=jnp.result_type(float), name=name)
