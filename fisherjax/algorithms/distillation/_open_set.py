"""The model that FedOV's clients train: a classifier with one more output, "unknown"."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fisherjax import likelihoods
from fisherjax._core import checks
from fisherjax._core.caching import cached
from fisherjax.algorithms.distillation._outliers import make_outliers
from fisherjax.typing import Apply, Array, Key, Model, Params


def _known_only(shape: tuple[int, ...], y: Array) -> None:
    # Without the last output: no example is labelled as unknown.
    likelihoods.categorical.check((*shape[:-1], shape[-1] - 1), y)


# Outputs are log-probabilities already, or in training the negative loss of each label.
_OPEN = likelihoods.categorical._replace(
    negative_log_likelihood=lambda z, y: -jnp.take_along_axis(z, y[..., None], -1)[..., 0],
    check=_known_only,
)


@cached
def open_set(
    model: Model,
    normalize: Callable[[Array], Array] | None = None,
    *,
    steps: int = 5,
    step: float = 0.002,
) -> Model:
    """Make the model that FedOV's clients train, which learns that corrupted images are unknown.

        l = CE(z(x), y) + CE(z(x'), u) + CE(z(x) without z_y, u) + CE(z(x''), u)

    is the loss of an example with label y, where u is the last of C + 1 outputs z. The image x
    should get its class y, and "unknown" the highest of the other outputs. The image x', corrupted
    in one of five ways, should be unknown, and so should x'', which is made from x' by steps of
    +-step in each pixel that increase CE(z(x''), u).

    In training, `apply_train` computes l of each label, as outputs -l [B, C + 1], which needs
    B (C + 1)^2 numbers of memory; otherwise outputs are log-probabilities.

    Args:
        model: `apply(params, images [B, H, W, channels]) -> logits [B, C + 1]`, where the images
            are floats, as `normalize` returns them, and H = W is even and at least 6. A suitable
            one is `networks.apply_fn(module, normalize)` with `datasets.normalizer`, which leaves
            floats as they are. The likelihood is the categorical one.
        normalize: Function from stored images to floats (default none, for floats). The paper
            divides by 255 only.
        steps: Number of steps from x' to x''.
        step: Size of each step, in units of the normalised images.

    Returns:
        The model for `training.train`; its targets are the C classes.

    Raises:
        ValueError: If the model has an `apply_train`, as with BatchNorm or dropout, or another
            likelihood, or a number is out of range; on use, if there are fewer than 3 outputs, or
            inputs are not such images.
        TypeError: On use, if inputs are not floats and there is no `normalize`.

    Example:
        >>> import fisherjax as fj
        >>> plain = fj.Model(lambda w, x: x.reshape(len(x), -1) @ w, fj.likelihoods.categorical)
        >>> model = open_set(plain, lambda x: x / 255.0)
        >>> params, images = jnp.zeros((64, 3)), jnp.zeros((2, 8, 8, 1), jnp.uint8)
        >>> print(model.apply(params, images)[0].round(2))
        [-1.1 -1.1 -1.1]
        >>> z, _ = jax.jit(model.apply_train)(params, images, jax.random.key(0), jnp.ones(2))
        >>> print(model.likelihood.negative_log_likelihood(z, jnp.array([0, 1])).round(2))
        [3.99 3.99]

    Source: Diao, Li, He, Towards addressing label skews in one-shot federated learning, ICLR 2023,
        and its code. Deviations: no mixtures of features; the code adds their loss with weight 0.01
        if no example is paired with one of its own label, which hardly ever happens with 64
        examples of two classes. x'' is not projected, because it cannot leave the ball of radius
        0.5 onto which it would be projected.
    """
    _check_plain(model)
    if model.likelihood is not likelihoods.categorical:
        raise ValueError(
            "FedOV's loss is made of cross-entropies: the model's likelihood must be "
            "likelihoods.categorical, and labels are not smoothed."
        )
    if normalize is not None:
        checks.function("normalize", normalize, "datasets.normalizer(dataset)")
    checks.count("steps", steps)
    checks.positive("step", step)

    def normalized(inputs: Array) -> Array:
        return jnp.asarray(inputs if normalize is None else normalize(inputs))

    def apply(params: Params, inputs: Array) -> Array:
        return jax.nn.log_softmax(open_outputs(model.apply, params, normalized(inputs)))

    def apply_train(params: Params, inputs: Array, key: Key, weights: Array) -> tuple[Array, None]:
        del weights  # the loss is weighted later
        images = normalized(inputs)
        outliers = make_outliers(key, images)
        harder = _adversarial(model.apply, params, outliers, steps, step)
        # In one pass of three times the minibatch.
        every = jnp.concatenate([images, outliers, harder])
        known, *unknown = jnp.split(open_outputs(model.apply, params, every), 3)
        unsure = jnp.asarray(sum(_unknown_loss(z) for z in unknown))
        return -(_label_losses(known) + unsure[:, None]), None

    return model._replace(apply=apply, likelihood=_OPEN, apply_train=apply_train)


def _check_plain(model: Model) -> None:
    checks.model(model)
    if model.apply_train is not None:
        raise ValueError(
            "The model has an apply_train already, for BatchNorm, dropout or augmentation; "
            "expected one that trains by apply alone, because FedOV sets its own apply_train."
        )


def open_outputs(apply: Apply, params: Params, images: Array) -> Array:
    z = apply(params, images)
    if z.ndim != 2 or z.shape[-1] < 3:
        raise ValueError(
            f"apply returned outputs of shape {z.shape}; expected [B, C + 1], of at least two "
            "classes and of unknown. Give the network one output more than there are classes."
        )
    return z


def _unknown_loss(z: Array) -> Array:
    """Compute CE(z, u), [B]."""
    return -jax.nn.log_softmax(z)[:, -1]


def _label_losses(z: Array) -> Array:
    """Compute CE(z, y) + CE(z without z_y, u) of each label y, [B, C + 1]."""
    others = jnp.where(jnp.eye(z.shape[-1], dtype=bool), -jnp.inf, z[:, None, :])
    # A sum without each label, because log(1 - p_y) is a rounding error if p_y is near one.
    return jax.nn.logsumexp(others, axis=-1) - z[:, -1:] - jax.nn.log_softmax(z)


def _adversarial(apply: Apply, params: Params, images: Array, steps: int, step: float) -> Array:
    """Move each pixel by steps of fixed size that increase CE(z, u); gradients are stopped."""
    # Stopped before the loop, which would otherwise be differentiated without need.
    params, images = jax.lax.stop_gradient((params, images))

    def loss(x: Array) -> Array:
        return _unknown_loss(open_outputs(apply, params, x)).sum()

    def up(x: Array, _: None) -> tuple[Array, None]:
        return x + step * jnp.sign(jax.grad(loss)(x)), None

    return jax.lax.scan(up, images, None, length=steps)[0]
