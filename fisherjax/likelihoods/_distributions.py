"""The likelihoods that have a name: classes, real numbers and bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fisherjax._core import checks, output_checks
from fisherjax._core.caching import cached
from fisherjax.typing import AnyArray, Array, ByPosition, Likelihood


def over_examples(values: Array) -> Array:
    """Sum values [B, ...] over all axes but the first."""
    return values.sum(tuple(range(1, values.ndim)))


def columns_of(factors: Array) -> Array | ByPosition:
    """Return the columns of factors [B, L..., C, K], one for each of the independent positions."""
    columns = jnp.moveaxis(factors, -1, 0)
    return columns if columns.ndim == 3 else ByPosition(columns)


def _diagonal_columns(roots: Array) -> Array | ByPosition:
    return columns_of(roots[..., :, None] * jnp.eye(roots.shape[-1], dtype=roots.dtype))


def _categorical_loss(z: Array, y: AnyArray) -> Array:
    # A sum over all classes compiles faster than a lookup, whose gradient is a scatter. A number
    # that is no label makes the loss NaN.
    is_label = jnp.asarray(y)[..., None] == jnp.arange(z.shape[-1])
    each = jnp.where(is_label, jax.nn.log_softmax(z), 0).sum(-1)
    return over_examples(-jnp.where(is_label.any(-1), each, jnp.nan))


def _categorical_factor(z: Array) -> Array | ByPosition:
    # The Cholesky factor of diag(p) - p p^T in closed form (Tanabe and Sagae, An exact Cholesky
    # decomposition and the generalized inverse of the variance-covariance matrix of the multinomial
    # distribution, JRSS B 1992): below the diagonal -p_j sqrt(p_k / (q_k q_{k+1})), with
    # q_k = sum_{i >= k} p_i. Every entry is a product of positive numbers: nothing cancels.
    p, share, after = _cholesky_parts(z)
    # The matrix has rank C - 1, and the last column is zero.
    rank = max(z.shape[-1] - 1, 1)
    # [K, B, L..., 1], so that columns are written in the order in which they are read.
    pair = share * after, _quotient(share, after)
    here, below = (jnp.moveaxis(x[..., :rank], -1, 0)[..., None] for x in pair)
    below = -p * below
    column, row = (jax.lax.broadcasted_iota(int, below.shape, axis) for axis in (0, z.ndim))
    columns = jnp.where(row > column, below, jnp.where(row == column, here, 0))
    return columns if columns.ndim == 3 else ByPosition(columns)


def _categorical_combination(z: Array, r: Array) -> Array:
    # The product of the same factor with r, by cumulative sums: C numbers in place of C^2.
    p, share, after = _cholesky_parts(z)
    r = jnp.pad(r, [(0, 0)] * (z.ndim - 1) + [(0, z.shape[-1] - r.shape[-1])])
    below = _quotient(share * r, after)
    # The sum of the classes before, shifted: subtracting the own term from a sum would cancel.
    before = jnp.concatenate([jnp.zeros_like(below[..., :1]), below[..., :-1]], axis=-1)
    earlier = jax.lax.cumsum(before, axis=z.ndim - 1)
    return share * after * r - p * earlier


def _cholesky_parts(z: Array) -> tuple[Array, Array, Array]:
    """Compute p_k, sqrt(p_k / q_k) and sqrt(q_{k+1}), [B, ..., C] each."""
    exponentials = jnp.exp(z - jax.lax.stop_gradient(z.max(-1, keepdims=True)))
    # The sums of this class and those after it; the first one is the normaliser of the softmax.
    sums = jax.lax.cumsum(exponentials, axis=z.ndim - 1, reverse=True)
    total = sums[..., :1]
    # The root has no derivative at zero, so the zero of the last class is put in after it.
    after = jnp.concatenate([jnp.sqrt(sums[..., 1:] / total), jnp.zeros_like(total)], axis=-1)
    return exponentials / total, jnp.sqrt(_quotient(exponentials, sums)), after


def _quotient(numerator: Array, denominator: Array) -> Array:
    """Divide by numbers that are not negative, with 0 / 0 = 0."""
    return numerator / jnp.maximum(denominator, jnp.finfo(denominator.dtype).tiny)


def _check_categorical(shape: tuple[int, ...], y: AnyArray) -> None:
    _check_shape("categorical", tuple(shape[:-1]), y, "one class index for each output vector")
    if not jnp.issubdtype(y.dtype, jnp.integer):
        raise TypeError(
            f"The categorical likelihood takes integer class labels, but the targets have dtype "
            f"{y.dtype}. Convert them with targets.astype('int32')."
        )
    _check_range("categorical", y, shape[-1] - 1, f"class labels of {shape[-1]} outputs")


def _check_gaussian(shape: tuple[int, ...], y: AnyArray) -> None:
    _check_shape("gaussian", tuple(shape), y, "the shape of the outputs")
    if not jnp.issubdtype(y.dtype, jnp.floating):
        raise TypeError(
            f"The gaussian likelihood takes floating-point targets, not {y.dtype}. Convert them "
            "with targets.astype('float32')."
        )


def _check_bernoulli(shape: tuple[int, ...], y: AnyArray) -> None:
    _check_shape("bernoulli", tuple(shape), y, "the shape of the outputs")
    _check_range("bernoulli", y, 1, "Bernoulli targets")


def _check_shape(name: str, expected: tuple[int, ...], y: AnyArray, meaning: str) -> None:
    if tuple(y.shape) != expected:
        is_one_hot = name == "categorical" and tuple(y.shape[:-1]) == expected
        remedy = "Of one-hot rows take targets.argmax(-1)" if is_one_hot else "Reshape the targets"
        raise ValueError(
            f"The {name} likelihood expected targets of shape {expected} ({meaning}), got "
            f"{tuple(y.shape)}. {remedy}, or check what apply returns."
        )


def _check_range(name: str, y: AnyArray, high: int, meaning: str) -> None:
    if checks.is_traced(y) or y.size == 0:
        return
    if checks.is_in_host_memory(y):
        known = np.asarray(y)  # `np.min` of a JAX array would call its own method
        smallest, largest = float(known.min()), float(known.max())
    else:
        # A traced function may close over targets with known values.
        with jax.ensure_compile_time_eval():
            smallest, largest = float(y.min()), float(y.max())
    if not (smallest >= 0 and largest <= high):  # negated: NaN compares false
        ignored = smallest == output_checks.IGNORED and len(y.shape) > 1
        raise ValueError(
            f"The {name} likelihood expected {meaning} between 0 and {high}, got values from "
            f"{smallest:g} to {largest:g}. Relabel the targets or give the network more outputs."
            + " Labels of -100 have no loss if the Model has positions."
            * ignored
        )


def _deviation(z: Array) -> Array:
    # 1 - p would cancel to zero if p is close to one.
    return jnp.sqrt(jax.nn.sigmoid(z) * jax.nn.sigmoid(-z))


categorical = Likelihood(
    negative_log_likelihood=_categorical_loss,
    sample=jax.random.categorical,
    factor=_categorical_factor,
    check=_check_categorical,
    combine=_categorical_combination,
    correct=lambda z, y: z.argmax(-1) == y,
)
"""Softmax classes: -log p(y|z) = logsumexp(z) - z_y; S S^T = diag(p) - p p^T, K = C - 1."""

gaussian = Likelihood(
    negative_log_likelihood=lambda z, y: over_examples(0.5 * jnp.square(z - y)),
    sample=lambda key, z: z + jax.random.normal(key, z.shape, z.dtype),
    factor=lambda z: _diagonal_columns(jnp.ones_like(z)),
    check=_check_gaussian,
    combine=lambda z, r: r.astype(z.dtype),
)
"""Unit-variance Gaussian: 1/2 ||y - z||^2, the constant 1/2 log(2 pi) left out; S = I, K = C."""

bernoulli = Likelihood(
    negative_log_likelihood=lambda z, y: over_examples(
        optax.sigmoid_binary_cross_entropy(z, y.astype(z.dtype))
    ),
    sample=lambda key, z: jax.random.bernoulli(key, jax.nn.sigmoid(z)).astype(z.dtype),
    factor=lambda z: _diagonal_columns(_deviation(z)),
    check=_check_bernoulli,
    combine=lambda z, r: _deviation(z) * r,
    correct=lambda z, y: (z > 0) == (y > 0.5),
)
"""Independent bits with logits z: softplus(z) - y z; S = diag(sqrt(p (1 - p))), K = C."""


@cached
def smoothed(share: float) -> Likelihood:
    """Make the categorical likelihood for training on smoothed labels.

    The loss is

        (1 - share) (-log p(y|z)) + share mean_c(-log p(c|z)).

    Its minimum is at probabilities that are never zero. Clients that train with it are less
    confident, and their models merge better if each has few classes. Only the training loss
    changes: sampling and the true Fisher information are those of `categorical`.

    Raises:
        ValueError: If the share is not from 0 to below 1.

    Example:
        >>> z, y = jnp.array([[2.0, 0.0]]), jnp.array([0])
        >>> print(
        ...     *(f"{x.negative_log_likelihood(z, y)[0]:.3f}" for x in (categorical, smoothed(0.1)))
        ... )
        0.127 0.227

    Source: Szegedy, Vanhoucke, Ioffe, Shlens, Wojna, Rethinking the Inception architecture for
        computer vision, CVPR 2016, section 7.
    """
    checks.number("share", share, below=1)

    def loss(z: Array, y: Array) -> Array:
        labels = optax.smooth_labels(jax.nn.one_hot(y, z.shape[-1], dtype=z.dtype), share)
        return over_examples(optax.softmax_cross_entropy(z, labels))

    return categorical._replace(negative_log_likelihood=loss)


def is_categorical(likelihood: Likelihood) -> bool:
    """Return whether outputs are logits of classes, with smoothed labels or without."""
    return likelihood.factor is categorical.factor


def check_regression(likelihood: Likelihood) -> None:
    """Check that least squares have targets of a likelihood, those of `regression_targets`.

    Raises:
        ValueError: If it is neither categorical, Gaussian nor Bernoulli.

    Example:
        >>> check_regression(smoothed(0.1))
    """
    if is_categorical(likelihood) or likelihood in (bernoulli, gaussian):
        return
    raise ValueError(
        "Least squares need targets of the categorical, Gaussian or Bernoulli likelihood; this "
        "model has another. A loss of your own for classes is likelihoods.custom(loss, "
        "like=likelihoods.categorical) without a factor; instead of another loss pass the model "
        "with a likelihood that these methods take, as model._replace(likelihood="
        "likelihoods.gaussian)."
    )


def regression_targets(likelihood: Likelihood, y: Array, outputs: int) -> Array:
    """Return the targets of least squares, [B, ..., C]: one-hot, bits as -1 and 1, or y.

    Raises:
        ValueError: As `check_regression`.

    Example:
        >>> print(regression_targets(categorical, jnp.array([1, 0]), outputs=2))
        [[0. 1.]
         [1. 0.]]
    """
    check_regression(likelihood)
    if is_categorical(likelihood):
        return jax.nn.one_hot(y, outputs)
    return 2 * y.astype(float) - 1 if likelihood == bernoulli else y
