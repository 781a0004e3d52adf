"""Training gradients that hide every example of a client."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fisherjax import leaves, tree
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.privacy.accounting import noisy
from fisherjax.typing import Array, Key, Model, Params


@cached
def dp_sgd(model: Model, *, clip: float, noise_multiplier: float) -> Model:
    """Make training gradients private: those of examples are clipped, and their sum is noisy.

        g = (sum_n min(1, C / |g_n|) g_n + sigma C N(0, I)) / B,    g_n = grad -log p(y_n | x_n),

    in place of the mean gradient of a minibatch of B examples, whatever optimiser or algorithm
    takes it, as long as it goes by gradients alone: one that wants the loss (`optax.lbfgs`) is
    refused. An epoch shows each example in one minibatch, so that `epochs` of them cost
    `epsilon(noise_multiplier, rounds=epochs, delta=...)`. That is of one client's examples and of
    the models trained; losses that training reports are as they are, and private. So is what a
    client computes of its data besides, such as its Fisher information. Outside of training the
    model is the same.

    Args:
        model: Its likelihood is of single examples.
        clip: C, of the gradients of the leaves that its mask trains.
        noise_multiplier: sigma; 0 is not private.

    Returns:
        The model, whose `apply_train` has the gradient above. Examples take their turns through it
        side by side, at the memory of B gradients.

    Raises:
        ValueError: If a number is out of range; while training, if the model keeps running
            statistics, which mix examples.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
        >>> model = dp_sgd(model, clip=0.5, noise_multiplier=0.0)
        >>> federation = fj.clients.federation((jnp.eye(2), 9 * jnp.ones((2, 1))), [[0, 1]])
        >>> how = {"optimizer": optax.sgd(1.0), "epochs": 1, "batch_size": 2}
        >>> start, key = jnp.zeros((2, 1)), jax.random.key(0)
        >>> print(fj.training.train(model, start, federation, key=key, **how).params[0].T)
        [[0.25 0.25]]

    Source: Abadi et al., Deep learning with differential privacy, CCS 2016, algorithm 1. Deviation:
        minibatches are those of a shuffled epoch, which is why nothing is amplified by sampling;
        the last one of an epoch is divided by its own number of examples.
    """
    checks.model(model)
    checks.positive("clip", clip)
    checks.number("noise_multiplier", noise_multiplier)

    def one(params: Params, inputs: Array, key: Key) -> Array:
        if model.apply_train is None:
            return model.apply(params, inputs[None])[0]
        outputs, new = model.apply_train(params, inputs[None], key, jnp.ones(1))
        if new is not None:
            raise ValueError(
                "This model keeps running statistics, as BatchNorm does: they mix examples, whose "
                "gradients cannot be clipped one by one. Use a network without them."
            )
        return outputs[0]

    def keys(key: Key, inputs: Array) -> tuple[Key, Key]:
        noise, rest = jax.random.split(key)
        return noise, jax.random.split(rest, len(inputs))

    @jax.custom_vjp
    def outputs(params: Params, inputs: Array, key: Key, weights: Array) -> Array:
        del weights
        return jax.vmap(one, (None, 0, 0))(params, inputs, keys(key, inputs)[1])

    def forward(*given: Any) -> tuple[Array, tuple]:
        return outputs(*given), given

    def backward(given: tuple, cotangents: Array) -> tuple:
        params, inputs, key, weights = given
        noise, own = keys(key, inputs)
        number = jnp.maximum((weights > 0).sum(), 1)

        trained = leaves.trained(model, params)

        def gradient(inputs: Array, key: Key, cotangent: Array) -> Params:
            _, pull = jax.vjp(lambda some: one(leaves.join(some, params), inputs, key), trained)
            return pull(cotangent)[0]

        # Of a mean loss: each example's own cotangent is that of the mean, times their number.
        each = jax.vmap(gradient)(inputs, own, cotangents * number.astype(cotangents.dtype))
        found, structure = jax.tree.flatten(each)
        found = tree.keep((weights > 0) & tree.finite(found).all(0), found)
        clipped, _ = optax.per_example_global_norm_clip(found, clip)
        total = noisy(noise, jax.tree.leaves(clipped), [clip * noise_multiplier] * len(found))
        mean = [leaf / number.astype(leaf.dtype) for leaf in total]
        # Frozen leaves have no gradient, and take no room under the clip.
        rest = jax.tree.map(jnp.zeros_like, params)
        return leaves.join(jax.tree.unflatten(structure, mean), rest), None, None, None

    outputs.defvjp(forward, backward)

    def apply_train(params: Params, inputs: Array, key: Key, weights: Array) -> tuple[Array, None]:
        return outputs(params, inputs, key, weights), None

    # Only gradients are hidden: an optimiser is told no loss, which would move its steps.
    apply_train.hides_the_loss = True
    return model._replace(apply_train=apply_train)
