"""The papers' networks in flax, with their initialisation, and what makes functions of them.

Nothing else in the library needs flax: any `apply(params, inputs) -> outputs` will do.

Source: Jhunjhunwala, Wang, Joshi, FedFisher, AISTATS 2024 (LeNet for MNIST-like images, the FedNet
CNN for 32 x 32 images, both without biases); Li, Diao, Chen, He, Federated Learning on Non-IID Data
Silos, ICDE 2022, and its code, NIID-Bench (SimpleCNN and SimpleCNNMNIST). Deviation: images are
[H, W, C] and are flattened in that order. Transformer names its own.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import flax.linen
import jax
import jax.numpy as jnp

from fisherjax import nn
from fisherjax.configuration import cached
from fisherjax.typing import Apply, ApplyTrain, Array, Key, Params


class MLP(flax.linen.Module):
    """Map inputs of any shape through dense layers with ReLU between them.

    The hidden layers have the widths `features`, and none has a bias unless `use_bias`.

    Example:
        >>> params = init(MLP(), jax.random.key(0), jnp.zeros((1, 64)))
        >>> {name: layer["kernel"].shape for name, layer in params.items()}
        {'dense1': (64, 64), 'dense2': (64, 64), 'dense3': (64, 10)}
    """

    features: tuple[int, ...] = (64, 64)
    num_classes: int = 10
    use_bias: bool = False

    @flax.linen.compact
    def __call__(self, inputs: Array) -> Array:
        """Return the outputs [B, num_classes] of inputs [B, ...]."""
        return _dense_layers(inputs, (*self.features, self.num_classes), self.use_bias)


class LeNet(flax.linen.Module):
    """Classify images: conv5 6, pool, conv5 16, pool, dense 120, 84, num_classes.

    Without biases it has 44,190 parameters on 28 x 28 x 1 images.
    """

    num_classes: int = 10
    use_bias: bool = False
    channels: ClassVar[tuple[int, ...]] = (6, 16)
    features: ClassVar[tuple[int, ...]] = (120, 84)

    @flax.linen.compact
    def __call__(self, inputs: Array) -> Array:
        """Return the outputs [B, num_classes] of images [B, H, W, C]."""
        if inputs.ndim != 4 or min(inputs.shape[1:3]) < 16:
            raise ValueError(
                f"{type(self).__name__} got inputs of shape {inputs.shape}; expected images "
                "[B, H, W, C] of at least 16 x 16 pixels. Use MLP for smaller ones."
            )
        hidden = inputs
        for number, channels in enumerate(self.channels, start=1):
            convolution = flax.linen.Conv(
                channels,
                (5, 5),
                padding="VALID",
                conv_general_dilated=nn.conv_general_dilated,
                name=f"conv{number}",
                **_settings(25 * hidden.shape[-1], self.use_bias),
            )
            # The maximum commutes with ReLU and leaves it a quarter of the work.
            hidden = flax.linen.relu(nn.max_pool(convolution(hidden), 2))
        return _dense_layers(hidden, (*self.features, self.num_classes), self.use_bias)


SimpleCNN = SimpleCNNMNIST = partial(LeNet, use_bias=True)
"""NIID-Bench's networks: LeNet with biases, 62,006 parameters for CIFAR-10, 44,426 for MNIST."""


class CNN(LeNet):
    """Classify images: conv5 32, pool, conv5 64, pool, dense 512, 128, num_classes ("FedNet").

    Without biases it has 939,616 parameters on 32 x 32 x 3 images.
    """

    channels = (32, 64)
    features = (512, 128)


class Transformer(flax.linen.Module):
    """Predict each next token of a sequence from those up to it: a decoder-only transformer.

        h <- h + attention(norm(h)),    h <- h + W_2 relu(W_1 norm(h)),    z = W norm(h)

    Position t attends to those up to t only. The log-likelihood of a sequence is a sum over its L
    positions: a learning rate that suits the mean over positions has to be divided by L.

    Args:
        num_classes: C, the number of tokens.
        width: Of the hidden vectors, a multiple of num_heads.
        num_layers: Blocks of attention and of two dense layers, the first 4 width wide.
        num_heads: Of the attention.
        context: The longest sequence; there is one learned vector for each position.

    Example:
        >>> model, tokens = Transformer(num_classes=65), jnp.zeros((2, 80), jnp.uint8)
        >>> params = init(model, jax.random.key(0), tokens)
        >>> jax.eval_shape(apply_fn(model), params, tokens).shape
        (2, 80, 65)

    Source: Vaswani et al., "Attention Is All You Need", NeurIPS 2017; as a decoder with the
    normalisation first and learned positions, Radford et al., "Language Models are Unsupervised
    Multitask Learners" (GPT-2), 2019. Deviations: ReLU, no dropout, flax's initialisation.
    """

    num_classes: int
    width: int = 64
    num_layers: int = 2
    num_heads: int = 4
    context: int = 80

    @flax.linen.compact
    def __call__(self, tokens: Array) -> Array:
        """Return the logits [B, L, num_classes] of tokens [B, L], L up to context."""
        self._check(tokens)
        embed = partial(flax.linen.Embed, features=self.width, param_dtype=jnp.result_type(float))
        hidden = embed(self.num_classes, name="tokens")(tokens)
        hidden = hidden + embed(self.context, name="positions")(jnp.arange(tokens.shape[1]))
        for number in range(1, self.num_layers + 1):
            hidden = _Block(self.num_heads, name=f"block{number}")(hidden)
        return _dense(self.num_classes, "head")(_norm("norm")(hidden))

    def _check(self, tokens: Array) -> None:
        if self.width % self.num_heads:
            raise ValueError(
                f"width is {self.width} and num_heads {self.num_heads}; expected a width that the "
                "heads share equally."
            )
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


