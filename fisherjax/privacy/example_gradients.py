"""Differentially private training: gradients that hide every example of a client."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fisherjax import leaves, tree
from fisherjax._core import batches, checks
from fisherjax._core.caching import cached
from fisherjax.privacy.accounting import add_noise
from fisherjax.typing import Array, Key, Model, Params


@cached
def dp_sgd(model: Model, *, clip: float, noise_multiplier: float) -> Model:
    """Make a model whose training gradients are clipped per example, summed, and noisy.

    The gradient

        g = (sum_n min(1, C / |g_n|) g_n + sigma C N(0, I)) / B,    g_n = grad -log p(y_n | x_n),

    replaces the mean gradient of a minibatch of B examples, for every algorithm and for every
    optimiser that uses gradients only. An optimiser that needs the loss (`optax.lbfgs`) is refused.

    An epoch uses each example in one minibatch, so that training for some epochs costs
    `epsilon(noise_multiplier, rounds=epochs, delta=...)`. This guarantee is about the examples of
    one client, and covers the trained models only. Two things have no noise, and the client should
    not publish them: the losses that training reports, and whatever else the client computes from
    its data, such as its Fisher information. Outside of training the model is unchanged. Noise is
    drawn from the key of the training, which has to be secret: take `system_key`, another one for
    each training; one that a number made causes a warning. The noise is of floating-point numbers,
    with the weakness that `private` describes.

    Args:
        model: A model whose likelihood is defined for single examples.
        clip: C, the largest norm of an example's gradient over the leaves that are trained.
        noise_multiplier: sigma. With 0 there is no privacy.

    Returns:
        The model with an `apply_train` that has the gradient above. It needs the memory of B
        gradients, because it differentiates the B examples of a minibatch in parallel.

    Raises:
        ValueError: If a number is out of range. While training, if the model keeps running
            statistics, which mix examples.

    Example:
        >>> import fisherjax as fj
        >>> model = fj.Model(lambda w, x: x @ w, fj.likelihoods.gaussian)
        >>> model = dp_sgd(model, clip=0.5, noise_multiplier=0.0)
        >>> federation = fj.clients.federation((jnp.eye(2), 9 * jnp.ones((2, 1))), [[0, 1]])
        >>> how = {"optimizer": optax.sgd(1.0), "epochs": 1, "batch_size": 2}
        >>> start, key = jnp.zeros((2, 1)), fj.privacy.system_key()
        >>> print(fj.training.train(model, start, federation, key=key, **how).params[0].T)
        [[0.25 0.25]]

    Source: Abadi et al., Deep learning with differential privacy, CCS 2016, algorithm 1. Deviation:
        minibatches are those of a shuffled epoch, so that sampling does not amplify privacy; the
        last minibatch of an epoch is divided by its own number of examples.
    """
    checks.model(model)
    checks.positive("clip", clip)
    checks.number("noise_multiplier", noise_multiplier)

    def apply_one(params: Params, inputs: Array, key: Key) -> Array:
        if model.apply_train is None:
            return model.apply(params, batches.take(inputs, None))[0]
        outputs, new = model.apply_train(params, batches.take(inputs, None), key, jnp.ones(1))
        # With statistics of the minibatch, an example would change the gradients of the others.
        if new is not None:
            raise ValueError(
                "dp_sgd got a model that keeps running statistics, as BatchNorm does. They mix "
                "examples, whose gradients cannot be clipped one by one; expected a network "
                "without running statistics."
            )
        return outputs[0]

    def split(key: Key, inputs: Array) -> tuple[Key, Key]:
        noise, rest = jax.random.split(key)
        # The forward and the backward pass split the same key, so that dropout is the same in both.
        return noise, jax.random.split(rest, batches.num_rows(inputs))

    # Only the backward pass changes, so that any optimiser and any training loop can use the model.
    @jax.custom_vjp
    def outputs(params: Params, inputs: Array, key: Key, weights: Array) -> Array:
        del weights
        return jax.vmap(apply_one, (None, 0, 0))(params, inputs, split(key, inputs)[1])

    def forward(*arguments: Any) -> tuple[Array, tuple]:
        return outputs(*arguments), arguments

    def backward(arguments: tuple, cotangents: Array) -> tuple:
        params, inputs, key, weights = arguments
        noise_key, keys = split(key, inputs)
        number = jnp.maximum((weights > 0).sum(), 1)
        trained = leaves.trained(model, params)

        def gradient(inputs: Array, key: Key, cotangent: Array) -> Params:
            _, pull = jax.vjp(
                lambda some: apply_one(leaves.join(some, params), inputs, key), trained
            )
            return pull(cotangent)[0]

        # The loss is a mean: an example's own cotangent is that of the mean times their number.
        # Padded rows of a short minibatch are among them; they are set to zero below.
        each = jax.vmap(gradient)(inputs, keys, cotangents * number.astype(cotangents.dtype))
        gradients, structure = jax.tree.flatten(each)
        gradients = tree.where((weights > 0) & tree.finite_by_client(gradients).all(0), gradients)
        clipped, _ = optax.per_example_global_norm_clip(gradients, clip)
        # The noise is that of the sum. Dividing the noisy sum afterwards costs no privacy.
        deviations = [clip * noise_multiplier] * len(gradients)
        total = add_noise(noise_key, jax.tree.leaves(clipped), deviations)
        mean = [leaf / number.astype(leaf.dtype) for leaf in total]
        # Frozen leaves have no gradient, and do not count in the norm that is clipped.
        zeros = jax.tree.map(jnp.zeros_like, params)
        return leaves.join(jax.tree.unflatten(structure, mean), zeros), None, None, None

    outputs.defvjp(forward, backward)

    def apply_train(params: Params, inputs: Array, key: Key, weights: Array) -> tuple[Array, None]:
        return outputs(params, inputs, key, weights), None

    # Only gradients are private: the loss has no noise, so no optimiser may use it for its steps.
    apply_train.hides_the_loss = True
    return model._replace(apply_train=apply_train)
