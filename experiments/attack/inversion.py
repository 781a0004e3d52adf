"""Invert a model: find images that it classifies as a given class and that look real."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from experiments.attack import gan
from fisherjax.fisher import Kronecker, kfac
from fisherjax.typing import Array, Examples, Key, Model, Params

Factors = dict[str, dict[str, Array]]
"""K-FAC's factors by layer and side, input or output."""


class Inversion(Protocol):
    """The options of an inversion, which are options of the command."""

    digit: int
    images: int
    restarts: int
    steps: int
    learning_rate_of_noise: float
    factor_weight: float


class Seen(NamedTuple):
    """What the server sees: a model, K-FAC's factors or None, and the model's epsilon."""

    params: Params
    factors: Factors | None = None
    epsilon: float = float("inf")


Pixels = Callable[[Array], Array]
"""The normalisation of images in [0, 1] that networks are trained on."""


def inverted(
    how: Inversion, model: Model, network: gan.Gan, seen: Seen, pixels: Pixels, key: Key
) -> Array:
    """Return images [I, 28, 28, 1] in [0, 1] that the seen model classifies as the digit.

        min_z -mean D(G(z)) + 100 mean -log p(class | G(z)) + w mean_f |F(G(z)) - F|^2 / |F|^2

    over noise z in [-1, 1], where F are K-FAC's factors f if they are seen.

    Source: Zhang et al., The secret revealer, CVPR 2020, equation 3, as in the FedFisher paper's
        appendix E, which adds the factors and does not give their weight.
    """
    optimizer = optax.sgd(how.learning_rate_of_noise, momentum=0.9, nesterov=True)

    def surprise(images: Array) -> Array:
        outputs = model.apply(seen.params, pixels(images))
        return -jax.nn.log_softmax(outputs)[:, how.digit]

    def loss(noise: Array) -> Array:
        images = network.generate(noise)
        value = -network.score(images).mean() + 100 * surprise(images).mean()
        if seen.factors is None:
            return value
        examples = Examples(pixels(images))
        own = kfac(model, seen.params, examples, batch_size=how.images)
        return value + how.factor_weight * mismatch(own, seen.factors)

    def step(carry: tuple, _: None) -> tuple[tuple, None]:
        noise, moments = carry
        change, moments = optimizer.update(jax.grad(loss)(noise), moments)
        return (jnp.clip(optax.apply_updates(noise, change), -1, 1), moments), None

    def one(key: Key) -> tuple[Array, Array]:
        noise = jnp.clip(jax.random.normal(key, (how.images, gan.NOISE)), -1, 1)
        (noise, _), _ = jax.lax.scan(step, (noise, optimizer.init(noise)), None, how.steps)
        images = network.generate(noise)
        return images, surprise(images)

    images, values = jax.jit(partial(jax.lax.map, one))(jax.random.split(key, how.restarts))
    return images[values.argmin(0), jnp.arange(how.images)]


def mismatch(own: Kronecker, seen: Factors) -> Array:
    """Return the mean over factors of |found - seen|^2 / |seen|^2."""

    def relative(found: Array, wanted: Array) -> Array:
        return jnp.square(found - wanted).sum() / jnp.square(wanted).sum()

    errors = jax.tree.leaves(jax.tree.map(relative, own.factors, seen))
    return sum(errors) / len(errors)


def marginals(factors: Factors, weights: Array) -> Factors:
    """Return the factors of all clients that sum_i p_i A_i (x) G_i reveals, by partial traces."""

    def mean(pair: dict[str, Array], side: str, other: str) -> Array:
        votes = weights * jnp.trace(pair[other], axis1=1, axis2=2)
        return jnp.tensordot(votes / votes.sum(), pair[side], 1)

    return {
        name: {"input": mean(pair, "input", "output"), "output": mean(pair, "output", "input")}
        for name, pair in factors.items()
    }