class _Block(flax.linen.Module):
    """One layer of a transformer."""

    num_heads: int

    @flax.linen.compact
    def __call__(self, hidden: Array) -> Array:
        _, length, width = hidden.shape
        normed = _norm("norm1")(hidden)
        # Kernels [inputs, outputs]; those of flax's own attention have an axis for the heads.
        query, key, value = (
            _dense(width, name)(normed).reshape(-1, length, self.num_heads, width // self.num_heads)
            for name in ("query", "key", "value")
        )
        causal = jnp.tril(jnp.ones((length, length), bool))
        heads = flax.linen.dot_product_attention(query, key, value, mask=causal)
        hidden = hidden + _dense(width, "mix")(heads.reshape(hidden.shape))
        inner = flax.linen.relu(_dense(4 * width, "dense1")(_norm("norm2")(hidden)))
        return hidden + _dense(width, "dense2")(inner)


def _dense(features: int, name: str) -> flax.linen.Dense:
    return flax.linen.Dense(features, param_dtype=jnp.result_type(float), name=name)


def _norm(name: str) -> flax.linen.LayerNorm:
    return flax.linen.LayerNorm(param_dtype=jnp.result_type(float), name=name)


def init(model: flax.linen.Module, key: Key, inputs: Array) -> Params:
    """Draw a model's parameters: the content of flax's "params" collection, nested dicts of arrays.

    Of the inputs, a batch [B, ...] of NumPy or JAX, only the shape and dtype are used.

    Raises:
        ValueError: If the model keeps anything besides parameters.

    Example:
        >>> images = jnp.zeros((1, 28, 28, 1))
        >>> init(LeNet(), jax.random.key(0), images)["conv2"]["kernel"].shape
        (5, 5, 6, 16)
    """
    dtype = jax.dtypes.canonicalize_dtype(inputs.dtype)
    # Lazily: nothing but the initialisers runs.
    variables = model.lazy_init(key, jax.ShapeDtypeStruct((1, *inputs.shape[1:]), dtype))
    if others := sorted(set(variables) - {"params"}):
        raise ValueError(
            f"{type(model).__name__} keeps the collections {others} besides its parameters; "
            "expected parameters only. Call model.init yourself, put all into one pytree, and give "
            "fisherjax.Model a mask and apply_train."
        )
    return variables["params"]


@cached
def apply_fn(model: flax.linen.Module, normalize: Callable[[Array], Array] | None = None) -> Apply:
    """Make the function `apply(params, inputs [B, ...]) -> outputs [B, ..., C]` of a flax model.

    What the module is made of can be hashed. `normalize` is applied to the inputs first, such as
    `datasets.normalizer(dataset)`, so that images stay uint8 in memory. Equal arguments give the
    same function object, so that nothing compiles again.

    Example:
        >>> params = init(MLP(), jax.random.key(0), jnp.zeros((1, 64)))
        >>> apply_fn(MLP(), normalize=lambda x: x / 16)(params, jnp.ones((3, 64))).shape
        (3, 10)
    """

    def apply(params: Params, inputs: Array) -> Array:
        inputs = inputs if normalize is None else normalize(inputs)
        # Computed in the dtype of the parameters, whatever that of the data.
        dtype = jax.tree.leaves(params)[0].dtype
        inputs = inputs.astype(dtype) if jnp.issubdtype(inputs.dtype, jnp.floating) else inputs
        return model.apply({"params": params}, inputs)

    return apply


@cached
def augmented(apply: Apply, augment: Callable[[Key, Array], Array]) -> ApplyTrain:
    """Make the `apply_train` of a `fisherjax.Model` that trains on augmented inputs.

    `augment(key, inputs)` gives inputs for `apply(params, inputs)`, such as
    `datasets.crop_and_flip(normalize)`; outside of training apply alone is used. Equal arguments
    give the same function object, so that nothing compiles again.

    Example:
        >>> noisy = lambda key, x: x + jax.random.normal(key, x.shape)
        >>> apply_train = augmented(lambda w, x: w * x, noisy)
        >>> apply_train(2.0, jnp.zeros(3), jax.random.key(0), jnp.ones(3))[0].shape
        (3,)
    """

    def apply_train(params: Params, inputs: Array, key: Key, weights: Array) -> tuple[Array, None]:
        del weights  # what they leave out is left out of the loss
        # The first edition kept the other half for dropout: so its augmentations are drawn again.
        augment_key, _ = jax.random.split(key)
        return apply(params, augment(augment_key, inputs)), None

    return apply_train


def _settings(fan_in: int, use_bias: bool) -> dict[str, Any]:
    """Return what layers have in common: all is drawn from U(-1/sqrt(fan_in), 1/sqrt(fan_in))."""
    draw = partial(jax.random.uniform, minval=-(fan_in**-0.5), maxval=fan_in**-0.5)
    dtype = jnp.result_type(float)
    return {"use_bias": use_bias, "param_dtype": dtype, "kernel_init": draw, "bias_init": draw}


def _dense_layers(hidden: Array, features: tuple[int, ...], use_bias: bool) -> Array:
    hidden = hidden.reshape(hidden.shape[0], math.prod(hidden.shape[1:]))
    for number, width in enumerate(features, start=1):
        settings = _settings(hidden.shape[-1], use_bias)
        hidden = flax.linen.Dense(width, name=f"dense{number}", **settings)(hidden)
        hidden = flax.linen.relu(hidden) if number < len(features) else hidden
    return hidden
