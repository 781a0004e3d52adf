"""Train a generative adversarial network on images that the attacker has."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import optax

from fisherjax import nn
from fisherjax.typing import Array, Key, Params

NOISE = 100
"""Length of the noise vector that an image is generated from."""
_SIZE, _KERNEL, _PENALTY, _BATCH, _CRITIC_STEPS = 32, (5, 5), 10.0, 64, 5
FEWEST = _BATCH * _CRITIC_STEPS
"""The smallest number of images that can be trained on: those of one step."""
_HOW = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


class Gan(NamedTuple):
    """A trained generator of images [B, 28, 28, 1] from noise [B, 100], and the critic's score."""

    generate: Callable[[Array], Array]
    score: Callable[[Array], Array]


class _Up(flax.linen.Module):
    """Apply a transposed convolution of stride 2, the transpose of `fisherjax.nn`'s convolution."""

    channels: int

    @flax.linen.compact
    def __call__(self, x: Array) -> Array:
        batch, height, width, channels = x.shape
        init = flax.linen.initializers.normal(0.02)
        kernel = self.param("kernel", init, (*_KERNEL, self.channels, channels))
        convolve = partial(nn.conv_general_dilated, window_strides=(2, 2), padding="SAME", **_HOW)
        images = jnp.zeros((batch, 2 * height, 2 * width, self.channels))
        return jax.vjp(lambda images: convolve(images, kernel), images)[1](x)[0]


class _Generator(flax.linen.Module):
    channels: tuple[int, int, int]

    @flax.linen.compact
    def __call__(self, noise: Array, training: bool) -> Array:
        def normed(x: Array) -> Array:
            norm = flax.linen.BatchNorm(use_running_average=not training, momentum=0.9)
            return flax.linen.relu(norm(x))

        first, *rest = self.channels
        x = flax.linen.Dense(4 * 4 * first, use_bias=False)(noise)
        x = normed(x).reshape(-1, 4, 4, first)
        for channels in rest:
            x = normed(_Up(channels)(x))
        return flax.linen.sigmoid(_Up(1)(x))[:, 2:-2, 2:-2]


class _Critic(flax.linen.Module):
    channels: tuple[int, int, int]

    @flax.linen.compact
    def __call__(self, images: Array) -> Array:
        margin = (_SIZE - images.shape[1]) // 2
        x = jnp.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
        for place, channels in enumerate(reversed(self.channels)):
            x = flax.linen.Conv(channels, _KERNEL, 2, conv_general_dilated=nn.conv_general_dilated)(
                x
            )
            # Normalise each image alone, because the gradient penalty is of single images.
            x = flax.linen.InstanceNorm()(x) if place else x
            x = flax.linen.leaky_relu(x, 0.2)
        return flax.linen.Dense(1)(x.reshape(len(x), -1))[:, 0]


class _State(NamedTuple):
    generator: Params
    statistics: Any
    critic: Params
    moments: tuple[optax.OptState, optax.OptState]


def train(
    key: Key,
    images: Array,
    *,
    epochs: int,
    channels: tuple[int, int, int],
) -> Gan:
    """Train on images [N, 28, 28, 1] in [0, 1].

    `channels` are those of the generator's layers of 4, 8 and 16 pixels, and of the critic's.

    Source: the recipe of Zhang et al., The secret revealer, CVPR 2020, and its code, at 32 x 32
        pixels: WGAN-GP of Gulrajani et al., NeurIPS 2017, five steps of the critic for each of the
        generator. Deviation: transposed convolutions have no bias.
    """
    generator, critic = _Generator(channels), _Critic(channels)
    optimizer = optax.adam(2e-4, b1=0.5, b2=0.999)
    first, second, key = jax.random.split(key, 3)
    drawn = generator.init(first, jnp.zeros((1, NOISE)), training=True)
    judged = critic.init(second, images[:1])["params"]
    moments = optimizer.init(drawn["params"]), optimizer.init(judged)
    state = _State(drawn["params"], drawn["batch_stats"], judged, moments)

    def make(state: _State, params: Params, key: Key) -> tuple[Array, Any]:
        variables = {"params": params, "batch_stats": state.statistics}
        noise = jax.random.normal(key, (_BATCH, NOISE))
        fake, new = generator.apply(variables, noise, training=True, mutable=["batch_stats"])
        return fake, new["batch_stats"]

    def judge(params: Params, images: Array) -> Array:
        return critic.apply({"params": params}, images)

    def distance(params: Params, real: Array, fake: Array, key: Key) -> Array:
        gap = judge(params, fake).mean() - judge(params, real).mean()
        mixed = fake + jax.random.uniform(key, (len(real), 1, 1, 1)) * (real - fake)
        slopes = jax.grad(lambda x: judge(params, x).sum())(mixed)
        lengths = jnp.sqrt(jnp.square(slopes).sum((1, 2, 3)) + 1e-12)
        return gap + _PENALTY * jnp.square(lengths - 1).mean()

    def criticize(carry: tuple, real: Array) -> tuple[tuple, None]:
        state, key = carry
        key, noise, mix = jax.random.split(key, 3)
        fake, _ = make(state, state.generator, noise)
        slopes = jax.grad(distance)(state.critic, real, fake, mix)
        change, own = optimizer.update(slopes, state.moments[1])
        new = optax.apply_updates(state.critic, change)
        return (state._replace(critic=new, moments=(state.moments[0], own)), key), None

    def step(carry: tuple, real: Array) -> tuple[tuple, None]:
        (state, key), _ = jax.lax.scan(criticize, carry, real)
        key, noise = jax.random.split(key)

        def loss(params: Params) -> tuple[Array, Any]:
            fake, statistics = make(state, params, noise)
            return -judge(state.critic, fake).mean(), statistics

        slopes, statistics = jax.grad(loss, has_aux=True)(state.generator)
        change, own = optimizer.update(slopes, state.moments[0])
        new = optax.apply_updates(state.generator, change)
        return (_State(new, statistics, state.critic, (own, state.moments[1])), key), None

    @jax.jit
    def epoch(state: _State, key: Key) -> _State:
        key, order = jax.random.split(key)
        rows = jax.random.permutation(order, len(images))
        steps = len(images) // FEWEST
        rows = rows[: steps * FEWEST].reshape(steps, _CRITIC_STEPS, _BATCH)
        return jax.lax.scan(lambda c, r: step(c, images[r]), (state, key), rows)[0][0]

    for number in range(epochs):
        state = epoch(state, jax.random.fold_in(key, number))
    learned = {"params": state.generator, "batch_stats": state.statistics}
    return Gan(partial(generator.apply, learned, training=False), partial(judge, state.critic))
